"""Checks for single values and for the arguments of public calls."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import FunctionType, MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar, cast

from msgspec.structs import replace

from everbeat.domain.settings.settings import (
    Elsewhere,
    FieldCheck,
    nowhere_else,
    place_of_caller,
    raise_or_gather,
    refused,
    shown,
    unknown_names,
)
from everbeat.errors import ConfigurationError, Problem
from everbeat.errors.wording import is_storable, nearest

_DIGITS = re.compile(r"-?[0-9]{1,18}")

N = TypeVar("N", int, float)
NumberReader: TypeAlias = Callable[[object], tuple[int, str] | None]
"""A function that returns the number for which a value of another type stands, and a note for the message, or None."""


def as_number(value: object) -> tuple[int, str] | None:
    """Return the integer that a string or float stands for (4 for "4") and a hint for the fix, or None if there is no such integer."""
    match value:
        case str() if _DIGITS.fullmatch(value.strip()):
            return int(value), " (without quotes)"
        case float() if value.is_integer():
            return int(value), ""
        case _:
            return None


def whole(lowest: int, highest: int, *, read: NumberReader = as_number) -> FieldCheck:
    """Return a check that accepts whole numbers between two inclusive bounds, but not True or False.

    `read` guesses which number a value of another type stands for, and the fix proposes that number.
    """

    def check(value: object, /, *, subject: str) -> int:
        rule = f"must be a whole number from {lowest} to {highest}"
        if isinstance(value, bool) or not isinstance(value, int):
            fix = _fix_of_type(value, lowest, highest, read)
            shell_fix = f"write a number such as {lowest}" if fix.startswith("pass an int") else None
            raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix, shell_fix=shell_fix)
        require_between(value, value, lowest, highest, subject=subject, rule=rule)
        return int(value)

    return check


def _fix_of_type(value: object, lowest: int, highest: int, read: NumberReader) -> str:
    found = None if isinstance(value, bool) else read(value)
    if found is None:
        return f"pass an int such as {lowest}, not {type(value).__name__}"
    number, explanation = found
    if lowest <= number <= highest:
        return f"pass {number}{explanation}"
    return f"{_nearest_bound(number, lowest, highest, str)}, not {number}{explanation}"


def require_between(
    value: object,
    number: N,
    lowest: N,
    highest: N,
    *,
    subject: str,
    rule: str = "",
    spell: Callable[[N], str] = str,
) -> None:
    """Raise ConfigurationError unless `number` is between two inclusive bounds. `spell` formats the bounds in the message."""
    if lowest <= number <= highest:
        return
    rule = rule or f"must be {spell(lowest)} to {spell(highest)}"
    fix = _nearest_bound(number, lowest, highest, spell)
    raise refused(value, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)


def _nearest_bound(number: N, lowest: N, highest: N, spell: Callable[[N], str]) -> str:
    return f"use {spell(lowest)} or more" if number < lowest else f"use {spell(highest)} or less"


def switch(value: object, /, *, subject: str) -> bool:
    """Return the value if it is True or False. Other values, such as 1 and "false", are rejected."""
    if isinstance(value, bool):
        return value
    rule = "must be True or False"
    raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix="pass True or False")


def switch_or(choice: str) -> FieldCheck:
    """Return a check that accepts True, False, or the text `choice`."""

    def check(value: object, /, *, subject: str) -> bool | str:
        if isinstance(value, bool) or value == choice:
            return value
        rule, fix = f"must be {choice!r}, True or False", f"use {choice!r}, for example"
        raise refused(value, subject=subject, code="UNKNOWN_CHOICE", rule=rule, fix=fix)

    return check


def one_of(*choices: str) -> FieldCheck:
    """Return a check that accepts one of the given texts."""

    def check(value: object, /, *, subject: str) -> str:
        if isinstance(value, str) and value in choices:
            return value
        guess = nearest(value, choices) if isinstance(value, str) else None
        rule = f"must be one of {', '.join(repr(str(choice)) for choice in choices)}"
        fix = f"use {str(guess)!r}" if guess else f"use {str(choices[0])!r}, for example"
        raise refused(value, subject=subject, code="UNKNOWN_CHOICE", rule=rule, fix=fix)

    return check


def optional(check: FieldCheck, *, none: str, shell_none: str = "omit it") -> FieldCheck:
    """Return the check, extended to accept None. `none` describes the effect of None, such as "keeps them forever".

    `shell_none` says how to give None in a shell.
    """

    def check_unless_none(value: object, /, *, subject: str) -> Any:
        if value is None:
            return None
        try:
            return check(value, subject=subject)
        except ConfigurationError as error:
            problems = [
                replace(
                    problem,
                    fix=f"{problem.fix}, or None, which {none}",
                    shell_fix=f"{problem.shell_fix or problem.fix}, or {shell_none}",
                )
                for problem in error.problems
            ]
            raise ConfigurationError(problems) from None

    return check_unless_none


def instance_of(kind: type[Any]) -> FieldCheck:
    """Return a check that accepts instances of a class."""

    def check(value: object, /, *, subject: str) -> Any:
        if isinstance(value, kind):
            return value
        rule = f"must be a {kind.__name__}, not {type(value).__name__}"
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=f"pass {kind.__name__}(...)")

    return check


def _text(form: str, rule: str, fix: str) -> FieldCheck:
    """Return a check that accepts printable text that matches the regular expression `form`."""
    pattern = re.compile(form)

    def check(value: object, /, *, subject: str) -> str:
        if not isinstance(value, str):
            wrong = f"{rule}, not {type(value).__name__}"
            raise refused(value, subject=subject, code="WRONG_TYPE", rule=wrong, fix=fix)
        if not (pattern.fullmatch(value) and value.isprintable()):
            raise refused(value, subject=subject, code="WRONG_NAME", rule=rule, fix=fix)
        return value

    return check


def sought(value: object, /, *, subject: str) -> str:
    """Return a text that stored texts are compared with. Raises ConfigurationError for texts that PostgreSQL cannot take."""
    rule = "must be a text without NUL characters and lone surrogates, because no stored text contains them"
    if not isinstance(value, str):
        wrong = f"must be a text, not {type(value).__name__}"
        raise refused(
            value, subject=subject, code="WRONG_TYPE", rule=wrong, fix=f"pass {str(value)!r}, for example"
        )
    if not is_storable(value):
        raise refused(
            value, subject=subject, code="WRONG_NAME", rule=rule, fix="check how the text was read or decoded"
        )
    return value


def sought_or_none(value: object, /, *, subject: str) -> str | None:
    """Return None, or the text as `sought` does."""
    return None if value is None else sought(value, subject=subject)


_ASCII: Final = r"[A-Za-z0-9_.-]{1,63}"
_ASCII_RULE: Final = "must be 1 to 63 letters, digits, dots, underscores or hyphens of ASCII"
queue_name: Final = _text(_ASCII, _ASCII_RULE, "use a name such as 'mail' or 'mail.bulk'")
limit_name: Final = _text(_ASCII, _ASCII_RULE, "use a name such as 'stripe' or 'tenant'")
slot_name: Final = _text(_ASCII, _ASCII_RULE, "use a name such as 'web-0', the same after a restart")
task_name: Final = _text(
    r"\S{1,200}",
    "must be 1 to 200 printable characters without spaces",
    "use a name such as 'welcome' or 'mail.welcome'",
)
flag_name: Final = _text(
    r"\S{1,63}",
    "must be 1 to 63 printable characters without spaces",
    "use a name such as 'infrastructure_resilient'",
)
remark: Final = _text(
    r"(?=.*\S).{1,1000}",
    "must be 1 to 1,000 printable characters on one line, not only spaces",
    "write a short text, or omit it",
)
error_code: Final = _text(
    r"[A-Z][A-Z0-9_]*",
    "an error code must be capitals, digits and underscores, a capital first",
    "use a code such as 'SMTP_DOWN'",
)


def sequence_of(
    check: FieldCheck, *, longest: int, shortest: int = 0, example: str | None = None
) -> FieldCheck:
    """Return a check that accepts a list or tuple whose items all pass `check`. The normal form is a tuple.

    `example` is the source of an item, for the fix of another value. Without it, the fix proposes a list of the value itself.
    """

    def check_each(value: object, /, *, subject: str) -> tuple[Any, ...]:
        items = several(value, subject=subject, example=example)
        if not shortest <= len(items) <= longest:
            rule = f"must have {shortest} to {longest} entries, not {len(items)}"
            fix = "add entries" if len(items) < shortest else "remove entries"
            raise refused(value, subject=subject, code="WRONG_COUNT", rule=rule, fix=fix)
        return each(items, check, subject=subject)

    return check_each


def several(value: object, *, subject: str, example: str | None = None) -> tuple[Any, ...]:
    """Return the items of a list, tuple or set. Strings are rejected, although they are sequences. `example`: see `sequence_of`."""
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray):
        return tuple(value)
    rule = f"must be a list or tuple, not {type(value).__name__}"
    fix = "pass a list or tuple"
    if example is not None:
        fix = f"write [{example}]"
    elif isinstance(value, str | type | int | float):
        fix = f"write [{_source(value)}]"
    elif isinstance(value, Mapping):
        fix = f"write {shown([*value])}"
    raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)


def each(items: Sequence[Any], check: FieldCheck, *, subject: str) -> tuple[Any, ...]:
    """Return each item in its normal form. Raises one ConfigurationError with all problems if any item is invalid."""
    return _all_checked((check, item, f"{subject}[{position}]") for position, item in enumerate(items))


def _all_checked(checks: Iterable[tuple[FieldCheck, object, str]]) -> tuple[Any, ...]:
    """Return the normal forms of values, given with their checks and subjects. Raises one error with all problems if any value is invalid."""
    found: list[Any] = []
    problems: list[Problem] = []
    for check, value, subject in checks:
        try:
            found.append(check(value, subject=subject))
        except ConfigurationError as error:
            problems += error.problems
    if problems:
        raise ConfigurationError(problems)
    return tuple(found)


def flags(value: object, /, *, subject: str) -> Mapping[str, bool]:
    """Return task flags in their normal form, a mapping from names to True or False. A collection of names sets these flags to True."""
    if isinstance(value, Mapping):
        return checked_mapping(value, flag_name, switch, subject=subject)
    names = each(several(value, subject=subject), flag_name, subject=subject)
    return MappingProxyType(dict.fromkeys(names, True))


def exception_codes(value: object, /, *, subject: str) -> Mapping[type[BaseException], str]:
    """Return a checked mapping from exception classes to error codes. The first entry that matches an exception determines its code."""
    if not isinstance(value, Mapping):
        rule = f"must map exception classes to error codes, not be a {type(value).__name__}"
        fix = 'write {ConnectionError: "SMTP_DOWN"}, for example'
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)
    return checked_mapping(value, _exception_class, error_code, subject=subject)


def checked_mapping(
    given: Mapping[Any, Any], check_key: FieldCheck, check_value: FieldCheck, *, subject: str
) -> Mapping[Any, Any]:
    """Return a checked, read-only copy. Raises one ConfigurationError if any entries are invalid, with each problem identified by its key."""
    _all_checked(
        (check, checked, f"{subject}[{_source(key)}]")
        for key, value in given.items()
        for check, checked in ((check_key, key), (check_value, value))
    )
    return MappingProxyType(dict(given))


def _exception_class(value: object, /, *, subject: str) -> type[BaseException]:
    if isinstance(value, type) and issubclass(value, BaseException):
        return value
    rule, fix = "must be an exception class", "pass the class itself, such as TimeoutError"
    raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)


def _source(value: object) -> str:
    return value.__name__ if isinstance(value, type) else shown(value)


C = TypeVar("C", bound=type[Any])
F = TypeVar("F", bound=Callable[..., Any])

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def public(cls: C) -> C:
    """Make all public methods of a class, including inherited ones, report invalid calls under the name of the class.

    Return the class itself. The methods keep their signatures for type checkers and `help`.
    """
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        is_public = name == "__init__" or not name.startswith("_")
        if is_public and isinstance(method, FunctionType) and not hasattr(method, "__wrapped__"):
            title = cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
            answered = reporting_wrong_calls(title)(method)
            answered.__qualname__ = f"{cls.__name__}.{name}"
            setattr(cls, name, answered)
    return cls


def reporting_wrong_calls(title: str, *, elsewhere: Elsewhere = nowhere_else) -> Callable[[F], F]:
    """Return a decorator that reports invalid calls of a function under the name `title`.

    `elsewhere` returns the rule and the fix for an argument name that belongs elsewhere.
    """

    def decorate(function: F) -> F:
        def answered(mistake: TypeError, given: Mapping[str, Any]) -> dict[str, Any]:
            """Raise the error for an invalid call. If mistakes are being gathered, return the known arguments instead."""
            error = wrong_call(title, function, given, mistake, elsewhere=elsewhere)
            if not isinstance(error, ConfigurationError):
                raise error from None
            raise_or_gather(error)
            known = _keywords(function)
            return {name: value for name, value in given.items() if name in known}

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def acall(*args: Any, **given: Any) -> Any:
                try:
                    running = function(*args, **given)
                except TypeError as mistake:  # raised by the call itself: no code has run yet
                    running = function(*args, **answered(mistake, given))
                return await running

            return cast(F, acall)

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            try:
                return function(*args, **given)
            except TypeError as mistake:
                if mistake.__traceback__ is not None and mistake.__traceback__.tb_next is not None:
                    raise  # raised by the code of the function, not by the call
                known = answered(mistake, given)
            return function(*args, **known)

        return cast(F, call)

    return decorate


def wrong_call(
    title: str,
    function: Callable[..., Any],
    given: Mapping[str, Any],
    mistake: TypeError,
    *,
    elsewhere: Elsewhere = nowhere_else,
) -> ConfigurationError | TypeError:
    """Return the error for an invalid call: ConfigurationError for unknown arguments, otherwise TypeError."""
    signature = inspect.signature(function)
    known = _keywords(function)
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    problems = (
        []
        if open_ended
        else unknown_names(title, "argument", known, given, elsewhere, where=place_of_caller())
    )
    if problems:
        return ConfigurationError(problems)
    return TypeError(str(mistake).replace(function.__qualname__, title))


def _keywords(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that can be passed by keyword, without `self`."""
    known = [each for each in inspect.signature(function).parameters.values() if each.kind in _NAMED]
    return [each.name for each in known if each.name != "self"]
