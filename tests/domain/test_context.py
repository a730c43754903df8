"""A task's code finds its Context anywhere, reports progress through it, and learns from it when to stop."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NoReturn
from uuid import UUID

import pytest

from everbeat.domain.task.checkpoint import CHECKPOINT_LIMIT_BYTES, Checkpoint, PartialWork
from everbeat.domain.task.context import Context, ContextSource, entered
from everbeat.domain.task.states import TaskState
from everbeat.errors import EverbeatError, OutsideTask, PayloadError, StopReason, TaskStopped


@dataclass
class Recorder:
    """A Context backend that records its calls."""

    reason: StopReason | None = None
    reports: list[tuple[str, float | None, str]] = field(default_factory=list)
    stored: list[Any] = field(default_factory=list)
    refusal: Exception | None = None

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        self.reports.append((stage, fraction, message))

    def stop_reason(self) -> StopReason | None:
        return self.reason

    def refuse_in_loop(self, name: str, *, instead: str) -> None:
        pass

    def store(self, checkpoint: Checkpoint) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.stored.append((checkpoint.number, json.loads(checkpoint.data)))

    async def astore(self, checkpoint: Checkpoint) -> None:
        self.store(checkpoint)

    def commit(self, connection: object) -> NoReturn:
        raise AssertionError(connection)


def context(number: int = 1, backend: Recorder | None = None, *, work: PartialWork | None = None) -> Context:
    return Context(
        task_id=UUID(int=number),
        name="task",
        queue="default",
        attempt=1,
        fence=number,
        claim_id=UUID(int=9),
        worker_id="host-1-abc",
        _backend=backend or Recorder(),
        _work=work or PartialWork(),
    )


class Letters:
    """A sequence that only has `__getitem__`."""

    def __getitem__(self, index: int) -> str:
        return "ab"[index]


@dataclass
class Reply:
    """A type that a checkpoint would return as a dict."""

    value: int


def test_current_raises_outside_a_task() -> None:
    with pytest.raises(OutsideTask, match=r"No task is running here.*Fix: call it inside a task"):
        Context.current()
    assert Context.current_or_none() is None


def test_current_returns_the_innermost_context_until_its_block_ends() -> None:
    outer, inner = context(1), context(2)
    with entered(outer):
        with entered(inner):
            assert Context.current() is inner
        assert Context.current() is outer
    assert Context.current_or_none() is None


async def test_concurrent_tasks_on_one_event_loop_see_their_own_context() -> None:
    both_inside = asyncio.Barrier(2)

    async def run(number: int) -> int:
        with entered(context(number)):
            await both_inside.wait()
            return Context.current().fence

    assert await asyncio.gather(run(1), run(2)) == [1, 2]


def test_the_context_of_an_attempt_is_made_when_the_code_first_needs_it() -> None:
    made: list[Context] = []

    def make() -> Context:
        made.append(context())
        return made[-1]

    source = ContextSource(make)
    source.exception_codes = {ValueError: "BAD_VALUE"}
    with entered(source):
        source.begin(7)
        assert made == []
        assert source.misfit is None
        one = Context.current()
        assert Context.current_or_none() is one
    assert made == [one]
    assert (one._book.home, one._book.exception_codes) == (7, {ValueError: "BAD_VALUE"})
    source.begin(8)
    assert one._book.home == 8


def test_two_threads_that_need_the_context_at_the_same_time_get_the_same() -> None:
    both, got = threading.Barrier(2), list[Context]()

    def make() -> Context:
        both.wait(10)
        return context()

    source = ContextSource(make)
    threads = [threading.Thread(target=lambda: got.append(source.get())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(got) == 2
    assert got[0] is got[1]


def test_a_new_thread_sees_the_context_only_through_copied_context_variables() -> None:
    seen: list[Context | None] = []

    def look() -> None:
        seen.append(Context.current_or_none())

    mine = context()
    with entered(mine):
        copied = contextvars.copy_context()
    with entered(mine):
        for target in (look, lambda: copied.run(look)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == [None, mine]


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (None, None),
        (0.25, 0.25),
        (1, 1.0),
        (1.0000001, 1.0),
        (10**400, 1.0),
        (Decimal("0.5"), 0.5),
        (-3, 0.0),
        (math.nan, None),
        (math.inf, 1.0),
    ],
)
def test_progress_reports_a_fraction_between_zero_and_one(
    given: float | None, reported: float | None
) -> None:
    recorder = Recorder()
    context(backend=recorder).progress("resize", given, "frame 1")
    assert recorder.reports == [("resize", reported, "frame 1")]


@pytest.mark.parametrize(
    ("given", "message", "fix"),
    [
        (("x", "half"), "fraction 'half'.*is of type str, not a number", "n / total"),
        (("x", True), "fraction True.*is of type bool, not a number", "n / total"),
        (("x", 1j), "fraction 1j.*is of type complex, not a number", "n / total"),
        ((0.5,), r"stage 0.5.*is of type float, not a text", r"ctx.progress\('resize', 0.5\)"),
    ],
)
def test_progress_rejects_invalid_stages_fractions_and_messages(given: Any, message: str, fix: str) -> None:
    recorder = Recorder()
    with pytest.raises(PayloadError, match=f"{message}.*Fix:.*{fix}"):
        context(backend=recorder).progress(*given)
    assert recorder.reports == []


@pytest.mark.parametrize("reason", ["cancelled", "lease_lost", "timed_out", "stalled", "shutting_down"])
def test_check_cancelled_raises_task_stopped_with_the_reason(reason: StopReason) -> None:
    recorder = Recorder()
    tested = context(backend=recorder)
    tested.check_cancelled()
    assert not tested.cancelled
    recorder.reason = reason
    assert tested.cancelled
    with pytest.raises(TaskStopped, match="should stop: ") as caught:
        tested.check_cancelled()
    assert (caught.value.reason, caught.value.task_id) == (reason, tested.task_id)


def test_except_exception_does_not_catch_task_stopped() -> None:
    def careless() -> None:
        try:
            context(backend=Recorder("cancelled")).check_cancelled()
        except Exception:  # noqa: BLE001 - the carelessness under test
            pytest.fail("swallowed")

    with pytest.raises(TaskStopped):
        careless()


def test_a_context_is_immutable() -> None:
    with pytest.raises(AttributeError):
        context().fence = 5  # type: ignore[misc]


class TestCheckpoints:
    def test_last_checkpoint_is_a_copy_of_the_stored_json(self) -> None:
        recorder = Recorder()
        tested = context(backend=recorder)
        assert tested.last_checkpoint is None
        tested.checkpoint({"page": (1, 2), "id": "7"})
        assert tested.last_checkpoint == {"page": [1, 2], "id": "7"}
        tested.last_checkpoint["page"].clear()
        assert tested.last_checkpoint["page"] == [1, 2]
        assert recorder.stored == [(1, {"value": {"page": [1, 2], "id": "7"}, "done": {}})]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({1: 2}, "has the key 1, which would arrive as a str"),
            ({"seen": {1, 2}}, r"at \['seen'\] is of type set and would arrive as list"),
            ([(1, UUID(int=7))], r"at \[0\]\[1\] is of type UUID and would arrive as str"),
            (datetime(2026, 1, 1, tzinfo=UTC), "is of type datetime and would arrive as str"),
            (b"raw", "is of type bytes and would arrive as str"),
            (Decimal("1.5"), "is of type Decimal and would arrive as str"),
            (Reply(3), "is of type Reply and would arrive as dict"),
        ],
    )
    def test_checkpoint_rejects_a_value_that_json_would_change(self, value: Any, message: str) -> None:
        tested = context(backend=(recorder := Recorder()))
        with pytest.raises(PayloadError, match=f"{message}.*Fix: checkpoint plain values"):
            tested.checkpoint(value)
        assert (tested.last_checkpoint, recorder.stored) == (None, [])

    @pytest.mark.parametrize(
        "value",
        [None, 0, 1.5, "text", [], {}, {"a": [1, (2, None)]}, TaskState.PENDING, 2**63, OrderedDict(a=1)],
    )
    def test_checkpoint_accepts_a_value_that_compares_equal_after_json(self, value: Any) -> None:
        tested = context()
        tested.checkpoint(value)
        assert tested.last_checkpoint == json.loads(json.dumps(value))

    def test_a_checkpoint_that_was_not_stored_does_not_replace_last_checkpoint(self) -> None:
        recorder = Recorder()
        tested = context(backend=recorder)
        tested.checkpoint("kept")
        recorder.refusal = EverbeatError("refused")
        with pytest.raises(EverbeatError, match="refused"):
            tested.checkpoint("lost")
        assert tested.last_checkpoint == "kept"

    def test_checkpoint_stores_the_value_before_it_raises_task_stopped(self) -> None:
        recorder = Recorder(reason="shutting_down")
        with pytest.raises(TaskStopped):
            context(backend=recorder).checkpoint(1)
        assert recorder.stored == [(1, {"value": 1, "done": {}})]

    @pytest.mark.parametrize(
        "stored", [None, "", "no json", "[]", '{"value": 1, "done": {"a": "x"}}', "null"]
    )
    def test_an_unreadable_stored_checkpoint_is_ignored(self, stored: str | None) -> None:
        assert PartialWork.from_json(stored).last is None

    def test_the_size_limit_of_a_checkpoint_includes_the_names_of_resumed_loops(self) -> None:
        work = PartialWork()
        work.checkpoint("x" * (CHECKPOINT_LIMIT_BYTES - 100), task_name="task")
        steps = work.steps("n" * 200, total=None, task_name="task")
        with pytest.raises(PayloadError, match=r"would take 1,048,7.. bytes of JSON; at most 1,048,576"):
            steps.count()
        assert steps.done == 0


class TestResume:
    def walk(self, tested: Context, *, until: int) -> list[int]:
        seen = []
        for item in tested.resume("step", [10, 20, 30]):
            seen.append(item)
            if item == until:
                break
        return seen

    def test_resume_counts_an_item_when_the_loop_asks_for_the_next_one(self) -> None:  # G3
        recorder = Recorder()
        assert self.walk(context(backend=recorder), until=30) == [10, 20, 30]
        assert [stored["done"] for _, stored in recorder.stored] == [{"step": 1}, {"step": 2}]
        assert recorder.reports == [("step", 1 / 3, "1 of 3"), ("step", 2 / 3, "2 of 3")]
        again = PartialWork.from_json(json.dumps(recorder.stored[-1][1]))
        assert self.walk(context(work=again), until=0) == [30]
        assert self.walk(context(work=PartialWork(done={"step": 3})), until=0) == []
        assert self.walk(context(work=PartialWork(done={"step": 9})), until=0) == []

    def test_resume_repeats_the_item_whose_body_raised(self) -> None:
        recorder = Recorder()
        tested = context(backend=recorder)

        def fail() -> None:
            for item in tested.resume("step", [1, 2, 3]):
                if item == 2:
                    raise LookupError

        with pytest.raises(LookupError):
            fail()
        assert self.walk_on(tested) == [2, 3]
        assert recorder.stored[-1][1]["done"] == {"step": 3}

    def walk_on(self, tested: Context) -> list[int]:
        return list(tested.resume("step", [1, 2, 3]))

    def test_resume_rejects_a_name_whose_loop_is_finished(self) -> None:
        tested = context()
        assert self.walk_on(tested) == [1, 2, 3]
        with pytest.raises(PayloadError, match="resumes 'step' again in the same attempt"):
            self.walk_on(tested)

    def test_resume_rejects_two_loops_of_one_name_at_the_same_time(self) -> None:
        tested = context()
        outer = tested.resume("step", [1, 2, 3])
        next(outer)
        inner = tested.resume("step", [1, 2, 3])
        next(inner)
        next(inner)
        with pytest.raises(PayloadError, match="at the same time"):
            next(outer)

    @pytest.mark.parametrize("name", ["", "x" * 201, "a\n", "\ud800", 3, None])
    def test_resume_rejects_names_that_are_not_short_printable_text(self, name: Any) -> None:
        with pytest.raises(PayloadError, match="printable text of 1 to 200 characters"):
            context().resume(name, [])

    @pytest.mark.parametrize("items", [{1, 2}, frozenset("ab")])
    def test_resume_rejects_items_without_a_stable_order(self, items: Any) -> None:
        with pytest.raises(PayloadError, match=r"order can differ.*Fix: .*sorted"):
            context().resume("step", items)
        assert list(context().resume("step", {"a": 1}.keys())) == ["a"], "a dict keeps its order"

    def test_resume_rejects_items_that_are_not_iterable(self) -> None:
        async def source() -> AsyncIterator[int]:
            yield 1

        tested = context()
        with pytest.raises(
            PayloadError, match="items 5 of the resume 'step' in task 'task' are of type int"
        ) as caught:
            tested.resume("step", 5)  # type: ignore[arg-type]
        assert caught.value.parameter == "items"
        assert "range(5)" in str(caught.value)
        with pytest.raises(
            PayloadError, match=r"asynchronous.*Fix: write 'async for \.\.\. in Context\.aresume"
        ):
            tested.resume("step", source())  # type: ignore[arg-type]
        with pytest.raises(PayloadError, match="items None of the resume 'step'"):
            tested.aresume("step", None)  # type: ignore[arg-type]
        tested.resume("step", Letters())  # type: ignore[arg-type]

    def test_resume_raises_task_stopped_before_the_first_item_and_between_items(self) -> None:
        recorder = Recorder(reason="cancelled")
        with pytest.raises(TaskStopped):
            self.walk(context(backend=recorder), until=0)
        assert recorder.stored == []
        recorder = Recorder()
        steps = context(backend=recorder).resume("step", [1, 2, 3])
        next(steps)
        recorder.reason = "shutting_down"
        with pytest.raises(TaskStopped):
            next(steps)
        assert recorder.stored == [(1, {"value": None, "done": {"step": 1}})]

    async def test_aresume_accepts_async_and_plain_iterables(self) -> None:
        async def source() -> AsyncIterator[int]:
            for item in (1, 2, 3):
                yield item

        for items in (source(), iter([1, 2, 3]), [1, 2, 3]):
            recorder = Recorder()
            tested = context(backend=recorder, work=PartialWork(done={"step": 1}))
            assert [item async for item in tested.aresume("step", items)] == [2, 3]
            assert recorder.stored[-1][1]["done"] == {"step": 3}

    def test_checkpoint_values_and_resumed_loops_are_stored_side_by_side(self) -> None:
        recorder = Recorder()
        tested = context(backend=recorder)
        for item in tested.resume("step", iter("ab")):
            tested.checkpoint(item)
        assert recorder.stored[-1] == (4, {"value": "b", "done": {"step": 2}})
        assert recorder.reports[-1] == ("step", None, "2 done")
