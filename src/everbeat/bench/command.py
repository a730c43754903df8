"""The command `everbeat bench`: its options, the parts that it measures, and the setup and cleanup of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import typer
from msgspec import Struct
from msgspec.structs import replace

from everbeat.bench import NATS_SCHEMA_VARIABLE, NATS_VARIABLE
from everbeat.bench.concurrency import sender_measurements, worker_measurements
from everbeat.bench.environment import (
    APPLICATION,
    PREFIX,
    SETUPS,
    Bench,
    lock_schema_name,
    remove_leftovers,
    require_durable,
    server_name,
)
from everbeat.bench.fleet import fleet_measurements
from everbeat.bench.latency import death_measurements, idle_measurements, latency_measurements
from everbeat.bench.limits import limit_measurements
from everbeat.bench.load import load_measurements
from everbeat.bench.machine import LIMIT_CORES, Meter, machine_document
from everbeat.bench.report import BenchReport
from everbeat.bench.sampling import Conditions, MachineBusy, Measurement, MeasurementGroup, take_all
from everbeat.bench.throughput import (
    drain_measurements,
    growth_measurements,
    send_measurements,
    workflow_measurements,
)
from everbeat.cli.failures import ExitCode, Form, exit_code_of, interruptible, show_failure
from everbeat.cli.output import say
from everbeat.cli.own_tree import own_schema
from everbeat.cli.selection import SCHEMA_VARIABLE, JsonOption, OwnUrlOption
from everbeat.client.database_access import database_of
from everbeat.domain.settings.checks import one_of
from everbeat.domain.settings.settings import refused
from everbeat.domain.settings.units import to_seconds
from everbeat.errors import EverbeatError, NatsNotInstalled
from everbeat.store.address import EMBEDDED, URL_VARIABLE, DatabaseAddress

if TYPE_CHECKING:
    from everbeat.bench.program import BenchProgram

PARTS: Final = ("idle", "send", "drain", "latency", "workflows", "deaths")
"""The parts that are measured unless --only selects others. Idle cost comes first, because the server is still cleaning up after the
other parts."""
GROWTH: Final = "growth"
"""Measured only on request, because each round inserts millions of rows."""
LIMITS: Final = "limits"
"""Measured only on request, because the drains of 100,000 keys take minutes."""
LOAD: Final = "load"
"""Measured only on request, because it first drains as many tasks as the part `drain`."""
SENDERS: Final = "senders"
"""Measured only on request, because it starts 62 processes in each round."""
WORKERS: Final = "workers"
"""Measured only on request, because it starts 31 worker processes in each round."""
FLEET: Final = "fleet"
"""Measured only on request, because it needs many connections."""
NATS: Final = "nats"
"""Measured only with --nats."""
FEW_TASKS: Final = 5_000
_PROGRAM: Final = "everbeat.bench.program"
_NATS_MODULE: Final = "everbeat.bench.nats"
_ONCE: Final = {"idle", "deaths", FLEET}
"""The parts that compare nothing and therefore need no pairs."""
_NEED_MANY_TASKS: Final = {"send", "drain", GROWTH, LIMITS, WORKERS}

_SHARED: Final[dict[str, tuple[Any, Any]]] = {
    "tasks": (
        Annotated[
            int, typer.Option(min=100, max=1_000_000, help="How many tasks to drain, and to send at once.")
        ],
        20_000,
    ),
    "pairs": (
        Annotated[
            int,
            typer.Option(
                min=1, max=100, help="Interleaved pairs of each comparison; an interval needs at least 5."
            ),
        ],
        8,
    ),
    "foreign_limit": (
        Annotated[
            float,
            typer.Option(
                min=0.0, metavar="CORES", help="Discard measurements during which other processes used more."
            ),
        ],
        LIMIT_CORES,
    ),
    "patience": (
        Annotated[
            str,
            typer.Option(
                metavar="DURATION", help="Wait this long for a quiet moment before giving up (exit code 5)."
            ),
        ],
        "2m",
    ),
    "allow_busy": (
        Annotated[
            bool, typer.Option("--allow-busy", help="Keep measurements of a busy machine, and mark them.")
        ],
        False,
    ),
    "url": (OwnUrlOption, EMBEDDED),
    "not_durable": (
        Annotated[
            bool,
            typer.Option("--not-durable", help="Measure even if the server does not wait for its disk."),
        ],
        False,
    ),
    "as_json": (JsonOption, False),
}
"""The options, with their defaults, of every command that measures."""

commands = typer.Typer(rich_markup_mode=None, add_completion=False)


class BenchOptions(Struct, frozen=True, kw_only=True):
    """The validated options of one run."""

    url: str
    parts: tuple[str, ...]
    tasks: int
    pairs: int
    conditions: Conditions
    not_durable: bool
    as_json: bool
    rows: int = 0
    watch_s: float = 0.0
    supervisors: int = 0
    nats: str | None = None


def measuring(
    known: Sequence[str], *, usual: Sequence[str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds --only for the known parts, and the options that all measuring commands share.

    The decorated function receives the validated options as its first argument. Without --only, the options select the usual parts.
    """
    only = Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PART",
            help=f"Measure only this part (can be repeated): {', '.join(known)}.",
        ),
    ]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        declared = signature(command, eval_str=True)
        own = [*declared.parameters.values()][1:]
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=option, default=default)
            for name, (option, default) in {"only": (only, None), **_SHARED}.items()
        ]

        @wraps(command)
        def run(
            *,
            only: Sequence[str] | None,
            foreign_limit: float,
            patience: str,
            allow_busy: bool,
            **options: Any,
        ) -> None:
            wanted = one_each(only or usual, known, subject="--only")
            conditions = Conditions(
                limit_cores=foreign_limit,
                patience_s=to_seconds(patience, subject="--patience"),
                allow_busy=allow_busy,
            )
            given = {name: options.pop(name) for name in _SHARED.keys() & options.keys()}
            parts = tuple(part for part in known if part in wanted)
            command(BenchOptions(parts=parts, conditions=conditions, **given), **options)

        run.__signature__ = declared.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return run

    return decorated


def one_each(names: Sequence[str], known: Iterable[str], *, subject: str) -> tuple[str, ...]:
    """Return the names without repetitions. Raises ConfigurationError for unknown names."""
    check = one_of(*known)
    return tuple(dict.fromkeys(check(name, subject=subject) for name in names))


@commands.command()
@measuring((*PARTS, LOAD, GROWTH, LIMITS, SENDERS, WORKERS, FLEET, NATS), usual=PARTS)
def bench(
    options: BenchOptions,
    *,
    rows: Annotated[
        int,
        typer.Option(
            min=100,
            max=10_000_000,
            help="How many finished or pending tasks the part 'growth' adds to a drain. 'limits' adds a tenth as many waiting keys.",
        ),
    ] = 1_000_000,
    watch_s: Annotated[
        float,
        typer.Option(
            "--watch", min=1.0, max=600.0, metavar="SECONDS", help="How long to watch the idle cost."
        ),
    ] = 10.0,
    supervisors: Annotated[
        int,
        typer.Option(
            min=8,
            max=1_000,
            help="How many supervisors the part 'fleet' simulates. Each takes three connections.",
        ),
    ] = 200,
    nats: Annotated[
        str | None,
        typer.Option(
            "--nats",
            metavar="URL",
            help="Also measure the part 'nats': notifications by PostgreSQL and by this NATS server.",
        ),
    ] = None,
) -> None:
    """Measure sends, drains, latency, idle cost and recovery, each beside what the bare server does in the same run.

    Compare ratios, not figures, between machines and runs. A ratio is the median of interleaved pairs. bench repeats
    measurements that other processes disturbed, and verifies that every drained task ran once, with its attempt row. It
    works in its own schema and drops it (with --nats in two, and a stream); the role needs CREATE on the database. It takes
    about ten minutes; --only and --pairs shorten it.
    """
    parts = options.parts
    _require_nats(nats, parts)
    if nats is not None and NATS not in parts:
        parts = (*parts, NATS)
    with running(
        replace(options, parts=parts, rows=rows, watch_s=watch_s, supervisors=supervisors, nats=nats)
    ) as run:
        report = run.measured(run.groups())
    report.publish(as_json=options.as_json)


def _require_nats(url: str | None, parts: Sequence[str]) -> None:
    """Raise ConfigurationError if the NATS part was requested without a server, and NatsNotInstalled if the client library is missing."""
    if url is not None and find_spec("nats") is None:
        raise NatsNotInstalled
    if url is None and NATS in parts:
        raise refused(
            NATS,
            subject="--only",
            code="MISSING",
            rule="needs a NATS server to measure",
            fix="name one: --nats nats://localhost:4222",
        )


class BenchRun(Struct, frozen=True, kw_only=True):
    """A benchmark run whose schema exists. It knows the parts to measure and the settings."""

    options: BenchOptions
    bench: Bench
    by_nats: BenchProgram | None
    meter: Meter
    head: dict[str, Any]

    def groups(self) -> Iterator[MeasurementGroup]:
        """Yield one group of measurements for each chosen part, in order."""
        bench, options = self.bench, self.options
        kinds: dict[str, Callable[[], Iterable[Measurement]]] = {
            "idle": lambda: idle_measurements(bench, watch_s=options.watch_s),
            "send": lambda: send_measurements(bench, tasks=options.tasks),
            "drain": lambda: drain_measurements(bench, tasks=options.tasks),
            "latency": lambda: latency_measurements(bench),
            LOAD: lambda: load_measurements(bench, tasks=options.tasks),
            GROWTH: lambda: growth_measurements(bench, tasks=options.tasks, rows=options.rows),
            LIMITS: lambda: limit_measurements(bench, tasks=options.tasks, keys=options.rows // 10),
            SENDERS: lambda: sender_measurements(bench),
            WORKERS: lambda: worker_measurements(bench, tasks=options.tasks),
            FLEET: lambda: fleet_measurements(
                bench, supervisors=options.supervisors, watch_s=options.watch_s
            ),
            "workflows": lambda: workflow_measurements(bench, widest=options.tasks),
            "deaths": lambda: death_measurements(bench),
            NATS: lambda: import_module(_NATS_MODULE).nats_measurements(
                bench, self.by_nats, tasks=options.tasks
            ),
        }
        for part in options.parts:
            yield MeasurementGroup(
                name=part,
                measurements=tuple(kinds[part]()),
                rounds=1 if part in _ONCE else options.pairs,
            )

    def measured(self, groups: Iterable[MeasurementGroup], **head: object) -> BenchReport:
        """Take these groups of measurements. Return a report whose document includes `head`.

        Raises MachineBusy if other processes do not stop in time.
        """
        if not self.options.as_json:
            say(f"server: {self.head['server']}")
        if not self.meter.can_measure:
            say(
                "warning: this system does not report how much processor time other processes use (/proc/stat). Figures of a "
                "busy machine look like those of a quiet one."
            )
        if self.options.tasks < FEW_TASKS and _NEED_MANY_TASKS & {*self.options.parts}:
            say(
                f"warning: with fewer than {FEW_TASKS:,} tasks, startup and shutdown dominate the figures and make them misleading."
            )
            say("fix: omit --tasks to get meaningful figures.")
        conditions = self.options.conditions
        return BenchReport(
            head=self.head | head,
            taken=tuple(take_all(groups, self.meter, conditions)),
            conditions=conditions,
        )


@contextmanager
def running(options: BenchOptions) -> Iterator[BenchRun]:
    """Set up a run with its program, its session and its schema, and clean up after the block.

    Raises ConfigurationError if the server is not durable, and typer.Exit if the run is interrupted or the machine stays busy.
    """
    try:
        with interruptible(), ExitStack() as stack:
            yield _run(options, stack)
    except MachineBusy as problem:
        show_failure(problem, form=Form.DOCUMENT if options.as_json else Form.TEXT)
        raise typer.Exit(ExitCode.TIMEOUT) from None


def _run(options: BenchOptions, stack: ExitStack) -> BenchRun:
    programs = _programs(options)
    program, app = programs.by_postgres, programs.by_postgres.app
    stack.enter_context(closing(app))
    target = database_of(app).target
    connection = stack.enter_context(target.connect(APPLICATION))
    bench = Bench(program=program, connection=connection)
    settings = dict(bench.execute("read_settings").fetchall())
    durable = require_durable(settings, not_durable=options.not_durable)
    lock_schema_name(connection, target)
    remove_leftovers(connection, target)
    meter = Meter(connection, app.schema, with_nats=options.nats is not None)
    stack.enter_context(own_schema(app))
    if programs.by_nats is not None:
        stack.enter_context(import_module(_NATS_MODULE).prepared(programs.by_nats))
    head = {
        "machine": machine_document(),
        "server": server_name(app, settings),
        "server_settings": settings,
        "durable": durable,
        "tasks": options.tasks,
        "pairs": options.pairs,
        "verified": "drain" in options.parts,
        "settings": {setup.name: setup.document() for setup in SETUPS},
    }
    return BenchRun(options=options, bench=bench, by_nats=programs.by_nats, meter=meter, head=head)


def _programs(options: BenchOptions) -> Any:
    """Import the programs. Like the processes that are started later, they read the database's address from the environment."""
    schema = f"{PREFIX}{uuid4().hex[:8]}"
    address = DatabaseAddress.parse(options.url, schema=schema, environment=os.environ)
    os.environ.update({URL_VARIABLE: address.portable, SCHEMA_VARIABLE: schema})
    if options.nats is not None:
        nats_schema = f"{PREFIX}{uuid4().hex[:8]}"
        os.environ.update({NATS_VARIABLE: options.nats, NATS_SCHEMA_VARIABLE: nats_schema})
    return import_module(_PROGRAM)


def run_program(application: typer.Typer, *, name: str) -> None:
    """Run the command line of a program other than `everbeat`. On an error, exit with the same exit code as `everbeat`."""
    command: Any = typer.main.get_command(application)
    try:
        command.main(prog_name=name)
    except EverbeatError as error:
        show_failure(error, form=Form.of(sys.argv[1:]))
        sys.exit(exit_code_of(error))
