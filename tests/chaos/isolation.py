"""A world of its own for a run: whatever it starts ends with it, and what it mounts nobody else sees.

Linux gives this to root, and to others where user namespaces are allowed. Without it a run goes on, but cannot fill a disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

_MARK: Final = "CHAOS_ISOLATED"
_OWN_NAMESPACES: Final = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# A shell is the first process of the new world: it reaps what its parents left behind, as an init does.
_INIT: Final = ("/bin/sh", "-c", '"$@"; exit $?', "sh")


def is_isolated() -> bool:
    """Whether this process lives in a world of its own."""
    return os.environ.get(_MARK) == "1"


def isolate(program: Sequence[str]) -> None:
    """Runs this Python program again in a world of its own, and does not return; returns where that is forbidden."""
    unshare = shutil.which("unshare")
    if is_isolated() or unshare is None:
        return
    for rights in ((), ("--map-root-user",)):
        command = [unshare, *rights, *_OWN_NAMESPACES]
        if subprocess.run([*command, "true"], capture_output=True, timeout=20).returncode == 0:
            os.environ[_MARK] = "1"
            sys.stdout.flush()
            os.execv(unshare, [*command, *_INIT, sys.executable, *program])
