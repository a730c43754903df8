"""Task functions that log."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from everbeat.domain.task.context import Context
from everbeat.domain.task.retry import RetryPolicy
from tests.worker.sample_tasks import Unprintable, gate, task

AGAIN = RetryPolicy(max_retries=1, intervals=["1s"], jitter=0, auto_retry_for=["UNHANDLED_EXCEPTION"])
log = logging.getLogger("shop.orders")
log.setLevel(logging.DEBUG)


def _say(attempt: int) -> None:
    log.debug("too low")
    log.info("begins attempt %d", attempt)
    try:
        raise ValueError("no stock")
    except ValueError:
        log.exception("cannot pack", extra={"card": "4242"})


@task(capture_logs=True, retry=AGAIN)
async def log_async(ctx: Context) -> str:
    _say(ctx.attempt)
    await asyncio.to_thread(log.warning, "in another thread")
    if ctx.attempt == 1:
        raise ValueError("again")
    return "done"


@task(capture_logs="info", retry=AGAIN)
def log_in_thread(ctx: Context) -> str:
    _say(ctx.attempt)
    log.warning("in another thread")
    if ctx.attempt == 1:
        raise ValueError("again")
    return "done"


@task(capture_logs="info", retry=AGAIN, run_in="process")
def log_in_process(ctx: Context) -> str:
    logging.getLogger("shop.orders").setLevel(logging.DEBUG)
    _say(ctx.attempt)
    log.warning("in another thread")
    if ctx.attempt == 1:
        raise ValueError("again")
    return "done"


@task(capture_logs=False)
async def log_nothing() -> None:
    log.error("secret")


@task()
async def log_as_the_worker_says() -> None:
    log.debug("detail")
    log.error("problem")


def _flood(lines: int) -> float:
    began = time.monotonic()
    for n in range(lines):
        log.info("line %d of the flood, which is as long as a usual line of a log", n + 1)
    return time.monotonic() - began


@task(capture_logs=True)
def flood_in_thread(lines: int) -> float:
    return _flood(lines)


@task(capture_logs=True, run_in="process")
def flood_in_process(lines: int) -> float:
    return _flood(lines)


@task(capture_logs=True, run_in="process")  # the handlers of pytest raise an error for such records
def log_hostile() -> None:
    log.info("nul \x00, surrogate \ud800, escape \x1b[31m, override \u202e")
    log.info("x" * 100_000)
    log.info("%d items", "wrong")
    log.info("%s", Unprintable())
    logging.getLogger("n\x00" * 200).error("odd logger")
    log.handle(logging.makeLogRecord({"name": "shop.odd", "levelno": 40, "levelname": "ERROR", "msg": 5}))


@task(capture_logs=True, run_in="process", on_crash="retry")
def log_and_die(ctx: Context) -> str:
    log.info("before the crash of attempt %d", ctx.attempt)
    if ctx.attempt == 1:
        time.sleep(0.5)  # longer than the time after which a task process sends its lines
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


@task(capture_logs=True)
def log_when_told() -> None:
    """Log, wait for the gate, and log again, also after the lease was lost."""
    log.info("before")
    gate.journal.append("waits")
    gate.opened.wait(20)
    log.info("after")
    gate.journal.append("logged")
