"""Test recovery hooks: they run without an open transaction and within a time limit, and take effect once."""

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
from everbeat.client.registry import HookRegistry
from everbeat.domain.recovery.hooks import (
    Default,
    FailWithBackoff,
    HookAnswer,
    HookKind,
    RecoveryContext,
    Reschedule,
    Skip,
    SweepSummary,
)
from everbeat.domain.settings.settings import gathering
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.task.states import TaskState
from everbeat.recovering.hooks import LocalHooks, PlannedHooks
from everbeat.recovering.orders import Death
from everbeat.recovering.recoverer import RecoveryLeft
from everbeat.runtime.events import HookFailed, TaskRecovered
from everbeat.runtime.processes import ExitReport
from everbeat.store import leases, workers
from everbeat.store.database import Database
from everbeat.store.leases import Recovered
from everbeat.store.plan import PlannedStatements, planned, run_plan
from tests.recovering.conftest import ManualObserver, StoreHarness, sweep
from tests.recovering.test_sweep import silence

GONE = Death(noticed_by="session", cause="gone")


@pytest.fixture
def registry() -> HookRegistry:
    return HookRegistry()


@pytest.fixture
def hooked(observer: ManualObserver, registry: HookRegistry) -> Callable[..., ManualObserver]:
    """Return a function that gives the observer with the hooks registered so far."""

    def use(*, timeout_s: float = 5.0) -> ManualObserver:
        observer.hooks = LocalHooks(registry.hooks(), timeout_s=timeout_s, events=observer.events)
        return observer

    return use


async def recover(observer: ManualObserver, **settings: Any) -> int:
    """End supervisor s1 and recover its tasks."""
    observer.db.run(workers.end_supervisor("s1", how="session"))
    observer.db.run(workers.bury_orphans())
    return await observer.recoverer(**settings).recover_supervisor("s1", GONE)


async def test_the_recovery_context_describes_the_task_and_the_loss(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # F7
    seen: list[RecoveryContext] = []

    @registry.deciding
    def note(context: RecoveryContext) -> Default:
        seen.append(context)
        return Default()

    running = db.running("w2", flags=b'{"slow": true, "fast": false}')
    db.run(leases.record_progress(running.id, running.claim_id, b'{"stage": "packing", "fraction": 0.5}'))
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
    is_async: bool, hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # F7
    at = datetime(2040, 5, 6, 7, 8, 9, 123_456, tzinfo=UTC)
    answers: dict[str, HookAnswer] = {
        "exact": Reschedule(at, attempts=3), "later": Reschedule(timedelta(minutes=10)), "past": Reschedule(datetime(2020, 1, 1, tzinfo=UTC)),
    }  # fmt: skip

    def answer(context: RecoveryContext) -> HookAnswer:
        return answers[context.queue]

    async def aanswer(context: RecoveryContext) -> HookAnswer:
        await asyncio.sleep(0)  # makes the hook really wait
        return answers[context.queue]

    registry.deciding(aanswer if is_async else answer)
    ids = {queue: db.running(queue=queue).id for queue in answers}
    assert await recover(hooked()) == 3
    assert db.row(ids["exact"], "state, enqueued_at, retry_count") == ("PENDING", at, 3)
    assert db.row(ids["later"], "enqueued_at - statement_timestamp() > interval '9 minutes 50 s'")
    assert db.row(ids["past"], "enqueued_at <= statement_timestamp(), retry_count") == (True, 1)
    told = db.table("recoveries", "action, hook, charge, next_retry_at is not null")
    assert set(told) == {("reschedule", "Reschedule", "loss", True)}
    assert {row[0] for row in db.table("attempts", "will_retry")} == {True}
    db.supervisor("me", "w9")
    (claimed,) = db.claim("w9")
    assert claimed.id == ids["past"]
    db.start(claimed)
    db.settle(claimed)


async def test_reschedule_of_a_claimed_task_charges_nothing(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:
    registry.deciding(lambda _: Reschedule(timedelta(hours=1)))
    task_id = db.send()
    db.claim()
    await recover(hooked())
    columns = (
        "state, retry_count, crash_count, loss_count, enqueued_at > statement_timestamp() + interval '59 m'"
    )
    assert db.row(task_id, columns) == ("PENDING", 0, 0, 0, True)
    assert db.table("attempts") == []


async def test_fail_with_backoff_counts_a_retry_and_delays_it(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # F7
    registry.deciding(lambda _: FailWithBackoff())
    listed = StoredPolicy(max_retries=1, intervals=(30.0,), retry_for=("SMTP_DOWN",)).to_json()
    plain, by_policy = db.running(), db.running(policy=listed)
    await recover(hooked())
    columns = "state, retry_count, loss_count, error ->> 'code', extract(epoch from enqueued_at - statement_timestamp())"
    state, retries, losses, code, waits = db.row(plain.id, columns)
    assert (state, retries, losses, code) == ("PENDING", 1, 1, "WORKER_CRASHED")
    assert 1.5 < waits <= 2.72
    *_, waits = db.row(by_policy.id, columns)
    assert 28 < waits <= 30


async def test_reschedule_beyond_good_until_fails_the_task_with_a_reason(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # C3, F7
    @registry.deciding
    def later(context: RecoveryContext) -> Reschedule:
        return Reschedule(timedelta(minutes=10))

    soon = datetime.now(UTC) + timedelta(minutes=5)
    running = db.running(good_until=soon).id
    claimed = db.send(good_until=soon)
    db.claim("w1")
    assert await recover(hooked()) == 2
    state, error, rerun = db.row(running, "state, error, next_retry_at")
    assert (state, error["code"], rerun) == ("FAILED", "WORKER_CRASHED", None)
    assert "not run again: its next run would be due at" in error["message"]
    assert error["message"].endswith(
        f", and its good_until is {soon.isoformat(sep=' ', timespec='milliseconds')}"
    )
    assert error["data"]["cause"] == "gone"
    told = db.table("recoveries", "was, action, hook, certificate ->> 'message'")
    assert sorted(row[:3] for row in told) == [
        ("CLAIMED", "reschedule", "Reschedule"),
        ("RUNNING", "fail", "Reschedule"),
    ]
    assert error["message"] in {row[3] for row in told}
    assert db.row(claimed, "state, enqueued_at > good_until") == ("PENDING", True), "it expires in time"


async def test_skip_keeps_the_lease_and_the_hook_is_called_again_after_a_check_interval(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # F7
    asked: list[UUID] = []
    interrupted: list[UUID] = []
    answers: dict[str, HookAnswer] = {"skipped": Skip(), "other": Default()}

    @registry.deciding
    def answer(context: RecoveryContext) -> HookAnswer:
        asked.append(context.task_id)
        return answers[context.queue]

    registry.other("on_interrupted", lambda context: interrupted.append(context.task_id))
    skipped, other = db.running(queue="skipped"), db.running("w2", queue="other")
    db.run(workers.end_supervisor("s1", how="session"))
    observer = hooked()
    recoverer = observer.recoverer(check_interval_ms=30_000)
    assert await recoverer.recover_ended() == 1
    assert db.row(skipped.id, "state, left_claim_id = claim_id, left_at is not null, loss_count") == (
        "RUNNING", True, True, 0,
    )  # fmt: skip
    assert db.row(other.id, "state") == "FAILED"
    assert [row[0] for row in db.table("recoveries", "task_id")] == [other.id]
    assert (asked, interrupted) == ([skipped.id, other.id], [other.id])
    assert len(observer.told(RecoveryLeft)) == 1
    await observer.clock.advance(29)
    assert await recoverer.recover_ended() == 0
    assert len(asked) == 2, "the hook must not be called before a check interval has passed"
    await observer.clock.advance(2)
    assert await recoverer.recover_ended() == 0
    assert len(asked) == 3
    answers["skipped"] = Default()
    await observer.clock.advance(31)
    assert await recoverer.recover_ended() == 1
    assert interrupted == [other.id, skipped.id]


async def test_a_sweep_names_the_worker_of_a_skipped_task_and_does_not_count_it(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # F7
    registry.deciding(lambda context: Skip())
    left = db.running("w2")
    silence(db, "s1", 6)
    observer = hooked()
    result = await sweep(observer.recoverer())
    assert (result.worker_ids, result.recovered_count) == (("w2",), 0), (
        "the tree still holds it, so w1 is not ended"
    )
    assert [(task.id, task.action) for task in result.tasks] == [(left.id, "leave")]


async def test_a_task_that_its_supervisor_skipped_is_offered_again_by_any_supervisor(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # F7
    answers: list[HookAnswer] = [Skip(), Default()]
    registry.deciding(lambda _: answers.pop(0))
    running = db.running()
    db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", signal=9))
    observer = hooked()
    own = observer.recoverer()
    killed = ExitReport(pid=2, signal_number=9, signal_name="SIGKILL")
    assert await own.recover_worker("w1", killed, died_at=0.0) == 0
    assert db.row(running.id, "state") == "RUNNING"
    assert await observer.recoverer().recover_ended() == 1
    assert db.row(running.id, "state") == "FAILED"


async def test_skipped_tasks_do_not_block_the_recovery_of_others(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:
    registry.deciding(lambda context: Skip() if context.queue == "skipped" else Default())
    left = [db.running(queue="skipped") for _ in range(5)]
    other = db.running()
    assert await recover(hooked(), sweep_batch_size=2) == 1
    assert db.row(other.id, "state") == "FAILED"
    for each in left:
        assert db.row(each.id, "state") == "RUNNING"
        assert db.settle(each) == "COMPLETED", "a skipped lease still belongs to its worker"


async def test_a_task_with_a_cancel_request_is_recovered_without_its_hook(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # I18
    registry.deciding(lambda _: Skip())
    running = db.running()
    db.cancel(running.id)
    assert await recover(hooked()) == 1
    assert db.row(running.id, "state") == "CANCELLED"


async def test_a_hook_for_one_task_takes_precedence_over_the_general_hook(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # F7
    registry.deciding(lambda _: Reschedule(timedelta(hours=1)))
    registry.deciding(task="mail")(lambda _: FailWithBackoff())
    db.send("mail")
    (mail,) = db.claim(names=["mail"])
    db.start(mail)
    other = db.running()
    await recover(hooked())
    assert dict(db.table("recoveries", "task_id, hook")) == {
        mail.id: "FailWithBackoff",
        other.id: "Reschedule",
    }


async def test_notification_hooks_are_called_once_for_each_task_and_once_for_the_pass(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # F7
    told: list[UUID] = []
    passes: list[SweepSummary] = []
    states: list[str] = []

    def note(context: RecoveryContext) -> None:
        told.append(context.task_id)
        states.append(db.row(context.task_id, "state"))

    registry.other("on_interrupted", note)
    registry.other("on_recovered", passes.append)
    tasks = [db.running("w1").id, db.running("w2").id, db.running("w2").id]
    assert await recover(hooked(), sweep_batch_size=2) == 3
    assert sorted(told) == sorted(tasks)
    assert states == ["FAILED"] * 3, "the hook is called after the recovery is written"
    (summary,) = passes
    assert (summary.worker_ids, summary.recovered_count) == (("w1", "w2"), 3)
    assert sorted(summary.task_ids) == sorted(tasks)
    assert summary.sweeping_worker_id == "me"
    assert await recover(hooked()) == 0
    assert len(passes) == 1, "a pass that recovered nothing calls no hook"


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
    said: str, hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:  # F7
    registry.deciding(task="work")(BAD[said])
    registry.deciding(lambda _: Reschedule(timedelta(hours=1)))
    running = db.running()
    db.send("mail")
    (mail,) = db.claim(names=["mail"])
    observer = hooked()
    assert await recover(observer) == 2
    assert db.row(running.id, "state, error ->> 'code'") == ("FAILED", "WORKER_CRASHED")
    assert db.row(mail.id, "state, enqueued_at > statement_timestamp()") == ("PENDING", True)
    (event,) = observer.told(HookFailed)
    assert isinstance(event, HookFailed)
    assert said in event.problem
    assert dict(db.table("recoveries", "task_id, hook")) == {
        running.id: f"no answer: {event.problem}", mail.id: "Reschedule",
    }  # fmt: skip
    assert (event.hook, event.task_id, event.task_name) == ("on_recovery", running.id, "work")
    assert "lambda" in event.function


@pytest.mark.parametrize("kind", ["thread", "async", "deaf"])
async def test_a_hook_that_never_returns_counts_as_default_after_its_timeout(
    kind: str, hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
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
                continue  # catches the cancellation
        return Skip()

    registry.deciding({"thread": thread, "async": waiting, "deaf": deaf}[kind])
    tasks = [db.running() for _ in range(20)]
    observer = hooked(timeout_s=0.2)
    began = time.monotonic()
    assert await recover(observer) == 20
    assert time.monotonic() - began < 3, "the hooks must run concurrently, each within its timeout"
    assert {db.row(task.id, "state") for task in tasks} == {"FAILED"}
    problems = {event.problem for event in observer.told(HookFailed)}  # type: ignore[attr-defined]
    assert problems == {"did not answer within 200ms"}
    assert set(db.table("recoveries", "hook")) == {("no answer: did not answer within 200ms",)}
    released.set()
    woken.set()


async def test_a_long_problem_of_a_hook_is_stored_shortened(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:
    registry.deciding(lambda _: raise_it(ValueError("\0" + "x" * 10_000)))  # type: ignore[arg-type,return-value]
    db.running()
    assert await recover(hooked()) == 1
    ((kept,),) = db.table("recoveries", "hook")
    assert kept.startswith("no answer: raised ValueError: ")
    assert len(kept) < 400


async def test_hooks_that_never_return_use_a_bounded_number_of_threads(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:
    released = threading.Event()
    registry.deciding(lambda _: released.wait(30))  # type: ignore[arg-type,return-value]
    for _ in range(40):
        db.running()
    before = threading.active_count()
    observer = hooked(timeout_s=0.1)
    assert await recover(observer) == 40
    assert threading.active_count() - before <= 32
    problems = [event.problem for event in observer.told(HookFailed)]  # type: ignore[attr-defined]
    assert any("have not returned yet" in problem for problem in problems)
    released.set()


async def test_a_hook_decision_after_another_recovery_has_no_effect(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:
    """Another observer was faster; the hook can run twice, but only the first decision takes effect."""
    running = db.running()

    @registry.deciding
    def meanwhile(_: RecoveryContext) -> HookAnswer:
        (lease,) = db.leases()
        db.recover(lease, "retry")
        return FailWithBackoff()

    interrupted: list[UUID] = []
    registry.other("on_interrupted", lambda context: interrupted.append(context.task_id))
    observer = hooked()
    assert await recover(observer) == 0
    assert db.row(running.id, "state, retry_count") == ("PENDING", 1)
    assert (interrupted, observer.told(TaskRecovered)) == ([], [])


async def test_no_transaction_is_open_while_a_hook_runs(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:
    seen: list[Any] = []

    @registry.deciding
    def look(_: RecoveryContext) -> HookAnswer:
        query = "select state from pg_stat_activity where application_name like 'everbeat test caretakers %'"
        seen.extend(db.connection.execute(query).fetchall())
        return Default()

    db.running()
    await recover(hooked())
    assert seen == [("idle",)]


async def test_the_hook_of_a_dead_task_process_is_called_until_it_does_not_skip(
    hooked: Callable[..., ManualObserver], registry: HookRegistry, db: StoreHarness
) -> None:
    answers = [Skip(), Skip(), Reschedule(timedelta(hours=1))]
    registry.deciding(lambda _: answers.pop(0))
    running = db.running()
    observer = hooked()
    report = ExitReport(pid=77, exit_code=3)
    death = Death.by_exit(report, after_s=0.0, pid=report.pid)
    recoverer = observer.recoverer(check_interval_ms=1_000)
    for _ in range(2):
        assert await recoverer.recover_attempt(running.id, running.claim_id, death) == "left"
        await observer.clock.advance(1.1)
        assert db.row(running.id, "state") == "RUNNING"
    landed = await recoverer.recover_attempt(running.id, running.claim_id, death)
    assert isinstance(landed, Recovered)
    assert (landed.action, landed.hook, answers) == ("reschedule", "Reschedule", [])


def test_a_sweep_without_an_event_loop_calls_async_hooks(
    db: StoreHarness, registry: HookRegistry
) -> None:  # F7
    told: list[UUID] = []

    @registry.deciding
    async def later(context: RecoveryContext) -> HookAnswer:
        await asyncio.sleep(0)  # makes the hook really wait
        return Reschedule(timedelta(hours=1)) if context.queue == "later" else Default()

    registry.other("on_interrupted", lambda context: told.append(context.task_id))
    later_id, other = db.running(queue="later").id, db.running().id
    silence(db, "s1", 6)
    observer = ManualObserver(db, PlannedStatements())  # type: ignore[arg-type]
    observer.hooks = PlannedHooks(registry.hooks(), timeout_s=5.0, events=observer.events)
    database = Database(db.target)
    result = run_plan(
        database,
        planned(lambda: sweep(observer.recoverer())),
    )
    database.close()
    assert {task.id: task.action for task in result.tasks} == {later_id: "reschedule", other: "fail"}
    assert sorted(told) == sorted([later_id, other])


def test_a_hook_that_blocks_its_loop_does_not_block_the_sweep(
    db: StoreHarness, registry: HookRegistry
) -> None:
    released = threading.Event()

    @registry.deciding
    async def blocks(_: RecoveryContext) -> HookAnswer:
        released.wait(30)
        return Skip()

    running = db.running()
    silence(db, "s1", 6)
    observer = ManualObserver(db, PlannedStatements())  # type: ignore[arg-type]
    observer.hooks = PlannedHooks(registry.hooks(), timeout_s=0.1, events=observer.events)
    database = Database(db.target)
    plan = planned(lambda: sweep(observer.recoverer()))
    assert run_plan(database, plan).recovered_count == 1
    database.close()
    released.set()
    assert db.row(running.id, "state") == "FAILED"
    (event,) = observer.told(HookFailed)
    assert "blocked its event loop" in event.problem  # type: ignore[attr-defined]
    assert event.task_id == running.id  # type: ignore[attr-defined]
    ((kept,),) = db.table("recoveries", "hook")
    assert kept == f"no answer: {event.problem}"  # type: ignore[attr-defined]


def test_a_second_hook_for_a_scope_is_refused(registry: HookRegistry) -> None:  # F7
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
def test_a_function_that_does_not_take_a_context_cannot_be_a_hook(registry: HookRegistry, wrong: Any) -> None:
    with pytest.raises(errors.RegistrationError, match="cannot be an on_recovery hook"):
        registry.deciding(wrong)
    with pytest.raises(errors.ConfigurationError, match=r"on_recovery\.task"):
        registry.deciding(task="two words")


@pytest.mark.parametrize(
    ("kind", "given"), [("on_interrupted", "RecoveryContext"), ("on_recovered", "SweepSummary")]
)
def test_the_fix_of_a_refused_hook_names_its_parameter(
    registry: HookRegistry, kind: HookKind, given: str
) -> None:
    with pytest.raises(errors.RegistrationError) as refusal:
        registry.other(kind, lambda: 1)
    assert refusal.value.fix == f"write a `def` or `async def` with one parameter, the {given}."


def test_all_wrong_hooks_of_a_program_are_reported_together(registry: HookRegistry) -> None:  # A8
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
