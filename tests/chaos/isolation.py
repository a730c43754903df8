"""Separate Linux namespaces for a run: all of its processes exit with it, and no other process sees its mounts.

Linux allows this for root, and for other users if user namespaces are enabled. Without namespaces, a run continues, but cannot fill a
disk.
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
# A shell is the first process of the namespace: it reaps orphans like an init process.
_INIT: Final = ("/bin/sh", "-c", '"$@"; exit $?', "sh")


def is_isolated() -> bool:
    """Return whether this process is running in separate namespaces."""
    return os.environ.get(_MARK) == "1"


def isolate(program: Sequence[str]) -> None:
    """Replace this process with a new run of the Python program in separate namespaces. Return only if that is not allowed."""
    unshare = shutil.which("unshare")
    if is_isolated() or unshare is None:
        return
    for rights in ((), ("--map-root-user",)):
        command = [unshare, *rights, *_OWN_NAMESPACES]
        if subprocess.run([*command, "true"], capture_output=True, timeout=20).returncode == 0:
            os.environ[_MARK] = "1"
            sys.stdout.flush()
            os.execv(unshare, [*command, *_INIT, sys.executable, *program])
