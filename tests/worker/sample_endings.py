"""Task functions that raise RetryLater or Cancel, each in all four execution modes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from everbeat.domain.task.context import Context
from everbeat.domain.task.ending import Cancel, RateLimited, RetryLater
from everbeat.domain.task.retry import RetryPolicy
from tests.worker.effects import effect, effects
from tests.worker.sample_starts import Flow
from tests.worker.sample_steps import Call, in_all_modes
from tests.worker.sample_tasks import gate, task

TWICE = RetryPolicy(max_retries=2, intervals=["1s"], jitter=0, auto_retry_for=["SMTP_DOWN"])
EVERY = RetryPolicy(max_retries=3, intervals=["1s"], jitter=0, auto_retry_for=[Exception])


def busy(ctx: Context, folder: str, kind: str = "after", until: int = 1) -> str:
    """Raise RetryLater in each attempt up to `until`, then return."""
    effect(folder, f"attempt {ctx.attempt}, retries left {ctx.retries_left}")
    if ctx.attempt > until:
        return "done"
    match kind:
        case "after":
            raise RetryLater(after="50ms", reason="the server is busy")
        case "at":
            raise RetryLater(at=datetime.now(UTC) + timedelta(hours=1), reason="closed")
        case "past":
            raise RetryLater(at=datetime(2020, 1, 1, tzinfo=UTC))
        case "counts":
            raise RetryLater(after="50ms", counts=True, reason="counted")
        case "counts at":
            raise RetryLater(at=datetime.now(UTC) + timedelta(hours=1), counts=True)
        case "group":
            raise ExceptionGroup("two parts", [RetryLater("50ms", reason="first"), RetryLater("9h")])
        case "mixed":
            raise ExceptionGroup("two parts", [RetryLater("50ms"), ValueError("a failure")])
        case _:
            raise RetryLater("soon")


async def abusy(ctx: Context, folder: str, kind: str = "after", until: int = 1) -> str:
    await asyncio.sleep(0)  # yields to the loop, as a call of an external service does
    return busy(ctx, folder, kind, until)


def withdraw(folder: str, reason: str | None = "the order was withdrawn") -> None:
    effect(folder, "withdraw")
    raise Cancel(reason)


async def awithdraw(folder: str, reason: str | None = "the order was withdrawn") -> None:
    withdraw(folder, reason)


def refused(ctx: Context, folder: str, until: int = 1, after: str = "600ms") -> str:
    """Raise RateLimited in each attempt up to `until`, then return."""
    effect(folder, f"attempt {ctx.attempt}")
    if ctx.attempt > until:
        return "done"
    raise RateLimited("stripe", after, reason="status 429")


async def arefused(ctx: Context, folder: str, until: int = 1, after: str = "600ms") -> str:
    await asyncio.sleep(0)  # yields to the loop, as a call of an external service does
    return refused(ctx, folder, until, after)


class Unset(RetryLater):
    """A subclass that does not call `super().__init__()`."""

    def __init__(self) -> None:
        pass


class TextTime(RetryLater):
    """A subclass that sets a time that the database cannot store."""

    def __init__(self) -> None:
        super().__init__("1s")
        self.after_s, self.at = None, "tomorrow"  # type: ignore[assignment]


class Unreadable(Cancel):
    """A subclass whose error cannot be read."""

    @property
    def error(self) -> Any:
        raise SystemExit("no error")


class Withdrawn(Cancel):
    """A subclass that does not call `super().__init__()`, and needs no argument of it."""

    def __init__(self, order: int) -> None:
        self.order = order


BROKEN = {"unset": Unset, "text_time": TextTime, "unreadable": Unreadable}


def broken(kind: str) -> None:
    raise BROKEN[kind]


async def abroken(kind: str) -> None:
    await asyncio.sleep(0)  # yields to the loop, as a call of an external service does
    broken(kind)


def withdrawn() -> None:
    raise Withdrawn(17)


async def awithdrawn() -> None:
    withdrawn()


in_all_modes("broken", broken, abroken)
in_all_modes("withdrawn", withdrawn, awithdrawn)
in_all_modes("refused", refused, arefused, limits=["stripe"], max_retry_later=2)
in_all_modes("busy", busy, abusy)
in_all_modes("busy_twice", busy, abusy, retry=TWICE, max_retry_later=2)
in_all_modes("withdraw", withdraw, awithdraw, retry=EVERY)


@task(name="busy_step")
def busy_step(ctx: Context, folder: str) -> str:
    """Raise RetryLater inside a step whose policy lists every exception."""
    return ctx.with_options(retry=EVERY).step(busy_once, folder)


def busy_once(folder: str) -> str:
    effect(folder, "call")
    if len(effects(Path(folder))) < 2:
        raise RetryLater("50ms", reason="the step is busy")
    return "done"


@task(name="withdraw_with_child")
def withdraw_with_child(ctx: Context, folder: str) -> Any:
    effect(folder, ctx.send(Call("a_task_that_no_worker_knows")))
    raise Cancel("no children either")


@task(name="withdraw_after_starting")
def withdraw_after_starting(ctx: Context) -> None:
    ctx.send(Call("a_task_that_no_worker_knows"))
    ctx.start(Flow("flow"))
    raise Cancel("no children either")


@task(name="withdraw_when_opened")
def withdraw_when_opened(ctx: Context) -> None:
    ctx.send(Call("a_task_that_no_worker_knows"))
    gate.journal.append("began")
    gate.opened.wait(20)
    raise Cancel("opened")


@task(name="busy_when_opened")
def busy_when_opened(folder: str) -> None:
    gate.journal.append("began")
    gate.opened.wait(20)
    raise RetryLater("1h")


@task(name="busy_when_stopped")
async def busy_when_stopped(folder: str) -> None:
    gate.journal.append("began")
    try:
        await asyncio.sleep(60)  # until the worker stops this code
    except asyncio.CancelledError:
        raise RetryLater("1h", reason="stopped") from None
