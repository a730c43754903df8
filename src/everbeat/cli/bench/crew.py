"""The workers that are measured: `everbeat worker`, as anybody starts it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from everbeat import App, SyncTask
from everbeat.cli.bench.watch import until
from everbeat.cli.own_tree import start_own_tree
from everbeat.errors import WorkerError

PROGRAM: Final = "everbeat.cli.bench.program"
_START_S: Final = 60.0


class Program(Protocol):
    """The module of that name, which reads from the environment where it works: it is loaded when that is known."""

    app: App
    nothing: SyncTask[..., int]
    begun: SyncTask[[], float]
    nap: SyncTask[[float], None]


@contextmanager
def started(*options: str, module: str = PROGRAM) -> Iterator[subprocess.Popen[bytes]]:
    """A tree that drains afterwards; where the bench itself is cut short the tree is, too. Its database is in the environment."""
    tree = start_own_tree(f"{module}:app", "--log-level", "warning", *options)
    try:
        yield tree
        tree.terminate()
        tree.wait()
    finally:
        tree.kill()  # its processes end with it
        tree.wait()


@contextmanager
def workers(
    app: App, *options: str, processes: int = 1, module: str = PROGRAM
) -> Iterator[subprocess.Popen[bytes]]:
    """A tree of the program in this module; inside, all of its workers claim."""
    with started("--processes", str(processes), *options, module=module) as tree:
        until(
            lambda: _are_ready(app, tree, processes),
            within_s=_START_S,
            what="a worker that is ready",
            every_s=0.05,
        )
        yield tree


def _are_ready(app: App, tree: subprocess.Popen[bytes], processes: int) -> bool:
    if tree.poll() is not None:
        raise WorkerError("The benchmark's worker does not start.", fix="see above what it wrote.")
    return len(app.list_active_workers()) >= processes
