"""Test which values answer a question, how a typed answer is read, and which questions are refused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import pytest

from everbeat.domain.task.questions import AnswerType, described, stored_question, type_of
from everbeat.errors import PayloadError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Address:
    street: str


FITTING: list[tuple[Any, list[Any], list[Any]]] = [
    (bool, [True, False], [1, "true", None]),
    (int, [3, -1], [True, 1.5, "3"]),
    (float, [3, 1.5], [True, "1.5"]),
    (str, ["", "yes"], [1, None]),
    (str | None, ["yes", None], [1]),
    (Literal["a", "b"], ["a", "b"], ["c", 1]),
    (Literal[1, 2], [1, 2], [True, 3, "1"]),
    (Colour, ["red", "blue"], ["RED", "green"]),
    (list[int], [[1], []], [{"a": 1}, "x"]),
    (Address, [{"street": "x"}], [["x"], "x"]),
    (UUID, ["00000000-0000-0000-0000-000000000001"], [1]),
    (int | str, [1, "x", [1]], []),
    (Any, [1, None, {"a": []}], []),
]


@pytest.mark.parametrize(("annotation", "fit", "misfit"), FITTING, ids=lambda each: str(each)[:40])
def test_an_answer_fits_the_type_of_its_question(annotation: Any, fit: list[Any], misfit: list[Any]) -> None:
    asked = type_of(annotation)
    assert [each for each in fit if not asked.accepts(each)] == []
    assert [each for each in misfit if asked.accepts(each)] == []


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (bool, "yes", True),
        (bool, "No", False),
        (bool, "true", True),
        (int, "3", 3),
        (float, "1.5", 1.5),
        (str, "3", "3"),
        (str, '"quoted"', '"quoted"'),
        (str | None, "null", "null"),
        (Literal["a", "b"], "a", "a"),
        (Literal[1, 2], "2", 2),
        (list[int], "[1]", [1]),
        (Any, '{"a": 1}', {"a": 1}),
        (Any, "plain", "plain"),
    ],
)
def test_a_typed_answer_is_read_as_the_question_asks(annotation: Any, text: str, value: object) -> None:
    assert type_of(annotation).read(text) == value


def test_an_answer_that_does_not_fit_is_refused_with_what_the_question_asks_for() -> None:
    with pytest.raises(
        PayloadError, match='The answer "perhaps" does not fit: the question asks for true or false'
    ):
        type_of(bool).read("perhaps")
    with pytest.raises(PayloadError, match='asks for "a" or "b"'):
        type_of(Literal["a", "b"]).read("c")
    assert str(type_of(int | None)) == "a whole number or null"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"question": ""}, "The text of a question of task 'refund' is not a text of 1 to 2,000 characters"),
        ({"question": 3}, "The text of a question"),
        ({"question": "Refund\ud800?"}, "The text of a question .* without NUL and lone surrogates"),
        ({"note": "\udfff"}, "The note of a question"),
        ({"note": "x" * 2_001}, "The note of a question"),
        ({"annotation": range}, "cannot be carried by JSON"),
        ({"choices": []}, "are not a list of 1 to 100 values"),
        ({"choices": "ab"}, "are not a list of 1 to 100 values"),
        ({"choices": [1, "x"], "annotation": int}, 'The choice "x" .* is not a whole number'),
        ({"choices": [{1}]}, "A choice of a question"),
    ],
)
def test_a_wrong_question_is_refused_with_a_reason(changed: dict[str, Any], reason: str) -> None:
    given = {"question": "Refund?", "annotation": Any, "choices": None, "note": None} | changed
    with pytest.raises(PayloadError, match=reason):
        described(
            given["question"],
            given["annotation"],
            choices=given["choices"],
            note=given["note"],
            task_name="refund",
        )


def test_an_unreadable_stored_question_is_shown_as_it_is() -> None:
    assert stored_question("{").question == "{"
    assert stored_question(None).type == AnswerType()
