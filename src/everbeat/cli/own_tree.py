"""A tree of workers that a command starts for itself: `everbeat worker` as anybody starts it, but it ends with the command.

What lives here: starting such a tree, and the program that it is. What may not: what the tree is for, and ending it in time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any

from everbeat.cli.main import main
from everbeat.runtime.parent import die_with_parent


def start_own_tree(
    locator: str,
    *options: str,
    environment: Mapping[str, str] | None = None,
    output: IO[Any] | None = None,
) -> subprocess.Popen[bytes]:
    """A supervisor in a session of its own: Ctrl-C is meant for the command, which then ends its trees itself.

    Where the kernel can (Linux) it is killed with a command that had no time for that. Needs the main thread. `output`
    takes stdout and stderr, which are the command's otherwise.
    """
    own = [sys.executable, "-m", "everbeat.cli.own_tree", str(os.getpid())]
    return subprocess.Popen(
        [*own, locator, *options],
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
    )


def _run() -> None:
    die_with_parent(int(sys.argv[1]))
    main(["worker", *sys.argv[2:]])


if __name__ == "__main__":
    _run()
