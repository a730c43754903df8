"""Task functions with steps, sleeps, waits and child tasks, each in all four execution modes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from everbeat.domain.task.argument_digest import digest_of_values
from everbeat.domain.task.context import Context
from everbeat.domain.task.context_backend import NewChild
from everbeat.domain.task.retry import RetryPolicy
from everbeat.errors import EventTimeout, TaskSuspended
from tests.worker.effects import effect, effects
from tests.worker.sample_tasks import gate, task

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
    await asyncio.sleep(0)  # yields to the loop, as a call of an external service does
    return charge(folder, number)


def pack(folder: str) -> str:
    effect(folder, "pack")
    return "packed"


def order(ctx: Context, folder: str) -> list[Any]:
    """Run three charge steps, of which the last fails at first, and a step with another name."""
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


def await_event(ctx: Context, folder: str, timeout: str | None) -> Any:
    effect(folder, "waits")
    heard = ctx.wait_event("approved", timeout=timeout, type=dict[str, int])
    effect(folder, "heard")
    return heard


async def async_await_event(ctx: Context, folder: str, timeout: str | None) -> Any:
    effect(folder, "waits")
    heard = await ctx.await_event("approved", timeout=timeout, type=dict[str, int])
    effect(folder, "heard")
    return heard


class Call:
    """A stand-in for the result of `task.call(...)` without an app."""

    def __init__(self, name: str, args: str = "{}") -> None:
        digest = digest_of_values((), json.loads(args))
        self._child = NewChild(name=name, queue="default", priority=0, args=args, digest=digest)

    def _as_child(self) -> NewChild:
        return self._child

    def _handle_of(self, task_id: UUID, /) -> str:
        return str(task_id)


def send_child(ctx: Context, folder: str) -> list[str]:
    sent = [ctx.send(Call("echo", f'{{"text": "{n}"}}')) for n in (1, 2)]
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return [*sent, ctx.send(Call("double", '{"x": 1}'))]


async def async_send_child(ctx: Context, folder: str) -> list[str]:
    sent = [await ctx.asend(Call("echo", f'{{"text": "{n}"}}')) for n in (1, 2)]
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return [*sent, await ctx.asend(Call("double", '{"x": 1}'))]


def change_arguments(ctx: Context, folder: str, numbers: list[int]) -> list[int]:
    """Give the second charge the number of this attempt."""
    found = [ctx.step(charge, folder, 1).number, ctx.step(charge, folder, numbers[ctx.attempt - 1]).number]
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return [*found, ctx.attempt]


async def async_change_arguments(ctx: Context, folder: str, numbers: list[int]) -> list[int]:
    found = [(await ctx.astep(acharge, folder, number)).number for number in (1, numbers[ctx.attempt - 1])]
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return [*found, ctx.attempt]


def reach(folder: str, fails: int) -> str:
    """Call a service that refuses the first calls."""
    effect(folder, "try")
    if len(effects(Path(folder))) <= fails:
        raise ConnectionError("refused")
    return "reached"


async def areach(folder: str, fails: int) -> str:
    await asyncio.sleep(0)  # yields to the loop, as a call of an external service does
    return reach(folder, fails)


def retry_step(ctx: Context, folder: str, fails: int, every: str) -> list[Any]:
    said = ctx.with_options(name="reach", retry=patience(every)).step(reach, folder, fails)
    return [said, ctx.attempt]


async def async_retry_step(ctx: Context, folder: str, fails: int, every: str) -> list[Any]:
    said = await ctx.with_options(name="reach", retry=patience(every)).astep(areach, folder, fails)
    return [said, ctx.attempt]


def patience(every: str) -> RetryPolicy:
    return RetryPolicy(max_retries=2, intervals=[every], jitter=0, auto_retry_for=[ConnectionError, "BUSY"])


in_all_modes("retry_step", retry_step, async_retry_step)
in_all_modes("change_arguments", change_arguments, async_change_arguments, retry=AGAIN)
in_all_modes("order", order, aorder, retry=AGAIN)
in_all_modes("nap", nap, anap)
in_all_modes("await_event", await_event, async_await_event)
in_all_modes("send_child", send_child, async_send_child, retry=AGAIN)


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
async def rest_at_the_gate(ctx: Context, folder: str, what: str) -> str:
    gate.journal.append("begun")
    await asyncio.to_thread(gate.opened.wait)
    if what == "wait":
        await ctx.await_event("approved")
    else:
        await ctx.asleep(what)
    return "woken"


@task()
async def leave_slowly(ctx: Context, folder: str, hangs: bool) -> None:
    try:
        await ctx.asleep("4900ms")
    except TaskSuspended:
        effect(folder, "told")
        # Longer than the pause of the worker between two stop requests.
        await asyncio.sleep(3_600 if hangs else 1.2)
        raise


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
async def gather_twice(ctx: Context, folder: str) -> list[int]:
    """Run steps that take longer the earlier they begin, so that they end in reverse order."""

    async def slow(number: int) -> int:
        await asyncio.sleep(0.05 * (5 - number))  # so that the first ends last
        return number

    found = await asyncio.gather(*(ctx.astep(slow, number) for number in range(5)))
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return found


async def swallow_the_misfit(ctx: Context, folder: str, how: str) -> str:
    """Catch the error of a record that does not fit, and continue."""
    if ctx.attempt == 1:
        await ctx.astep(acharge, folder, 1)
        raise RuntimeError("once")
    with suppress(Exception):
        await asyncio.gather(ctx.astep(acharge, folder, 2), return_exceptions=how == "gather")
    match how:
        case "step":
            await ctx.astep(pack, folder)
        case "sleep":
            await ctx.asleep("1h")
        case "send":
            await ctx.asend(Call("echo", '{"text": "1"}'))
        case "raise":
            raise RuntimeError("something else")
        case "commit":
            ctx.commit(object())
        case _:
            pass
    return "went on"


def swallow_the_misfit_in_a_thread(ctx: Context, folder: str, how: str) -> str:
    if ctx.attempt == 1:
        ctx.step(charge, folder, 1)
        raise RuntimeError("once")
    with suppress(Exception):
        ctx.step(charge, folder, 2)
    return "went on"


in_all_modes("swallow", swallow_the_misfit_in_a_thread, swallow_the_misfit, retry=AGAIN)


@task(retry=AGAIN)
async def flow_side_by_side(ctx: Context, folder: str, numbers: list[list[int]]) -> list[str]:
    """Run flows with two steps each; the flows that begin last reach their second step first."""

    async def slow(number: int) -> int:
        await asyncio.sleep(0.05 * (5 - number) if number < 5 else 0)  # so that the first ends last
        return number

    async def flow(number: int) -> str:
        got = await ctx.astep(slow, number)
        if ctx.attempt == 1 and number == 1:
            raise RuntimeError("once")
        return f"{got}: {(await ctx.astep(acharge, folder, got)).number}"

    return await asyncio.gather(*(flow(number) for number in numbers[ctx.attempt - 1]))


@task(retry=AGAIN)
def step_in_threads(ctx: Context, folder: str) -> list[int]:
    def flow(number: int) -> int:
        time.sleep(0.05 * abs(number - 4 * (ctx.attempt - 1)))  # in another order in each attempt
        return ctx.step(charge, folder, number).number

    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(flow, range(5)))
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return found


@task(retry=AGAIN)
async def send_another_child(ctx: Context, folder: str) -> str:
    sent = await ctx.asend(Call("echo", f'{{"text": "{ctx.attempt}"}}'))
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return sent


@task(retry=AGAIN)
async def wait_otherwise(ctx: Context, folder: str) -> str:
    """Change the duration of a sleep and of a wait in the second attempt."""
    await ctx.asleep(0.01 * ctx.attempt)
    with suppress(EventTimeout):
        await ctx.await_event("approved", timeout=0 if ctx.attempt == 1 else "1h")
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return "went on"


@task()
async def retry_nested_steps(ctx: Context, folder: str) -> list[int]:
    """Retry a step whose inner steps were recorded."""

    async def whole() -> int:
        await ctx.astep(acharge, folder, 1)
        await ctx.astep(acharge, folder, 2)
        effect(folder, "try")
        if len(effects(Path(folder))) < 4:
            raise ConnectionError("refused")
        return 3

    return [await ctx.with_options(retry=patience("1s")).astep(whole)]


@task(exception_codes={LookupError: "BUSY"})
async def misuse_step_options(ctx: Context, folder: str, what: str) -> Any:
    async def hang() -> None:
        effect(folder, "try")
        try:
            await asyncio.Event().wait()
        finally:
            effect(folder, "left")

    def fail() -> None:
        effect(folder, "try")
        raise {"unlisted": ValueError, "code": KeyError}[what]("no")

    async def late() -> None:
        effect(folder, "try")
        raise TimeoutError("of its own")

    match what:
        case "timeout":
            again = RetryPolicy(max_retries=1, intervals=["1s"], auto_retry_for=[TimeoutError])
            await ctx.with_options(retry=again, timeout="200ms").astep(hang)
        case "own":
            await ctx.with_options(timeout="10s").astep(late)
        case "thread":
            await ctx.with_options(timeout="10s").astep(pack, folder)
        case "retry":
            ctx.with_options(retry=3)  # type: ignore[arg-type]
        case "length":
            ctx.with_options(timeout=0)
        case _:
            await ctx.with_options(retry=patience("1s")).astep(fail)


@task(retry=AGAIN)
def nest(ctx: Context, folder: str) -> list[int]:
    """Run a step with inner steps, then the same step again, which a later attempt skips."""

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
def await_event_at_the_gate(ctx: Context, folder: str) -> Any:
    gate.journal.append("begun")
    gate.opened.wait(20)
    return ctx.wait_event("approved")


@task()
def await_event_twice(ctx: Context, folder: str) -> list[Any]:
    return [ctx.wait_event("approved"), ctx.wait_event("approved")]


@task()
async def await_event_side_by_side(ctx: Context, folder: str) -> list[Any]:
    return list(await asyncio.gather(ctx.await_event("approved"), ctx.await_event("approved")))
