"""The early end of a command that has started something: Ctrl-C, SIGTERM and a terminal that closes end it in one way.

What lives here: from a signal to an exit code. What may not: what is cleared away, which each command knows.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import typer

from everbeat.cli.exit_codes import ExitCode
from everbeat.cli.output import say

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first of these signals is a KeyboardInterrupt, and whatever ends the command clears away what it started.

    Further ones do not keep it from doing so. Raises typer.Exit with the code of an interruption. Needs the main thread.
    """
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        nonlocal asked
        if not asked:
            asked = True
            raise KeyboardInterrupt

    # Who ignores a signal has been told to: nohup, a shell that puts its command into the background.
    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    except KeyboardInterrupt:
        say("Interrupted; workers ended, everything cleared away.")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if asked else handler)  # its end has begun
