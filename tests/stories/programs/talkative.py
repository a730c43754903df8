"""Tasks that write to stderr in every possible way."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import threading
import time
import warnings
from pathlib import Path

from everbeat import App, Context, RecoveryConfig
from everbeat.config import WorkerConfig

app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    worker=WorkerConfig(**json.loads(os.environ["STORY_WORKER"])),
    recovery=RecoveryConfig(**json.loads(os.environ["STORY_RECOVERY"])),
)
print("the module\nis imported", file=sys.stderr)


@app.task
def talk() -> None:
    logging.getLogger("shop").warning("several\nlines %s", "\x1b[31m \u202e \x7f", extra={"order": 5})
    warnings.warn("this is\nold", stacklevel=1)
    print('{"not": json}\nand text', file=sys.stderr)
    print('{"of": "the shop"}', file=sys.stderr)
    ctypes.CDLL(None).write(2, b"from C\n", 7)
    thread = threading.Thread(target=int, args=("x",), name="broken")
    thread.start()
    thread.join()
    raise ValueError("two\nlines")


@app.task
async def say_async(word: str) -> None:
    logging.getLogger("shop.said").warning("%s\nin two lines", word)


@app.task
def say_in_thread(word: str) -> None:
    logging.getLogger("shop.said").warning("%s\nin two lines", word)


@app.task(run_in="process")
def say_apart(word: str) -> None:
    logging.getLogger("shop.said").warning("%s\nin two lines", word)


@app.task(run_in="process", stall_timeout="1s")
def stall(ctx: Context) -> None:
    ctx.progress("begins")
    time.sleep(60)  # the stall itself


@app.task
def die() -> None:
    os.kill(os.getpid(), 9)


@app.task
def wait() -> str:
    return "done"


@app.task
def chatter(until: str) -> None:
    """Write more than the socket of the log holds, until the file exists."""
    while not Path(until).exists():
        print("x" * 5_000, file=sys.stderr)
        time.sleep(0.002)  # lets other threads of the worker run


@app.task(run_in="process")
def chatter_apart(until: str) -> None:
    while not Path(until).exists():
        print("y" * 5_000, file=sys.stderr)
        time.sleep(0.002)  # a pace like that of chatter
