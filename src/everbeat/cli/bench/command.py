"""The command: what is measured, how often, and the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, Final, cast
from uuid import uuid4

import typer

from everbeat import App
from everbeat.cli.bench.ceiling import plain_figures
from everbeat.cli.bench.contest import contest_figures, require_compared, require_one
from everbeat.cli.bench.crew import PROGRAM, Program
from everbeat.cli.bench.deaths import death_figures
from everbeat.cli.bench.drains import drain_figures
from everbeat.cli.bench.environments import PEERS, Peer, installed
from everbeat.cli.bench.figures import Figure, Sample, gathered
from everbeat.cli.bench.growth import growth_figures
from everbeat.cli.bench.idle import idle_figures
from everbeat.cli.bench.leftovers import PREFIX, remove_leftovers, reserve
from everbeat.cli.bench.report import figure_document, show_figures
from everbeat.cli.bench.sends import send_figures
from everbeat.cli.bench.surroundings import NATS_SCHEMA_VARIABLE, NATS_VARIABLE
from everbeat.cli.bench.told import NATS_PROGRAM, told_figures
from everbeat.cli.bench.watch import Plain
from everbeat.cli.bench.workflows import workflow_figures
from everbeat.cli.interruption import interruptible
from everbeat.cli.locate import load
from everbeat.cli.output import say, show_json
from everbeat.cli.own_schema import own_schema
from everbeat.cli.selection import SCHEMA_VARIABLE, JsonOption, OwnUrlOption
from everbeat.domain.checks import one_of
from everbeat.domain.settings import refused
from everbeat.errors import NatsError, NatsNotInstalled
from everbeat.store.address import EMBEDDED, URL_VARIABLE, DatabaseAddress
from everbeat.store.statement import compose

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

PARTS: Final = ("idle", "plain", "send", "drain", "growth", "workflows", "deaths")
"""In this order: after all others the server has to clean up for a while, which would count as the cost of idling."""
NATS_PART: Final = "nats"
"""Last of all, and only where a NATS server is named."""
NATS_LEFTOVERS: Final = "everbeat.cli.bench.nats_leftovers"
FEW_TASKS: Final = 5_000
_SINGLES: Final = 1_000


NatsOption = Annotated[
    str | None,
    typer.Option(
        "--nats",
        metavar="URL",
        help="Also the part 'nats': workers told by PostgreSQL and by this NATS server, side by side.",
    ),
]


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
    nats: NatsOption = None,
    url: OwnUrlOption = EMBEDDED,
    not_durable: Annotated[
        bool, typer.Option("--not-durable", help="Measure although the server does not wait for its disk.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure sends, drains, latency, idle cost and recovery, each beside what the bare server does in the same run.

    Figures of different machines, and of different runs, cannot be compared: only ratios can. Every drained task is
    verified to have run once, with its attempt row. Works in a schema of its own and drops it (with --nats in two, and a stream);
    the role needs CREATE on the database, and CREATEDB for --peer. Takes about five minutes; --only and --rows shorten it.
    """
    wanted = {one_of(*PARTS, NATS_PART)(part, subject="--only") for part in only or PARTS}
    parts = [part for part in PARTS if part in wanted]
    _require_nats(nats, wanted)
    others = [one_of(*PEERS)(peer, subject="--peer") for peer in peers or ()]
    require_compared(others, parts)
    app = (program := _program_at(url)).app
    measured = partial(_samples, program, parts=parts, tasks=tasks, rows=rows, watch_s=watch_s)
    with (
        interruptible(),
        _nats_program(nats) as other,
        closing(app),
        app.door.target.connect("everbeat bench") as connection,
    ):
        durable = _require_durable(connection, app.schema, not_durable=not_durable)
        reserve(connection, app.door.target)
        remove_leftovers(connection, app.door.target)
        server = _server(app, connection)
        with own_schema(app), installed(others) as queues:
            _announce(server, tasks=tasks, parts=parts, as_json=as_json)
            runs = [
                [*measured(connection, queues), *_told(program, other, connection, tasks)]
                for _ in range(repeats)
            ]
    head = {
        "server": server,
        "tasks": tasks,
        "repeats": repeats,
        "durable": durable,
        "verified": "drain" in parts,
    }
    _report(gathered(runs), head, queues, as_json=as_json)
    require_one(others, [sample.name for sample in runs[0]])


def _report(
    figures: Sequence[Figure], head: Mapping[str, object], queues: Sequence[Peer], *, as_json: bool
) -> None:
    if as_json:
        versions = {queue.name: queue.version for queue in queues}
        show_json({**head, "peers": versions, "figures": [figure_document(one) for one in figures]})
    else:
        show_figures(figures)


def _program_at(url: str) -> Program:
    """The program, which works at this address in a schema of its own; and so does every process that is started from now on."""
    schema = f"{PREFIX}{uuid4().hex[:8]}"
    address = DatabaseAddress.parse(url, schema=schema, environment=os.environ)
    os.environ.update({URL_VARIABLE: address.portable, SCHEMA_VARIABLE: schema})
    program: Program = cast(Any, load(PROGRAM))
    return program


def _require_nats(url: str | None, parts: Set[str]) -> None:
    """Raises ConfigurationError where the part is asked for without a server, NatsNotInstalled where nobody could speak to it."""
    if url is not None and find_spec("nats") is None:
        raise NatsNotInstalled
    if url is None and NATS_PART in parts:
        raise refused(
            NATS_PART,
            subject="--only",
            code="MISSING",
            rule="needs a NATS server to measure",
            fix="name one: --nats nats://localhost:4222",
        )


@contextmanager
def _nats_program(url: str | None) -> Iterator[Program | None]:
    """The same program in another schema, whose workers this server tells of tasks; nothing where none is named."""
    if url is None:
        yield None
        return
    os.environ.update({NATS_VARIABLE: url, NATS_SCHEMA_VARIABLE: f"{PREFIX}{uuid4().hex[:8]}"})
    program: Program = cast(Any, load(NATS_PROGRAM))
    app = program.app
    with closing(app), app.door.target.connect("everbeat bench") as connection:
        reserve(connection, app.door.target)
        try:
            with own_schema(app):
                yield program
        finally:
            _remove_stream(app)


def _remove_stream(app: App) -> None:
    try:
        cast(Any, load(NATS_LEFTOVERS)).remove_stream(app.nats, app.schema)
    except NatsError as problem:
        say(f"warning: the stream of this bench may be left behind. {problem.message}")


def _told(program: Program, other: Program | None, connection: Plain, tasks: int) -> Iterator[Sample]:
    if other is not None:
        print(f"measuring: {NATS_PART}", file=sys.stderr)
        yield from told_figures(program, other, connection, rounds=200, sends=min(tasks, 8_000), tasks=tasks)


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
        "plain": lambda: plain_figures(connection, program.app.schema, rows=tasks),
        "send": lambda: send_figures(program, connection, singles=_SINGLES, bulk=tasks),
        "drain": lambda: drain_figures(program, connection, tasks=tasks),
        "growth": lambda: growth_figures(
            program,
            connection,
            tasks=tasks,
            rows=rows,
            connect=lambda: program.app.door.opened().target.connect("everbeat bench"),
        ),
        "idle": lambda: idle_figures(program, connection, rounds=200, watch_s=watch_s),
        "workflows": lambda: workflow_figures(program, connection, most=tasks),
        "deaths": lambda: death_figures(program, connection),
    }
    for part in parts:
        print(f"measuring: {part}", file=sys.stderr)
        yield from kinds[part]()
    if queues:
        connection.execute(
            compose("bench/forget", program.app.schema)
        )  # others are spared the clean-up after us
        yield from contest_figures(queues, program.app.door.target, jobs=tasks, parts=parts)


def _server(app: App, connection: Plain) -> str:
    """Which server is measured, in words."""
    folder = app.door.address.folder
    row = connection.execute(compose("bench/server", app.schema)).fetchone()
    where = app.door.target.shown if folder is None else f"embedded in {folder}"
    return f"PostgreSQL {row[0] if row else '?'}, {where}"


def _announce(server: str, *, tasks: int, parts: Sequence[str], as_json: bool) -> None:
    if not as_json:
        say(f"server: {server}")
    if tasks < FEW_TASKS and {*parts} & {"plain", "send", "drain", "growth"}:
        say(
            f"warning: with fewer than {FEW_TASKS:,} tasks most of a figure is its beginning and its end; it misleads."
        )
        say("fix: leave --tasks out for figures that mean something.")


def _require_durable(connection: Plain, schema: str, *, not_durable: bool) -> bool:
    """Whether commits are on disk when they are acknowledged. Raises ConfigurationError where they are not, unless that was asked for."""
    row = connection.execute(compose("bench/durability", schema)).fetchone()
    settings = dict(zip(("fsync", "synchronous_commit"), row or (), strict=True))
    off = [name for name, is_on in settings.items() if not is_on]
    if off and not not_durable:
        raise refused(
            ", ".join(f"{name} off" for name in off),
            subject="the server's settings",
            code="NOT_DURABLE",
            rule="a server that may lose what it acknowledged is not measured, its speed says nothing",
            fix=f"switch {' and '.join(off)} on",
            shell_fix=f"switch {' and '.join(off)} on, or say --not-durable",
        )
    return not off
