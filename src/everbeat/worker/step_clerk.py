"""What the worker does about the steps of running code: reads and records them, lets it sleep and wait, sends its children.

What lives here: the answers, each at the hand of the database, and how long a sleep may be that keeps its slot. What may not: the
code's half (`domain.durable`), and how an attempt ends that is suspended (`settlement`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, assert_never

from everbeat.domain.backend import (
    LoadSteps,
    RecordStep,
    SendChild,
    Sleep,
    StepAnswer,
    StepQuestion,
    WaitForEvent,
)
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.store import steps
from everbeat.worker.attempt import Attempt
from everbeat.worker.inquiry import Inquiry, Stopped

REST_IN_PLACE_S: Final = 5.0
"""A shorter rest keeps its slot: giving it back costs a settle, a claim and the code before the sleep once more. A worker that is told
to stop gives it back all the same."""
_LOOK_EVERY_S: Final = 0.25
_MOST_TRIES: Final = 20


class Suspend(Exception):
    """The code is to give its slot back; the task's row says until when."""


class StepClerk:
    """One for each worker, on its loop."""

    def __init__(self, inquiry: Inquiry, *, clock: Clock, is_leaving: Callable[[], bool]) -> None:
        self._inquiry = inquiry
        self._clock = clock
        self._is_leaving = is_leaving

    async def answer(self, attempt: Attempt, question: StepQuestion) -> StepAnswer:
        """The answer. Raises Stopped, and Suspend where the code should end until it is time."""
        match question:
            case LoadSteps(after):
                page = await self._inquiry.ask(attempt, steps.load_steps(*attempt.lease, after=after))
                if page is None:
                    self._inquiry.lost(attempt)
                return StepAnswer(records=page.records, next_after=page.next_after)
            case RecordStep(name, result):
                record = steps.record_step(*attempt.lease, name=name, result=result.encode())
                if not await self._inquiry.ask(attempt, record):
                    self._inquiry.lost(attempt)
                return StepAnswer()
            case Sleep():
                return await self._sleep(attempt, question)
            case WaitForEvent():
                return await self._wait(attempt, question)
            case SendChild():
                return await self._send(attempt, question)
            case _:
                assert_never(question)

    async def _sleep(self, attempt: Attempt, question: Sleep) -> StepAnswer:
        begin = steps.begin_sleep(*attempt.lease, name=question.name, duration_ms=question.duration_ms)
        left_ms = await self._inquiry.ask(attempt, begin)
        if left_ms is None:
            self._inquiry.lost(attempt)
        if left_ms > REST_IN_PLACE_S * 1_000:
            raise Suspend
        attempt.rests += 1
        try:
            await self._rest(attempt, left_ms / 1_000)
        finally:
            attempt.rests -= 1
        return StepAnswer()

    async def _rest(self, attempt: Attempt, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while (left_s := until - self._clock.monotonic()) > 0:
            self._inquiry.require_running(attempt)
            if attempt.stopped is not None:
                raise Stopped(attempt.stopped)
            if self._is_leaving():  # another worker goes on when it is time
                raise Suspend
            await self._clock.sleep(min(left_s, _LOOK_EVERY_S))

    async def _wait(self, attempt: Attempt, question: WaitForEvent) -> StepAnswer:
        wait = steps.wait_for_signal(
            *attempt.lease, name=question.name, event=question.event, timeout_ms=question.timeout_ms
        )
        async with attempt.wait_turn:
            # Twice: a signal that was being stored when the first look began is seen by the second, and any later one sees
            # what the first has written.
            for _ in range(2):
                found = await self._inquiry.ask(attempt, wait)
                if found is None:
                    self._inquiry.lost(attempt)
                if found.state != "OPEN":
                    return StepAnswer(state=found.state, value=found.value)
        raise Suspend

    async def _send(self, attempt: Attempt, question: SendChild) -> StepAnswer:
        send = steps.send_child(
            *attempt.lease, step=question.name, child=question.child, channel=self._inquiry.channel
        )
        for _ in range(_MOST_TRIES):
            found = await self._inquiry.ask(attempt, send)
            if found is None:
                self._inquiry.lost(attempt)
            if found.verdict == "cancelled":
                raise Stopped("cancelled")
            if found.id is not None:
                return StepAnswer(child=found.id)
        raise DatabaseError(
            f"The key of {question.child.name} ({question.child.key!r}) was taken and freed again at each of {_MOST_TRIES} tries to send.",
            fix="send again; nothing was stored for it.",
        )
