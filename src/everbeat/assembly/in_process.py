"""Builds workers that run inside the calling program."""

from __future__ import annotations

from functools import partial

from everbeat.assembly.app_definition import AppDefinition
from everbeat.assembly.workers import prepare
from everbeat.in_process import InProcessWorker


def in_process_worker(definition: AppDefinition) -> InProcessWorker:
    """Return a worker that will run inside the calling program. The worker's `run` method opens the database."""
    return InProcessWorker(partial(prepare, definition))
