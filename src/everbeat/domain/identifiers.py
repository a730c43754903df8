"""Task ids: UUIDv7, made by whoever sends, so that a send may be repeated and ids sort by time.

What lives here: the arithmetic. What may not: the clock and the dice, which are passed in.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

RANDOM_BYTES: Final = 10

_VARIABLE_BITS: Final = 74  # the 12 bits of rand_a and the 62 of rand_b, read as one number
_LARGEST: Final = (1 << _VARIABLE_BITS) - 1
_STEP_BITS: Final = 32


def uuid7(*, unix_ms: int, random: bytes, previous: UUID | None = None) -> UUID:
    """The next id at `unix_ms`, from 10 random bytes; always above `previous`, also when the clock stands or steps back."""
    number = int.from_bytes(random, "big")
    variable = number & _LARGEST
    if previous is not None and unix_ms <= (last_ms := previous.int >> 80):
        # Still unguessable: the same millisecond counts on by a random step.
        unix_ms = last_ms
        variable = _variable(previous) + 1 + (number & ((1 << _STEP_BITS) - 1))
        if variable > _LARGEST:
            unix_ms, variable = last_ms + 1, number & _LARGEST
    high, low = variable >> 62, variable & ((1 << 62) - 1)
    return UUID(int=(unix_ms << 80) | (7 << 76) | (high << 64) | (2 << 62) | low)


def _variable(uuid: UUID) -> int:
    return (((uuid.int >> 64) & 0xFFF) << 62) | (uuid.int & ((1 << 62) - 1))
