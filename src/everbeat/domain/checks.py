"""The checks that settings name for their fields: whole numbers, switches, choices, names, error codes.

What lives here: functions of the `Check` shape and makers of such functions. What may not: rules between two
fields, which belong to the settings object that has both, and durations, which have a module of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from everbeat.domain.settings import Check, refused, shown
from everbeat.errors import ConfigurationError, Problem, nearest

_QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_TASK_NAME = re.compile(r"\S{1,200}")
_FLAG_NAME = re.compile(r"\S{1,63}")
_REMARK = re.compile(r"(?=.*\S).{1,1000}")
_ERROR_CODE = re.compile(r"[A-Z][A-Z0-9_]*")


def whole(lowest: int, highest: int) -> Check:
    """The check of a whole number between two bounds, both allowed; True is no number here."""

    def check(value: object, /, *, subject: str) -> int:
        rule = f"must be a whole number from {lowest} to {highest}"
        if isinstance(value, bool) or not isinstance(value, int):
            fix = f"pass an int such as {lowest}, not {type(value).__name__}"
            raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)
        if not lowest <= value <= highest:
            bound = lowest if value < lowest else highest
            fix = f"use {bound} or {'more' if bound == lowest else 'less'}"
            raise refused(value, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)
        return int(value)

    return check


def switch(value: object, /, *, subject: str) -> bool:
    """The check of True or False, which 1 and "false" are not."""
    if isinstance(value, bool):
        return value
    raise refused(
        value, subject=subject, code="WRONG_TYPE", rule="must be True or False", fix="pass True or False"
    )


def switch_or(word: str) -> Check:
    """The check of True, False or one word."""

    def check(value: object, /, *, subject: str) -> bool | str:
        if isinstance(value, bool) or value == word:
            return value
        rule = f"must be {word!r}, True or False"
        raise refused(
            value, subject=subject, code="UNKNOWN_CHOICE", rule=rule, fix=f"use {word!r}, for example"
        )

    return check


def one_of(*choices: str) -> Check:
    """The check of one word out of a few."""

    def check(value: object, /, *, subject: str) -> str:
        if isinstance(value, str) and value in choices:
            return value
        guess = nearest(value, choices) if isinstance(value, str) else None
        raise refused(
            value,
            subject=subject,
            code="UNKNOWN_CHOICE",
            rule=f"must be one of {', '.join(map(repr, choices))}",
            fix=f"use {guess!r}" if guess else f"use {choices[0]!r}, for example",
        )

    return check


def optional(check: Check, *, none: str) -> Check:
    """The same check with None allowed; `none` says what None does, as in "keeps them for ever"."""

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
                    shell_fix=f"{problem.shell_fix or problem.fix}, or leave it out",
                )
                for problem in error.problems
            ]
            raise ConfigurationError(problems) from None

    return check_unless_none


def instance_of(kind: type[Any]) -> Check:
    """The check of an object of one class."""

    def check(value: object, /, *, subject: str) -> Any:
        if isinstance(value, kind):
            return value
        rule = f"must be a {kind.__name__}, not {type(value).__name__}"
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=f"pass {kind.__name__}(...)")

    return check


def queue_name(value: object, /, *, subject: str) -> str:
    """The check of a queue's name."""
    rule = "must be 1 to 63 letters, digits, dots, underscores or hyphens of ASCII"
    return _named(value, subject, _QUEUE_NAME, rule, "use a name such as 'mail' or 'mail.bulk'")


def task_name(value: object, /, *, subject: str) -> str:
    """The check of a task's name."""
    rule = "must be 1 to 200 printable characters without spaces"
    return _named(value, subject, _TASK_NAME, rule, "use a name such as 'welcome' or 'mail.welcome'")


def flag_name(value: object, /, *, subject: str) -> str:
    """The check of a task flag's name."""
    rule = "must be 1 to 63 printable characters without spaces"
    return _named(value, subject, _FLAG_NAME, rule, "use a name such as 'infrastructure_resilient'")


def slot_name(value: object, /, *, subject: str) -> str:
    """The check of a slot's name."""
    rule = "must be 1 to 63 letters, digits, dots, underscores or hyphens of ASCII"
    return _named(value, subject, _QUEUE_NAME, rule, "use a name such as 'web-0', the same after a restart")


def remark(value: object, /, *, subject: str) -> str:
    """The check of a few words for people, in one line."""
    rule = "must be 1 to 1,000 printable characters in one line, not only spaces"
    return _named(value, subject, _REMARK, rule, "write a short text, or leave it out")


def error_code(value: object, /, *, subject: str) -> str:
    """The check of an error code."""
    rule = "an error code must be capitals, digits and underscores, a capital first"
    return _named(value, subject, _ERROR_CODE, rule, "use a code such as 'SMTP_DOWN'")


def sequence_of(check: Check, *, longest: int, shortest: int = 0) -> Check:
    """The check of a list or tuple whose every item passes `check`; its normal form is a tuple."""

    def check_each(value: object, /, *, subject: str) -> tuple[Any, ...]:
        items = several(value, subject=subject)
        if not shortest <= len(items) <= longest:
            rule = f"must have {shortest} to {longest} entries, not {len(items)}"
            fix = "add entries" if len(items) < shortest else "remove entries"
            raise refused(value, subject=subject, code="WRONG_COUNT", rule=rule, fix=fix)
        return each(items, check, subject=subject)

    return check_each


def several(value: object, *, subject: str) -> tuple[Any, ...]:
    """The items of a list, tuple or set; a lone string is refused, though it is a sequence of letters."""
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray):
        return tuple(value)
    rule = f"must be a list or tuple, not {type(value).__name__}"
    fix = "pass a list or tuple"
    if isinstance(value, str | type | int | float):
        fix = f"write [{_source(value)}]"
    elif isinstance(value, Mapping):
        fix = f"write {shown([*value])}"
    raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)


def each(items: Sequence[Any], check: Check, *, subject: str) -> tuple[Any, ...]:
    """Every item in its normal form; raises one ConfigurationError with the problems of all items."""
    found: list[Any] = []
    problems: list[Problem] = []
    for position, item in enumerate(items):
        try:
            found.append(check(item, subject=f"{subject}[{position}]"))
        except ConfigurationError as error:
            problems += error.problems
    if problems:
        raise ConfigurationError(problems)
    return tuple(found)


def flags(value: object, /, *, subject: str) -> Mapping[str, bool]:
    """The check of task flags: names that are set, or names with True or False, which is the normal form."""
    if isinstance(value, Mapping):
        return _mapping(value, flag_name, switch, subject=subject)
    names = each(several(value, subject=subject), flag_name, subject=subject)
    return MappingProxyType(dict.fromkeys(names, True))


def exception_codes(value: object, /, *, subject: str) -> Mapping[type[BaseException], str]:
    """The check of error codes by exception class; the first entry that fits an exception gives its code."""
    if not isinstance(value, Mapping):
        rule = f"must map exception classes to error codes, not be a {type(value).__name__}"
        fix = 'write {ConnectionError: "SMTP_DOWN"}, for example'
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)
    return _mapping(value, _exception_class, error_code, subject=subject)


def _mapping(
    given: Mapping[Any, Any], check_key: Check, check_value: Check, *, subject: str
) -> Mapping[Any, Any]:
    """An unchangeable copy; raises one ConfigurationError with the problems of all entries, each named by its key."""
    problems: list[Problem] = []
    for key, value in given.items():
        place = f"{subject}[{_source(key)}]"
        for check, checked in ((check_key, key), (check_value, value)):
            try:
                check(checked, subject=place)
            except ConfigurationError as error:
                problems += error.problems
    if problems:
        raise ConfigurationError(problems)
    return MappingProxyType(dict(given))


def _exception_class(value: object, /, *, subject: str) -> type[BaseException]:
    if isinstance(value, type) and issubclass(value, BaseException):
        return value
    rule = "must be an exception class"
    raise refused(
        value,
        subject=subject,
        code="WRONG_TYPE",
        rule=rule,
        fix="pass the class itself, such as TimeoutError",
    )


def _named(value: object, subject: str, form: re.Pattern[str], rule: str, fix: str) -> str:
    if not isinstance(value, str):
        raise refused(
            value, subject=subject, code="WRONG_TYPE", rule=f"{rule}, not {type(value).__name__}", fix=fix
        )
    if not (form.fullmatch(value) and value.isprintable()):
        raise refused(value, subject=subject, code="WRONG_NAME", rule=rule, fix=fix)
    return value


def _source(value: object) -> str:
    return value.__name__ if isinstance(value, type) else shown(value)
