"""The commands of `everbeat db` for the embedded PostgreSQL server.

The server stops when its last user closes it. `db start` leaves a background process running that uses the server until `db stop`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from everbeat.cli.failures import ExitCode
from everbeat.cli.output import say, show_json, show_pairs
from everbeat.cli.selection import JsonOption, SchemaOption, chosen_schema
from everbeat.embedded.server import DEFAULT_FOLDER, EmbeddedServer, FileLock
from everbeat.store.address import FOLDER_VARIABLE

commands = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

FolderOption: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--folder",
        envvar=FOLDER_VARIABLE,
        metavar="FOLDER",
        help="The folder of the database.",
        file_okay=False,
    ),
]

_CHECK_INTERVAL_S: Final = 1.0
_MOST_ABSENT: Final = 3
_KEEPING: Final = "keeping"


@commands.command()
def start(
    *,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run until Ctrl-C, then stop the server.")
    ] = False,
    folder: FolderOption = DEFAULT_FOLDER,
    as_json: JsonOption = False,
) -> None:
    """Start the server, keep it running until `db stop`, and print its URL."""
    with EmbeddedServer.open(folder) as server:
        if not foreground:
            _leave_a_keeper(server.folder)
        if as_json:
            _show_status(folder, as_json=True)
        else:
            print(server.url, flush=True)
        if foreground:
            say("Running until Ctrl-C.")
            _until_stopped(folder)


@commands.command()
def stop(*, folder: FolderOption = DEFAULT_FOLDER) -> None:
    """Stop the server, even if programs are still using it."""
    stopped = EmbeddedServer.shut_down(folder)
    say(f"Stopped the PostgreSQL in {folder}." if stopped else f"No PostgreSQL runs in {folder}.")


@commands.command()
def status(*, folder: FolderOption = DEFAULT_FOLDER, as_json: JsonOption = False) -> None:
    """Show whether the server is running; exit code 1 if it is not."""
    running = _show_status(folder, as_json=as_json)
    raise typer.Exit(ExitCode.OK if running else ExitCode.FAILED)


@commands.command()
def url(*, folder: FolderOption = DEFAULT_FOLDER) -> None:
    """Print the URL of the running server, for other programs; exit code 1 if the server is not running."""
    found = EmbeddedServer.status(folder)
    if found.url is None:
        say(f"error: No PostgreSQL runs in {found.folder}.")
        say("fix: start it: everbeat db start")
        raise typer.Exit(ExitCode.FAILED)
    print(found.url)


@commands.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def psql(
    context: typer.Context, *, schema: SchemaOption = None, folder: FolderOption = DEFAULT_FOLDER
) -> None:
    """Open psql on the server and start the server if needed. Arguments after -- go to psql: db psql -- -c 'select 1'."""
    name = chosen_schema(schema)
    path = f"-c search_path={name},public"
    with EmbeddedServer.open(folder) as server:
        finished = subprocess.run(
            [str(EmbeddedServer.psql_binary()), *context.args],
            env=os.environ
            | server.psql_environment()
            | {"PGOPTIONS": f"{os.environ.get('PGOPTIONS', '')} {path}".strip()},
            check=False,
        )
    raise typer.Exit(finished.returncode)


@commands.command(hidden=True)
def keep(*, folder: FolderOption = DEFAULT_FOLDER) -> None:
    """Use the server until it stops; `db start` runs this in the background."""
    with EmbeddedServer.open(folder) as server:
        alone = FileLock(server.folder / "keeper.lock")
        first = alone.try_exclusive()
        print(_KEEPING, flush=True)
        if not first:
            return  # another process keeps the server running
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (sys.stdin, sys.stdout, sys.stderr):
            os.dup2(null, standard.fileno())
        _until_stopped(folder)
        alone.release()


def _leave_a_keeper(folder: Path) -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-m", "everbeat", "db", "keep", "--folder", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdout is not None
    with keeper.stdout as output:
        if output.readline().strip() != _KEEPING:
            raise typer.Exit(ExitCode.DATABASE)  # the background process has written the reason to stderr


def _until_stopped(folder: Path) -> None:
    """Return when a signal arrives or the server has stopped permanently. A restart takes less time than the checks."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopping.set())
    absent = 0
    while absent < _MOST_ABSENT and not stopping.wait(_CHECK_INTERVAL_S):
        absent = 0 if EmbeddedServer.status(folder).running else absent + 1


def _show_status(folder: Path, *, as_json: bool) -> bool:
    found = EmbeddedServer.status(folder)
    if as_json:
        show_json({name: getattr(found, name) for name in ("folder", "initialised", "running", "pid", "url")})
    else:
        state = "running" if found.running else "stopped" if found.initialised else "not created yet"
        show_pairs(
            [
                ("folder", str(found.folder)),
                ("state", state),
                ("pid", None if found.pid is None else str(found.pid)),
                ("url", found.url),
            ]
        )
    return found.running
