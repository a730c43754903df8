"""Start the child processes of the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from everbeat.runtime.processes import ChildProcess, OutOfMemoryCounter, spawn

ROOT = Path(__file__).parents[3]


def start_child(
    *arguments: str, own_group: bool = False, out_of_memory: OutOfMemoryCounter | None = None
) -> ChildProcess:
    """Spawn `child.py` with these arguments."""
    return spawn(
        [sys.executable, "-m", "tests.runtime.programs.child", *arguments],
        env=environment(),
        own_group=own_group,
        out_of_memory=out_of_memory,
    )


def environment() -> dict[str, str]:
    """Return the environment of the test with the tests and the sources on the path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
