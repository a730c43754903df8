from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from random import Random

import pytest

from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import Event, ServiceFailed, ServiceRecovered
from everbeat.runtime.task_scope import ServiceRunner, TaskScope
from everbeat.testing.clock import ManualClock, settle


class Recorder:
    """A service that records its ticks and then calls `act`."""

    name = "recorder"

    def __init__(
        self,
        clock: ManualClock,
        *,
        interval_s: float = 10.0,
        act: Callable[[int], Awaitable[float | None]] | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.at: list[float] = []
        self.in_flight = 0
        self._clock = clock
        self._act = act

    async def tick(self) -> float | None:
        self.at.append(self._clock.monotonic())
        self.in_flight += 1
        assert self.in_flight == 1, "two ticks at once"
        try:
            return None if self._act is None else await self._act(len(self.at))
        finally:
            self.in_flight -= 1


def runner_of(service: Recorder, clock: ManualClock, events: list[Event], **options: object) -> ServiceRunner:
    return ServiceRunner(service, clock=clock, random=Random(1), emit=events.append, **options)  # type: ignore[arg-type]


def gaps(moments: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(moments)]


async def test_a_service_ticks_with_jitter_and_never_later_than_its_interval() -> None:
    clock, events = ManualClock(), list[Event]()
    service = Recorder(clock)
    async with TaskScope(name="test") as scope:
        scope.start(runner_of(service, clock, events).run(), name="recorder")
        await clock.advance(1000)
    assert service.at[0] == 0
    assert all(9.0 <= gap <= 10.0 for gap in gaps(service.at))
    assert len(set(gaps(service.at))) > 50
    assert events == []


async def test_the_tick_interval_counts_from_the_start_and_missed_ticks_are_skipped() -> None:
    clock = ManualClock()

    async def act(number: int) -> None:
        await clock.sleep({1: 4.0, 2: 35.0}.get(number, 0.0))  # by hand: ticks that take long

    service = Recorder(clock, act=act)
    async with TaskScope(name="test") as scope:
        scope.start(runner_of(service, clock, []).run(), name="recorder")
        await clock.advance(70)
    first, second, third = gaps(service.at)[:3]
    assert 9.0 <= first <= 10.0
    assert second == pytest.approx(35.0)
    assert 9.0 <= third <= 10.0


async def test_a_tick_can_request_the_time_of_the_next_one() -> None:
    clock = ManualClock()
    answers = {1: 0.0, 2: 0.0, 3: 3.25, 4: 100.0, 5: -1.0, 6: float("nan")}

    async def act(number: int) -> float | None:
        return answers.get(number)

    service = Recorder(clock, act=act)
    async with TaskScope(name="test") as scope:
        scope.start(runner_of(service, clock, []).run(), name="recorder")
        await clock.advance(120)
    assert service.at[:6] == [0, 0, 0, 3.25, 103.25, 103.25]
    assert 9.0 <= service.at[6] - 103.25 <= 10.0


async def test_a_wake_brings_the_next_tick_forward_even_during_a_tick() -> None:
    clock = ManualClock()
    wake = asyncio.Event()

    async def act(number: int) -> None:
        if number == 2:
            wake.set()

    service = Recorder(clock, act=act)
    runner = runner_of(service, clock, [], wake=wake)
    async with TaskScope(name="test") as scope:
        scope.start(runner.run(), name="recorder")
        await clock.advance(2)
        assert service.at == [0]
        runner.wake_now()
        await settle()
        assert service.at == [0, 2, 2]


async def test_service_failures_back_off_to_thirty_seconds_and_end_with_a_recovery() -> None:
    clock, events = ManualClock(), list[Event]()
    broken = True

    async def act(_: int) -> None:
        if broken:
            raise ValueError("no luck")

    service = Recorder(clock, interval_s=3600.0, act=act)
    runner = runner_of(service, clock, events)
    async with TaskScope(name="test") as scope:
        task = scope.start(runner.run(), name="recorder")
        await clock.advance(300)
        waits = gaps(service.at)
        assert all(
            base <= wait <= 1.25 * base for wait, base in zip(waits, [0.5, 1, 2, 4, 8, 16], strict=False)
        )
        assert waits[-1] == 30.0
        failed = [event for event in events if isinstance(event, ServiceFailed)]
        assert [event.consecutive for event in failed] == list(range(1, len(failed) + 1))
        assert str(failed[0].error) == "no luck"
        assert not task.done()

        broken = False
        await clock.advance(30)
        assert events[-1] == ServiceRecovered(name="recorder", failures=len(failed))
        assert (runner.consecutive_failures, runner.ticks) == (0, 1)


async def test_a_failing_heartbeat_service_ticks_no_later_than_a_working_one() -> None:
    clock, events = ManualClock(), list[Event]()

    async def act(_: int) -> None:
        raise ValueError("no luck")

    service = Recorder(clock, interval_s=1.0, act=act)
    async with TaskScope(name="test") as scope:
        scope.start(runner_of(service, clock, events).run(), name="recorder")
        await clock.advance(2000)
    assert len(events) >= 2000
    assert max(event.retry_in_s for event in events if isinstance(event, ServiceFailed)) == 1.0


async def test_many_wakes_do_not_turn_a_failing_service_into_a_busy_loop() -> None:
    clock = ManualClock()
    wake = asyncio.Event()

    async def act(_: int) -> None:
        wake.set()
        raise ValueError("no luck")

    service = Recorder(clock, interval_s=3600.0, act=act)
    async with TaskScope(name="test") as scope:
        scope.start(runner_of(service, clock, [], wake=wake).run(), name="recorder")
        await clock.advance(10)
    assert len(service.at) == 21


async def test_a_cancelled_future_inside_a_tick_does_not_end_the_service() -> None:
    clock, events = ManualClock(), list[Event]()

    async def act(number: int) -> None:
        if number == 1:
            raise asyncio.CancelledError

    service = Recorder(clock, act=act)
    async with TaskScope(name="test") as scope:
        task = scope.start(runner_of(service, clock, events).run(), name="recorder")
        await clock.advance(1)
        assert len(service.at) == 2
        assert not task.done()
    assert isinstance(events[0], ServiceFailed)


async def test_a_hanging_tick_is_ended_by_its_timeout() -> None:
    events = list[Event]()
    hung = asyncio.Event()
    clock = ManualClock()

    async def act(number: int) -> None:
        if number == 1:
            await hung.wait()

    service = Recorder(clock, act=act)
    async with TaskScope(name="test") as scope, asyncio.timeout(10):
        scope.start(runner_of(service, clock, events, tick_timeout_s=0.05).run(), name="recorder")
        while not events:
            await asyncio.sleep(0.01)  # the timeout of a tick is real time, and the list sends no event
        await clock.advance(1)
    assert isinstance(events[0], ServiceFailed)
    assert isinstance(events[0].error, TimeoutError)
    assert len(service.at) == 2


@pytest.mark.parametrize("where", ["tick", "pause", "back-off", "swallowed"])
async def test_a_cancel_ends_a_service_loop_promptly_at_any_point(where: str) -> None:
    clock = ManualClock()

    async def act(_: int) -> None:
        match where:
            case "tick":
                await clock.sleep(1000)  # by hand: never
            case "back-off":
                raise ValueError("no luck")
            case "swallowed":
                try:
                    await clock.sleep(1000)  # by hand: never
                except asyncio.CancelledError:
                    return
            case _:
                pass

    task = asyncio.create_task(runner_of(Recorder(clock, act=act), clock, []).run())
    await settle()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=1)
    assert done == {task}
    assert task.cancelled()


async def test_a_failing_event_subscriber_does_not_end_the_service() -> None:
    clock = ManualClock()

    def broken(event: Event) -> None:
        raise ValueError("cannot listen")

    async def act(_: int) -> None:
        raise ValueError("no luck")

    service = Recorder(clock, act=act)
    runner = ServiceRunner(service, clock=clock, random=Random(1), emit=broken)
    async with TaskScope(name="test") as scope:
        scope.start(runner.run(), name="recorder")
        await clock.advance(5)
    assert len(service.at) > 2


async def test_a_service_with_the_system_clock_ticks_in_real_time() -> None:
    ticked = asyncio.Event()

    class Ticker:
        name = "ticker"
        interval_s = 0.02
        count = 0

        async def tick(self) -> None:
            self.count += 1
            if self.count == 5:
                ticked.set()

    async with TaskScope(name="test") as scope, asyncio.timeout(5):
        runner = ServiceRunner(Ticker(), clock=SystemClock(), random=Random(), emit=lambda event: None)
        scope.start(runner.run(), name="ticker")
        await ticked.wait()
    assert runner.ticks >= 4
