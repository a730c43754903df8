"""Tasks that ask people; they extend the sample tasks."""

from __future__ import annotations

import asyncio
from typing import Literal

from sample_tasks import app, effect, quick

from everbeat import Context
from everbeat.errors import EventTimeout

__all__ = ["app", "quick"]


@app.task(on_crash="retry")
async def refund(ctx: Context, euros: int) -> str:
    effect("start")
    if await ctx.aask(f"Refund {euros} EUR to Ann?", type=bool, note="order 17"):
        effect("refunded")
        return "refunded"
    return "kept"


@app.task(run_in="process", on_crash="retry")
def choose_in_process(ctx: Context) -> str:
    effect("start")
    how: Literal["mail", "parcel"] = ctx.ask("How is it sent?", type=Literal["mail", "parcel"])
    count = ctx.ask("How many?", choices=[1, 2, 3], type=int)
    return f"{count} by {how} for {ctx.labels['tenant']}"


@app.task(on_crash="retry")
def ask_briefly(ctx: Context) -> str:
    try:
        return str(ctx.ask("Still there?", type=str, timeout="1s"))
    except EventTimeout as late:
        return late.message


@app.task(on_crash="retry")
async def ask_two(ctx: Context) -> list[str]:
    return await asyncio.gather(ctx.aask("Which size?", type=str), ctx.aask("Which colour?", type=str))
