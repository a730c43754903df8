"""Observe a running command from outside: list its processes, and wait for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return all processes of everbeat that run in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and "everbeat" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(truth: Callable[[], object], *, within_s: float) -> None:
    since = time.monotonic()
    while not truth():
        assert time.monotonic() - since < within_s
        time.sleep(0.05)  # the other process sends no event
