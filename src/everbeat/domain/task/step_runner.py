"""Runs the steps, sleeps, waits, child tasks and workflows of one attempt, unless an earlier attempt recorded them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from random import Random
from typing import Any, Final, TypeAlias, TypeVar, final
from uuid import UUID

from msgspec import Struct, structs
from msgspec.json import decode, encode

from everbeat.domain.labels import decode_labels
from everbeat.domain.plan import aperform, perform
from everbeat.domain.settings.units import Duration, milliseconds, spelled_duration, to_milliseconds
from everbeat.domain.task.argument_digest import digest_of_call
from everbeat.domain.task.context_backend import (
    ChildEnd,
    ContextBackend,
    FailedTry,
    JoinChildren,
    ListChildren,
    LoadSteps,
    NewChild,
    NewWorkflow,
    Recorded,
    RecordStep,
    SendChild,
    SendChildren,
    Sleep,
    StartWorkflow,
    StepAnswer,
    StepQuestion,
    WaitForEvent,
)
from everbeat.domain.task.ending import ending_of
from everbeat.domain.task.gathering import ENDS_PER_RECORD, NewGather, portions, recorded_ends, with_recorded
from everbeat.domain.task.outcome import code_of, error_from_exception
from everbeat.domain.task.questions import StoredAnswer, described, step_of
from everbeat.domain.task.retry import RetryPolicy
from everbeat.domain.task.steps import (
    StepBook,
    StepOptions,
    StepRecord,
    checked_name,
    codec_of,
    decode_event,
    decode_result,
    encode_result,
    inside,
    is_async_function,
    place_of,
    require_carried,
)
from everbeat.domain.tracing.model import TracedSend
from everbeat.domain.typed_json import TypedJson
from everbeat.errors import EventTimeout, PayloadError, TaskStopped
from everbeat.errors.wording import amount, storable

R = TypeVar("R")
T = TypeVar("T")
StepPlan: TypeAlias = Generator[StepQuestion, StepAnswer, T]
"""A generator of requests to the worker. Threads and event loops use the same generators."""

_PLAIN: Final = StepOptions()
_MESSAGE_BYTES: Final = 1_000
"""The maximum length of a failed try's message, in bytes. It is low because the next attempt reads all records of the task."""


class _StepCall(Struct, frozen=True):
    """A step to run: the place of its record, the codec of its result, and the digest of its arguments."""

    fn: partial[Any]
    place: StepRecord
    codec: TypedJson
    digest: str
    retry: RetryPolicy | None
    timeout_s: float | None

    @property
    def name(self) -> str:
        return self.place.name


@final
class StepRunner(Struct, frozen=True, eq=False):
    """Performs each operation only once across attempts. Uses the records of earlier attempts, and sends other requests to the worker."""

    task_id: UUID
    task_name: str
    backend: ContextBackend
    book: StepBook

    def run(self, method: str, plan: StepPlan[T]) -> T:
        """Run the plan of a Context method in this thread. Raises BlockingCallInLoop, which names `method`, on an event loop."""
        self._refuse_in_loop(method)
        return perform(plan, self.backend.ask_step)

    async def arun(self, plan: StepPlan[T]) -> T:
        """Run a plan on the running event loop and return its result."""
        return await aperform(plan, self.backend.aask_step)

    def check_cancelled(self) -> None:
        """Raise TaskStopped if the task should stop."""
        reason = self.backend.stop_reason()
        if reason is not None:
            raise TaskStopped(reason, task_id=self.task_id)

    def run_step(
        self,
        name: str,
        fn: Callable[..., R],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: StepOptions = _PLAIN,
    ) -> R:
        """Return the recorded result of a step, or call the function and record its result."""
        self._refuse_in_loop("step")
        if is_async_function(fn):
            raise self._is_async(name)
        step = self._step(name, fn, args, kwargs, options)
        if (recorded := perform(self._recorded(step), self.backend.ask_step)) is not None:
            known: R = decode_result(step.codec, recorded, task_name=self.task_name)
            return known

        def call() -> R:
            with self._traced(step.name), inside(step.name, strand=self.backend.strand()):
                returned: R = step.fn()
                return returned

        value = _Tries(self, step).run(call)
        if inspect.iscoroutine(value):
            value.close()
            raise self._is_async(step.name)
        perform(self._record(step, value), self.backend.ask_step)
        return value

    def arun_step(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: StepOptions = _PLAIN,
    ) -> Coroutine[Any, Any, Any]:
        """Async version of `run_step` that does not block the running event loop.

        The step's place is determined by this call, even if the coroutine is awaited later in another asyncio task.
        """
        return self._aran(self._step(name, fn, args, kwargs, options))

    async def _aran(self, step: _StepCall) -> Any:
        if (recorded := await self.arun(self._recorded(step))) is not None:
            return decode_result(step.codec, recorded, task_name=self.task_name)
        name, fn = step.name, step.fn

        def in_thread() -> Any:
            with inside(name, strand=self.backend.strand()):
                return fn()

        async def call() -> Any:
            with self._traced(name):
                value = fn if is_async_function(fn.func) else await self.backend.in_thread(in_thread)
                with inside(name, strand=self.backend.strand()):
                    if value is not fn:
                        return await value if inspect.isawaitable(value) else value
                    if (limit_s := step.timeout_s) is None:
                        return await fn()
                    late = f"Step {name!r} of task {self.task_name!r} ran longer than its timeout of {spelled_duration(limit_s)}."
                    return await self.backend.in_time(fn(), timeout_s=limit_s, late=late)

        value = await _Tries(self, step).arun(call)
        await self.arun(self._record(step, value))
        return value

    def sleep(self, duration: Duration) -> StepPlan[None]:
        """Sleep, or return immediately if an earlier attempt recorded that the sleep has ended."""
        duration_ms = to_milliseconds(duration, subject="duration of Context.sleep")
        question = Sleep(self.book.draw("sleep", "sleep"), duration_ms)
        yield from self._read()
        self.check_cancelled()
        if self.book.find("sleep", question.name) is None:
            yield question
            self.check_cancelled()

    def wait_event(self, event: str, timeout: Duration | None, annotation: Any) -> StepPlan[Any]:
        """Return the value of an event.

        Raises EventTimeout if the event does not arrive in time, and PayloadError if the name, type or value is invalid.
        """
        checked_name(event, owner=f"an event in task {self.task_name!r}")
        require_carried(annotation, event=event, task_name=self.task_name)
        subject = "timeout of Context.wait_event"
        timeout_ms = None if timeout is None else to_milliseconds(timeout, subject=subject)
        answer = yield from self._waited(WaitForEvent(self.book.draw("event", event), event, timeout_ms))
        if answer.state == "TIMED_OUT":
            raise EventTimeout(event, timeout_s=(timeout_ms or 0) / 1_000)
        return decode_event(annotation, answer.value or "null", event=event, task_name=self.task_name)

    def ask(
        self,
        question: str,
        annotation: Any,
        *,
        choices: Sequence[Any] | None,
        note: str | None,
        timeout: Duration | None,
    ) -> StepPlan[Any]:
        """Return a person's answer to a question. Raises EventTimeout if the answer does not arrive in time."""
        asked = described(question, annotation, choices=choices, note=note, task_name=self.task_name)
        subject = "timeout of Context.ask"
        timeout_ms = None if timeout is None else to_milliseconds(timeout, subject=subject)
        name = self.book.draw_question()
        answer = yield from self._waited(WaitForEvent(name, name, timeout_ms, encode(asked).decode()))
        if answer.state == "TIMED_OUT":
            raise EventTimeout(step_of(name), timeout_s=(timeout_ms or 0) / 1_000, question=question)
        given = decode(answer.value or "null", type=StoredAnswer)
        return decode_event(annotation, bytes(given.answer), event=step_of(name), task_name=self.task_name)

    def _waited(self, question: WaitForEvent) -> StepPlan[StepAnswer]:
        yield from self._read()
        self.check_cancelled()
        found = self.book.find("event", question.name)
        answer = (yield question) if found is None else StepAnswer(state=found.state, value=found.result)
        self.check_cancelled()
        return answer

    def send(self, child: NewChild, *, in_batch: bool = False) -> StepPlan[UUID]:
        """Send a child task, unless an earlier attempt sent it, and return its id. `in_batch`: it belongs to the batch of this task.

        Raises PayloadError if this task belongs to no batch.
        """
        name = self.book.draw("child", child.name)

        def ask() -> StepPlan[StepAnswer]:
            with self._sending([child]) as (sent,):
                return (yield SendChild(name, sent, in_batch))

        return self._own("child", name, child.digest, ask)

    def gather(self, children: Sequence[NewChild]) -> StepPlan[list[tuple[UUID, ChildEnd]]]:
        """Send children, wait until all of them have ended, and return their ids and outcomes in order.

        A child that an operator retries later does not change its outcome.
        """
        name, given = self.book.draw("child", "gather"), NewGather.of(children)
        yield from self._read()
        self.check_cancelled()
        begun = self.book.find_matching(
            "child", name, digest=given.digest, task_name=self.task_name, title="gather", is_begun=True
        )
        batch_id = given.id_in(self.task_id, name) if begun is None else UUID((begun.result or "").strip('"'))
        ids = given.ids(batch_id)
        if begun is None or begun.state == "OPEN":
            for part in portions(children):
                with self._sending(children[part], ids[part]) as some:
                    yield SendChildren(
                        name, batch_id, ids[part], some, given.digest, is_last=part.stop == len(children)
                    )
                self.check_cancelled()
        yield JoinChildren(name, batch_id)
        self.check_cancelled()
        return [*zip(ids, (yield from self._ends(name, ids)), strict=True)]

    def _ends(self, name: str, ids: Sequence[UUID]) -> StepPlan[Sequence[ChildEnd]]:
        """Return the outcomes of ended children. Record those of children that did not complete, because they can still be retried."""
        found: list[ChildEnd] = []
        for first in range(0, len(ids), ENDS_PER_RECORD):
            page: list[ChildEnd] = []
            some = tuple(ids[first : first + ENDS_PER_RECORD])
            while len(page) < len(some):
                page += (yield ListChildren(some[len(page) :])).ends
            record_name = f"{name}/ends@{first}"
            recorded = self.book.find("step", record_name)
            result = recorded_ends(page) if recorded is None else recorded.result
            if recorded is None and result is not None:
                yield RecordStep(record_name, result)
            found += with_recorded(page, result)
            self.check_cancelled()
        return found

    def start(self, workflow: NewWorkflow, *, named: str | None = None) -> StepPlan[UUID]:
        """Start a workflow, unless an earlier attempt started it, and return its id."""
        name = self.book.draw("child", named or workflow.name)

        def ask() -> StepPlan[StepAnswer]:
            return (yield StartWorkflow(name, workflow))

        return self._own("workflow", name, workflow.digest, ask)

    def _own(
        self, title: str, name: str, digest: str | None, ask: Callable[[], StepPlan[StepAnswer]]
    ) -> StepPlan[UUID]:
        yield from self._read()
        self.check_cancelled()
        found = self.book.find_matching("child", name, digest=digest, task_name=self.task_name, title=title)
        if found is not None:
            return UUID((found.result or "").strip('"'))
        answer = yield from ask()
        if answer.child is None:
            raise PayloadError(
                f"Task {self.task_name!r} belongs to no batch, so it cannot add tasks to it.",
                parameter="call",
                fix="send the task with app.batch(...).send(...), or send the child with ctx.send(...).",
            )
        return answer.child

    def _read(self) -> StepPlan[None]:
        """Read the records of earlier attempts, once per attempt.

        Even a first attempt can have records: when a workflow is retried, a node's new task gets copies of the old task's records.
        """
        self.book.require_deterministic()
        after: tuple[str, str] | None = ("", "")
        while after is not None and not self.book.is_read:
            answer = yield LoadSteps(after)
            self.book.take(answer.records)
            after = answer.next_after
            self.book.is_read = after is None

    def _step(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: StepOptions,
    ) -> _StepCall:
        if options.timeout_s is not None and not is_async_function(fn):
            raise PayloadError(
                f"Step {name!r} of task {self.task_name!r} has a timeout, but its function is not async, and a thread cannot be interrupted.",
                parameter="timeout",
                fix="make the function async and await Context.astep(...), or set a timeout of the client that it calls.",
            )
        digest = digest_of_call(fn, args, kwargs)
        codec = codec_of(fn, step=name, task_name=self.task_name)
        place = self.book.place(name, digest=digest, strand=self.backend.strand())
        return _StepCall(partial(fn, *args, **kwargs), place, codec, digest, options.retry, options.timeout_s)

    def _recorded(self, step: _StepCall) -> StepPlan[Recorded | None]:
        yield from self._read()
        found = self.book.find_step(step.place, digest=step.digest, task_name=self.task_name)
        if found is None:
            self.check_cancelled()
        elif (tracing := self.backend.tracing) is not None:
            tracing.step_recorded(step.name)
        return found

    def _traced(self, name: str) -> AbstractContextManager[object]:
        tracing = self.backend.tracing
        return nullcontext() if tracing is None else tracing.step(name)

    @contextmanager
    def _sending(
        self, children: Sequence[NewChild], ids: Sequence[UUID] = ()
    ) -> Iterator[tuple[NewChild, ...]]:
        """Surround the request that sends these children, and give them with their carriers."""
        tracing = self.backend.tracing
        if tracing is None or not children:
            yield tuple(children)
            return
        sends = [
            TracedSend(
                name=child.name, queue=child.queue, task_id=ids[place] if ids else None, size=len(child.args), key=child.key,
                labels=decode_labels(child.labels), parent_id=self.task_id,
            )
            for place, child in enumerate(children)
        ]  # fmt: skip
        with tracing.sending(sends) as contexts:
            yield tuple(
                structs.replace(child, context=context)
                for child, context in zip(children, contexts, strict=True)
            )

    def _record(self, step: _StepCall, value: object) -> StepPlan[None]:
        result = encode_result(step.codec, value, step=step.name, task_name=self.task_name).decode()
        if "/" in step.name:  # a retry of the enclosing step finds this record
            self.book.take([Recorded("step", step.name, "DONE", result, None, step.digest)])
        yield RecordStep(step.name, result, step.digest)
        self.check_cancelled()

    def _refuse_in_loop(self, method: str) -> None:
        self.backend.refuse_in_loop(f"Context.{method}", instead=f"await Context.a{method}(...)")

    def _is_async(self, name: str) -> PayloadError:
        return PayloadError(
            f"Step {name!r} of task {self.task_name!r} is an async function, which Context.step cannot await.",
            parameter="fn",
            fix="await Context.astep(...) in an async task.",
        )


@final
class _Tries:
    """Counts the tries of one step across all attempts, and sleeps between tries."""

    __slots__ = ("_name", "_policy", "_runner", "_sleeps", "_used", "_wait")

    def __init__(self, runner: StepRunner, step: _StepCall) -> None:
        self._runner = runner
        self._name = step.name
        self._policy = step.retry
        self._sleeps = f"{place_of(step.name)}/retry"
        self._used = 0
        self._wait: Sleep | None = None
        if step.retry is not None:
            while runner.book.has("sleep", self._sleep_name(self._used + 1)):
                self._used += 1
        if self._used and runner.book.find("sleep", name := self._sleep_name(self._used)) is None:
            # An earlier attempt started this sleep, so its end is already fixed.
            self._wait = Sleep(name, 0)

    def run(self, call: Callable[[], T]) -> T:
        """Call the function until it succeeds, and return its result. Raises the exception of the last try or of a sleep between tries."""
        while True:
            perform(self._slept(), self._runner.backend.ask_step)
            try:
                return call()
            except Exception as error:
                if not self._is_retried(error):
                    raise

    async def arun(self, call: Callable[[], Awaitable[T]]) -> T:
        """Async version of `run` that awaits the call on the running event loop."""
        while True:
            await self._runner.arun(self._slept())
            try:
                return await call()
            except Exception as error:
                if not self._is_retried(error):
                    raise

    def _slept(self) -> StepPlan[None]:
        if self._wait is not None:
            yield self._wait
            self._runner.check_cancelled()
            self._runner.book.restart(self._name)

    def _is_retried(self, error: Exception) -> bool:
        """Return whether the step is retried after this exception. If it is, set the sleep before the next try."""
        policy, book = self._policy, self._runner.book
        if policy is None or book.misfit is not None or ending_of(error) is not None:
            return False
        if not policy.matches(code_of(error, book.exception_codes), error):
            return False
        if self._used >= policy.max_retries:
            with suppress(Exception):  # a user's exception class can reject notes
                tries = amount(self._used + 1, "time")
                error.add_note(f"Step {self._name!r} failed {tries}, at last with this exception.")
            return False
        self._used += 1
        name = self._sleep_name(self._used)
        random = Random(f"{self._runner.task_id}/{name}")
        known = error_from_exception(error, codes=book.exception_codes)
        message = storable(known.message, limit=_MESSAGE_BYTES)
        failed = FailedTry(self._name, self._used, policy.max_retries, known.code, message, known.type)
        self._wait = Sleep(name, milliseconds(policy.delay(self._used, random)), failed)
        return True

    def _sleep_name(self, number: int) -> str:
        return self._sleeps if number == 1 else f"{self._sleeps}#{number}"


class StepMethods:
    """Base class of the groups of a Context's methods that use durable steps."""

    __slots__ = ()

    @property
    def _steps(self) -> StepRunner:
        raise NotImplementedError
