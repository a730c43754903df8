"""Disable everbeat in children that user code forks: their descriptors are replaced, and everbeat's code does not continue in them.

A forked child shares every socket and file lock of its parent, so a dead parent would appear alive. This module covers `os.fork` and
everything built on it, but not a C library that calls `fork` itself.
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
"""The exit code of a forked child that would otherwise have continued its parent's work."""


class Descriptor(Protocol):
    """An object that owns a file descriptor."""

    def fileno(self) -> int:
        """Return the descriptor. If the descriptor has been closed, raise an error or return a negative number."""


_owners: weakref.WeakSet[Descriptor] = weakref.WeakSet()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_generation = 0


def close_in_forked_child(owner: Descriptor) -> None:
    """Replace the descriptor of `owner` with /dev/null in every child that this process forks, as long as `owner` exists.

    All of everbeat's long-lived descriptors are registered here. The descriptor's number stays in use, so an owner that closes it in the
    child cannot close another file. The owner also cannot send on a socket that the parent still needs.
    """
    _owners.add(owner)


def call_in_forked_child(method: Callable[[], None]) -> None:
    """Call a bound method in every child that this process forks, as long as the method's object exists.

    A lock that another thread held during the fork would stay locked in the child forever. Threads and connections stay with the parent.
    Objects that own locks, threads or connections must replace them in the child.
    """
    if hasattr(os, "register_at_fork"):
        held = weakref.WeakMethod(method)
        os.register_at_fork(after_in_child=lambda: _call(held))


def generation() -> int:
    """Return the number of forks between the process that imported everbeat and this process."""
    return _generation


class UserCode:
    """A context manager around user code. A child that this code forks exits at the end of the block and never runs the code after it."""

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
    """Run `loop` inside the block. A child forked by code on the loop exits when that code returns control to the loop."""
    thread = threading.get_ident()
    _loops[thread] = loop
    try:
        yield
    finally:
        _loops.pop(thread, None)


def _end(problem: BaseException | None) -> None:
    """Exit this forked child as the interpreter would, but without running the parent's exit handlers."""
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
        "Fix: fork with multiprocessing.Process, or exit the child with os._exit before its first await.\n",
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
    global _generation  # noqa: PLW0603 - one counter per process
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
        nothing = None  # no descriptor is available, so the originals are only closed
    for owner in list(_owners):
        with suppress(Exception):  # already closed: each type of owner raises a different error
            if (number := owner.fileno()) >= 0:
                os.close(number) if nothing is None else os.dup2(nothing, number, inheritable=False)
    _owners.clear()
    if nothing is not None:
        os.close(nothing)


def _stop_stray(loop: Any) -> None:
    # Callbacks that are ready would run in both processes. Loops other than asyncio's hide them, and therefore stop one iteration later.
    with suppress(AttributeError):
        loop._ready.clear()
    loop.call_soon(_end_stray)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
