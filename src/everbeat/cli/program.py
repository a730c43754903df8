"""The programs of a tree: `python -m everbeat.cli.program worker_process ARGUMENT...`, and the same with `task_process`."""

from __future__ import annotations

import sys
from importlib import import_module

from everbeat.runtime.loading import no_collection

if __name__ == "__main__":
    name = sys.argv.pop(1)
    if name not in ("worker_process", "task_process"):
        raise SystemExit(f"{name!r} is not a program of a tree")
    with no_collection():
        program = import_module(f"everbeat.cli.{name}")
    program.main()
