"""The commands that start worker processes and task processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec


def worker_process_argv(locator: str, overrides: Mapping[str, object]) -> tuple[str, ...]:
    """Return the command that starts a worker process of the app at `locator`. `overrides` replace some of the app's worker settings."""
    return program("worker_process", locator, msgspec.json.encode(overrides).decode())


def program(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs the program `name` of `everbeat.cli` with the current Python interpreter."""
    return (sys.executable, "-m", "everbeat.cli.program", name, *arguments)
