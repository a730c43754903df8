"""The entry point of the `everbeat` command.

`worker` loads no command-line parser, because its process lives for as long as its workers. All other commands load one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from everbeat.runtime.loading import no_collection


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with an `ExitCode`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with no_collection():
        command = import_module(f"everbeat.cli.{'worker_tree' if given[:1] == ['worker'] else 'main'}")
    command.main(given)
