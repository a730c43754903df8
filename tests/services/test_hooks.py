"""Recovery hooks: asked with no transaction open, bounded in time, and landing once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from everbeat import errors
from everbeat.client.hooks import HookRegistry
from everbeat.config import RecoveryConfig
from everbeat.domain.gathering import gathering
from everbeat.domain.hooks import (
    Default,
    FailWithBackoff,
    HookAnswer,
    HookKind,
    RecoveryContext,
    Reschedule,
    Skip,
    SweepSummary,
)
from everbeat.domain.policy import StoredPolicy
from everbeat.domain.states import TaskState
from everbeat.runtime.events import HookFailed, TaskRecovered
from everbeat.runtime.exit_report import ExitReport
from everbeat.services.carrying import RecoveryLeft
from everbeat.services.death import Death
from everbeat.services.hooks import LocalHooks
from everbeat.services.planned_hooks import PlannedHooks
from everbeat.services.sweep import sweep
from everbeat.store import leases, workers
from everbeat.store.database import Database
from everbeat.store.plan import PlannedStatements, planned, run_plan
from tests.services.conftest import Hands, Onlooker
from tests.services.test_sweep import silence

GONE = Death(noticed_by="session", cause="gone")


@pytest.fixture
def registry() -> HookRegistry:
    return HookRegistry()


@pytest.fixture
def hooked(onlooker: Onlooker, registry: HookRegistry) -> Callable[..., Onlooker]:
    """The onlooker with the hooks registered so far."""

    def use(*, timeout_s: float = 5.0) -> Onlooker:
        onlooker.hooks = LocalHooks(registry.hooks(), timeout_s=timeout_s, events=onlooker.events)
        return onlooker

    return use


async def recover(onlooker: Onlooker, **settings: Any) -> int:
    """The supervisor s1 is dead; what it held is settled."""
    onlooker.hands.run(workers.end_supervisor("s1", how="session"))
    onlooker.hands.run(workers.bury_orphans())
    return await onlooker.recoverer(**settings).recover_supervisor("s1", GONE)


async def test_the_context_says_everything_about_the_task(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # F7
    seen: list[RecoveryContext] = []

    @registry.deciding
    def note(context: RecoveryContext) -> Default:
        seen.append(context)
        return Default()

    running = hands.running("w2", flags=b'{"slow": true, "fast": false}')
    hands.run(leases.record_progress(running.id, running.claim_id, b'{"stage": "packing", "fraction": 0.5}'))
    assert await recover(hooked()) == 1
    (context,) = seen
    assert (context.task_id, context.name, context.queue) == (running.id, "work", "default")
    assert (context.state, context.attempt) == (TaskState.RUNNING, 1)
    assert (context.retry_count, context.crash_count, context.loss_count) == (0, 0, 0)
    assert (context.flags, context.hostname) == ({"slow": True, "fast": False}, "host")
    assert context.progress is not None
    assert (context.progress.stage, context.progress.fraction) == ("packing", 0.5)
    assert (context.sweeping_worker_id, context.previous_worker_id) == ("me", "w2")
    assert (context.reason, context.cause, context.noticed_by) == ("worker_crashed", "gone", "session")


@pytest.mark.parametrize("is_async", [False, True])
async def test_reschedule_is_exact_and_replaces_the_attempts(
    is_async: bool, hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # F7
    at = datetime(2040, 5, 6, 7, 8, 9, 123_456, tzinfo=UTC)
    answers: dict[str, HookAnswer] = {
        "exact": Reschedule(at, attempts=3), "later": Reschedule(timedelta(minutes=10)), "past": Reschedule(datetime(2020, 1, 1, tzinfo=UTC)),
    }  # fmt: skip

    def answer(context: RecoveryContext) -> HookAnswer:
        return answers[context.queue]

    async def aanswer(context: RecoveryContext) -> HookAnswer:
        await asyncio.sleep(0)  # a hook that really waits
        return answers[context.queue]

    registry.deciding(aanswer if is_async else answer)
    ids = {queue: hands.running(queue=queue).id for queue in answers}
    assert await recover(hooked()) == 3
    assert hands.row(ids["exact"], "state, enqueued_at, retry_count") == ("PENDING", at, 3)
    assert hands.row(ids["later"], "enqueued_at - statement_timestamp() > interval '9 minutes 50 s'")
    assert hands.row(ids["past"], "enqueued_at <= statement_timestamp(), retry_count") == (True, 1)
    told = hands.table("recoveries", "action, hook, charge, next_retry_at is not null")
    assert set(told) == {("reschedule", "Reschedule", "loss", True)}
    assert {row[0] for row in hands.table("attempts", "will_retry")} == {True}
    hands.supervisor("me", "w9")
    (claimed,) = hands.claim("w9")
    assert claimed.id == ids["past"]
    hands.start(claimed)
    hands.settle(claimed)


async def test_a_claimed_task_is_rescheduled_at_no_cost(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:
    registry.deciding(lambda _: Reschedule(timedelta(hours=1)))
    task_id = hands.send()
    hands.claim()
    await recover(hooked())
    columns = (
        "state, retry_count, crash_count, loss_count, enqueued_at > statement_timestamp() + interval '59 m'"
    )
    assert hands.row(task_id, columns) == ("PENDING", 0, 0, 0, True)
    assert hands.table("attempts") == []


async def test_fail_with_backoff_is_counted_and_waits(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # F7
    registry.deciding(lambda _: FailWithBackoff())
    listed = StoredPolicy(max_retries=1, intervals=(30.0,), retry_for=("SMTP_DOWN",)).to_json()
    plain, by_policy = hands.running(), hands.running(policy=listed)
    await recover(hooked())
    columns = "state, retry_count, loss_count, error ->> 'code', extract(epoch from enqueued_at - statement_timestamp())"
    state, retries, losses, code, waits = hands.row(plain.id, columns)
    assert (state, retries, losses, code) == ("PENDING", 1, 1, "WORKER_CRASHED")
    assert 1.5 < waits <= 2.72
    *_, waits = hands.row(by_policy.id, columns)
    assert 28 < waits <= 30


async def test_skip_leaves_the_lease_and_is_offered_again_a_check_interval_later(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # F7
    asked: list[UUID] = []
    interrupted: list[UUID] = []
    answers: dict[str, HookAnswer] = {"skipped": Skip(), "other": Default()}

    @registry.deciding
    def answer(context: RecoveryContext) -> HookAnswer:
        asked.append(context.task_id)
        return answers[context.queue]

    registry.other("on_interrupted", lambda context: interrupted.append(context.task_id))
    skipped, other = hands.running(queue="skipped"), hands.running("w2", queue="other")
    hands.run(workers.end_supervisor("s1", how="session"))
    onlooker = hooked()
    recoverer = onlooker.recoverer(check_interval_ms=30_000)
    assert await recoverer.recover_ended() == 1
    assert hands.row(skipped.id, "state, left_claim_id = claim_id, left_at is not null, loss_count") == (
        "RUNNING", True, True, 0,
    )  # fmt: skip
    assert hands.row(other.id, "state") == "FAILED"
    assert [row[0] for row in hands.table("recoveries", "task_id")] == [other.id]
    assert (asked, interrupted) == ([skipped.id, other.id], [other.id])
    assert len(onlooker.told(RecoveryLeft)) == 1
    await onlooker.clock.advance(29)
    assert await recoverer.recover_ended() == 0
    assert len(asked) == 2, "not before a check interval has passed"
    await onlooker.clock.advance(2)
    assert await recoverer.recover_ended() == 0
    assert len(asked) == 3
    answers["skipped"] = Default()
    await onlooker.clock.advance(31)
    assert await recoverer.recover_ended() == 1
    assert interrupted == [other.id, skipped.id]


async def test_what_its_own_supervisor_left_is_offered_again_by_anybody(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # F7
    answers: list[HookAnswer] = [Skip(), Default()]
    registry.deciding(lambda _: answers.pop(0))
    running = hands.running()
    hands.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", signal=9))
    onlooker = hooked()
    own = onlooker.recoverer()
    killed = ExitReport(pid=2, signal_number=9, signal_name="SIGKILL")
    assert await own.recover_worker("w1", killed, died_at=0.0) == 0
    assert hands.row(running.id, "state") == "RUNNING"
    assert await onlooker.recoverer().recover_ended() == 1
    assert hands.row(running.id, "state") == "FAILED"


async def test_those_that_a_hook_leaves_do_not_keep_others_from_being_recovered(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:
    registry.deciding(lambda context: Skip() if context.queue == "skipped" else Default())
    left = [hands.running(queue="skipped") for _ in range(5)]
    other = hands.running()
    assert await recover(hooked(), sweep_batch_size=2) == 1
    assert hands.row(other.id, "state") == "FAILED"
    for each in left:
        assert hands.row(each.id, "state") == "RUNNING"
        assert hands.settle(each) == "COMPLETED", "a lease that is left is its holder's"


async def test_one_that_is_to_be_cancelled_is_not_asked_about(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # I18
    registry.deciding(lambda _: Skip())
    running = hands.running()
    hands.cancel(running.id)
    assert await recover(hooked()) == 1
    assert hands.row(running.id, "state") == "CANCELLED"


async def test_a_hook_of_one_task_goes_before_the_one_for_all(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # F7
    registry.deciding(lambda _: Reschedule(timedelta(hours=1)))
    registry.deciding(task="mail")(lambda _: FailWithBackoff())
    hands.send("mail")
    (mail,) = hands.claim(names=["mail"])
    hands.start(mail)
    other = hands.running()
    await recover(hooked())
    assert dict(hands.table("recoveries", "task_id, hook")) == {
        mail.id: "FailWithBackoff",
        other.id: "Reschedule",
    }


async def test_hooks_are_told_once_for_each_and_once_for_the_pass(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # F7
    told: list[UUID] = []
    passes: list[SweepSummary] = []
    states: list[str] = []

    def note(context: RecoveryContext) -> None:
        told.append(context.task_id)
        states.append(hands.row(context.task_id, "state"))

    registry.other("on_interrupted", note)
    registry.other("on_recovered", passes.append)
    tasks = [hands.running("w1").id, hands.running("w2").id, hands.running("w2").id]
    assert await recover(hooked(), sweep_batch_size=2) == 3
    assert sorted(told) == sorted(tasks)
    assert states == ["FAILED"] * 3, "told after it landed"
    (summary,) = passes
    assert (summary.worker_ids, summary.recovered_count) == (("w1", "w2"), 3)
    assert sorted(summary.task_ids) == sorted(tasks)
    assert summary.sweeping_worker_id == "me"
    assert await recover(hooked()) == 0
    assert len(passes) == 1, "a pass that recovered nothing is not told"


BAD: dict[str, Callable[[RecoveryContext], Any]] = {
    "raised ValueError: no idea": lambda _: raise_it(ValueError("no idea")),
    "answered nothing": lambda _: None,
    "answered a value of type str": lambda _: "skip",
    "answered the class Skip": lambda _: Skip,
    "ended with SystemExit": lambda _: raise_it(SystemExit(3)),
    "must not be negative": lambda _: Reschedule(timedelta(seconds=-3)),
}


def raise_it(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("said", BAD)
async def test_a_hook_that_fails_counts_as_default_and_is_reported(
    said: str, hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # F7
    registry.deciding(task="work")(BAD[said])
    registry.deciding(lambda _: Reschedule(timedelta(hours=1)))
    running = hands.running()
    hands.send("mail")
    (mail,) = hands.claim(names=["mail"])
    onlooker = hooked()
    assert await recover(onlooker) == 2
    assert hands.row(running.id, "state, error ->> 'code'") == ("FAILED", "WORKER_CRASHED")
    assert hands.row(mail.id, "state, enqueued_at > statement_timestamp()") == ("PENDING", True)
    (event,) = onlooker.told(HookFailed)
    assert isinstance(event, HookFailed)
    assert said in event.problem
    assert dict(hands.table("recoveries", "task_id, hook")) == {
        running.id: f"no answer: {event.problem}", mail.id: "Reschedule",
    }  # fmt: skip
    assert (event.hook, event.task_id, event.task_name) == ("on_recovery", running.id, "work")
    assert "lambda" in event.function


@pytest.mark.parametrize("kind", ["thread", "async", "deaf"])
async def test_a_hook_that_never_returns_counts_as_default_after_its_limit(
    kind: str, hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:  # F7
    released = threading.Event()
    woken = asyncio.Event()

    def thread(_: RecoveryContext) -> HookAnswer:
        released.wait(30)
        return Skip()

    async def waiting(_: RecoveryContext) -> HookAnswer:
        await woken.wait()
        return Skip()

    async def deaf(_: RecoveryContext) -> HookAnswer:
        while not woken.is_set():
            try:
                await woken.wait()
            except asyncio.CancelledError:
                continue  # code that swallows it
        return Skip()

    registry.deciding({"thread": thread, "async": waiting, "deaf": deaf}[kind])
    tasks = [hands.running() for _ in range(20)]
    onlooker = hooked(timeout_s=0.2)
    began = time.monotonic()
    assert await recover(onlooker) == 20
    assert time.monotonic() - began < 3, "side by side, and none for longer than its limit"
    assert {hands.row(task.id, "state") for task in tasks} == {"FAILED"}
    problems = {event.problem for event in onlooker.told(HookFailed)}  # type: ignore[attr-defined]
    assert problems == {"did not answer within 200ms"}
    assert set(hands.table("recoveries", "hook")) == {("no answer: did not answer within 200ms",)}
    released.set()
    woken.set()


async def test_a_long_problem_is_kept_cut(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:
    registry.deciding(lambda _: raise_it(ValueError("\0" + "x" * 10_000)))  # type: ignore[arg-type,return-value]
    hands.running()
    assert await recover(hooked()) == 1
    ((kept,),) = hands.table("recoveries", "hook")
    assert kept.startswith("no answer: raised ValueError: ")
    assert len(kept) < 400


async def test_hooks_that_never_return_are_not_called_for_ever(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:
    released = threading.Event()
    registry.deciding(lambda _: released.wait(30))  # type: ignore[arg-type,return-value]
    for _ in range(40):
        hands.running()
    before = threading.active_count()
    onlooker = hooked(timeout_s=0.1)
    assert await recover(onlooker) == 40
    assert threading.active_count() - before <= 32
    problems = [event.problem for event in onlooker.told(HookFailed)]  # type: ignore[attr-defined]
    assert any("have not returned yet" in problem for problem in problems)
    released.set()


async def test_a_decision_that_came_too_late_lands_nowhere(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:
    """The hook may run twice; another observer was faster, and only what it decided has landed."""
    running = hands.running()

    @registry.deciding
    def meanwhile(_: RecoveryContext) -> HookAnswer:
        (lease,) = hands.leases()
        hands.recover(lease, "retry")
        return FailWithBackoff()

    interrupted: list[UUID] = []
    registry.other("on_interrupted", lambda context: interrupted.append(context.task_id))
    onlooker = hooked()
    assert await recover(onlooker) == 0
    assert hands.row(running.id, "state, retry_count") == ("PENDING", 1)
    assert (interrupted, onlooker.told(TaskRecovered)) == ([], [])


async def test_no_transaction_is_open_while_a_hook_runs(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:
    seen: list[Any] = []

    @registry.deciding
    def look(_: RecoveryContext) -> HookAnswer:
        query = "select state from pg_stat_activity where application_name like 'everbeat test caretakers %'"
        seen.extend(hands.connection.execute(query).fetchall())
        return Default()

    hands.running()
    await recover(hooked())
    assert seen == [("idle",)]


async def test_a_task_process_that_died_is_asked_about_until_the_answer_is_no_skip(
    hooked: Callable[..., Onlooker], registry: HookRegistry, hands: Hands
) -> None:
    answers = [Skip(), Skip(), Reschedule(timedelta(hours=1))]
    registry.deciding(lambda _: answers.pop(0))
    running = hands.running()
    onlooker = hooked()
    report = ExitReport(pid=77, exit_code=3)
    recoverer = onlooker.recoverer(check_interval_ms=1_000)
    recovering = asyncio.ensure_future(recoverer.recover_lease(running.id, running.claim_id, report))
    while not recovering.done():
        await onlooker.clock.advance(1.1)
        await asyncio.sleep(0.01)  # the database answers in its own time
    landed = recovering.result()
    assert landed is not None
    assert (landed.action, landed.hook, answers) == ("reschedule", "Reschedule", [])


def test_a_sweep_without_a_loop_calls_hooks_too(hands: Hands, registry: HookRegistry) -> None:  # F7
    told: list[UUID] = []

    @registry.deciding
    async def later(context: RecoveryContext) -> HookAnswer:
        await asyncio.sleep(0)  # a hook that really waits
        return Reschedule(timedelta(hours=1)) if context.queue == "later" else Default()

    registry.other("on_interrupted", lambda context: told.append(context.task_id))
    later_id, other = hands.running(queue="later").id, hands.running().id
    silence(hands, "s1", 6)
    onlooker = Onlooker(hands, PlannedStatements())  # type: ignore[arg-type]
    onlooker.hooks = PlannedHooks(registry.hooks(), timeout_s=5.0, events=onlooker.events)
    database = Database(hands.target)
    result = run_plan(
        database,
        planned(lambda: sweep(onlooker.session, RecoveryConfig(), recoverer=onlooker.recoverer())),
    )
    database.close()
    assert {task.id: task.action for task in result.tasks} == {later_id: "reschedule", other: "fail"}
    assert sorted(told) == sorted([later_id, other])


def test_a_hook_that_blocks_its_loop_does_not_block_the_sweep(hands: Hands, registry: HookRegistry) -> None:
    released = threading.Event()

    @registry.deciding
    async def blocks(_: RecoveryContext) -> HookAnswer:
        released.wait(30)
        return Skip()

    running = hands.running()
    silence(hands, "s1", 6)
    onlooker = Onlooker(hands, PlannedStatements())  # type: ignore[arg-type]
    onlooker.hooks = PlannedHooks(registry.hooks(), timeout_s=0.1, events=onlooker.events)
    database = Database(hands.target)
    plan = planned(lambda: sweep(onlooker.session, RecoveryConfig(), recoverer=onlooker.recoverer()))
    assert run_plan(database, plan).recovered_count == 1
    database.close()
    released.set()
    assert hands.row(running.id, "state") == "FAILED"
    (event,) = onlooker.told(HookFailed)
    assert "blocked its event loop" in event.problem  # type: ignore[attr-defined]
    assert event.task_id == running.id  # type: ignore[attr-defined]
    ((kept,),) = hands.table("recoveries", "hook")
    assert kept == f"no answer: {event.problem}"  # type: ignore[attr-defined]


def test_a_scope_has_one_hook(registry: HookRegistry) -> None:  # F7
    registry.deciding(_default)
    registry.deciding(task="mail")(_default)
    registry.other("on_interrupted", print)
    for again in (
        lambda: registry.deciding(_default),
        lambda: registry.deciding(task="mail")(_default),
        lambda: registry.other("on_interrupted", print),
    ):
        with pytest.raises(errors.RegistrationError, match="already"):
            again()


@pytest.mark.parametrize("wrong", [lambda: None, lambda a, b: None, 3, "later"])
def test_what_cannot_be_called_with_a_context_is_no_hook(registry: HookRegistry, wrong: Any) -> None:
    with pytest.raises(errors.RegistrationError, match="cannot be an on_recovery hook"):
        registry.deciding(wrong)
    with pytest.raises(errors.ConfigurationError, match=r"on_recovery\.task"):
        registry.deciding(task="two words")


@pytest.mark.parametrize(
    ("kind", "given"), [("on_interrupted", "RecoveryContext"), ("on_recovered", "SweepSummary")]
)
def test_the_fix_of_a_refused_hook_names_what_it_is_given(
    registry: HookRegistry, kind: HookKind, given: str
) -> None:
    with pytest.raises(errors.RegistrationError) as refusal:
        registry.other(kind, lambda: 1)
    assert refusal.value.fix == f"write a `def` or `async def` with one parameter, the {given}."


def test_every_wrong_hook_of_a_program_is_told_at_once(registry: HookRegistry) -> None:  # A8
    with gathering() as mistakes:
        registry.deciding("render")(_default)  # type: ignore[type-var]
        registry.deciding(task="two words")(_default)
        registry.deciding(_default)
        registry.deciding(_default)
    texts = [str(each.error) for each in mistakes]
    assert len(texts) == 3
    for text, said in zip(texts, ("@app.on_recovery(task=...)", "on_recovery.task", "already"), strict=True):
        assert said in text


def _default(_: RecoveryContext) -> HookAnswer:
    return Default()
