"""The workers that are measured: `everbeat worker`, as anybody starts it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from everbeat import App, SyncTask
from everbeat.cli.bench.watch import until
from everbeat.errors import WorkerError

PROGRAM: Final = "everbeat.cli.bench.program"
_START_S: Final = 60.0


class Program(Protocol):
    """The module of that name, which reads from the environment where it works: it is loaded when that is known."""

    app: App
    nothing: SyncTask[..., int]
    begun: SyncTask[[], float]
    nap: SyncTask[[float], None]


def start_tree(*options: str) -> subprocess.Popen[bytes]:
    """A supervisor in a session of its own; its database is in the environment."""
    command = [sys.executable, "-m", "everbeat", "worker", f"{PROGRAM}:app", "--log-level", "warning"]
    return subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL, start_new_session=True)


@contextmanager
def workers(app: App, *, processes: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A tree; inside, all of its workers claim."""
    tree = start_tree("--processes", str(processes))
    try:
        until(
            lambda: _are_ready(app, tree, processes),
            within_s=_START_S,
            what="a worker that is ready",
            every_s=0.05,
        )
        yield tree
    finally:
        tree.terminate()
        tree.wait()


def _are_ready(app: App, tree: subprocess.Popen[bytes], processes: int) -> bool:
    if tree.poll() is not None:
        raise WorkerError("The benchmark's worker does not start.", fix="see above what it wrote.")
    return len(app.list_active_workers()) >= processes
