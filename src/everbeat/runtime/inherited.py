"""Correct settings that this process inherited from its parent and that would break it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Final

_NAMES: Final = ("stdin", "stdout", "stderr")


def correct_inherited() -> None:
    """Open closed standard streams, unblock signals, and ensure that the exit codes of children are kept. Call this first."""
    open_standard_streams()
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # If SIGCHLD is ignored, the kernel discards the exit codes of children.
    for number in (signal.SIGCHLD, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def open_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed.

    Otherwise a socket would get descriptor 0, 1 or 2. A child started with other streams would lose the socket, and stderr output of C code
    would be sent to PostgreSQL.
    """
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is `number`
            os.set_inheritable(number, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
