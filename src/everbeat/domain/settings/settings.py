"""The base class of all settings. Settings report all problems in one error, and suggest a known name for each unknown name."""

from __future__ import annotations

import functools
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, fields
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from everbeat.errors import ConfigurationError, EverbeatError, Problem
from everbeat.errors.wording import nearest, visible

T = TypeVar("T")


class Mistake(Struct, frozen=True):
    """An error that was gathered instead of raised. `where` is the `file:line` in the user's code."""

    error: EverbeatError
    where: str | None


_mistakes: ContextVar[list[Mistake] | None] = ContextVar("everbeat_mistakes", default=None)


@contextmanager
def gathering() -> Iterator[list[Mistake]]:
    """Inside the block, gather this thread's mistakes instead of raising them. The code continues with defaults and stand-ins."""
    mistakes: list[Mistake] = []
    token = _mistakes.set(mistakes)
    try:
        yield mistakes
    finally:
        _mistakes.reset(token)


def raise_or_gather(error: EverbeatError) -> None:
    """Raise the error, or gather it inside `gathering`."""
    mistakes = _mistakes.get()
    if mistakes is None:
        raise error
    mistakes.append(Mistake(error, place_of_caller()))


def make_or_gather(make: Callable[[], T], *, otherwise: object) -> T:
    """Return the result of `make`. If `make` fails inside `gathering`, gather its error and return `otherwise`, which has the same shape."""
    try:
        return make()
    except EverbeatError as error:
        mistake = _placed(error)
    raise_or_gather(mistake)
    return cast(T, otherwise)


def _placed(error: EverbeatError) -> EverbeatError:
    """Return the error after adding the location of the user's call to each problem that has no location."""
    if not isinstance(error, ConfigurationError) or all(problem.where for problem in error.problems):
        return error
    place = place_of_caller()
    return ConfigurationError([replace(each, where=each.where or place) for each in error.problems])


class StandIn:
    """A stand-in for a task that could not be registered. A stand-in accepts any use, so that the import can continue."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> Self:
        return self

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def place_of_caller() -> str | None:
    """Return the `file:line` of the nearest calling code outside everbeat and the standard `dataclasses` module."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "dataclasses" and not f"{module}.".startswith("everbeat."):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


S = TypeVar("S", bound="Settings")

Elsewhere: TypeAlias = Callable[[str], tuple[str, str] | None]
"""A function that returns the rule and the fix for a name that belongs elsewhere, or None for any other name."""

_CHECK = "check"
_SECRET: Final = re.compile(r"://|passw|secret|token|dsn", re.IGNORECASE)


class FieldCheck(Protocol):
    """A check that returns a value in its normal form, or raises ConfigurationError with all problems."""

    def __call__(self, value: object, /, *, subject: str) -> Any: ...


def by(check: FieldCheck) -> Mapping[str, FieldCheck]:
    """Return the dataclass field metadata that applies this check to the field."""
    return {_CHECK: check}


class Settings:
    """Base class of frozen settings objects. Decorate subclasses with `@checked` above `@dataclass(...)`."""

    __slots__ = ()

    def replace(self, **changes: Any) -> Self:
        """Return a copy with these fields changed, after checking all rules again."""
        return type(self)(**{**self.values(), **changes})

    def values(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {known.name: getattr(self, known.name) for known in _fields(type(self))}

    def warnings(self) -> list[str]:
        """Return warnings about settings that are valid but probably not intended."""
        return []

    @classmethod
    def _decided_elsewhere(cls, name: str) -> tuple[str, str] | None:
        """Return the rule and the fix for a name that is a setting of another class, or None."""
        del name
        return None

    def _contradictions(self) -> Iterator[Problem]:
        """Yield violations of rules that involve several fields. A field that violates its own rule can have any type here."""
        return iter(())


def checked(cls: type[S]) -> type[S]:
    """Make a dataclass check its fields and the rules between fields, and report all problems at once.

    This is a decorator above `@dataclass`, not a metaclass, so that type checkers see the plain dataclass signature.
    """
    build = cls.__init__
    known = {each.name: each for each in _fields(cls)}
    positional = [name for name, each in known.items() if not each.kw_only]

    @functools.wraps(build)
    def checked_init(self: S, *args: Any, **given: Any) -> None:
        values = dict(zip(positional, args, strict=False))
        problems = [
            *_surplus(cls.__name__, positional, args),
            *unknown_names(cls.__name__, "setting", known, given, cls._decided_elsewhere),
        ]
        values |= {name: value for name, value in given.items() if name in known}
        wrong = []
        for name, each in known.items():
            values.setdefault(name, _default(each))
            if found := _settled(f"{cls.__name__}.{name}", each, values):
                wrong.append(each)
                problems += found
        build(self, **values)
        problems += self._contradictions()
        if problems:
            place = place_of_caller()
            raise_or_gather(
                ConfigurationError([replace(problem, where=problem.where or place) for problem in problems])
            )
            build(self, **_mended(values, wrong))

    cls.__init__ = checked_init  # type: ignore[method-assign,assignment]
    return cls


def _fields(cls: type[Any]) -> tuple[Field[Any], ...]:
    return fields(cls)


def _default(each: Field[Any]) -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default


def _settled(subject: str, each: Field[Any], values: dict[str, Any]) -> list[Problem]:
    """Store the normal form of a field in `values`, and return the problems of the field."""
    value = values[each.name]
    if value is MISSING:
        rule = "a value is required"
        return [Problem(code="MISSING", subject=subject, value="nothing", rule=rule, fix=f"pass {each.name}")]
    check: FieldCheck | None = each.metadata.get(_CHECK)
    if check is not None:
        try:
            values[each.name] = check(value, subject=subject)
        except ConfigurationError as error:
            return list(error.problems)
    return []


def _mended(values: dict[str, Any], wrong: list[Field[Any]]) -> dict[str, Any]:
    """Return the values after replacing wrong values with defaults."""
    for each in wrong:
        default = _default(each)
        if default is not MISSING:
            values[each.name] = default
            _settled(each.name, each, values)
    return values


def nowhere_else(name: str) -> tuple[str, str] | None:
    """Return None, because no name belongs elsewhere."""
    del name
    return None


def unknown_names(
    owner: str,
    kind: str,
    known: Collection[str],
    given: Mapping[str, Any],
    elsewhere: Elsewhere = nowhere_else,
    *,
    where: str | None = None,
) -> list[Problem]:
    """Return a problem for each unknown name, suggesting the closest known one. `kind` is the noun in messages, such as "setting"."""
    found = []
    for name in given:
        if name not in known:
            guess = nearest(name, known)
            rule, fix = elsewhere(name) or (
                f"{owner} has no {kind} of this name",
                f"use {guess}" if guess else f"use one of {', '.join(known)}" if known else "omit it",
            )
            value = shown(given[name])
            # The value of an unknown name might be a secret: App(dsn="postgresql://user:password@…").
            value = "***" if _SECRET.search(f"{name}={value}") else value
            subject = f"{owner}.{name}"
            found.append(
                Problem(code="UNKNOWN_NAME", subject=subject, value=value, rule=rule, fix=fix, where=where)
            )
    return found


def _surplus(owner: str, positional: list[str], args: tuple[Any, ...]) -> Iterator[Problem]:
    for value in args[len(positional) :]:
        yield Problem(
            code="UNNAMED_VALUE",
            subject=owner,
            value=shown(value),
            rule=f"only {' and '.join(positional) or 'nothing'} can be given without a name",
            fix=f"name the setting, as in {owner}(name=value)",
        )


def shown(value: object) -> str:
    """Return a short `repr` of the value for messages, even if the value's own `__repr__` raises."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 80
    try:
        return visible(shortener.repr(value))
    except Exception:  # noqa: BLE001 - a broken __repr__ must not hide the problem that is being reported
        return f"<{type(value).__name__}>"


def refused(
    value: object,
    *,
    subject: str,
    code: str,
    rule: str,
    fix: str,
    shell_fix: str | None = None,
    shell_rule: str | None = None,
) -> ConfigurationError:
    """Return the error for one invalid value. `shell_fix` and `shell_rule` apply if the value was typed in a shell."""
    return ConfigurationError(
        [
            Problem(
                code=code,
                subject=subject,
                value=shown(value),
                rule=rule,
                fix=fix,
                shell_fix=shell_fix,
                shell_rule=shell_rule,
            )
        ]
    )
