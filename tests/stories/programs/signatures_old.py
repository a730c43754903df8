"""The version of a program before its task functions got new parameters."""

from __future__ import annotations

from sample_tasks import app, effect  # type: ignore[import-not-found]  # a program stands beside it

from everbeat import Context

LANES = ("async", "thread", "process")


def greet(context: Context, who: str) -> str:
    effect("start", version="old")
    return f"hello {who}"


def pay(amount: int) -> str:
    effect("start", version="old")
    return f"{amount}"


async def agreet(context: Context, who: str) -> str:
    return greet(context, who)


async def apay(amount: int) -> str:
    return pay(amount)


for lane in LANES:
    app.task(name=f"greet_{lane}", run_in=lane, on_crash="fail", timeout="50s")(
        agreet if lane == "async" else greet
    )
    app.task(name=f"pay_{lane}", run_in=lane, on_crash="fail", timeout="50s")(
        apay if lane == "async" else pay
    )
