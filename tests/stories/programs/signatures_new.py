"""The next version of `signatures_old`, with one new optional and one new required parameter."""

from __future__ import annotations

from sample_tasks import app, effect  # type: ignore[import-not-found]  # a program stands beside it

from everbeat import Context

LANES = ("async", "thread", "process")


def greet(context: Context, who: str, locale: str = "en") -> str:
    effect("start", version="new")
    return f"{locale}: {who}"


def pay(amount: int, currency: str) -> str:
    effect("start", version="new")
    return f"{amount} {currency}"


async def agreet(context: Context, who: str, locale: str = "en") -> str:
    return greet(context, who, locale)


async def apay(amount: int, currency: str) -> str:
    return pay(amount, currency)


for lane in LANES:
    app.task(name=f"greet_{lane}", run_in=lane, on_crash="retry", timeout="60s")(
        agreet if lane == "async" else greet
    )
    app.task(name=f"pay_{lane}", run_in=lane, on_crash="retry", timeout="60s")(
        apay if lane == "async" else pay
    )
