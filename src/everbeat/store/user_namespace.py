"""A program, run by its path: `python -I -S user_namespace.py UID GID PROGRAM [ARGUMENT ...]` runs PROGRAM as
UID.

It enters a fresh user namespace in which the caller is called UID:GID and becomes PROGRAM; outside, the
caller's files stay the caller's. A program of its own because doing this between fork and exec of a threaded
Python may deadlock. Nothing of everbeat may be imported here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

FORBIDDEN = 99  # exit status: this machine forbids user namespaces
_CLONE_NEWUSER = 0x10000000


def enter(*, uid: int, gid: int) -> None:
    """Enter a new user namespace as `uid`:`gid`; raises OSError where that is forbidden."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWUSER)")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {outer_uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {outer_gid} 1")


def main() -> None:
    """Become the program of the command line."""
    uid, gid, *command = sys.argv[1:]
    try:
        enter(uid=int(uid), gid=int(gid))
    except OSError as error:
        sys.stderr.write(f"user namespaces are forbidden here: {error}\n")
        sys.exit(FORBIDDEN)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
