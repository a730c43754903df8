"""The command `everbeat demo` and its final report."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import uuid4

import typer
from msgspec import to_builtins
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everbeat.cli.failures import ExitCode, interruptible
from everbeat.cli.locate import load
from everbeat.cli.output import VisibleConsole, show_json
from everbeat.cli.own_tree import own_schema
from everbeat.cli.selection import SCHEMA_VARIABLE, JsonOption, OwnUrlOption
from everbeat.demo import NATS_VARIABLE
from everbeat.demo.processes import DemoNatsServer
from everbeat.demo.scenario import DemoRun
from everbeat.demo.source_files import FEWEST_FILES, SourceFiles, choose
from everbeat.demo.verification import (
    Evidence,
    FaultKind,
    FaultResult,
    Verification,
    verify,
)
from everbeat.demo.view import open_view
from everbeat.runtime.clock import SystemClock
from everbeat.store.address import EMBEDDED, URL_VARIABLE, DatabaseAddress

_FAULTS: Final = {
    FaultKind.KILL_WORKER: "kill -9 of one worker process",
    FaultKind.FREEZE_TREE: "SIGSTOP of a whole tree, SIGCONT later",
    FaultKind.KILL_TREE: "kill -9 of a whole tree",
}


def document(evidence: Evidence, verified: Verification) -> dict[str, Any]:
    """Return the evidence and its verification as a JSON document. Times are in seconds."""
    return {
        "ok": verified.ok,
        "tasks": len(evidence.files),
        "completed": verified.completed,
        "lost": verified.lost,
        "duplicated": verified.duplicated,
        "totals_match": verified.totals_match,
        "took_s": round(evidence.took_s, 3),
        "path": str(evidence.folder),
        "files": {"found": evidence.found, "chosen": len(evidence.paths)},
        "totals": asdict(verified.totals),
        "independent_totals": None if evidence.independent is None else asdict(evidence.independent),
        "kills": [_rounded(_kill(result)) for result in verified.results],
        "recoveries": [_rounded(to_builtins(recovery)) for recovery in verified.recoveries],
        "nats": None if evidence.messages is None else asdict(evidence.messages),
        "promises": [asdict(promise) for promise in verified.promises],
    }


def _kill(result: FaultResult) -> dict[str, Any]:
    fault = result.fault
    return {
        "what": fault.planned.kind.value,
        "tree": fault.tree,
        "pid": fault.pid,
        "worker_ids": sorted(fault.worker_ids),
        "at_s": fault.at_s,
        "tasks_held": len(fault.held),
        "recovered": len(result.recoveries),
        "noticed_by": result.noticed_by,
        "noticed_after_s": result.noticed_after_s,
        "settled_after_s": result.settled_after_s,
        "promised_within_s": fault.planned.within_s,
        "rerun_after_s": result.rerun_after_s,
        "thawed_after_s": fault.thawed_after_s,
        "late_attempts_refused": fault.refused,
    }


def _rounded(document: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in document.items()}


def show_verification(console: Console, evidence: Evidence, verified: Verification) -> None:
    """Print the results of the demo as tables and sentences."""
    totals = verified.totals
    of_how_many = "" if evidence.found == len(evidence.paths) else f" of {evidence.found:,}"
    odd = [
        f"{number} {what}"
        for number, what in (
            (totals.unreadable, "unreadable"),
            (totals.undecodable, "undecodable"),
            (totals.unparsable, "unparsable"),
        )
        if number
    ]
    summary = Text(
        f"{len(evidence.paths):,}{of_how_many} files of {evidence.folder}{' (' + ', '.join(odd) + ')' if odd else ''}:"
        f" {totals.code_lines:,} lines of code, {totals.comment_lines:,} of comment, {totals.blank_lines:,} blank,"
        f" {totals.functions:,} functions, {totals.classes:,} classes, {totals.imports:,} imports"
        f" in {evidence.took_s:.1f} s."
    )
    title = "every promise held" if verified.ok else "a promise was broken"
    parts = Group(summary, Text(), _fault_table(verified), Text(), _promise_table(verified))
    console.print(Panel(parts, title=title, border_style="green" if verified.ok else "red", padding=(1, 2)))


def _fault_table(verified: Verification) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("FAULT", "HELD", "RECOVERED", "NOTICED BY", "AFTER", "RERUN AFTER"):
        table.add_column(name, justify="left" if name in ("FAULT", "NOTICED BY") else "right")
    for result in verified.results:
        table.add_row(
            _FAULTS[result.fault.planned.kind],
            str(len(result.fault.held)),
            str(len(result.recoveries)),
            result.noticed_by or "not noticed",
            _after(result.settled_after_s),
            _after(result.rerun_after_s),
        )
    return table


def _after(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


def _promise_table(verified: Verification) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for promise in verified.promises:
        mark = Text("held", style="green") if promise.held else Text("BROKEN", style="bold red")
        table.add_row(mark, promise.words, Text(promise.seen, style="dim"))
    return table


commands = typer.Typer(rich_markup_mode=None, add_completion=False)

PROGRAM: Final = "everbeat.demo.tasks"


@commands.command()
def demo(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A folder or git checkout with Python files.  [default: the standard library]",
            show_default=False,
        ),
    ] = None,
    *,
    nats: Annotated[
        bool,
        typer.Option(
            "--nats", help="Notify workers with a NATS server that the demo starts, and kill it too."
        ),
    ] = False,
    headless: Annotated[bool, typer.Option("--headless", help="Show nothing before the result.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the schema.")] = False,
    url: OwnUrlOption = EMBEDDED,
    as_json: JsonOption = False,
) -> None:
    """Watch workers being killed and their work being finished.

    Three trees of workers count lines, functions, classes and imports, with one task for each file. At the same time the
    demo kills one worker process, freezes and thaws one tree, and kills one tree; with --nats it also kills the NATS server.
    At the end it compares the results in the database with an independent count. It takes at most a minute. The exit code is
    0 only if every promise held. It works in its own schema, for which the role needs CREATE on the database.
    """
    files = _chosen(path)
    console = VisibleConsole(stderr=as_json)
    with interruptible():
        evidence = _run(files, url=url, keep=keep, console=console, headless=headless, nats=nats)
    verified = verify(evidence)
    if as_json:
        show_json(document(evidence, verified))
    else:
        show_verification(console, evidence, verified)
    raise typer.Exit(ExitCode.OK if verified.ok else ExitCode.FAILED)


def _chosen(path: Path | None) -> SourceFiles:
    if path is not None and not path.is_dir():
        raise typer.BadParameter(
            f"{str(path)!r} is not a folder. Give a folder with Python files.", param_hint="PATH"
        )
    files = choose(path)
    if len(files.chosen) < FEWEST_FILES:
        raise typer.BadParameter(
            f"{str(files.folder)!r} holds {len(files.chosen)} Python files of up to 1 MiB; the demo needs"
            f" {FEWEST_FILES} or more, so that each fault hits running tasks. Give a larger folder, or none for"
            " the standard library.",
            param_hint="PATH",
        )
    return files


def _run(
    files: SourceFiles, *, url: str, keep: bool, console: Console, headless: bool, nats: bool
) -> Evidence:
    """Run the demo and return its evidence. The demo's files and processes are removed, and so is its schema unless `keep` is set."""
    clock = SystemClock()
    started_at = clock.monotonic()
    schema = f"everbeat_demo_{uuid4().hex[:8]}"
    address = DatabaseAddress.parse(url, schema=schema, environment=os.environ)
    # The program reads its database from the environment, like a user's program, both here and in the workers.
    os.environ.update({URL_VARIABLE: address.portable, SCHEMA_VARIABLE: schema})
    with (
        tempfile.TemporaryDirectory(prefix="everbeat-demo-", ignore_cleanup_errors=True) as folder,
        _nats_server(Path(folder) / "nats", schema=schema, clock=clock, wanted=nats) as nats_server,
    ):
        program: Any = load(PROGRAM)
        with (
            closing(program.app),
            open_view(console, headless=headless) as view,
            own_schema(program.app, keep=keep),
            closing(
                DemoRun(
                    program.app,
                    program.TASKS_IN_TURN,
                    files,
                    view=view,
                    environment=os.environ,
                    folder=Path(folder),
                    clock=clock,
                    started_at=started_at,
                    nats_server=nats_server,
                )
            ) as run,
        ):
            return run.run()


@contextmanager
def _nats_server(
    folder: Path, *, schema: str, clock: SystemClock, wanted: bool
) -> Iterator[DemoNatsServer | None]:
    """Yield a running NATS server whose URL is set in the environment, or None if `wanted` is false. Raises a NatsError."""
    if not wanted:
        os.environ.pop(NATS_VARIABLE, None)
        yield None
        return
    with closing(DemoNatsServer(folder, schema=schema, clock=clock)) as server:
        server.start()
        os.environ[NATS_VARIABLE] = server.url
        yield server
