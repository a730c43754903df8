"""What the command `everbeat` answers to the shell: the one table of exit codes, and the code of every error.

What lives here: numbers. What may not: text for people, which is `failures`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from everbeat.errors import (
    AppNotFound,
    ConfigurationError,
    DatabaseError,
    EverbeatError,
    ImportFailed,
    PayloadError,
    RecoveryNotFound,
    TaskNotFound,
    UnknownName,
    UnknownTask,
    WaitTimeout,
    WorkerRefused,
    WorkflowNotFound,
)


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DATABASE = 3
    NOT_FOUND = 4
    TIMEOUT = 5
    INTERRUPTED = 130


MEANINGS: Final = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "it failed, or what was asked for has problems",
    ExitCode.USAGE: "wrong options, arguments or settings",
    ExitCode.DATABASE: "the database is unreachable or does not fit",
    ExitCode.NOT_FOUND: "no such app, task, workflow, recovery or other name",
    ExitCode.TIMEOUT: "the time to wait was over",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}

_OF_KIND: Final[dict[type[EverbeatError], ExitCode]] = {
    AppNotFound: ExitCode.NOT_FOUND,
    ConfigurationError: ExitCode.USAGE,
    DatabaseError: ExitCode.DATABASE,
    EverbeatError: ExitCode.FAILED,
    ImportFailed: ExitCode.FAILED,
    PayloadError: ExitCode.USAGE,
    RecoveryNotFound: ExitCode.NOT_FOUND,
    TaskNotFound: ExitCode.NOT_FOUND,
    WorkflowNotFound: ExitCode.NOT_FOUND,
    UnknownName: ExitCode.NOT_FOUND,
    UnknownTask: ExitCode.NOT_FOUND,
    WaitTimeout: ExitCode.TIMEOUT,
}


def exit_code_of(error: EverbeatError) -> ExitCode:
    """The exit code of a command that ended with this error; that of a refused worker is its reason's."""
    kind = type(error)
    if isinstance(error, WorkerRefused):
        kind = next((each for each in _kinds(EverbeatError) if each.code == error.reason), kind)
    return next(_OF_KIND[each] for each in kind.__mro__ if each in _OF_KIND)


def _kinds(base: type[EverbeatError]) -> Iterator[type[EverbeatError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
