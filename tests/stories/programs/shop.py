"""One program in two versions: version 2 adds parameters and renames a task. Senders send only what their version knows.

Run as `python -m shop VERSION PER_SECOND SEED`: send until the gate `closed` opens, and record every acknowledged task.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from sample_tasks import effect

from everbeat import App, RecoveryConfig
from everbeat.config import WorkerConfig

KINDS: dict[str, dict[str, Any]] = {
    "async": {},
    "thread": {"run_in": "thread"},
    "process": {"run_in": "process"},
}
POLICIES: dict[str, dict[str, Any]] = {
    "retry": {"on_crash": "retry", "max_crashes": 50, "max_losses": 100},
    "fail": {"on_crash": "fail"},
    "stop_retry": {"on_crash": "fail", "on_stop": "retry"},
    "stop_fail": {"on_crash": "retry", "on_stop": "fail", "max_crashes": 50, "max_losses": 100},
}
SHAPES = ("same", "optional", "required", "renamed")
SLICE_S = 0.1
LINES = 12


async def slowly(took_s: float, **given: str) -> None:
    effect("start", given=given)
    until = time.monotonic() + took_s
    while time.monotonic() < until:
        await asyncio.sleep(SLICE_S)
        effect("runs")
    effect("end")


def blocking(took_s: float, **given: str) -> None:
    effect("start", given=given)
    until = time.monotonic() + took_s
    while time.monotonic() < until:
        time.sleep(SLICE_S)
        effect("runs")
    effect("end")


def given(version: int, shape: str) -> dict[str, str]:
    """Return the arguments that a sender of this version passes besides `took_s`."""
    if version == 1:
        return {}
    return {"optional": {"locale": "fr"}, "required": {"country": "fr"}}.get(shape, {})


def coroutine_of(version: int, shape: str) -> Callable[..., Any]:
    """Return the code of an async task with the signature of this version."""

    async def plain(took_s: float) -> None:
        await slowly(took_s)

    async def localised(took_s: float, locale: str = "en") -> None:
        await slowly(took_s, locale=locale)

    async def taxed(took_s: float, country: str) -> None:
        await slowly(took_s, country=country)

    later = {"optional": localised, "required": taxed}
    return plain if version == 1 else later.get(shape, plain)


def function_of(version: int, shape: str) -> Callable[..., Any]:
    """Return the code of a thread or process task with the signature of this version."""

    def plain(took_s: float) -> None:
        blocking(took_s)

    def localised(took_s: float, locale: str = "en") -> None:
        blocking(took_s, locale=locale)

    def taxed(took_s: float, country: str) -> None:
        blocking(took_s, country=country)

    later = {"optional": localised, "required": taxed}
    return plain if version == 1 else later.get(shape, plain)


def name_of(kind: str, policy: str, shape: str, version: int) -> str:
    return f"{kind}-{policy}-{shape}" + (f"-v{version}" if shape == "renamed" else "")


class Shop:
    """The app of one version, and its tasks by kind, policy and shape."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.app = App(
            os.environ["STORY_URL"],
            schema=os.environ["STORY_SCHEMA"],
            recovery=RecoveryConfig(**json.loads(os.environ.get("STORY_RECOVERY", "{}"))),
            worker=WorkerConfig(**json.loads(os.environ.get("STORY_WORKER", "{}"))),
        )
        self.tasks = {
            (kind, policy, shape): self.app.task(
                name=name_of(kind, policy, shape, version), **POLICIES[policy], **place
            )((coroutine_of if kind == "async" else function_of)(version, shape))
            for kind, place in KINDS.items()
            for policy in POLICIES
            for shape in SHAPES
        }


def send_on(version: int, *, per_second: float, seed: int) -> None:
    """Send tasks of all kinds, one in ten as a workflow of three, some in serial lines, until the story closes the shop."""
    shop, random = Shop(version), Random(seed)
    closed = Path(os.environ["STORY_GATES"]) / "closed"
    journal = Path(os.environ["STORY_EFFECTS"]).with_name(f"sent-{version}-{os.getpid()}.jsonl")
    keys = sorted(shop.tasks)
    with journal.open("a", buffering=1) as lines:
        while not closed.exists():
            kind, policy, shape = random.choice(keys)
            task, more = shop.tasks[kind, policy, shape], given(version, shape)
            took_s = random.choice((0.0, 0.0, 0.0, 0.05, 0.2, 1.0, 3.0))
            if random.random() < 0.1:
                workflow = shop.app.workflow("order")
                first = workflow.add(task, took_s, **more).named("first")
                other = shop.tasks[kind, "retry", SHAPES[1]]
                second = workflow.add(other, 0.0, **given(version, SHAPES[1])).after(first).named("second")
                workflow.add(shop.tasks["async", "retry", "same"], 0.0).after(second).named("third")
                lines.write(json.dumps({"workflow": str(workflow.start().id)}) + "\n")
            else:
                line = f"line-{random.randrange(LINES)}" if random.random() < 0.15 else None
                lined = task if line is None else task.with_options(serial=line)
                lines.write(json.dumps({"task": str(lined.send(took_s, **more).id)}) + "\n")
            time.sleep(random.random() * 2 / per_second)  # the load, at random intervals
    shop.app.close()


if __name__ == "__main__":
    send_on(int(sys.argv[1]), per_second=float(sys.argv[2]), seed=int(sys.argv[3]))
