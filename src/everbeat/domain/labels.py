"""Labels: keys and values on tasks and workflows, by which they can be found."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec

from everbeat.domain.settings.checks import checked_mapping
from everbeat.domain.settings.settings import refused
from everbeat.errors import PayloadError
from everbeat.errors.wording import is_storable

MOST_LABELS: Final = 16
"""How many labels a task or workflow can have, including those that it inherits."""
LONGEST_KEY: Final = 64
LONGEST_VALUE: Final = 200
Labels: TypeAlias = Mapping[str, str]
"""Texts by key."""
NO_LABELS: Final[Labels] = MappingProxyType({})

_KEY: Final = re.compile(rf"[A-Za-z0-9_./-]{{1,{LONGEST_KEY}}}")
_KEY_RULE: Final = f"must have 1 to {LONGEST_KEY} of the characters A-Z, a-z, 0-9, '_', '.', '-' and '/'"
_RESERVED: Final = ("_", "everbeat.")
_decoder: Final = msgspec.json.Decoder(dict[str, str])


def checked_labels(value: object, /, *, subject: str) -> Mapping[str, str]:
    """Return the labels as a read-only mapping. Raises ConfigurationError, which names each key, if they are invalid."""
    found = checked_mapping(_mapping(value, subject=subject), _key, _text, subject=subject)
    if len(found) > MOST_LABELS:
        rule = f"has {len(found)} labels, and a task or workflow can have at most {MOST_LABELS}"
        fix = "leave some labels out, or move their values to the arguments"
        raise refused(sorted(found), subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)
    return found


def sought_labels(value: object, /, *, subject: str) -> Mapping[str, str | None]:
    """Return the labels of a search. A value of None stands for any value. Raises ConfigurationError if they are invalid."""
    return checked_mapping(_mapping(value, subject=subject), _key, _text_or_any, subject=subject)


def _mapping(value: object, *, subject: str) -> Mapping[object, object]:
    if isinstance(value, Mapping):
        return value
    rule = f"must map the keys of labels to values, not be of type {type(value).__name__}"
    raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix='write labels={"tenant": "42"}')


def _key(value: object, /, *, subject: str) -> str:
    if not isinstance(value, str):
        rule = f"must be a text, not {type(value).__name__}"
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix='use a key such as "tenant"')
    if not _KEY.fullmatch(value):
        raise refused(
            value, subject=subject, code="WRONG_KEY", rule=_KEY_RULE, fix='use a key such as "tenant"'
        )
    if value.startswith(_RESERVED):
        rule = "must not start with '_' or 'everbeat.', because these keys are reserved"
        name = value.removeprefix("everbeat.").lstrip("_") or "tenant"
        raise refused(value, subject=subject, code="WRONG_KEY", rule=rule, fix=f"use {name!r}")
    return value


def _text(value: object, /, *, subject: str) -> str:
    if not isinstance(value, str):
        rule = f"must be a text, not {type(value).__name__}"
        fix = f"write {str(value)!r}" if isinstance(value, int | float) else 'pass a text such as "42"'
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)
    if len(value) > LONGEST_VALUE:
        rule = f"has {len(value):,} characters, and the value of a label can have at most {LONGEST_VALUE}"
        fix = "use a shorter value, such as an id"
        raise refused(value, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)
    if not is_storable(value):
        rule = "must not contain NUL characters or lone surrogates"
        raise refused(value, subject=subject, code="WRONG_TEXT", rule=rule, fix='use a value such as "42"')
    return value


def _text_or_any(value: object, /, *, subject: str) -> str | None:
    return None if value is None else _text(value, subject=subject)


def split_labels(
    labels: Mapping[str, str | None] | None, *, subject: str
) -> tuple[dict[str, str], Sequence[str]]:
    """Return the labels of a search that have a value, and the keys of the others. Raises ConfigurationError as `sought_labels` does."""
    given = {} if labels is None else sought_labels(labels, subject=subject)
    with_value = {key: value for key, value in given.items() if value is not None}
    return with_value, [key for key in given if key not in with_value]


def encode_labels(labels: Mapping[str, str]) -> str | None:
    """Return the labels as JSON text, or None if there are none."""
    return msgspec.json.encode(dict(labels)).decode() if labels else None


def decode_labels(text: str | None) -> Mapping[str, str]:
    """Return the labels that are stored as this JSON text. Labels that another program has stored in another form are left out."""
    if text is None:
        return {}
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError):
        return {}


def require_room(inherited: Mapping[str, str], own: str | None, *, owner: str) -> None:
    """Raise PayloadError if a child has too many labels together with those that it inherits. `own` is JSON text."""
    if not inherited or own is None:
        return
    total = len({**inherited, **decode_labels(own)})
    if total > MOST_LABELS:
        raise PayloadError(
            f"{owner} would have {total} labels, including {len(inherited)} that it inherits; at most {MOST_LABELS} are allowed.",
            parameter="labels",
            fix="leave some labels out, or use the same keys: a child's own labels replace inherited ones.",
        )
