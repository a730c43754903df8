"""Waiting for results: one listener for everybody, a poll underneath, ends remembered and timeouts not."""

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

from everbeat import (
    TASK_CANCELLED,
    TASK_EXPIRED,
    App,
    AppClosed,
    BlockingCallInLoop,
    Completed,
    Failed,
    Handle,
    TaskFailed,
    TaskNotFound,
    WaitTimeout,
)
from everbeat.client import waiter
from everbeat.store import tasks
from tests.store.conftest import Hands


@pytest.fixture
def work(app: App) -> Callable[..., Handle[int]]:
    @app.task
    def work(n: int = 1) -> int:
        return n

    return work.send


def complete(hands: Hands, handle: Handle[int], result: bytes = b"1") -> None:
    (claimed,) = [task for task in hands.claim("w1", limit=1_000) if task.id == handle.id]
    hands.start(claimed)
    hands.settle(claimed, result=result)


def test_a_result_arrives_by_hint_without_waiting_for_a_poll(
    app: App, hands: Hands, work: Callable[..., Handle[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = threading.Event()
    heard = waiter.Waiter._heard

    def noted(self: waiter.Waiter, state: bool) -> None:
        heard(self, state)
        if state:
            listening.set()

    monkeypatch.setattr(waiter.Waiter, "_heard", noted)
    handle = work()
    threading.Timer(0.0, lambda: listening.wait(20) and complete(hands, handle)).start()
    assert handle.result(timeout=20) == 1
    later = work()
    asked = time.monotonic()
    timer = threading.Timer(0.3, complete, args=(hands, later))  # past the first look-up, before any poll
    timer.start()
    assert later.result(timeout=20) == 1
    assert time.monotonic() - asked < 0.9, "the poll of a listening waiter comes after 1 s"


def test_a_result_arrives_by_poll_where_hints_cannot_be_heard(
    app: App, hands: Hands, work: Callable[..., Handle[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiter.Waiter, "_hinted", lambda self, hint: None)
    monkeypatch.setattr(waiter.Waiter, "_heard", lambda self, listening: None)
    handle = work()
    timer = threading.Timer(0.5, complete, args=(hands, handle))  # longer than a deaf waiter polls at first
    timer.start()
    asked = time.monotonic()
    assert handle.result(timeout=20) == 1
    assert time.monotonic() - asked < 3


def test_a_timeout_says_the_state_and_is_not_remembered(  # B14
    hands: Hands, work: Callable[..., Handle[int]]
) -> None:
    handle = work()
    for timeout in (0, "20ms", 0.3):
        with pytest.raises(WaitTimeout, match=f"{handle.id} is still PENDING") as end:
            handle.result(timeout=timeout)
        assert end.value.task_id == handle.id
    complete(hands, handle)
    assert handle.result(timeout=0) == 1
    assert handle.outcome() == Completed(1)


def test_an_unknown_id_says_so(app: App) -> None:  # B14
    missing = app.handle(uuid4())
    for ask in (missing.result, missing.outcome, missing.info, missing.cancel, missing.retry):
        with pytest.raises(TaskNotFound, match=str(missing.id)):
            ask()
    with pytest.raises(TaskNotFound):
        missing.result(timeout=0)


def test_a_failure_is_raised_with_what_the_task_said(app: App, hands: Hands) -> None:
    @app.task
    def work() -> None: ...

    handle = work.send()
    (claimed,) = hands.claim("w1")
    hands.start(claimed)
    hands.settle(
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


def test_cancelled_and_expired_tasks_end_with_their_own_codes(app: App, hands: Hands) -> None:
    @app.task
    def work() -> None: ...

    cancelled, late = (
        work.send(),
        work.with_options(good_until=datetime.now(UTC) - timedelta(seconds=1)).send(),
    )
    cancelled.cancel()
    assert hands.run(tasks.expire(channel=hands.target.channel)) == [late.id]
    for handle, code in ((cancelled, TASK_CANCELLED), (late, TASK_EXPIRED)):
        with pytest.raises(TaskFailed) as failure:
            handle.result(timeout=10)
        assert failure.value.error.code == code


def test_results_have_their_type_again(app: App, hands: Hands) -> None:
    @app.task
    def work() -> dict[str, date]:
        return {}

    handle = work.send()
    (claimed,) = hands.claim("w1")
    hands.start(claimed)
    hands.settle(claimed, result=work.definition.codec.encode_result({"a": date(2030, 1, 2)}))
    assert handle.result(timeout=10) == {"a": date(2030, 1, 2)}
    assert app.handle(str(handle.id), work).result(timeout=10) == {"a": date(2030, 1, 2)}
    assert app.handle(handle.id).result(timeout=10) == {"a": "2030-01-02"}


def test_waiting_on_a_loop_does_not_block_it(
    app: App, hands: Hands, work: Callable[..., Handle[int]]
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
        await asyncio.to_thread(complete, hands, handle)
        result = await waiting
        await app.aclose()
        return result

    assert asyncio.run(program()) == 1
    assert handle.result() == 1


def test_whoever_stops_waiting_is_forgotten(app: App, work: Callable[..., Handle[int]]) -> None:
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
    assert app.door.waiter._waiting == {}


def test_a_thousand_waiters_share_one_connection(app: App, hands: Hands) -> None:  # B14
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
        while claimed := hands.claim("w1", limit=100):
            hands.start(*claimed)
            for task in claimed:
                number = task.args.removeprefix('{"n":').removesuffix("}")
                hands.settle(task, result=number.encode())
            rows = hands.connection.execute(
                "select count(*) from pg_stat_activity where application_name in ('everbeat waiter', 'everbeat client') and query ilike %s",
                [f"%{hands.target.channel}%"],
            ).fetchone()
            assert rows is not None
            most = max(most, rows[0])

    assert asyncio.run(program()) == list(range(1_000))
    assert most <= 1, "one listening connection for all waiters"


def test_closing_tells_whoever_waits(app: App, work: Callable[..., Handle[int]]) -> None:
    handle = work()
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            handle.result(timeout=30)
        except AppClosed as end:
            ends.append(end)

    thread = threading.Thread(target=wait)
    thread.start()
    while not app.door.waiter._waiting:
        time.sleep(0.01)  # until it waits; the waiter has no bell for that
    app.close()
    thread.join(20)
    assert len(ends) == 1
    assert handle.cancel().state == "CANCELLED"
    assert isinstance(handle.outcome(timeout=10), Failed)


def test_an_idle_waiter_gives_its_connection_back(
    app: App, hands: Hands, work: Callable[..., Handle[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiter, "IDLE_S", 0.2)
    handle = work()
    handle.cancel()
    assert isinstance(handle.outcome(timeout=10), Failed)
    thread = app.door.waiter._thread
    if thread is not None:
        thread.join(20)
    assert app.door.waiter._thread is None
    again = work()
    again.cancel()
    assert isinstance(again.outcome(timeout=10), Failed)


def test_waiting_goes_on_over_lost_connections(
    app: App, hands: Hands, work: Callable[..., Handle[int]]
) -> None:
    handle = work()
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(handle.result(timeout=60)))
    thread.start()
    while not app.door.waiter._waiting:
        time.sleep(0.01)  # until it waits
    hands.connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name in ('everbeat waiter', 'everbeat client')"
    )
    complete(hands, handle)
    thread.join(60)
    assert results == [1]


def test_a_loop_that_ends_takes_its_connections_along(app: App, hands: Hands) -> None:
    @app.task
    async def work() -> None: ...

    async def program() -> None:
        await asyncio.gather(*(work.asend() for _ in range(5)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(program())
        gc.collect()
    assert not list(app.door.database()._loops)


class TestMany:
    """`App.outcomes`, `App.results` and their twins: looked up together, in the order asked."""

    def test_the_results_of_many_come_in_their_order_by_few_questions(
        self, app: App, hands: Hands, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @app.task
        def work(n: int) -> int:
            return n

        handles = app.send_many(work.call(n) for n in range(600))
        for claimed in hands.claim("w1", limit=600):
            hands.start(claimed)
            hands.settle(claimed, result=claimed.args.encode()[5:-1])
        asked: list[int] = []
        look_up = app.door._look_up

        def counted(ids: Sequence[UUID]) -> dict[UUID, tasks.StoredOutcome]:
            asked.append(len(ids))
            return look_up(ids)

        monkeypatch.setattr(app.door, "_look_up", counted)
        assert app.results(reversed(handles), timeout=30) == list(reversed(range(600)))
        assert len(asked) < 60, "not one question for each"
        asked.clear()
        assert app.results(handles[:3]) == [0, 1, 2]
        assert app.results([]) == []
        assert asked == [], "known by now"

    async def test_the_same_to_await(self, app: App, hands: Hands) -> None:
        @app.task
        def work(n: int) -> int:
            return n

        handles = await app.asend_many([work.call(1), work.call(2)])
        for claimed in hands.claim("w1", limit=2):
            hands.start(claimed)
            hands.settle(claimed, result=b"7")
        assert await app.aresults([*handles, handles[0]], timeout=30) == [7, 7, 7]
        with pytest.raises(BlockingCallInLoop, match="aoutcomes"):
            app.outcomes([app.handle(UUID(int=1))])

    async def test_whoever_stops_waiting_leaves_nothing_behind(
        self, app: App, hands: Hands, caplog: pytest.LogCaptureFixture
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
        await asyncio.sleep(0)  # what was never asked is complained of by the loop
        assert [record for record in caplog.records if "never retrieved" in record.message] == []
        assert not any(
            not future.cancelled() for waiting in app.door.waiter._waiting.values() for future in waiting
        )

    def test_a_failure_is_raised_when_all_have_ended(self, app: App, hands: Hands) -> None:
        @app.task
        def work(n: int) -> int:
            return n

        handles = app.send_many(work.call(n) for n in range(3))
        first, second, third = hands.claim("w1", limit=3)
        for claimed in (first, second, third):
            hands.start(claimed)
        hands.settle(first, result=b"1")
        hands.settle(second, "FAILED", error=b'{"code":"NO","message":"not today"}')
        with pytest.raises(WaitTimeout):
            app.outcomes(handles, timeout=0.2)
        hands.settle(third, result=b"3")
        assert [type(each).__name__ for each in app.outcomes(handles, timeout=30)] == [
            "Completed",
            "Failed",
            "Completed",
        ]
        with pytest.raises(TaskFailed, match="not today"):
            app.results(handles)

    def test_an_unknown_task_is_said_at_once(self, app: App) -> None:
        with pytest.raises(TaskNotFound):
            app.results([app.handle(UUID(int=5))], timeout=30)
