"""Test waiting for results: one listener for all waits, with polling as the fallback."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from everbeat import App, Completed, Failed, Handle, TaskFailed, WaitTimeout
from everbeat.client import waiter
from everbeat.client.database_access import database_of
from everbeat.errors import TASK_CANCELLED, TASK_EXPIRED, AppClosed, BlockingCallInLoop, TaskNotFound
from everbeat.store import expiry, tasks
from tests.store.conftest import StoreHarness


@pytest.fixture
def work(app: App) -> Callable[..., Handle[int]]:
    @app.task
    def work(n: int = 1) -> int:
        return n

    return work.send


def complete(db: StoreHarness, handle: Handle[int], result: bytes = b"1") -> None:
    (claimed,) = [task for task in db.claim("w1", limit=1_000) if task.id == handle.id]
    db.start(claimed)
    db.settle(claimed, result=result)


def test_a_notification_delivers_a_result_before_the_next_poll(
    app: App, db: StoreHarness, work: Callable[..., Handle[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = threading.Event()
    heard = waiter.Waiter._heard

    def noted(self: waiter.Waiter, state: bool) -> None:
        heard(self, state)
        if state:
            listening.set()

    monkeypatch.setattr(waiter.Waiter, "_heard", noted)
    handle = work()
    threading.Timer(0.0, lambda: listening.wait(20) and complete(db, handle)).start()
    assert handle.result(timeout=20) == 1
    later = work()
    asked = time.monotonic()
    timer = threading.Timer(0.3, complete, args=(db, later))  # after the first query and before any poll
    timer.start()
    assert later.result(timeout=20) == 1
    assert time.monotonic() - asked < 0.9, "the poll of a listening waiter comes after 1 s"


def test_a_poll_delivers_a_result_where_notifications_do_not_arrive(
    app: App, db: StoreHarness, work: Callable[..., Handle[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiter.Waiter, "_hinted", lambda self, hint: None)
    monkeypatch.setattr(waiter.Waiter, "_heard", lambda self, listening: None)
    handle = work()
    timer = threading.Timer(
        0.5, complete, args=(db, handle)
    )  # longer than the first poll interval of a waiter without notifications
    timer.start()
    asked = time.monotonic()
    assert handle.result(timeout=20) == 1
    assert time.monotonic() - asked < 3


def test_a_wait_timeout_names_the_state_and_a_later_wait_gets_the_result(  # B14
    db: StoreHarness, work: Callable[..., Handle[int]]
) -> None:
    handle = work()
    for timeout in (0, "20ms", 0.3):
        with pytest.raises(WaitTimeout, match=f"{handle.id} is still PENDING") as end:
            handle.result(timeout=timeout)
        assert end.value.task_id == handle.id
    complete(db, handle)
    assert handle.result(timeout=0) == 1
    assert handle.outcome() == Completed(1)


def test_every_handle_method_refuses_an_unknown_id(app: App) -> None:  # B14
    missing = app.handle(uuid4())
    for ask in (missing.result, missing.outcome, missing.info, missing.cancel, missing.retry):
        with pytest.raises(TaskNotFound, match=str(missing.id)):
            ask()
    with pytest.raises(TaskNotFound):
        missing.result(timeout=0)


def test_result_raises_the_error_code_message_and_data_of_a_failed_task(app: App, db: StoreHarness) -> None:
    @app.task
    def work() -> None: ...

    handle = work.send()
    (claimed,) = db.claim("w1")
    db.start(claimed)
    db.settle(
        claimed, "FAILED", error=b'{"code":"SMTP_DOWN","message":"no route","data":{"port":25},"type":"x.E"}'
    )
    with pytest.raises(TaskFailed, match="SMTP_DOWN: no route") as failure:
        handle.result(timeout=10)
    error = failure.value.error
    assert (failure.value.task_id, error.code, error.data, error.type) == (
        handle.id,
        "SMTP_DOWN",
        {"port": 25},
        "x.E",
    )
    assert handle.outcome() == Failed(error)
    info = handle.info()
    assert (info.error, info.failed_at) == (error, info.ended_at)


def test_cancelled_and_expired_tasks_have_their_own_error_codes(app: App, db: StoreHarness) -> None:
    @app.task
    def work() -> None: ...

    cancelled, late = (
        work.send(),
        work.with_options(good_until=datetime.now(UTC) - timedelta(seconds=1)).send(),
    )
    cancelled.cancel()
    assert [each.id for each in db.run(expiry.expire(channel=db.target.channel))] == [late.id]
    for handle, code in ((cancelled, TASK_CANCELLED), (late, TASK_EXPIRED)):
        with pytest.raises(TaskFailed) as failure:
            handle.result(timeout=10)
        assert failure.value.error.code == code


def test_result_decodes_the_annotated_return_type(app: App, db: StoreHarness) -> None:
    @app.task
    def work() -> dict[str, date]:
        return {}

    handle = work.send()
    (claimed,) = db.claim("w1")
    db.start(claimed)
    db.settle(claimed, result=work._definition.codec.encode_result({"a": date(2030, 1, 2)}))
    assert handle.result(timeout=10) == {"a": date(2030, 1, 2)}
    assert app.handle(str(handle.id), work).result(timeout=10) == {"a": date(2030, 1, 2)}
    assert app.handle(handle.id).result(timeout=10) == {"a": "2030-01-02"}


def test_aresult_does_not_block_the_event_loop(
    app: App, db: StoreHarness, work: Callable[..., Handle[int]]
) -> None:
    handle, other = work(), work()

    async def program() -> int:
        for blocking in (handle.result, handle.outcome, handle.info, handle.cancel, handle.retry):
            with pytest.raises(BlockingCallInLoop, match=f"a{blocking.__name__}"):
                blocking()
        waiting = asyncio.ensure_future(handle.aresult(timeout=30))
        with pytest.raises(WaitTimeout):
            await other.aresult(timeout=0.05)
        assert not waiting.done()
        await asyncio.to_thread(complete, db, handle)
        result = await waiting
        await app.aclose()
        return result

    assert asyncio.run(program()) == 1
    assert handle.result() == 1


def test_a_cancelled_wait_leaves_nothing_registered(app: App, work: Callable[..., Handle[int]]) -> None:
    handle = work()

    async def program() -> None:
        waiting = [asyncio.ensure_future(handle.aresult()) for _ in range(3)]
        await asyncio.sleep(0.05)  # they wait now
        for one in waiting:
            one.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError)
            for end in await asyncio.gather(*waiting, return_exceptions=True)
        )
        await app.aclose()

    asyncio.run(program())
    assert database_of(app).waiter._waiting == {}


def test_a_thousand_waiters_share_one_connection(app: App, db: StoreHarness) -> None:  # B14
    @app.task
    def work(n: int) -> int:
        return n

    handles = app.send_many(work.call(n) for n in range(1_000))

    async def program() -> list[int]:
        waiting = [asyncio.ensure_future(handle.aresult(timeout=60)) for handle in handles]
        await asyncio.to_thread(finish_all)
        results = await asyncio.gather(*waiting)
        await app.aclose()
        return results

    most = 0

    def finish_all() -> None:
        nonlocal most
        while claimed := db.claim("w1", limit=100):
            db.start(*claimed)
            for task in claimed:
                number = task.args.removeprefix('{"n":').removesuffix("}")
                db.settle(task, result=number.encode())
            rows = db.connection.execute(
                "select count(*) from pg_stat_activity where application_name in ('everbeat waiter', 'everbeat client') and query ilike %s",
                [f"%{db.target.channel}%"],
            ).fetchone()
            assert rows is not None
            most = max(most, rows[0])

    assert asyncio.run(program()) == list(range(1_000))
    assert most <= 1, "one listening connection for all waiters"


def test_closing_the_app_ends_waits_with_an_error(app: App, work: Callable[..., Handle[int]]) -> None:
    handle = work()
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            handle.result(timeout=30)
        except AppClosed as end:
            ends.append(end)

    thread = threading.Thread(target=wait)
    thread.start()
    while not database_of(app).waiter._waiting:
        time.sleep(0.01)  # until it waits; the waiter sends no event for that
    app.close()
    thread.join(20)
    assert len(ends) == 1
    assert handle.cancel().state == "CANCELLED"
    assert isinstance(handle.outcome(timeout=10), Failed)


def test_an_idle_waiter_closes_its_connection(
    app: App, db: StoreHarness, work: Callable[..., Handle[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiter, "IDLE_S", 0.2)
    handle = work()
    handle.cancel()
    assert isinstance(handle.outcome(timeout=10), Failed)
    thread = database_of(app).waiter._thread
    if thread is not None:
        thread.join(20)
    assert database_of(app).waiter._thread is None
    again = work()
    again.cancel()
    assert isinstance(again.outcome(timeout=10), Failed)


def test_a_wait_continues_after_its_connections_are_lost(
    app: App, db: StoreHarness, work: Callable[..., Handle[int]]
) -> None:
    handle = work()
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(handle.result(timeout=60)))
    thread.start()
    while not database_of(app).waiter._waiting:
        time.sleep(0.01)  # until it waits
    db.connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name in ('everbeat waiter', 'everbeat client')"
    )
    complete(db, handle)
    thread.join(60)
    assert results == [1]


def test_an_event_loop_that_ends_closes_its_connections(app: App, db: StoreHarness) -> None:
    @app.task
    async def work() -> None: ...

    async def program() -> None:
        await asyncio.gather(*(work.asend() for _ in range(5)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(program())
        gc.collect()
    assert not list(database_of(app).database()._loops)


class TestMany:
    """`App.outcomes`, `App.results` and their twins: queried together and returned in the order of the handles."""

    def test_results_returns_many_results_in_order_with_few_queries(
        self, app: App, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @app.task
        def work(n: int) -> int:
            return n

        handles = app.send_many(work.call(n) for n in range(600))
        for claimed in db.claim("w1", limit=600):
            db.start(claimed)
            db.settle(claimed, result=claimed.args.encode()[5:-1])
        asked: list[int] = []
        look_up = database_of(app)._look_up

        def counted(ids: Sequence[UUID]) -> dict[UUID, tasks.StoredOutcome]:
            asked.append(len(ids))
            return look_up(ids)

        monkeypatch.setattr(database_of(app), "_look_up", counted)
        assert app.results(reversed(handles), timeout=30) == list(reversed(range(600)))
        assert len(asked) < 60, "there must be less than one query for each task"
        asked.clear()
        assert app.results(handles[:3]) == [0, 1, 2]
        assert app.results([]) == []
        assert asked == [], "the outcomes are cached now"

    async def test_aresults_and_aoutcomes_return_many_results_in_order(
        self, app: App, db: StoreHarness
    ) -> None:
        @app.task
        def work(n: int) -> int:
            return n

        handles = await app.asend_many([work.call(1), work.call(2)])
        for claimed in db.claim("w1", limit=2):
            db.start(claimed)
            db.settle(claimed, result=b"7")
        assert await app.aresults([*handles, handles[0]], timeout=30) == [7, 7, 7]
        with pytest.raises(BlockingCallInLoop, match="aoutcomes"):
            app.outcomes([app.handle(UUID(int=1))])

    async def test_a_cancelled_wait_for_many_results_leaves_nothing_registered(
        self, app: App, db: StoreHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        @app.task
        def work(n: int) -> int:
            return n

        handles = await app.asend_many([work.call(n) for n in range(3)])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await app.aresults(handles)
        with pytest.raises(TaskNotFound):
            await app.aresults([*handles, app.handle(UUID(int=5))], timeout=30)
        gc.collect()
        await asyncio.sleep(0)  # the loop warns about a coroutine that never started
        assert [record for record in caplog.records if "never retrieved" in record.message] == []
        assert not any(
            not future.cancelled()
            for waiting in database_of(app).waiter._waiting.values()
            for future in waiting
        )

    def test_results_raises_a_failure_after_all_tasks_have_ended(self, app: App, db: StoreHarness) -> None:
        @app.task
        def work(n: int) -> int:
            return n

        handles = app.send_many(work.call(n) for n in range(3))
        first, second, third = db.claim("w1", limit=3)
        for claimed in (first, second, third):
            db.start(claimed)
        db.settle(first, result=b"1")
        db.settle(second, "FAILED", error=b'{"code":"NO","message":"not today"}')
        with pytest.raises(WaitTimeout):
            app.outcomes(handles, timeout=0.2)
        db.settle(third, result=b"3")
        assert [type(each).__name__ for each in app.outcomes(handles, timeout=30)] == [
            "Completed",
            "Failed",
            "Completed",
        ]
        with pytest.raises(TaskFailed, match="not today"):
            app.results(handles)

    def test_results_refuses_an_unknown_task_immediately(self, app: App) -> None:
        with pytest.raises(TaskNotFound):
            app.results([app.handle(UUID(int=5))], timeout=30)
