"""How a command says that it cannot: "error: ..." and "fix: ..." on stderr, or one JSON document there with --json.

What lives here: the last word of a failed command. What may not: deciding what failed.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import typer
from msgspec.structs import replace

from everbeat.errors import ConfigurationError, EverbeatError, Problem
from everbeat.errors.visible import visible_json

DEBUG_VARIABLE: Final = "EVERBEAT_DEBUG"
_MACHINERY: Final = str(Path(typer.__file__).parent)


def wants_traceback() -> bool:
    """Whether EVERBEAT_DEBUG asks for the whole traceback."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


class WrongUsage(EverbeatError):
    """What the parser of the command line refused."""

    code = "WRONG_USAGE"


def wrong_usage(problem: Exception) -> WrongUsage:
    """The parser's error as one of ours."""
    told: Any = problem
    command = getattr(told.ctx, "command_path", "everbeat")
    message = " ".join(str(told.format_message()).split())
    return WrongUsage(message, fix=f"see what it takes: {command} --help.")


def show_failure(error: EverbeatError, *, as_json: bool) -> None:
    """Writes an error to stderr."""
    if isinstance(error, ConfigurationError):
        error = _in_the_users_words(error)
    if as_json:
        print(visible_json(json.dumps({"error": failure_document(error)}, indent=2)), file=sys.stderr)
        return
    print(f"error: {error.message}", file=sys.stderr)
    if error.fix is not None:
        print(f"fix: {error.fix}", file=sys.stderr)


def _in_the_users_words(error: ConfigurationError) -> ConfigurationError:
    """The error as whoever typed it can mend it: without places in the machinery that reads the command line, or Python."""
    return ConfigurationError(
        [
            replace(problem, where=None, fix=problem.shell_fix or problem.fix)
            if problem.where is None or problem.where.startswith(_MACHINERY)
            else problem
            for problem in error.problems
        ]
    )


def failure_document(error: EverbeatError) -> dict[str, Any]:
    """An error as programs read it: what is wrong in `message`, what helps in `fix`."""
    document: dict[str, Any] = {"code": error.code, "message": error.message, "fix": error.fix}
    if isinstance(error, ConfigurationError):
        if len(error.problems) > 1:
            document["message"] = "\n".join(problem.finding() for problem in error.problems)
            document["fix"] = "\n".join(f"{problem.fix}." for problem in error.problems)
        document["problems"] = [problem_document(problem) for problem in error.problems]
    return document


def problem_document(problem: Problem) -> dict[str, Any]:
    """One problem as programs read it."""
    return {
        "code": problem.code,
        "subject": problem.subject,
        "value": _plain(problem.value),
        "rule": problem.rule,
        "fix": problem.fix,
        "where": problem.where,
    }


def _plain(shown: str) -> str:
    """A value as it was given: a text without the quotes that tell people where it ends."""
    try:
        value = ast.literal_eval(shown)
    except (ValueError, SyntaxError):
        return shown
    return value if isinstance(value, str) else shown
