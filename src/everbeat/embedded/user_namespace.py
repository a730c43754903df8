"""A standalone program: `python -I -S user_namespace.py UID GID PROGRAM [ARGUMENT ...]` runs PROGRAM as UID.

The program enters a new user namespace, in which the caller appears as UID:GID, and executes PROGRAM. Outside the namespace, the caller
still owns the files. This is a separate program because the same calls can deadlock between fork and exec in a threaded Python process. The
program must not import everbeat.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

FORBIDDEN = 99  # exit code: this machine forbids user namespaces
_CLONE_NEWUSER = 0x10000000


def enter(*, uid: int, gid: int) -> None:
    """Enter a new user namespace as `uid`:`gid`. Raises OSError if the machine forbids user namespaces."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWUSER)")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {outer_uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {outer_gid} 1")


def main() -> None:
    """Execute the program given on the command line."""
    uid, gid, *command = sys.argv[1:]
    try:
        enter(uid=int(uid), gid=int(gid))
    except OSError as error:
        sys.stderr.write(f"user namespaces are forbidden here: {error}\n")
        sys.exit(FORBIDDEN)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
