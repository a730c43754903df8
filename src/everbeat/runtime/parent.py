"""The child's side of `process.py`: take over the channel, and never outlive the parent.

Call `adopt_channel` first thing in the child's main thread, before any other thread or import of user code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from typing import Final

from everbeat.runtime.fork import close_in_forked_child
from everbeat.runtime.tree_lock import adopt_tree_locks

CHANNEL_FD_VARIABLE: Final = "EVERBEAT_CHANNEL_FD"
PARENT_PID_VARIABLE: Final = "EVERBEAT_PARENT_PID"

EXIT_ORPHANED: Final = 71
"""Exit code of a child that ended itself because its parent was gone."""

STACK_DUMP_SIGNAL: Final = getattr(signal, "SIGUSR2", signal.SIGTERM)

_PR_SET_PDEATHSIG = 1


def adopt_channel() -> socket.socket:
    """Take over the socket and the locks that `spawn` left in the environment; die with the parent where that is sound.

    The variables are removed and the descriptor is closed on exec again, so that grandchildren get neither.
    Raises RuntimeError in a process that `spawn` did not start.
    """
    text = os.environ.pop(CHANNEL_FD_VARIABLE, None)
    parent_pid = os.environ.pop(PARENT_PID_VARIABLE, None)
    if text is None:
        raise RuntimeError(
            f"{CHANNEL_FD_VARIABLE} is not set: this program is started by everbeat's worker, not by hand. "
            "Fix: run `everbeat worker module:app`."
        )
    try:
        sock = socket.socket(fileno=int(text))
    except (ValueError, OSError) as error:
        raise RuntimeError(
            f"{CHANNEL_FD_VARIABLE} is {text!r}, which is no open socket of this process."
        ) from error
    sock.set_inheritable(False)
    close_in_forked_child(sock)  # user code may fork while it is imported
    adopt_tree_locks()
    if parent_pid is not None:
        die_with_parent(int(parent_pid))
    return sock


def die_with_parent(parent_pid: int) -> bool:
    """Have the kernel SIGKILL this process when `parent_pid` ends; False where only end-of-file can tell.

    Sound only if the *main* thread of the parent made this process: the signal follows the thread. Exits with
    EXIT_ORPHANED if that parent is gone already.
    """
    armed = sys.platform == "linux" and _set_death_signal(signal.SIGKILL)
    # A parent that died before the call above sends no signal. Not compared with 1: a subreaper adopts too.
    if os.getppid() != parent_pid:
        exit_orphaned()
    return armed


def exit_orphaned() -> None:
    """End this process at once; meant as the `on_eof` of a child's channel.

    Nothing is cleaned up: somebody else may hold its work by now.
    """
    os._exit(EXIT_ORPHANED)


def offer_stack_dumps() -> None:
    """Write the stacks of all threads to stderr on STACK_DUMP_SIGNAL, even while C code holds the GIL."""
    if hasattr(faulthandler, "register"):
        faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True, chain=False)


def _set_death_signal(number: int) -> bool:
    unused = 0
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), unused, unused, unused) == 0)
