"""Test the text form of hints: it round-trips, and no text breaks a listener."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.hints.topics import (
    IDS_PER_PAYLOAD,
    MAX_PAYLOAD_BYTES,
    CancelAsked,
    Everything,
    Hint,
    LeaseTaken,
    MessagesWritten,
    TaskEnded,
    TasksReady,
    TurnFree,
    WorkflowsMoved,
    decode,
    encode,
)

_ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
_SOME_IDS = st.lists(st.uuids(), min_size=1, max_size=20).map(tuple)


@pytest.mark.parametrize(
    ("hint", "payload"),
    [
        (TasksReady("mail"), "t:mail"),
        (TasksReady("a:b,c"), "t:a:b,c"),
        (TaskEnded((_ID, _ID)), f"d:{_ID},{_ID}"),
        (CancelAsked(_ID), f"c:{_ID}"),
        (LeaseTaken((_ID,)), f"l:{_ID}"),
        (Everything(), "*"),
        (WorkflowsMoved(), "w"),
        (MessagesWritten(), "o:"),
        (MessagesWritten("a:b"), "o:::a:b"),
        (TurnFree(), "r"),
    ],
)
def test_hint_payloads_are_those_that_the_sql_statements_send(hint: Hint, payload: str) -> None:
    assert encode(hint) == (payload,)
    assert decode(payload) == hint


@given(
    st.one_of(
        st.builds(TasksReady, st.text(min_size=1, max_size=200)),
        st.builds(TaskEnded, _SOME_IDS),
        st.builds(CancelAsked, st.uuids()),
        st.builds(LeaseTaken, _SOME_IDS),
        st.just(Everything()),
        st.builds(MessagesWritten, st.none() | st.text(min_size=1, max_size=200)),
    )
)
def test_a_hint_survives_encoding_and_decoding(hint: Hint) -> None:
    assert [decode(payload) for payload in encode(hint)] == [hint]


@given(st.text())
def test_decoding_any_text_raises_no_error(text: str) -> None:
    for payload in (text, f"t:{text}", f"d:{text}", f"c:{text}", f"l:{text}", f"o:{text}"):
        hint = decode(payload)
        assert hint is None or isinstance(hint, Hint)


@pytest.mark.parametrize("payload", ["", ":", "t:", "d:", "d:,", "c:nobody", "l:1,2", "x:mail", "mail"])
def test_a_payload_that_is_not_a_hint_is_ignored(payload: str) -> None:
    assert decode(payload) is None


def test_one_invalid_id_does_not_hide_the_other_ids_of_a_payload() -> None:
    assert decode(f"d:broken,{_ID}") == TaskEnded((_ID,))


def test_many_ids_are_split_into_payloads_that_postgresql_accepts() -> None:
    ids = tuple(uuid4() for _ in range(3 * IDS_PER_PAYLOAD + 1))
    payloads = encode(TaskEnded(ids))
    assert len(payloads) == 4
    assert max(len(payload.encode()) for payload in payloads) <= MAX_PAYLOAD_BYTES
    told: list[UUID] = []
    for payload in payloads:
        hint = decode(payload)
        assert isinstance(hint, TaskEnded)
        told += hint.ids
    assert tuple(told) == ids


def test_a_queue_name_too_long_for_a_payload_becomes_a_hint_to_check_everything() -> None:
    assert encode(TasksReady("ü" * MAX_PAYLOAD_BYTES)) == ("*",)


def test_a_hint_of_an_outbox_row_is_reduced_to_its_queue() -> None:
    assert decode(f"o:7:{_ID}:a:b") == MessagesWritten("a:b")
    assert decode("o:" + 7_900 * "9") == MessagesWritten()
