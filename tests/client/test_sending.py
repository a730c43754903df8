"""Test sends: each task is stored once and completely before the call returns."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from everbeat import WORKER_CRASHED, App, Handle, QueueConfig, RetryPolicy, TaskState
from everbeat.errors import BlockingCallInLoop, ConfigurationError, PayloadError
from tests.store.conftest import StoreHarness

pytestmark = pytest.mark.usefixtures("migrated")


def test_a_sent_task_is_pending_and_has_the_time_it_was_sent(app: App, db: StoreHarness) -> None:  # B2
    @app.task(queue="mail", priority=-3, flags=["infrastructure_resilient"])
    async def welcome(user_id: int, locale: str = "en") -> None: ...

    handle = welcome.send(42)
    info = handle.info()
    assert (info.id, info.name, info.queue, info.priority) == (handle.id, "welcome", "mail", -3)
    assert info.state is TaskState.PENDING
    assert info.arguments == {"user_id": 42}  # a default stays the function's, which may change it
    assert info.flags == {"infrastructure_resilient": True}
    assert info.sent_at == info.enqueued_at
    assert (info.claimed, info.claimed_at, info.claimed_by_worker_id, info.attempt) == (False, None, None, 0)
    assert info.attempts == ()


def test_info_has_the_time_of_each_step_of_a_task(app: App, db: StoreHarness) -> None:  # B2
    @app.task
    def work(n: int) -> list[int]:
        return [n]

    handle = work.send(1)
    (claimed,) = db.claim("w1")
    info = handle.info()
    assert (info.state, info.claimed, info.claimed_by_worker_id) == (TaskState.CLAIMED, True, "w1")
    db.start(claimed)
    assert handle.info().state is TaskState.RUNNING
    db.settle(claimed, result=b"[1]")
    info = handle.info()
    times = [info.sent_at, info.enqueued_at, info.claimed_at, info.started_at, info.completed_at]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]
    assert (info.state, info.result, info.attempt) == (TaskState.COMPLETED, [1], 1)
    (attempt,) = info.attempts
    assert (attempt.attempt, attempt.worker_id, attempt.outcome) == (1, "w1", "COMPLETED")


def test_a_send_stores_the_retry_policy_with_the_task(app: App, db: StoreHarness) -> None:
    retry = RetryPolicy(max_retries=2, intervals=[5], jitter=0, auto_retry_for=[WORKER_CRASHED])

    @app.task(retry=retry, timeout="30s", max_crashes=7)
    def work() -> None: ...

    policy = work.send().info().policy
    assert (policy.max_retries, policy.intervals, policy.lists(["WORKER_CRASHED"])) == (2, (5.0,), True)
    assert (policy.timeout_ms, policy.max_crashes, policy.on_crash) == (30_000, 7, "fail")
    overridden = work.with_options(timeout="1m", retry=None).send().info().policy
    assert (overridden.timeout_ms, overridden.max_retries, overridden.lists(["WORKER_CRASHED"])) == (
        60_000,
        0,
        False,
    )
    assert overridden.max_crashes == 7


def test_a_retry_policy_of_one_send_keeps_the_registered_codes_of_a_lost_worker(
    app: App, db: StoreHarness
) -> None:
    codes = [WORKER_CRASHED, "TASK_STALLED", "SMTP_DOWN", OSError]

    @app.task(retry=RetryPolicy(max_retries=2, auto_retry_for=codes))
    def work() -> None: ...

    given = RetryPolicy(max_retries=5, auto_retry_for=["BUSY", "WORKER_STOPPED"])
    policy = work.with_options(retry=given).send().info().policy
    assert policy.max_retries == 5
    assert sorted(policy.retry_for) == ["BUSY", "TASK_STALLED", "WORKER_CRASHED", "WORKER_STOPPED"]
    by_name = app.send_by_name("work", retry=given).info().policy
    assert by_name == policy, "a send by name of a known task"
    assert work.with_options(retry=None).send().info().policy.retry_for == ()


def test_the_on_crash_default_of_the_app_applies_to_every_task(database_url: str, schema: str) -> None:
    app = App(database_url, schema=schema, on_crash="retry")

    @app.task
    def work() -> None: ...

    assert work.send().info().policy.on_crash == "retry"
    assert app.send_by_name("elsewhere").info().policy.on_crash == "retry"
    app.close()


@pytest.mark.parametrize(
    ("theirs", "instead"),
    [
        ("idempotency_key", "use key"),
        ("run_at", "task.schedule("),
        ("delay", "task.schedule("),
        ("countdown", "task.schedule("),
        ("eta", "task.schedule("),
        ("max_attempts", "RetryPolicy(max_retries=...)"),
    ],
)
def test_an_option_name_of_another_task_queue_is_refused_with_ours(
    app: App, theirs: str, instead: str
) -> None:
    @app.task
    def work() -> None: ...

    with pytest.raises(ConfigurationError) as refusal:
        work.with_options(**{theirs: 1})  # type: ignore[misc]
    (problem,) = refusal.value.problems
    assert (problem.rule, instead in problem.fix) == ("is not an option of a send", True)


def test_the_stall_timeout_of_the_app_applies_to_each_task_without_its_own(
    database_url: str, schema: str
) -> None:  # G2
    app = App(database_url, schema=schema, stall_timeout="5m")

    @app.task
    def plain() -> None: ...

    @app.task(stall_timeout="10s")
    def nearer() -> None: ...

    @app.task(stall_timeout="never")
    def unwatched() -> None: ...

    def stored(handle: Handle[None]) -> int | None:
        return handle.info().policy.stall_timeout_ms

    assert [stored(each.send()) for each in (plain, nearer, unwatched)] == [300_000, 10_000, None]
    assert stored(plain.with_options(timeout="1h").send()) == 300_000, "a send with another option"
    assert stored(app.send_by_name("nearer")) == 10_000, "a send by name of a known task"
    with pytest.raises(ConfigurationError, match=r"write @app.task\(stall_timeout="):
        plain.with_options(stall_timeout="1m")  # type: ignore[call-arg]
    app.close()


def test_the_stall_timeout_of_the_app_does_not_replace_a_policy_of_another_program(
    database_url: str, schema: str, db: StoreHarness
) -> None:  # G2
    app = App(database_url, schema=schema, stall_timeout="5m")
    by_name = app.send_by_name("elsewhere")
    assert db.row(by_name.id, "policy") is None, "the worker stores the registered policy"
    decided = app.send_by_name("elsewhere", timeout="1m").info().policy
    assert (decided.timeout_ms, decided.stall_timeout_ms) == (60_000, 300_000)
    app.close()


def test_schedule_uses_the_clock_of_the_database(app: App, db: StoreHarness) -> None:
    @app.task
    def work() -> None: ...

    info = work.schedule(timedelta(minutes=5)).info()
    assert info.enqueued_at - info.sent_at == timedelta(minutes=5)
    assert info.waiting_because is not None
    assert "it is due at" in info.waiting_because
    moment = datetime.now(UTC) + timedelta(hours=1)
    assert work.schedule(moment).info().enqueued_at == moment
    past = work.schedule(datetime(2001, 1, 1, tzinfo=UTC)).info()
    assert past.enqueued_at == past.sent_at
    assert db.claim("w1", limit=5) != []


def test_datetimes_without_a_time_zone_are_refused(app: App) -> None:  # C3
    @app.task
    def work() -> None: ...

    with pytest.raises(ConfigurationError, match="time zone"):
        work.schedule(datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(ConfigurationError, match="good_until"):
        work.with_options(good_until=datetime(2030, 1, 1))  # noqa: DTZ001


def test_good_until_is_stored_with_the_task(app: App) -> None:
    @app.task
    def work() -> None: ...

    deadline = datetime.now(UTC) + timedelta(minutes=1)
    assert work.with_options(good_until=deadline).send().info().good_until == deadline


def test_only_one_live_task_has_a_key(app: App, db: StoreHarness) -> None:
    @app.task
    def work(n: int) -> None: ...

    keyed = work.with_options(key="user-42")
    first, second = keyed.send(1), keyed.send(2)
    assert second.id == first.id
    assert second.info().arguments == {"n": 1}
    first.cancel()
    assert keyed.send(3).id != first.id
    handles = app.send_many([keyed.call(4), work.call(5), keyed.call(6)])
    assert handles[0].id == handles[2].id != handles[1].id


def test_send_many_takes_any_iterable_of_calls(app: App) -> None:
    @app.task
    def work(n: int) -> None: ...

    @app.task
    async def other(text: str) -> None: ...

    handles = app.send_many(work.call(n) for n in range(1_000))
    assert len({handle.id for handle in handles}) == 1_000
    assert [handle.id for handle in handles] == sorted(handle.id for handle in handles)
    first = app.list_tasks(limit=1_000)
    assert [task.id for task in first] == [handle.id for handle in reversed(handles)]
    mixed = app.send_many([work.with_options(priority=9).call(1), other.call("x")])
    assert [handle.info().priority for handle in mixed] == [9, 0]
    assert app.send_many([]) == []


def test_send_many_stores_all_tasks_or_none(app: App, db: StoreHarness) -> None:
    @app.task
    def work(n: int) -> None: ...

    app.send_many([work.call(0)])
    with pytest.raises(PayloadError, match="not a call of a task"):
        app.send_many([work.call(1), "work"])  # type: ignore[list-item]
    db.connection.execute(
        f"alter table {db.target.schema}.tasks add constraint odd check ((args->>'n')::int <> 7) not valid"
    )
    with pytest.raises(Exception, match="odd"):
        app.send_many([work.call(6), work.call(7)])
    assert len(app.list_tasks()) == 1


@pytest.mark.parametrize("size", [10_000, 1_000_000, 20_000_000])
def test_large_arguments_are_stored_unchanged(app: App, db: StoreHarness, size: int) -> None:  # B13
    @app.task
    def work(text: str) -> None: ...

    text = "é" * (size // 2)
    work.send(text)
    (claimed,) = db.claim("w1")
    assert work._definition.codec.decode(claimed.args) == ((text,), {})


def test_unusual_characters_in_arguments_are_stored_unchanged(app: App, db: StoreHarness) -> None:  # B13
    @app.task
    def work(text: str) -> None: ...

    handle = work.send("nul \x00 and \U0001f480")
    (claimed,) = db.claim("w1")
    assert work._definition.codec.decode(claimed.args) == (("nul \x00 and \U0001f480",), {})
    assert handle.info().arguments == {"text": "nul \x00 and \U0001f480"}


def test_a_send_names_the_wrong_argument_and_stores_nothing(app: App) -> None:  # B13
    @app.task
    def work(count: int, label: str = "") -> None: ...

    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: work.send("three"), "count"),  # type: ignore[arg-type]
        (lambda: work.send(1, label=object()), "label"),  # type: ignore[arg-type]
        (lambda: work.send(1, "\ud800"), "label"),
        (work.send, "count"),
        (lambda: work.send(1, lable="x"), "lable"),  # type: ignore[call-arg]
    ]
    for send, parameter in wrong:
        with pytest.raises(PayloadError) as refusal:
            send()
        assert refusal.value.parameter == parameter
        assert "'work'" in refusal.value.message
    assert app.list_tasks() == []


def test_an_app_that_declares_queues_refuses_other_queues(database_url: str, schema: str) -> None:
    app = App(database_url, schema=schema, queues=[QueueConfig("mail", priority=1), QueueConfig("bulk")])

    @app.task(queue="mail")
    def welcome() -> None: ...

    with pytest.raises(ConfigurationError, match=r"queue of task 'welcome' = 'mial'.*use 'mail'"):
        welcome.with_options(queue="mial").send()
    with pytest.raises(ConfigurationError, match="declares: bulk, default, mail"):

        @app.task(queue="unheard-of")
        def other() -> None: ...

    @app.task
    def plain() -> None: ...

    assert plain.send().info().queue == "default"
    app.close()


def test_a_blocking_send_is_refused_on_a_loop_and_names_its_twin(app: App) -> None:  # B9
    @app.task
    def work(n: int) -> None: ...

    async def program() -> tuple[UUID, UUID]:
        with pytest.raises(BlockingCallInLoop, match=r"send\(\) would block.*await asend"):
            work.send(1)
        with pytest.raises(BlockingCallInLoop, match="asend_many"):
            app.send_many([work.call(1)])
        one = await work.asend(1)
        (two,) = await app.asend_many([work.call(2)])
        await work.aschedule(timedelta(seconds=1), 3)
        await app.asend_by_name("work", {"n": 4})
        in_thread = await asyncio.to_thread(work.send, 5)
        assert in_thread.id > two.id > one.id
        await app.aclose()
        return one.id, two.id

    asyncio.run(program())
    assert len(app.list_tasks()) == 5


def test_threads_and_loops_share_one_app(app: App) -> None:
    @app.task
    def work(n: int) -> None: ...

    sent: list[UUID] = []

    def by_thread(first: int) -> None:
        sent.extend(work.send(first + n).id for n in range(10))

    def by_loop(first: int) -> None:
        async def program() -> None:
            handles = await asyncio.gather(*(work.asend(first + n) for n in range(10)))
            sent.extend(handle.id for handle in handles)
            await app.aclose()

        asyncio.run(program())

    threads = [
        threading.Thread(target=target, args=(n * 10,)) for n, target in enumerate([by_thread, by_loop] * 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(sent)) == 100
    assert {task.id for task in app.list_tasks(limit=1_000)} == set(sent)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_process_can_send_and_wait(app: App, db: StoreHarness) -> None:
    @app.task
    def work(n: int) -> int:
        return n

    mine = work.send(1)
    with pytest.raises(TimeoutError):
        mine.result(timeout="50ms")  # the parent's waiter and its listener run now
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            theirs = work.send(2)
            code = 0 if theirs.info().arguments == {"n": 2} and theirs.cancel().state == "CANCELLED" else 2
            code = code or (0 if theirs.outcome(timeout=10) is not None else 3)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert work.send(3).id != mine.id
    claimed = next(task for task in db.claim("w1") if task.id == mine.id)
    db.start(claimed)
    db.settle(claimed, result=b"1")
    assert mine.result(timeout=10) == 1
