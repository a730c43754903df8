"""The Context is found everywhere a task's code runs, reports progress, and says when to stop."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from everbeat.domain.context import Context, OutsideTask, StopReason, TaskStopped


@dataclass
class Recorder:
    """A worker's side of a Context, which keeps what it is told."""

    reason: StopReason | None = None
    reports: list[tuple[str, float | None, str]] = field(default_factory=list)

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        self.reports.append((stage, fraction, message))

    def stop_reason(self) -> StopReason | None:
        return self.reason


def context(number: int = 1, backend: Recorder | None = None) -> Context:
    return Context(
        task_id=UUID(int=number),
        name="task",
        queue="default",
        attempt=1,
        fence=number,
        claim_id=UUID(int=9),
        worker_id="host-1-abc",
        backend=backend or Recorder(),
    )


def test_outside_a_task_there_is_no_context() -> None:
    with pytest.raises(OutsideTask, match=r"No task runs here.*Fix: call it inside a task"):
        Context.current()
    assert Context.current_or_none() is None


def test_the_current_context_is_the_innermost_and_ends_with_its_block() -> None:
    outer, inner = context(1), context(2)
    with outer.entered():
        with inner.entered():
            assert Context.current() is inner
        assert Context.current() is outer
    assert Context.current_or_none() is None


async def test_tasks_on_one_loop_see_their_own_context() -> None:
    both_inside = asyncio.Barrier(2)

    async def run(number: int) -> int:
        with context(number).entered():
            await both_inside.wait()
            return Context.current().fence

    assert await asyncio.gather(run(1), run(2)) == [1, 2]


def test_a_thread_sees_the_context_it_was_started_in_only_if_it_is_handed_over() -> None:
    seen: list[Context | None] = []

    def look() -> None:
        seen.append(Context.current_or_none())

    mine = context()
    with mine.entered():
        copied = contextvars.copy_context()
    with mine.entered():
        for target in (look, lambda: copied.run(look)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == [None, mine]


@pytest.mark.parametrize(
    ("given", "reported"),
    [(None, None), (0.25, 0.25), (1, 1.0), (1.0000001, 1.0), (-3, 0.0), (math.nan, None), (math.inf, 1.0)],
)
def test_progress_reports_a_fraction_between_zero_and_one(
    given: float | None, reported: float | None
) -> None:
    recorder = Recorder()
    context(backend=recorder).progress("resize", given, "frame 1")
    assert recorder.reports == [("resize", reported, "frame 1")]


@pytest.mark.parametrize("reason", ["cancelled", "lease_lost", "timed_out", "stalled", "shutting_down"])
def test_code_that_should_stop_is_told_why(reason: StopReason) -> None:
    recorder = Recorder()
    tested = context(backend=recorder)
    tested.check_cancelled()
    assert not tested.cancelled
    recorder.reason = reason
    assert tested.cancelled
    with pytest.raises(TaskStopped, match="should stop: ") as caught:
        tested.check_cancelled()
    assert (caught.value.reason, caught.value.task_id) == (reason, tested.task_id)


def test_a_stop_is_not_swallowed_by_except_exception() -> None:
    def careless() -> None:
        try:
            context(backend=Recorder("cancelled")).check_cancelled()
        except Exception:  # noqa: BLE001 - the carelessness under test
            pytest.fail("swallowed")

    with pytest.raises(TaskStopped):
        careless()


def test_a_detached_context_reports_nowhere_and_never_stops() -> None:
    detached = Context.detached(task_id=UUID(int=5), name="task", queue="q")
    detached.progress("resize", 0.5)
    detached.check_cancelled()
    assert (detached.attempt, detached.fence, detached.task_id) == (1, 0, UUID(int=5))
    assert "backend" not in repr(detached)


def test_a_context_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        context().fence = 5  # type: ignore[misc]
