"""`everbeat bench`: how fast sends, drains and answers are on this machine, each task verified to have run once.

What lives here: the measurements. What may not: shortcuts that a user would not have; it uses the public API.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from statistics import median, quantiles
from typing import Annotated, Any, Final
from uuid import uuid4

import typer
from msgspec import Struct

from everbeat import App, Handle, SyncTask
from everbeat.cli.locate import load
from everbeat.cli.output import show_json, show_table
from everbeat.cli.selection import SCHEMA_VARIABLE, JsonOption
from everbeat.errors import DatabaseUnreachable, WorkerError
from everbeat.runtime.clock import SystemClock
from everbeat.store.address import EMBEDDED, URL_VARIABLE, DatabaseAddress

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

PROGRAM: Final = "everbeat.cli.bench_tasks"
_ROUNDS: Final = 200
_START_S: Final = 60.0
_DRAIN_S: Final = 300.0


class Measured(Struct, frozen=True, kw_only=True):
    """One figure: `value` in `unit`."""

    name: str
    value: float
    unit: str


@commands.command()
def bench(
    *,
    tasks: Annotated[
        int, typer.Option(min=100, max=1_000_000, help="How many tasks are sent and drained.")
    ] = 2_000,
    url: Annotated[
        str,
        typer.Option("--url", metavar="URL", help="PostgreSQL URL, or 'embedded' for one in ./.everbeat."),
    ] = EMBEDDED,
    as_json: JsonOption = False,
) -> None:
    """Measure sending, draining and latency with one worker process, durable, with the full life cycle.

    Figures of different machines cannot be compared. Every task is verified to have run once, with its attempt row.
    Works in a schema of its own and drops it.
    """
    schema = f"everbeat_bench_{uuid4().hex[:8]}"
    address = DatabaseAddress.parse(url, schema=schema, environment=os.environ)
    os.environ.update({URL_VARIABLE: address.portable, SCHEMA_VARIABLE: schema})
    program: Any = load(PROGRAM)
    app: App = program.app
    with closing(app):
        try:
            app.migrate()
            measured = [*_measured(app, program.nothing, tasks)]
        finally:
            with suppress(DatabaseUnreachable):  # then nothing was made, or that very error is on its way
                app.door.opened().drop()
    if as_json:
        show_json({"tasks": tasks, "verified": True, "figures": measured})
        return
    rows = [(one.name, f"{one.value:,.1f}", one.unit) for one in measured]
    show_table(("WHAT", "VALUE", "UNIT"), rows, numbers=("VALUE",), empty="")


def _measured(app: App, nothing: SyncTask[[int], int], tasks: int) -> Iterator[Measured]:
    took, singles = _timed(lambda: [nothing.send(number) for number in range(_ROUNDS)])
    yield Measured(name="sent one at a time", value=_ROUNDS / took, unit="tasks/s")
    took, bulk = _timed(lambda: app.send_many(nothing.call(number) for number in range(tasks)))
    yield Measured(name="sent in one statement", value=tasks / took, unit="tasks/s")
    with _worker(app):
        took, results = _timed(lambda: [handle.result(timeout=_DRAIN_S) for handle in [*singles, *bulk]])
        yield Measured(name="drained by one worker process", value=(tasks + _ROUNDS) / took, unit="tasks/s")
        _verify([*singles, *bulk], results, expected=[*range(_ROUNDS), *range(tasks)])
        answers = [_timed(lambda: nothing.send(1).result(timeout=_DRAIN_S))[0] for _ in range(_ROUNDS)]
    yield Measured(name="idle, send to result: p50", value=median(answers) * 1_000, unit="ms")
    yield Measured(name="idle, send to result: p99", value=quantiles(answers, n=100)[98] * 1_000, unit="ms")


def _verify(handles: list[Handle[int]], results: list[int], *, expected: list[int]) -> None:
    """Every result is right, and a sample of the tasks has exactly one attempt. Raises WorkerError."""
    step = max(1, len(handles) // 50)
    attempts = [len(handle.info().attempts) for handle in islice(handles, 0, None, step)]
    if results != expected or set(attempts) != {1}:
        raise WorkerError(
            "The benchmark's tasks did not run once each.", fix="report this with the database's log."
        )


@contextmanager
def _worker(app: App) -> Iterator[None]:
    """A supervisor with one worker process; inside, it claims."""
    process = subprocess.Popen(
        [sys.executable, "-m", "everbeat", "worker", f"{PROGRAM}:app", "--log-level", "warning"],
        stdin=subprocess.DEVNULL,
    )
    clock = SystemClock()
    give_up_at = clock.monotonic() + _START_S
    try:
        while not app.list_workers():
            if process.poll() is not None or clock.monotonic() > give_up_at:
                raise WorkerError("The benchmark's worker does not start.", fix="see above what it wrote.")
        yield
    finally:
        process.terminate()
        process.wait()


def _timed(what: Callable[[], Any]) -> tuple[float, Any]:
    clock = SystemClock()
    began = clock.monotonic()
    result = what()
    return clock.monotonic() - began, result
