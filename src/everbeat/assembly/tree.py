"""Starts a tree: the first worker process, and its supervisor.

The process starts before this program loads the code of the supervisor, so that both load their code at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from everbeat import assembly
from everbeat.assembly.programs import worker_process_argv
from everbeat.config import WorkerConfig
from everbeat.runtime.identity import take_tree_lock
from everbeat.runtime.loading import no_collection
from everbeat.runtime.processes import ChildProcess, spawn

_SERVICE_MANAGER_VARIABLE: Final = "NOTIFY_SOCKET"


def supervise(
    locator: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    probe: str | None = None,
    probe_file: str | None = None,
    version: str = "",
) -> None:
    """Start and supervise workers of the app at `locator` until SIGTERM or SIGINT arrives. Call this function in the main thread.

    `overrides` replace settings of the app's WorkerConfig. `probe` is the address at which the supervisor answers probes, and
    `probe_file` is a file that it touches while it is alive. `version` is that of everbeat. Raises ConfigurationError if any of these is
    invalid, and WorkerError or DatabaseError if the workers cannot run.
    """
    changed = dict(overrides or {})
    WorkerConfig(**changed)  # reject invalid settings before any process is started
    probes = None
    if probe is not None or probe_file is not None or _SERVICE_MANAGER_VARIABLE in os.environ:
        # Most supervisors answer no probes, so they do not load this code.
        module = import_module("everbeat.supervisor.probes")
        probes = module.Probes.open(address=probe, file=probe_file, environment=os.environ)
    argv = worker_process_argv(locator, changed)
    lock = take_tree_lock()  # acquired before any process starts, because each process inherits it
    first = _first_process(argv)
    with no_collection():
        run_supervisor = assembly.run_supervisor
    run_supervisor(argv, lock=lock, first=first, probes=probes, version=version)


def _first_process(argv: tuple[str, ...]) -> ChildProcess | None:
    """Start the first worker process. Return None if the system refuses it: the supervisor tries again, and reports the reason."""
    try:
        return spawn(argv)
    except OSError:
        return None
