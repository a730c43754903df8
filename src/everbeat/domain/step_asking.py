"""What the durable half of a Context asks for, and what it makes of the answers.

What lives here: one step, sleep, wait or child at a time. What may not: their public faces (`durable`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from everbeat.domain.backend import LoadSteps, RecordStep, SendChild, Sleep, StepAnswer, WaitForEvent
from everbeat.domain.callables import is_async_function
from everbeat.domain.duration import Duration, to_milliseconds
from everbeat.domain.outcome import EventTimeout
from everbeat.domain.settings import shown
from everbeat.domain.step_book import (
    checked_name,
    codec_of,
    decode_event,
    decode_result,
    encode_result,
    inside,
    require_carried,
)
from everbeat.domain.typed_json import TypedJson
from everbeat.errors import PayloadError

if TYPE_CHECKING:
    from everbeat.domain.durable import ChildCall, DurableContext

R = TypeVar("R")


def run_step(
    context: DurableContext, name: str, fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> R:
    """The result of a step: recorded, or made and recorded now."""
    context.backend.refuse_in_loop("Context.step", instead="await Context.astep(...)")
    if is_async_function(fn):
        raise _is_async(context, name)
    name, codec = _drawn(context, name, fn)
    read_records(context)
    if (recorded := context.book.find("step", name)) is not None:
        known: R = decode_result(codec, recorded, task_name=context.name)
        return known
    context.check_cancelled()
    with inside(name):
        value = fn(*args, **kwargs)
    if inspect.iscoroutine(value):
        value.close()
        raise _is_async(context, name)
    context.backend.ask_step(_record(context, codec, name, value))
    context.check_cancelled()
    return value


async def arun_step(
    context: DurableContext, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The twin of `run_step`."""
    name, codec = _drawn(context, name, fn)
    await aread_records(context)
    if (recorded := context.book.find("step", name)) is not None:
        return decode_result(codec, recorded, task_name=context.name)
    context.check_cancelled()
    with inside(name):
        if is_async_function(fn):
            value = await fn(*args, **kwargs)
        else:
            value = await context.backend.in_thread(lambda: fn(*args, **kwargs))
            value = await value if inspect.isawaitable(value) else value
    await context.backend.aask_step(_record(context, codec, name, value))
    context.check_cancelled()
    return value


def _drawn(context: DurableContext, name: str, fn: Callable[..., Any]) -> tuple[str, TypedJson]:
    codec = codec_of(fn, step=name, task_name=context.name)
    return context.book.draw("step", name), codec


def _record(context: DurableContext, codec: TypedJson, name: str, value: object) -> RecordStep:
    return RecordStep(name, encode_result(codec, value, step=name, task_name=context.name).decode())


def _is_async(context: DurableContext, name: str) -> PayloadError:
    return PayloadError(
        f"Step {name!r} of task {context.name!r} is an async function, which Context.step cannot await.",
        parameter="fn",
        fix="await Context.astep(...) in an async task.",
    )


def read_records(context: DurableContext) -> None:
    """What earlier attempts recorded, asked for once in each attempt but the first."""
    after: tuple[str, str] | None = _begin(context)
    while after is not None:
        after = _took(context, context.backend.ask_step(LoadSteps(after)))


async def aread_records(context: DurableContext) -> None:
    """The twin of `read_records`."""
    after: tuple[str, str] | None = _begin(context)
    while after is not None:
        after = _took(context, await context.backend.aask_step(LoadSteps(after)))


def _begin(context: DurableContext) -> tuple[str, str] | None:
    return None if context.book.is_read or context.attempt == 1 else ("", "")


def _took(context: DurableContext, answer: StepAnswer) -> tuple[str, str] | None:
    context.book.take(answer.records)
    context.book.is_read = answer.next_after is None
    return answer.next_after


def sleep_of(context: DurableContext, duration: Duration) -> Sleep:
    """What is asked for a sleep."""
    duration_ms = to_milliseconds(duration, subject="duration of Context.sleep")
    return Sleep(context.book.draw("sleep", "sleep"), duration_ms)


def wait_of(context: DurableContext, event: str, timeout: Duration | None, annotation: Any) -> WaitForEvent:
    """What is asked for a wait; raises PayloadError for a name or a type that cannot be."""
    checked_name(event, what="an event", task_name=context.name)
    require_carried(annotation, event=event, task_name=context.name)
    timeout_ms = (
        None if timeout is None else to_milliseconds(timeout, subject="timeout of Context.wait_event")
    )
    return WaitForEvent(context.book.draw("event", event), event, timeout_ms)


def known_wait(context: DurableContext, question: WaitForEvent) -> StepAnswer | None:
    """How the wait ended for an earlier attempt."""
    found = context.book.find("event", question.name)
    return None if found is None else StepAnswer(state=found.state, value=found.result)


def event_of(context: DurableContext, question: WaitForEvent, answer: StepAnswer, annotation: Any) -> Any:
    """The value of an event; raises EventTimeout where there is none."""
    context.check_cancelled()
    if answer.state == "TIMED_OUT":
        raise EventTimeout(question.event, timeout_s=(question.timeout_ms or 0) / 1_000)
    return decode_event(annotation, answer.value or "null", event=question.event, task_name=context.name)


def child_of(context: DurableContext, call: ChildCall[Any]) -> SendChild:
    """What is asked for a child; raises PayloadError for what is no call."""
    if not hasattr(call, "as_child"):
        raise PayloadError(
            f"{shown(call)} cannot be sent by task {context.name!r}: it is no call of a task, but of type {type(call).__name__}.",
            parameter="call",
            fix="make it with task.call(...).",
        )
    child = call.as_child()
    return SendChild(context.book.draw("child", child.name), child)


def known_child(context: DurableContext, question: SendChild) -> UUID | None:
    """The id of the child that an earlier attempt sent."""
    found = context.book.find("child", question.name)
    return None if found is None else UUID((found.result or "").strip('"'))


def child_id(answer: StepAnswer) -> UUID:
    """The id of the child that was sent now."""
    assert answer.child is not None
    return answer.child
