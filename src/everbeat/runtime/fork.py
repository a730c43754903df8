"""What happens in a child that user code forks: everbeat's descriptors are replaced there, and none of its code goes on.

A forked child shares every socket and file lock of its parent, so the parent would look alive after its death.
`os.fork` and all that is built on it is covered. A C library that calls `fork` by itself is not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Protocol

EXIT_STRAY: Final = 70
"""Exit code of a forked child that would have gone on with the work of its parent."""


class Descriptor(Protocol):
    """An owner of a file descriptor."""

    def fileno(self) -> int:
        """The descriptor; raises or answers a negative number once it is closed."""


_owners: weakref.WeakSet[Descriptor] = weakref.WeakSet()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_generation = 0


def close_in_forked_child(owner: Descriptor) -> None:
    """Replace the descriptor of `owner` by /dev/null in every child that this process forks, as long as `owner` lives.

    Every long-lived descriptor of everbeat is registered here. Its number stays in use: an owner that closes it in the
    child closes nothing else, and sends no farewell on a socket that the parent still needs.
    """
    _owners.add(owner)


def call_in_forked_child(method: Callable[[], None]) -> None:
    """Calls a bound method in every child that this process forks, as long as its object lives.

    A lock that another thread held at the fork stays held in the child for ever; threads and connections stay
    the parent's. Objects that have such make new ones there.
    """
    if hasattr(os, "register_at_fork"):
        held = weakref.WeakMethod(method)
        os.register_at_fork(after_in_child=lambda: _call(held))


def generation() -> int:
    """Return the number of forks between the process that imported everbeat and this one."""
    return _generation


class UserCode:
    """A block that runs user code. A child that the code forks ends at the end of the block and never runs what follows."""

    __slots__ = ("_generation",)

    def __enter__(self) -> None:
        self._generation = _generation

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _generation != self._generation:
            _end(problem)


@contextmanager
def loop_of_this_thread(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Run `loop` inside the block. A child forked by code on the loop ends when that code returns control to the loop."""
    thread = threading.get_ident()
    _loops[thread] = loop
    try:
        yield
    finally:
        _loops.pop(thread, None)


def _end(problem: BaseException | None) -> None:
    """End this forked child as the interpreter ends a program, but without the parent's exit handlers."""
    match problem:
        case None | SystemExit(code=None):
            _leave(0)
        case SystemExit(code=int(code)):
            _leave(code)
        case SystemExit(code=text):
            _leave(1, f"{text}\n")
        case _:
            _leave(1, "".join(traceback.format_exception(problem)))


def _end_stray() -> None:
    _leave(
        EXIT_STRAY,
        f"everbeat: a task forked process {os.getpid()}, which then awaited something on the worker's event loop and was ended. "
        "Fix: fork by multiprocessing.Process, or end the child by os._exit before its first await.\n",
    )


def _leave(code: int, text: str = "") -> None:
    with suppress(Exception):
        sys.stderr.write(text)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def _call(held: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = held()
    if method is not None:
        method()


def _after_fork_in_child() -> None:
    global _generation  # noqa: PLW0603 - one number for the process
    _generation += 1
    _replace_descriptors()
    loop = _loops.get(threading.get_ident())
    _loops.clear()
    if loop is not None:
        _stop_stray(loop)


def _replace_descriptors() -> None:
    try:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        nothing = None  # every number is in use: closing must do
    for owner in list(_owners):
        with suppress(Exception):  # closed already: each kind of owner raises its own
            if (number := owner.fileno()) >= 0:
                os.close(number) if nothing is None else os.dup2(nothing, number, inheritable=False)
    _owners.clear()
    if nothing is not None:
        os.close(nothing)


def _stop_stray(loop: Any) -> None:
    # What is ready would run in both processes. A loop that is not asyncio's own does not show it, and ends one round later.
    with suppress(AttributeError):
        loop._ready.clear()
    loop.call_soon(_end_stray)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
