"""The base of all errors of everbeat."""

from __future__ import annotations

from typing import Any, ClassVar

from everbeat.errors.visible import visible


def _restored(kind: type[EverbeatError], args: tuple[Any, ...], state: dict[str, Any]) -> EverbeatError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class EverbeatError(Exception):
    """Base of all errors of everbeat: `code` is stable for programs, `message` and `fix` are for people."""

    code: ClassVar[str] = "EVERBEAT_ERROR"

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        # A message quotes what users and the database gave; a traceback takes it to a terminal.
        self.message = visible(message)
        self.fix = None if fix is None else visible(fix)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message} Fix: {self.fix}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take keywords, which the default reduction cannot give back to __init__.
        return _restored, (type(self), self.args, self.__dict__)
