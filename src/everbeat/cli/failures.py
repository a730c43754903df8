"""Exit codes and error output of commands: "error: ..." and "fix: ..." on stderr, or one JSON document with --json."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, IntEnum, auto
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final

import typer
from msgspec.structs import replace

from everbeat.cli.logs import is_json, message_line
from everbeat.cli.streams import hanging, terminal_width
from everbeat.domain.documents import failure_document
from everbeat.errors import (
    AmbiguousId,
    AppNotFound,
    BatchNotFound,
    BulkActionNotFound,
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
from everbeat.errors.wording import nearest, visible_json

DEBUG_VARIABLE: Final = "EVERBEAT_DEBUG"
_MACHINERY: Final = str(Path(typer.__file__).parent)


def wants_traceback() -> bool:
    """Return whether EVERBEAT_DEBUG is set, so that errors show their full traceback."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


class Form(Enum):
    """The output format of a command's errors."""

    TEXT = auto()
    DOCUMENT = auto()
    """One JSON document, selected by --json."""
    LINES = auto()
    """One JSON object on one line, like a log record, selected by `worker --log-format json`."""

    @classmethod
    def of(cls, given: Sequence[str]) -> Form:
        """Return the error format that a command line selects, even if the parser rejects the command line."""
        if given[:1] == ["worker"]:
            formats = [after for option, after in pairwise(given) if option == "--log-format"]
            formats += [each.partition("=")[2] for each in given if each.startswith("--log-format=")]
            if formats[0].lower() == "json" if formats else is_json():
                return cls.LINES
        return cls.DOCUMENT if "--json" in given else cls.TEXT


def show_failure(error: EverbeatError, *, form: Form) -> None:
    """Write an error to stderr."""
    if isinstance(error, ConfigurationError):
        error = _for_the_shell(error)
    if form is Form.LINES:
        document = failure_document(error)
        message = document.pop("message")
        print(message_line(message, event="command_failed", level="ERROR", **document), file=sys.stderr)
        return
    if form is Form.DOCUMENT:
        print(visible_json(json.dumps({"error": failure_document(error)}, indent=2)), file=sys.stderr)
        return
    show_labelled("error", error.message)
    if error.fix is not None:
        show_labelled("fix", error.fix)


def show_labelled(label: str, text: str) -> None:
    """Write `error: ...` or `fix: ...` to stderr. On a terminal, the text has a hanging indent."""
    lines = hanging(f"{label}: ", text, width=terminal_width(sys.stderr))
    print("\n".join(lines), file=sys.stderr)


def _for_the_shell(error: ConfigurationError) -> ConfigurationError:
    """Return the error with its rules and fixes worded for a shell, and without locations inside the command-line parser."""
    return ConfigurationError(
        [
            replace(
                problem,
                where=None,
                rule=problem.shell_rule or problem.rule,
                fix=problem.shell_fix or problem.fix,
            )
            if problem.where is None or problem.where.startswith(_MACHINERY)
            else problem
            for problem in error.problems
        ]
    )


_LOCATOR: Final = re.compile(r"[\w./-]+:\w+|[\w./-]+\.py")
_CHOICE: Final = re.compile(r"'([^']*)' is not one of ('.*')")
_VALIDATOR_PREFIX: Final = "Value error, "
_VALIDATOR_RULE: Final = "Input should be "
_OTHER_NAMES: Final = {
    ("workers", "resume"): "to resume quiet workers: everbeat workers quiet --resume ID, or --resume --all.",
    ("workers", "pause"): "to stop claiming: everbeat workers quiet ID, or --host HOST, or --all.",
    ("workers", "stop"): (
        "to stop claiming: everbeat workers quiet ID. To stop workers, send SIGTERM to their supervisor."
    ),
}
"""Hints for command names that users might try, where the most similar existing command does something else."""


class WrongUsage(EverbeatError):
    """Raised if the command line is invalid."""

    code = "WRONG_USAGE"


def reword_validation(problem: Any) -> None:
    """Remove the validator's words from the parser's error message, and name the value: "'0' must be greater than or equal to 1"."""
    if not isinstance(message := getattr(problem, "message", None), str):
        return
    problem.message = message.removeprefix(_VALIDATOR_PREFIX)
    found = getattr(problem.__cause__, "errors", None)
    if message.startswith(_VALIDATOR_RULE) and callable(found):
        rule = message.removeprefix(_VALIDATOR_RULE).partition(", unable")[0]
        problem.message = f"{found()[0]['input']!r} must be {rule}"


def wrong_usage(problem: Any, given: Sequence[str]) -> WrongUsage:
    """Return the parser's error as an EverbeatError."""
    path = getattr(getattr(problem, "ctx", None), "command_path", "everbeat")
    message = " ".join(str(problem.format_message()).split())
    return WrongUsage(message, fix=corrected(problem, given) or f"see the usage: {path} --help.")


def corrected(problem: Exception, given: Sequence[str]) -> str | None:
    """Return a hint that corrects a rejected command line, or None if there is nothing to suggest."""
    command = getattr(getattr(problem, "ctx", None), "command", None)
    parameters = [] if command is None else command.params
    option = getattr(problem, "option_name", None)
    if option is not None:
        return _of_option(option, given, takes_locator=any(each.name == "locator" for each in parameters))
    for (group, name), fix in _OTHER_NAMES.items():
        if list(given[:2]) == [group, name]:
            return fix
    message = str(getattr(problem, "message", ""))
    if (refused := _CHOICE.search(message)) is not None:
        return _of_choice(refused[1], re.findall(r"'([^']*)'", refused[2]))
    takes_app = hasattr(command, "commands") or any("--app" in each.opts for each in parameters)
    has_app = any(each == "--app" or each.startswith("--app=") for each in given)
    reads_locator = any(
        "LOCATOR" in str(each.metavar) and not each.opts[0].startswith("-") for each in parameters
    )
    if not takes_app or has_app or reads_locator:
        return None
    located = next((each for each in given if _LOCATOR.fullmatch(each) and each in message), None)
    if located is not None:
        words = [word for each in given for word in (("--app", each) if each == located else (each,))]
        return f"the app is an option here: everbeat {shlex.join(words)}"
    return None


def _of_choice(given: str, choices: Sequence[str]) -> str:
    guess = nearest(given.lower(), choices)
    return f"give one of these: {', '.join(choices)}." if guess is None else f"did you mean {guess!r}?"


def _of_option(option: str, given: Sequence[str], *, takes_locator: bool) -> str | None:
    if not takes_locator:
        return None
    if option == "--app":
        words = [each.removeprefix("--app=") for each in given if each != "--app"]
        return f"the app is an argument here: everbeat {shlex.join(words)}"
    if option == "--url":
        return "the app has its own database: write App('postgresql://...'), or set EVERBEAT_DATABASE_URL for an App() without a URL."
    if option == "--schema":
        return "the app has its own schema: write App(schema='...')."
    return None


_PART: Final = re.compile(r"\[| \(")
"""Where the name of an entry or of a part begins: `limits[0]`, `rate (starts)`."""


@contextmanager
def named_as_options(options: Mapping[str, str]) -> Iterator[None]:
    """Rename the subjects of a ConfigurationError after their options. An entry of a list, or a part of a value, gets the option of the whole."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(
            [
                replace(problem, subject=options.get(_PART.split(problem.subject)[0], problem.subject))
                for problem in error.problems
            ]
        ) from None


class ExitCode(IntEnum):
    """The exit codes that commands use."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DATABASE = 3
    NOT_FOUND = 4
    TIMEOUT = 5
    INTERRUPTED = 130


MEANINGS: Final = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "the command failed, or a check found problems",
    ExitCode.USAGE: "wrong options, arguments or settings",
    ExitCode.DATABASE: "the database is unreachable or incompatible",
    ExitCode.NOT_FOUND: "no such app, task, workflow, recovery or other name",
    ExitCode.TIMEOUT: "the wait timed out",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}

_NOT_FOUND: Final = (
    AppNotFound,
    BatchNotFound,
    BulkActionNotFound,
    RecoveryNotFound,
    TaskNotFound,
    WorkflowNotFound,
    UnknownName,
    UnknownTask,
)
_OF_KIND: Final[dict[type[EverbeatError], ExitCode]] = {
    EverbeatError: ExitCode.FAILED,
    ImportFailed: ExitCode.FAILED,
    **dict.fromkeys((AmbiguousId, ConfigurationError, PayloadError), ExitCode.USAGE),
    DatabaseError: ExitCode.DATABASE,
    **dict.fromkeys(_NOT_FOUND, ExitCode.NOT_FOUND),
    WaitTimeout: ExitCode.TIMEOUT,
}


def exit_code_of(error: EverbeatError) -> ExitCode:
    """Return the exit code for an error. The exit code for a WorkerRefused depends on its reason."""
    kind = type(error)
    if isinstance(error, WorkerRefused):
        kind = next((each for each in _kinds(EverbeatError) if each.code == error.reason), kind)
    return next(_OF_KIND[each] for each in kind.__mro__ if each in _OF_KIND)


def _kinds(base: type[EverbeatError]) -> Iterator[type[EverbeatError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


_ENDING: Final = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first SIGINT, SIGTERM or SIGHUP, so that the command can clean up.

    Later signals do not interrupt the cleanup. Raises typer.Exit with the exit code for an interruption. Must be called in
    the main thread.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    # A signal that is already ignored stays ignored: nohup set this, or a shell did for a background command.
    handled = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    except KeyboardInterrupt:
        print("Interrupted. All workers have ended and temporary data is deleted.", file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            # The command is ending, so later signals are ignored.
            signal.signal(number, signal.SIG_IGN if interrupted else handler)
