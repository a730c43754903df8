"""Settings that cannot hold, and each rule that they break."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from everbeat.errors.base import EverbeatError


class Problem(Struct, frozen=True, kw_only=True):
    """One broken rule of a configuration or a registration; `where` is `file:line` when known.

    `shell_fix`: what helps whoever typed the value in a shell, where that is something else than in Python.
    """

    code: str
    subject: str
    value: str
    rule: str
    fix: str
    where: str | None = None
    shell_fix: str | None = None

    def finding(self) -> str:
        """What is wrong, and where; not what helps."""
        found = f"{self.subject} = {self.value}: {self.rule}."
        return found if self.where is None else f"{self.where}: {found}"

    def sentence(self) -> str:
        """The problem without its place."""
        return f"{self.subject} = {self.value}: {self.rule}. Fix: {self.fix}."

    def __str__(self) -> str:
        return self.sentence() if self.where is None else f"{self.where}: {self.sentence()}"


class ConfigurationError(EverbeatError):
    """Settings that cannot hold; `problems` lists every broken rule, not only the first.

    Of several problems each has its fix beside it in the message.
    """

    code = "CONFIGURATION_INVALID"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0].finding(), fix=f"{self.problems[0].fix}.")
        else:
            super().__init__(_listed(self.problems))


def _listed(problems: tuple[Problem, ...]) -> str:
    places = {problem.where for problem in problems}
    if len(places) == 1 and None not in places:
        heading = f"{problems[0].where}: {len(problems)} problems:"
        lines = [problem.sentence() for problem in problems]
    else:
        heading = f"{len(problems)} problems:"
        lines = [str(problem) for problem in problems]
    return "\n".join([heading, *(f"  {number}. {line}" for number, line in enumerate(lines, 1))])
