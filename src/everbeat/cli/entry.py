"""The entry point of the `everbeat` command.

`worker` loads no command-line parser, because its process lives for as long as its workers. All other commands load one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with an `ExitCode`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    runs_workers = given[:1] == ["worker"]
    import_module("everbeat.cli.worker_tree" if runs_workers else "everbeat.cli.main").main(given)
