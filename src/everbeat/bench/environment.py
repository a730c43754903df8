"""The environment of a benchmark: the app that is measured, its session, its schema and its workers."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from msgspec import Struct

from everbeat import App, WorkerConfig
from everbeat.cli.output import say
from everbeat.cli.own_tree import start_own_tree
from everbeat.client.database_access import database_of
from everbeat.domain.settings.settings import refused
from everbeat.errors import WorkerError
from everbeat.runtime.clock import SystemClock
from everbeat.store.statement import compose
from everbeat.store.target import Target, is_pooled

if TYPE_CHECKING:
    from everbeat.bench.program import BenchProgram

T = TypeVar("T")

APPLICATION: Final = "everbeat bench"
PREFIX: Final = "everbeat_bench_"
_NAME: Final = re.compile(rf"{PREFIX}[0-9a-f]{{8}}")
_LOCK: Final = "bench"

_START_S: Final = 60.0
_OPTIONS: Final = {"async_concurrency": "--concurrency", "prefetch": "--prefetch"}
"""Maps each setting that a setup can change to the matching option of `everbeat worker`."""


class BenchConnection(Protocol):
    """A psycopg connection in autocommit mode, as opened by the store."""

    def execute(self, query: bytes, params: Any = None, *, prepare: bool | None = None) -> Any: ...

    def cursor(self) -> Any: ...

    def close(self) -> None: ...


class Bench(Struct, frozen=True, kw_only=True):
    """A program that is being measured, and a session in its schema."""

    program: BenchProgram
    connection: BenchConnection

    @property
    def app(self) -> App:
        """Return the app of the program."""
        return self.program.app

    @property
    def target(self) -> Target:
        """Return the database and the schema of the app."""
        return database_of(self.app).target

    def execute(self, name: str, parameters: dict[str, Any] | None = None) -> Any:
        """Run the statement with this name from `sql/bench`."""
        return self.connection.execute(compose(f"bench/{name}", self.app.schema), parameters)

    def is_true(self, name: str) -> bool:
        """Run the statement and return its single Boolean value."""
        row = self.execute(name).fetchone()
        return bool(row and row[0])

    def settle_server(self, vacuum: str) -> None:
        """Run `vacuum` and, if allowed, CHECKPOINT now, so that the server does neither during a measurement."""
        self.execute(vacuum)
        if self.is_true("check_checkpoint_right"):
            self.execute("write_checkpoint")


def server_name(app: App, settings: dict[str, str]) -> str:
    """Return a description of the measured server."""
    folder = database_of(app).address.folder
    where = database_of(app).target.shown if folder is None else f"embedded in {folder}"
    return f"PostgreSQL {settings['server_version']}, {where}"


def require_durable(settings: dict[str, str], *, not_durable: bool) -> bool:
    """Return whether commits are on disk when the server acknowledges them.

    Raises ConfigurationError if they are not, unless `not_durable` is set.
    """
    off = [name for name in ("fsync", "synchronous_commit") if settings[name] == "off"]
    if off and not not_durable:
        raise refused(
            ", ".join(f"{name} off" for name in off),
            subject="the server's settings",
            code="NOT_DURABLE",
            rule="must be on: the speed of a server that can lose acknowledged commits is meaningless",
            fix=f"switch {' and '.join(off)} on",
            shell_fix=f"switch {' and '.join(off)} on, or use --not-durable",
        )
    return not off


def lock_schema_name(connection: BenchConnection, target: Target) -> bool:
    """Lock the schema's name and return whether this session holds the lock. The lock keeps other benchmarks from dropping the schema.

    The result is always False behind a transaction pooler, where sessions keep no locks.
    """
    if is_pooled(cast(Any, connection)):
        return False
    row = connection.execute(
        compose("bench/lock_schema", target.schema), {"lock_key": target.lock_key(_LOCK)}
    ).fetchone()
    return bool(row and row[0])


def remove_leftovers(connection: BenchConnection, target: Target) -> None:
    """Drop and report the schemas of benchmarks that were killed, except schemas in which a supervisor is alive."""
    for name, is_made in connection.execute(compose("bench/list_bench_schemas", target.schema)).fetchall():
        other = Target(url=target.url, schema=name)
        if name == target.schema or not _NAME.fullmatch(name) or not lock_schema_name(connection, other):
            continue
        if not is_made or not connection.execute(compose("bench/find_live_supervisor", name)).fetchone()[0]:
            connection.execute(compose("schema/drop_schema", name))
            say(f"removed: {name}, left behind by a bench that was killed")
        connection.execute(compose("bench/unlock_schema", name), {"lock_key": other.lock_key(_LOCK)})


class Setup(Struct, frozen=True, kw_only=True):
    """The settings of workers. `changed` contains the settings that differ from `WorkerConfig()`."""

    name: str
    changed: dict[str, int]

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of `everbeat worker` for these settings."""
        return tuple(word for name, value in self.changed.items() for word in (_OPTIONS[name], str(value)))

    def document(self) -> dict[str, Any]:
        """Return the values of all worker settings, including the changed ones."""
        return asdict(WorkerConfig(**self.changed))  # type: ignore[arg-type]


DEFAULTS: Final = Setup(name="defaults", changed={})
BEST: Final = Setup(name="best settings", changed={"async_concurrency": 2_000})
"""With more than 2,000 concurrent async tasks, measured throughput was lower, because more of them leave the processor's cache before they
finish."""
SETUPS: Final = (DEFAULTS, BEST)


@contextmanager
def started(bench: Bench, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a supervisor. It drains and exits when the block ends, and is killed if the benchmark is interrupted."""
    tree = start_own_tree(bench.program.locator, "--log-level", "warning", *options)
    try:
        yield tree
        tree.terminate()
        tree.wait()
    finally:
        tree.kill()  # its processes exit with it
        tree.wait()


@contextmanager
def workers(bench: Bench, *options: str, processes: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """Start a supervisor and wait until all of its workers are claiming tasks. The supervisor exits when the block ends."""
    earlier = {worker.worker_id for worker in bench.app.list_active_workers()}
    with started(bench, "--processes", str(processes), *options) as tree:

        def are_ready() -> bool:
            if tree.poll() is not None:
                raise WorkerError("The benchmark's worker did not start.", fix="see its messages above.")
            return (
                len({worker.worker_id for worker in bench.app.list_active_workers()} - earlier) >= processes
            )

        wait_until(are_ready, within_s=_START_S, what="a worker that is ready", every_s=0.05)
        yield tree


def timed(work: Callable[[], object]) -> float:
    """Do the work and return how many seconds it took."""
    clock = SystemClock()
    started_at = clock.monotonic()
    work()
    return clock.monotonic() - started_at


def wait_until(condition: Callable[[], T | None], *, within_s: float, what: str, every_s: float = 0.005) -> T:
    """Call `look` repeatedly and return its first true result. Raises WorkerError if no result is true within `within_s` seconds."""
    clock = SystemClock()
    deadline = clock.monotonic() + within_s
    while clock.monotonic() < deadline:
        if found := condition():
            return found
        pause(every_s)
    raise WorkerError(
        f"The benchmark timed out after waiting {within_s:g} s for {what}.",
        fix="see the messages of its worker above.",
    )


def pause(seconds: float) -> None:
    """Sleep for `seconds` while the measured work continues in other processes."""
    threading.Event().wait(seconds)
