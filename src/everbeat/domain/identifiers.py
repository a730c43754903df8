"""Task ids (UUIDv7), and the id prefixes that users type."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from uuid import UUID

RANDOM_BYTES: Final = 10

_VARIABLE_BITS: Final = 74  # the 12 bits of rand_a and the 62 of rand_b, read as one number
_LARGEST: Final = (1 << _VARIABLE_BITS) - 1
_STEP_BITS: Final = 32


def uuid7(*, unix_ms: int, random: bytes, previous: UUID | None = None) -> UUID:
    """Return the next id at `unix_ms`, from 10 random bytes. The id is greater than `previous`, even if the clock stops or is set back."""
    number = int.from_bytes(random, "big")
    variable = number & _LARGEST
    if previous is not None and unix_ms <= (last_ms := previous.int >> 80):
        # Within the same millisecond, ids increase by random amounts, so they cannot be guessed.
        unix_ms = last_ms
        variable = _variable(previous) + 1 + (number & ((1 << _STEP_BITS) - 1))
        if variable > _LARGEST:
            unix_ms, variable = last_ms + 1, number & _LARGEST
    high, low = variable >> 62, variable & ((1 << 62) - 1)
    return UUID(int=(unix_ms << 80) | (7 << 76) | (high << 64) | (2 << 62) | low)


def _variable(uuid: UUID) -> int:
    return (((uuid.int >> 64) & 0xFFF) << 62) | (uuid.int & ((1 << 62) - 1))


SHORTEST_TYPED: Final = 4
SHORTEST_SHOWN: Final = 12
"""The minimum number of hexadecimal digits shown. The first 12 digits of an id encode its millisecond, so later ids start differently."""
_DIGITS: Final = re.compile("[0-9a-f-]*", re.IGNORECASE)
_OF_ONE_PROCESS: Final = re.compile(r"-[0-9a-f]{8}$")
_HYPHENS_AFTER: Final = (8, 12, 16, 20)


def bounds(prefix: str) -> tuple[UUID, UUID] | None:
    """Return the lowest and highest ids that start with `prefix`, or None unless it has 4 to 32 hexadecimal digits."""
    digits = prefix.replace("-", "")
    if not _DIGITS.fullmatch(prefix) or not SHORTEST_TYPED <= len(digits) <= 32:
        return None
    return UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))


def shortest_prefix(one: UUID, others: Iterable[UUID]) -> str:
    """Return the shortest prefix of `one`, at least 12 digits long, that is not a prefix of any of the `others`."""
    shared = (32 - ((one.int ^ other.int).bit_length() + 3) // 4 for other in others if other != one)
    digits = max(SHORTEST_SHOWN, 1 + max(shared, default=0))
    return str(one)[: digits + sum(digits > place for place in _HYPHENS_AFTER)]


def stem(worker_id: str) -> str:
    """Return the `host-pid` part of a worker or supervisor id. An id in any other form is returned unchanged."""
    return _OF_ONE_PROCESS.sub("", worker_id)
