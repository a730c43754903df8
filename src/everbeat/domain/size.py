"""Sizes of memory as users write them: "512MB", "1.5GB", or a number of bytes.

What lives here: reading them, and refusing what is ambiguous. What may not: measuring.
"""

from __future__ import annotations

import re

from everbeat.domain.settings import Check, refused
from everbeat.errors import ConfigurationError

_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT])i?B", re.IGNORECASE)
_SHELL_FORMS = 'write "512MB" or "1.5GB" (of 1,024 of the next smaller unit)'
_FORMS = f"{_SHELL_FORMS}, or a number of bytes"


def size(lowest: int, highest: int) -> Check:
    """The check of a size between two bounds in bytes, both allowed; its normal form is bytes."""

    def check(value: object, /, *, subject: str) -> int:
        bounds = f"{spelled(lowest)} to {spelled(highest)}"
        given = _bytes(value, subject, bounds=bounds)
        if lowest <= given <= highest:
            return given
        rule = f"must be {bounds}"
        fix = f"use {spelled(lowest)} or more" if given < lowest else f"use {spelled(highest)} or less"
        raise refused(value, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)

    return check


def spelled(count: int) -> str:
    """Bytes in the largest unit that leaves no fraction: 536870912 is "512MB"."""
    for unit, size_ in reversed(_UNITS.items()):
        if count and count % size_ == 0:
            return f"{count // size_}{unit}"
    return f"{count} bytes"


def _bytes(value: object, subject: str, *, bounds: str) -> int:
    match value:
        case bool():
            raise _wrong(value, subject, f"must be a size, not {type(value).__name__}")
        case int():
            return value
        case str() if form := _FORM.fullmatch(value.strip()):
            return int(float(form[1]) * _UNITS[f"{form[2].upper()}B"])
        case str():
            rule = f"must be a size of {bounds}: a number and its unit, KB, MB, GB or TB"
            raise _wrong(value, subject, rule)
        case _:
            raise _wrong(value, subject, f"must be a size, not {type(value).__name__}")


def _wrong(value: object, subject: str, rule: str) -> ConfigurationError:
    return refused(value, subject=subject, code="SIZE_INVALID", rule=rule, fix=_FORMS, shell_fix=_SHELL_FORMS)
