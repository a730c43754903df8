"""What `everbeat check` finds: one shape for every kind of mistake.

What lives here: a finding, and how everbeat's errors become findings. What may not: looking for them (`check`,
`unregistered`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from everbeat.domain.gathering import Mistake
from everbeat.errors import ConfigurationError, EverbeatError, ImportFailed, RegistrationError


class Finding(Struct, frozen=True, kw_only=True):
    """One mistake, or one warning; `where` is `file:line` when known."""

    code: str
    message: str
    fix: str | None = None
    where: str | None = None

    def lines(self, severity: str) -> str:
        """The finding for people."""
        place = "" if self.where is None else f"{_short(self.where)}: "
        fix = "" if self.fix is None else f"\n    fix: {self.fix}"
        return f"{place}{severity}: {self.message}{fix}"


def findings_of(mistakes: list[Mistake]) -> list[Finding]:
    """The findings of gathered mistakes, each once, in the order of the code."""
    found = [finding for mistake in mistakes for finding in of_error(mistake.error, where=mistake.where)]
    return list(dict.fromkeys(found))


def of_error(error: EverbeatError, *, where: str | None) -> Iterator[Finding]:
    """The findings of one error; `where` is for errors that do not know their own place."""
    match error:
        case ConfigurationError(problems=problems):
            for problem in problems:
                yield Finding(
                    code=problem.code,
                    message=f"{problem.subject} = {problem.value}: {problem.rule}.",
                    fix=f"{problem.fix}.",
                    where=problem.where or where,
                )
        case RegistrationError() | ImportFailed():
            message = error.message.removeprefix(f"{error.where}: ").rstrip()
            yield Finding(code=error.code, message=message, fix=error.fix, where=error.where or where)
        case _:
            yield Finding(code=error.code, message=error.message, fix=error.fix, where=where)


def _short(where: str) -> str:
    """The place as seen from the working folder, if it lies below it."""
    here = f"{Path.cwd()}/"
    return where.removeprefix(here)
