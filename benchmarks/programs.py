"""Run programs in other environments, each with its own empty database."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import quote, urlencode
from uuid import uuid4

import msgspec
import psycopg
from msgspec import Struct
from psycopg import Connection
from psycopg.sql import SQL, Identifier

from everbeat.errors import EverbeatError

ADAPTERS: Final = Path(__file__).parent / "adapters"
_LAST_LINES: Final = 5
_ADAPTER_S: Final = 960.0  # adapters give up after 900 s
_HIDDEN: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "NODE_PATH", "EVERBEAT_")
"""Prefixes of environment variables that would carry packages or settings of this environment into another one."""


def say(line: str) -> None:
    """Write a message that is not data to stderr."""
    print(line, file=sys.stderr, flush=True)


class ProgramFailed(EverbeatError):
    """Raised if another queue or version could not be installed or measured here."""

    code: ClassVar[str] = "PEER_FAILED"


class Program(Struct, frozen=True, kw_only=True):
    """An adapter in `folder`. `command` runs the adapter there with the environment variables in `variables`."""

    name: str
    version: str
    folder: Path
    command: tuple[str, ...]
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)


class Figures(Struct, frozen=True, kw_only=True):
    """The figures that an adapter prints. A figure is None if the adapter cannot measure it or was not asked to measure it."""

    bulk_per_s: float | None = None
    single_per_s: float | None = None
    drain_per_s: float | None = None
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None


def measured_by(program: Program, url: str, tasks: int, parts: Sequence[str]) -> Figures:
    """Return the adapter's figures, measured in its own database on this server. Raises ProgramFailed."""
    database = f"everbeat_bench_{program.name.replace('-', '_')}_{uuid4().hex[:8]}"
    with own_database(url, database) as own_url:
        # Pass the URL in the environment, because every user of the machine can read the arguments.
        written = run(
            [*program.command, str(tasks), *parts],
            folder=program.folder,
            within_s=_ADAPTER_S,
            variables={**program.variables, "DATABASE_URL": own_url},
        )
    try:
        return msgspec.json.decode(written, type=Figures)
    except msgspec.DecodeError as problem:
        raise ProgramFailed(f"The adapter did not print figures: {problem}.") from problem


def run(
    command: Sequence[str], *, folder: Path, within_s: float, variables: Mapping[str, str] | None = None
) -> str:
    """Return the stdout of a program. After `within_s`, the program is killed with all its children. Raises ProgramFailed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN)}
    shown = " ".join([Path(command[0]).name, *command[1:]])
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=environment | dict(variables or {}), text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as problem:
        raise ProgramFailed(f"{command[0]} cannot be started: {problem.strerror}.") from None
    with process:
        try:
            written, complaints = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise ProgramFailed(f"This command did not finish within {within_s:g} s: {shown}.") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        end = "\n".join((complaints.strip() or written.strip()).splitlines()[-_LAST_LINES:])
        raise ProgramFailed(
            f"This command exited with code {process.returncode}: {shown}. Its output:\n{end}"
        )
    return written


def copied(adapter: str, folder: Path) -> str:
    """Copy an adapter to the folder of its packages, where Node looks for them. The copy's name does not hide any package from Python."""
    path = folder / f"adapter_of_{adapter}"
    path.write_text((ADAPTERS / adapter).read_text(encoding="utf-8"), encoding="utf-8")
    return str(path)


@contextmanager
def own_database(url: str, name: str) -> Iterator[str]:
    """Yield the URL of a new, empty database, which is dropped afterwards. Raises ProgramFailed."""
    with _connected(url) as connection:
        own_url = _url(connection, name)
        try:
            connection.execute(SQL("create database {} template template0").format(Identifier(name)))
        except psycopg.errors.InsufficientPrivilege:
            raise ProgramFailed(
                "It needs a database of its own, which this role cannot create.",
                fix=f'let the role create databases: ALTER ROLE "{connection.info.user}" CREATEDB.',
            ) from None
    try:
        yield own_url
    finally:
        with _connected(url) as connection:
            connection.execute(SQL("drop database if exists {} with (force)").format(Identifier(name)))


@contextmanager
def _connected(url: str) -> Iterator[Connection]:
    try:
        with psycopg.connect(url, autocommit=True, application_name="everbeat benchmarks") as connection:
            yield connection
    except psycopg.Error as problem:
        raise ProgramFailed(f"PostgreSQL refused: {problem}".rstrip()) from problem


def _url(connection: Connection, name: str) -> str:
    """Return a URL that libpq, asyncpg and node-postgres interpret in the same way, even for a Unix socket."""
    info = connection.info
    known = {
        "host": info.host or info.hostaddr,
        "port": str(info.port),
        "user": info.user,
        "password": info.password,
        "sslmode": info.get_parameters().get("sslmode"),
    }
    given = {key: value for key, value in known.items() if value}
    return f"postgresql:///{quote(name)}?{urlencode(given, quote_via=quote)}"
