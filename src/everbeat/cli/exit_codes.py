"""What the command `everbeat` answers to the shell: the one table of exit codes, and the code of every error.

What lives here: numbers. What may not: text for people, which is `failures`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from everbeat.errors import (
    AppNotFound,
    ConfigurationError,
    DatabaseError,
    EverbeatError,
    ImportFailed,
    PayloadError,
    TaskNotFound,
    UnknownTask,
    WaitTimeout,
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
    ExitCode.NOT_FOUND: "no such app, task or worker",
    ExitCode.TIMEOUT: "the time to wait was over",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}


def exit_code_of(error: EverbeatError) -> ExitCode:
    """The exit code of a command that ended with this error."""
    match error:
        case DatabaseError():
            return ExitCode.DATABASE
        case ImportFailed():
            return ExitCode.FAILED
        case AppNotFound() | TaskNotFound() | UnknownTask():
            return ExitCode.NOT_FOUND
        case WaitTimeout():
            return ExitCode.TIMEOUT
        case ConfigurationError() | PayloadError():
            return ExitCode.USAGE
        case _:
            return ExitCode.FAILED
