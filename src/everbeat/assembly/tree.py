"""Starts a tree: the first worker process, and its supervisor.

The process starts before this program loads the code of the supervisor, so that both load their code at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everbeat import assembly
from everbeat.assembly.programs import worker_process_argv
from everbeat.config import WorkerConfig
from everbeat.runtime.identity import take_tree_lock
from everbeat.runtime.loading import no_collection
from everbeat.runtime.processes import ChildProcess, spawn


def supervise(locator: str, *, overrides: Mapping[str, Any] | None = None) -> None:
    """Start and supervise workers of the app at `locator` until SIGTERM or SIGINT arrives. Call this function in the main thread.

    `overrides` replace settings of the app's WorkerConfig. Raises ConfigurationError if they are invalid, and WorkerError or
    DatabaseError if the workers cannot run.
    """
    changed = dict(overrides or {})
    WorkerConfig(**changed)  # reject invalid settings before any process is started
    argv = worker_process_argv(locator, changed)
    lock = take_tree_lock()  # acquired before any process starts, because each process inherits it
    first = _first_process(argv)
    with no_collection():
        run_supervisor = assembly.run_supervisor
    run_supervisor(argv, lock=lock, first=first)


def _first_process(argv: tuple[str, ...]) -> ChildProcess | None:
    """Start the first worker process. Return None if the system refuses it: the supervisor tries again, and reports the reason."""
    try:
        return spawn(argv)
    except OSError:
        return None
