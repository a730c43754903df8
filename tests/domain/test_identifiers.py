"""Ids sort by time, never repeat and cannot be guessed, even if the clock steps back."""

from __future__ import annotations

from uuid import RFC_4122, UUID

from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.identifiers import RANDOM_BYTES, uuid7

MOMENTS = st.integers(min_value=0, max_value=2**48 - 2)
RANDOM = st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES)


def test_uuid7_has_the_standard_layout() -> None:
    made = uuid7(unix_ms=0x017F22E279B0, random=bytes.fromhex("33221100ffeeddccbbaa"))
    assert (made.version, made.variant) == (7, RFC_4122)
    assert made.int >> 80 == 0x017F22E279B0


@given(st.lists(st.tuples(MOMENTS, RANDOM), min_size=2, max_size=50))
def test_each_uuid7_is_greater_than_the_previous_one_even_if_the_clock_steps_back(
    draws: list[tuple[int, bytes]],
) -> None:
    made: list[UUID] = []
    for unix_ms, random in draws:
        made.append(uuid7(unix_ms=unix_ms, random=random, previous=made[-1] if made else None))
    assert made == sorted(set(made))
    assert {each.version for each in made} == {7}
    assert {each.variant for each in made} == {RFC_4122}


def test_uuid7_moves_to_the_next_millisecond_when_one_is_full() -> None:
    last = uuid7(unix_ms=5, random=b"\xff" * RANDOM_BYTES)
    following = uuid7(unix_ms=5, random=b"\x00" * RANDOM_BYTES, previous=last)
    assert following.int >> 80 == 6
    assert following > last


@given(MOMENTS, RANDOM, RANDOM)
def test_the_time_of_a_uuid7_can_be_read(unix_ms: int, random: bytes, other: bytes) -> None:
    first = uuid7(unix_ms=unix_ms, random=random)
    assert first.int >> 80 == unix_ms
    later = uuid7(unix_ms=unix_ms + 1, random=other, previous=first)
    assert later.int >> 80 == unix_ms + 1
