"""What all settings share: every problem in one error, unknown names refused with the nearest right one.

What lives here: the `checked` decorator, the `Settings` base and the `Check` shape. The checks themselves are
in `checks` and `duration`; a settings class says which check belongs to which field with
`field(metadata=by(...))`. What may not live here: any particular setting.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Protocol, Self, TypeVar

from msgspec.structs import replace

from everbeat.domain.gathering import place_of_caller, raise_or_gather
from everbeat.errors import ConfigurationError, Problem, nearest
from everbeat.errors.visible import visible

S = TypeVar("S", bound="Settings")

_CHECK = "check"


class Check(Protocol):
    """Returns the value in its normal form, or raises ConfigurationError with every problem it has."""

    def __call__(self, value: object, /, *, subject: str) -> Any: ...


def by(check: Check) -> Mapping[str, Check]:
    """Field metadata that names the check of this field."""
    return {_CHECK: check}


class Settings:
    """Base of frozen settings objects; a subclass is decorated with `@checked` above `@dataclass(...)`."""

    __slots__ = ()

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields changed, checked as a whole again."""
        return type(self)(**{**self.values(), **changes})

    def values(self) -> dict[str, Any]:
        """The fields by name."""
        return {known.name: getattr(self, known.name) for known in _fields(type(self))}

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant."""
        return []

    @classmethod
    def _decided_elsewhere(cls, name: str) -> tuple[str, str] | None:
        """Rule and fix for a name that is no setting of this class, but of another that may be meant."""
        del name
        return None

    def _contradictions(self) -> Iterator[Problem]:
        """Rules between fields. A field that broke its own rule holds what was given, of whatever type."""
        return iter(())


def checked(cls: type[S]) -> type[S]:
    """Makes a dataclass check its fields, then the rules between them, and report all problems at once.

    A decorator above `@dataclass`, not a metaclass: type checkers go on seeing the plain dataclass signature.
    """
    build = cls.__init__
    known = {each.name: each for each in _fields(cls)}
    positional = [name for name, each in known.items() if not each.kw_only]

    @functools.wraps(build)
    def checked_init(self: S, *args: Any, **given: Any) -> None:
        values = dict(zip(positional, args, strict=False))
        problems = [*_surplus(cls.__name__, positional, args), *_unknown(cls, known, given)]
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
    """Puts the normal form of a field into `values`; returns what is wrong with it."""
    value = values[each.name]
    if value is MISSING:
        rule = "a value is required"
        return [Problem(code="MISSING", subject=subject, value="nothing", rule=rule, fix=f"pass {each.name}")]
    check: Check | None = each.metadata.get(_CHECK)
    if check is not None:
        try:
            values[each.name] = check(value, subject=subject)
        except ConfigurationError as error:
            return list(error.problems)
    return []


def _mended(values: dict[str, Any], wrong: list[Field[Any]]) -> dict[str, Any]:
    """The values with defaults for the wrong ones that have a default."""
    for each in wrong:
        default = _default(each)
        if default is not MISSING:
            values[each.name] = default
            _settled(each.name, each, values)
    return values


def _unknown(cls: type[Settings], known: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Problem]:
    for name in given:
        if name not in known:
            guess = nearest(name, known)
            rule, fix = cls._decided_elsewhere(name) or (
                f"{cls.__name__} has no setting of this name",
                f"use {guess}" if guess else f"use one of {', '.join(known)}",
            )
            subject = f"{cls.__name__}.{name}"
            yield Problem(code="UNKNOWN_NAME", subject=subject, value=shown(given[name]), rule=rule, fix=fix)


def _surplus(owner: str, positional: list[str], args: tuple[Any, ...]) -> Iterator[Problem]:
    for value in args[len(positional) :]:
        yield Problem(
            code="UNNAMED_VALUE",
            subject=owner,
            value=shown(value),
            rule=f"only {' and '.join(positional) or 'nothing'} may be given without a name",
            fix=f"name the setting that is meant, as in {owner}(name=value)",
        )


def shown(value: object) -> str:
    """A short `repr` for messages, also of objects whose `repr` is broken."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 80
    try:
        return visible(shortener.repr(value))
    except Exception:  # noqa: BLE001 - a broken __repr__ must not hide the problem that is being told
        return f"<{type(value).__name__}>"


def refused(
    value: object, *, subject: str, code: str, rule: str, fix: str, shell_fix: str | None = None
) -> ConfigurationError:
    """The error of one check about one value; `shell_fix`: for a value that was typed in a shell."""
    return ConfigurationError(
        [Problem(code=code, subject=subject, value=shown(value), rule=rule, fix=fix, shell_fix=shell_fix)]
    )
