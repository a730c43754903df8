"""The command: what is measured, how often, and the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Annotated, Any, Final, cast
from uuid import uuid4

import typer

from everbeat.cli.bench.ceiling import plain_figures
from everbeat.cli.bench.contest import contest_figures, require_one
from everbeat.cli.bench.crew import PROGRAM, Program
from everbeat.cli.bench.deaths import death_figures
from everbeat.cli.bench.drains import drain_figures
from everbeat.cli.bench.environments import PEERS, Peer, installed
from everbeat.cli.bench.figures import Figure, Sample, gathered
from everbeat.cli.bench.growth import growth_figures
from everbeat.cli.bench.idle import idle_figures
from everbeat.cli.bench.leftovers import PREFIX, remove_leftovers, reserve
from everbeat.cli.bench.sends import send_figures
from everbeat.cli.bench.watch import Plain
from everbeat.cli.interruption import interruptible
from everbeat.cli.locate import load
from everbeat.cli.output import show_json, show_table
from everbeat.cli.own_schema import own_schema
from everbeat.cli.selection import SCHEMA_VARIABLE, JsonOption
from everbeat.domain.checks import one_of
from everbeat.domain.settings import refused
from everbeat.store.address import EMBEDDED, URL_VARIABLE, DatabaseAddress
from everbeat.store.statement import compose

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

PARTS: Final = ("plain", "send", "drain", "growth", "idle", "deaths")
_SINGLES: Final = 500


@commands.command()
def bench(
    *,
    tasks: Annotated[
        int, typer.Option(min=100, max=1_000_000, help="How many tasks are drained, and sent in bulk.")
    ] = 20_000,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="How often all of it is measured.")] = 1,
    rows: Annotated[
        int, typer.Option(min=100, max=10_000_000, help="Beside how many other rows, in the part 'growth'.")
    ] = 1_000_000,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PART", help=f"Only this part (may be repeated): {', '.join(PARTS)}."),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="QUEUE",
            help=f"Another queue in the same run (may be repeated; is installed in a folder of its own): {', '.join(PEERS)}.",
        ),
    ] = None,
    watch_s: Annotated[
        float,
        typer.Option("--watch", min=1.0, max=600.0, metavar="SECONDS", help="How long idle cost is watched."),
    ] = 10.0,
    url: Annotated[
        str,
        typer.Option("--url", metavar="URL", help="PostgreSQL URL, or 'embedded' for one in ./.everbeat."),
    ] = EMBEDDED,
    not_durable: Annotated[
        bool, typer.Option("--not-durable", help="Measure although the server does not wait for its disk.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure sends, drains, latency, idle cost and recovery, each beside what the bare server does in the same run.

    Figures of different machines, and of different runs, cannot be compared: only ratios can. Every drained task is
    verified to have run once, with its attempt row. Works in a schema of its own and drops it.
    """
    parts = [one_of(*PARTS)(part, subject="--only") for part in only or PARTS]
    others = [one_of(*PEERS)(peer, subject="--peer") for peer in peers or ()]
    program = _program_at(url)
    app = program.app
    measured = partial(_samples, program, parts=parts, tasks=tasks, rows=rows, watch_s=watch_s)
    with interruptible(), closing(app), app.door.target.connect("everbeat bench") as connection:
        durable = _require_durable(connection, app.schema, not_durable=not_durable)
        reserve(connection, app.door.target)
        remove_leftovers(connection, app.door.target)
        with own_schema(app), installed(others) as queues:
            runs = [[*measured(connection, queues)] for _ in range(repeats)]
    figures = gathered(runs)
    if as_json:
        head = {"tasks": tasks, "repeats": repeats, "durable": durable, "verified": "drain" in parts}
        versions = {queue.name: queue.version for queue in queues}
        show_json(head | {"peers": versions, "figures": [_document(one) for one in figures]})
    else:
        _show_figures(figures)
    require_one(others, [one.name for one in figures])


def _program_at(url: str) -> Program:
    """The program, which works at this address in a schema of its own; and so does every process that is started from now on."""
    schema = f"{PREFIX}{uuid4().hex[:8]}"
    address = DatabaseAddress.parse(url, schema=schema, environment=os.environ)
    os.environ.update({URL_VARIABLE: address.portable, SCHEMA_VARIABLE: schema})
    program: Program = cast(Any, load(PROGRAM))
    return program


def _samples(
    program: Program,
    connection: Plain,
    queues: Sequence[Peer],
    *,
    parts: Sequence[str],
    tasks: int,
    rows: int,
    watch_s: float,
) -> Iterator[Sample]:
    kinds: dict[str, Callable[[], Iterator[Sample]]] = {
        "plain": lambda: plain_figures(connection, program.app.schema, rows=tasks, singles=_SINGLES),
        "send": lambda: send_figures(program, singles=_SINGLES, bulk=tasks),
        "drain": lambda: drain_figures(program, connection, tasks=tasks),
        "growth": lambda: growth_figures(
            program,
            connection,
            tasks=tasks,
            rows=rows,
            connect=lambda: program.app.door.opened().target.connect("everbeat bench"),
        ),
        "idle": lambda: idle_figures(program, connection, rounds=200, watch_s=watch_s),
        "deaths": lambda: death_figures(program, connection),
    }
    for part in parts:
        print(f"measuring: {part}", file=sys.stderr)
        yield from kinds[part]()
    if queues:
        connection.execute(
            compose("bench/forget", program.app.schema)
        )  # others are spared the clean-up after us
        yield from contest_figures(queues, program.app.door.target, jobs=tasks)


def _require_durable(connection: Plain, schema: str, *, not_durable: bool) -> bool:
    """Whether commits are on disk when they are acknowledged. Raises ConfigurationError where they are not, unless that was asked for."""
    row = connection.execute(compose("bench/durability", schema)).fetchone()
    settings = dict(zip(("fsync", "synchronous_commit"), row or (), strict=True))
    off = [name for name, is_on in settings.items() if not is_on]
    if off and not not_durable:
        raise refused(
            [f"{name} = off" for name in off],
            subject="bench",
            code="NOT_DURABLE",
            rule="leaves a server that may lose what it acknowledged, whose speed says nothing",
            fix=f"switch {' and '.join(off)} on",
            shell_fix=f"switch {' and '.join(off)} on, or say --not-durable",
        )
    return not off


def _show_figures(figures: Sequence[Figure]) -> None:
    show_table(
        ("WHAT", "VALUE", "UNIT", "SPREAD", "RATIO", "BESIDE", "TARGET"),
        [_row(one) for one in figures],
        numbers=("VALUE", "SPREAD", "RATIO"),
        empty="",
    )


def _document(figure: Figure) -> dict[str, object]:
    return {
        "name": figure.name, "value": figure.value, "unit": figure.unit, "values": figure.values, "spread": figure.spread,
        "ratio": figure.ratio, "beside": figure.beside, "target": figure.target,
    }  # fmt: skip


def _row(figure: Figure) -> tuple[str, ...]:
    spread = f"{figure.spread:.0%}" if len(figure.values) > 1 else ""
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    return (
        figure.name,
        f"{figure.value:,.1f}",
        figure.unit,
        spread,
        ratio,
        figure.beside or "",
        figure.target or "",
    )
