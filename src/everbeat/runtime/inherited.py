"""What a program inherits from the process that started it and could not work with."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Final

_NAMES: Final = ("stdin", "stdout", "stderr")


def correct_inherited() -> None:
    """Give this program open standard streams, no blocked signals, and its children's exit codes. Its first act."""
    open_standard_streams()
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # With SIGCHLD ignored, the kernel discards the exit codes of children.
    for number in (signal.SIGCHLD, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that are closed.

    Otherwise a socket would get the number 0, 1 or 2: a child that starts with other streams loses it, and what C code
    writes to stderr would reach PostgreSQL.
    """
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
