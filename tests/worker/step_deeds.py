"""Task functions that do things for good: steps, sleeps, waits and children, each in all four modes of running code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from everbeat.domain.context import Context, TaskSuspended
from everbeat.domain.outcome import EventTimeout
from everbeat.domain.recorded import NewChild
from everbeat.domain.retry import RetryPolicy
from tests.worker.deeds import gate, task
from tests.worker.partial_deeds import effect

AGAIN = RetryPolicy(max_retries=3, intervals=["1s"], jitter=0, auto_retry_for=["UNHANDLED_EXCEPTION"])
MODES = ("in_thread", "in_process", "on_loop", "on_loop_in_process")


def in_all_modes(
    name: str, sync: Callable[..., Any], asynchronous: Callable[..., Coroutine[Any, Any, Any]], **options: Any
) -> None:
    for mode in MODES:
        function = sync if mode in ("in_thread", "in_process") else asynchronous
        own = {"run_in": "process"} if mode.endswith("process") else {}
        task(name=f"{name}_{mode}", **own, **options)(function)


@dataclass
class Receipt:
    number: int


def charge(folder: str, number: int) -> Receipt:
    effect(folder, f"charge {number}")
    return Receipt(number)


async def acharge(folder: str, number: int) -> Receipt:
    await asyncio.sleep(0)  # what a call of somebody else's service does
    return charge(folder, number)


def pack(folder: str) -> str:
    effect(folder, "pack")
    return "packed"


def order(ctx: Context, folder: str) -> list[Any]:
    """Three charges, of which the last fails at first, and a step of another name."""
    found = [ctx.step(charge, folder, number).number for number in (1, 2)]
    packed = ctx.named("wrap").step(pack, folder)
    if ctx.attempt == 1:
        effect(folder, "once")
        raise RuntimeError("once")
    last = ctx.step(charge, folder, number=3)
    return [*found, packed, type(last).__name__, ctx.attempt]


async def aorder(ctx: Context, folder: str) -> list[Any]:
    found = [(await ctx.astep(acharge, folder, number)).number for number in (1, 2)]
    packed = await ctx.named("wrap").astep(pack, folder)
    if ctx.attempt == 1:
        effect(folder, "once")
        raise RuntimeError("once")
    last = await ctx.astep(partial(acharge, number=3), folder)
    return [*found, packed, type(last).__name__, ctx.attempt]


def nap(ctx: Context, folder: str, duration: str) -> str:
    ctx.step(pack, folder)
    ctx.sleep(duration)
    effect(folder, "woken")
    return f"attempt {ctx.attempt}"


async def anap(ctx: Context, folder: str, duration: str) -> str:
    await ctx.astep(pack, folder)
    await ctx.asleep(duration)
    effect(folder, "woken")
    return f"attempt {ctx.attempt}"


def hear(ctx: Context, folder: str, timeout: str | None) -> Any:
    effect(folder, "waits")
    heard = ctx.wait_event("approved", timeout=timeout, type=dict[str, int])
    effect(folder, "heard")
    return heard


async def ahear(ctx: Context, folder: str, timeout: str | None) -> Any:
    effect(folder, "waits")
    heard = await ctx.await_event("approved", timeout=timeout, type=dict[str, int])
    effect(folder, "heard")
    return heard


class Call:
    """What `task.call(...)` gives, for a worker that has no app."""

    def __init__(self, name: str, args: str = "{}") -> None:
        self._child = NewChild(name=name, queue="default", priority=0, args=args)

    def as_child(self) -> NewChild:
        return self._child

    def child_handle(self, task_id: UUID, /) -> str:
        return str(task_id)


def beget(ctx: Context, folder: str) -> list[str]:
    sent = [ctx.send(Call("echo", f'{{"text": "{n}"}}')) for n in (1, 2)]
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return [*sent, ctx.send(Call("double", '{"x": 1}'))]


async def abeget(ctx: Context, folder: str) -> list[str]:
    sent = [await ctx.asend(Call("echo", f'{{"text": "{n}"}}')) for n in (1, 2)]
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return [*sent, await ctx.asend(Call("double", '{"x": 1}'))]


in_all_modes("order", order, aorder, retry=AGAIN)
in_all_modes("nap", nap, anap)
in_all_modes("hear", hear, ahear)
in_all_modes("beget", beget, abeget, retry=AGAIN)


@task()
def patient(ctx: Context, folder: str) -> str:
    try:
        ctx.wait_event("approved", timeout=0)
    except EventTimeout as late:
        return f"{late.code} {late.event} {late.data}"
    return "heard"


@task()
async def swallow(ctx: Context, folder: str) -> str:
    with suppress(TaskSuspended):
        await ctx.asleep("1h")
    return "went on"


@task()
async def pretend(ctx: Context, folder: str) -> None:
    raise TaskSuspended


@task()
async def sleep_in_a_group(ctx: Context, folder: str) -> str:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.asleep("1h"))
        group.create_task(asyncio.Event().wait())
    return "woken"


@task()
async def step_side_by_side(ctx: Context, folder: str) -> list[int]:
    found = await asyncio.gather(*(ctx.astep(acharge, folder, number) for number in range(5)))
    return [one.number for one in found]


@task(retry=AGAIN)
def nest(ctx: Context, folder: str) -> list[int]:
    """The inner steps of one that is recorded are not counted when it is skipped."""

    def both() -> int:
        return ctx.step(charge, folder, 1).number + ctx.step(charge, folder, 2).number

    found = [ctx.step(both)]
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return [*found, ctx.step(charge, folder, 3).number, ctx.step(both)]


def unrecordable(folder: str) -> object:
    effect(folder, "done")
    return {1, 2}


def unreadable(folder: str) -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
    effect(folder, "done")
    return None


def uncarried(folder: str) -> Callable[[], None]:
    effect(folder, "done")
    return lambda: None


def large(folder: str) -> str:
    effect(folder, "done")
    return "x" * 1_100_000


def failing(folder: str) -> int:
    effect(folder, "tried")
    raise ValueError("no")


@task()
def step_wrongly(ctx: Context, folder: str, what: str) -> Any:
    match what:
        case "unrecordable":
            return ctx.step(unrecordable, folder)
        case "unreadable":
            return ctx.step(unreadable, folder)
        case "uncarried":
            return ctx.step(uncarried, folder)
        case "large":
            return ctx.step(large, folder)
        case "failing":
            return ctx.step(failing, folder)
        case "async":
            return ctx.step(acharge, folder, 1)
        case "lambda":
            return ctx.step(lambda: 1)
        case "called":
            return ctx.step(pack(folder))  # type: ignore[arg-type]
        case "name":
            return ctx.named("a#2").step(pack, folder)
        case "event":
            return ctx.wait_event("a/b")
        case "type":
            return ctx.wait_event("a", type=Callable[[], None])
        case "child":
            return ctx.send("echo")  # type: ignore[arg-type]
        case _:
            raise AssertionError(what)


@task()
async def step_on_the_loop(ctx: Context, folder: str, what: str) -> Any:
    match what:
        case "step":
            return ctx.step(pack, folder)
        case "sleep":
            return ctx.sleep(1)
        case "wait_event":
            return ctx.wait_event("a")
        case _:
            return ctx.send(Call("echo"))


@task(retry=AGAIN)
def change_the_annotation(ctx: Context, folder: str) -> Any:
    found = ctx.named("charge").step(charge, folder, 1)
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return found


@task()
def two_steps_at_the_gate(ctx: Context, folder: str) -> str:
    ctx.step(charge, folder, 1)
    gate.journal.append("begun")
    gate.opened.wait(20)
    try:
        ctx.step(charge, folder, 2)
        return "went on"
    except BaseException as stopped:
        gate.journal.append(str(stopped))
        raise


@task()
def hear_at_the_gate(ctx: Context, folder: str) -> Any:
    gate.journal.append("begun")
    gate.opened.wait(20)
    return ctx.wait_event("approved")


@task()
def hear_twice(ctx: Context, folder: str) -> list[Any]:
    return [ctx.wait_event("approved"), ctx.wait_event("approved")]


@task()
async def hear_side_by_side(ctx: Context, folder: str) -> list[Any]:
    return list(await asyncio.gather(ctx.await_event("approved"), ctx.await_event("approved")))
