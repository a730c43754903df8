"""Attributes and items in Python lead to the right places in JSON."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import pytest

from everbeat.domain.task.definition import CallCodec
from everbeat.domain.typed_json import TypedJson
from everbeat.domain.workflow.graph import part_at
from everbeat.domain.workflow.shapes import (
    ANY,
    NoPart,
    Part,
    attribute,
    inner,
    item,
    items_of,
    shape_of,
    spelled,
)
from everbeat.errors import TaskError
from tests.domain.workflow_types import (
    Colour,
    Keyed,
    Line,
    Model,
    Packed,
    Page,
    Pair,
    Payment,
    Renamed,
    Root,
    Short,
    Sided,
    TaggedPacked,
)

LINE = Line(7, "n")
PAYMENT = Payment(1, LINE, [LINE, Line(8)], {UUID(int=5): LINE}, Payment(2, LINE))


def stored(annotation: Any, value: object) -> str:
    def task(): ...

    task.__annotations__ = {"return": annotation}
    return CallCodec.from_function(task, task_name="task").encode_result(value).decode()


def walk(annotation: Any, steps: Sequence[str | tuple[object]]) -> tuple[tuple[str | int, ...], Part]:
    """Return the path in JSON and its part; a step is an attribute (text) or an item (a tuple of one)."""
    part = Part("", shape_of(annotation))
    path: list[str | int] = []
    for step in steps:
        part = attribute(part.shape, step) if isinstance(step, str) else item(part.shape, step[0])
        path.append(part.step)
    return tuple(path), part


@pytest.mark.parametrize(
    ("annotation", "value", "steps", "get", "kind"),
    [
        (Payment, PAYMENT, ["amount"], lambda it: it.amount, int),
        (Payment, PAYMENT, ["line", "note"], lambda it: it.line.note, str),
        (Payment, PAYMENT, ["lines", (1,), "amount"], lambda it: it.lines[1].amount, int),
        (Payment, PAYMENT, ["lines", (-1,)], lambda it: it.lines[-1], Line),
        (Payment, PAYMENT, ["by_id", (UUID(int=5),), "amount"], lambda it: it.by_id[UUID(int=5)].amount, int),
        (Payment, PAYMENT, ["next", "amount"], lambda it: it.next.amount, int),
        (Payment | None, PAYMENT, ["amount"], lambda it: it.amount, int),
        (Page[Line], Page([LINE]), ["items", (0,), "amount"], lambda it: it.items[0].amount, int),
        (Renamed, Renamed("u", LINE), ["user_name"], lambda it: it.user_name, str),
        (Renamed, Renamed("u", LINE), ["inner_part", "amount"], lambda it: it.inner_part.amount, int),
        (Short, Short(3), ["always"], lambda it: it.always, int),
        (Packed, Packed(1, LINE), ["second", "note"], lambda it: it.second.note, str),
        (TaggedPacked, TaggedPacked(4), ["first"], lambda it: it.first, int),
        (Pair, Pair(1, LINE), ["right", "amount"], lambda it: it.right.amount, int),
        (Pair, Pair(1, LINE), [(0,)], operator.itemgetter(0), int),
        (Keyed, {"name": "n", "size": 3}, [("size",)], operator.itemgetter("size"), int),
        (Model, Model(plain=1, user_id=2, written=3), ["plain"], lambda it: it.plain, int),
        (Model, Model(plain=1, user_id=2, written=3), ["user_id"], lambda it: it.user_id, int),
        (dict[str, list[int]], {"a.b": [1]}, [("a.b",), (0,)], lambda it: it["a.b"][0], int),
        (dict[int, int], {5: 6}, [(5,)], operator.itemgetter(5), int),
        (tuple[int, str], (1, "x"), [(-1,)], operator.itemgetter(-1), str),
        (tuple[str, ...], ("x", "y"), [(1,)], operator.itemgetter(1), str),
        (Any, {"a": [1]}, [("a",), (0,)], lambda it: it["a"][0], Any),
        (Any, {"a": {"b": 1}}, ["a", "b"], lambda it: it["a"]["b"], Any),
    ],
)  # fmt: skip
def test_the_path_of_a_part_finds_its_json(
    annotation: Any, value: object, steps: Sequence[Any], get: Callable[[Any], object], kind: Any
) -> None:
    path, part = walk(annotation, steps)
    assert TypedJson(kind).decode(part_at(stored(annotation, value), path)) == get(value)
    assert part.shape == shape_of(kind)


def test_a_negative_tuple_index_counts_from_the_end() -> None:
    assert item(shape_of(tuple[int, str, int]), -1).step == 2
    assert item(shape_of(Pair), -2).step == 0


def test_a_pydantic_alias_is_the_step_in_json() -> None:
    assert attribute(shape_of(Model), "written").step == "asWritten"


@pytest.mark.parametrize(
    ("annotation", "steps", "says", "choices"),
    [
        (Payment, ["amnt"], "Payment has no field of this name", "amount"),
        (Payment, ["total"], "Payment has no field of this name", "amount"),
        (Payment, [("amount",)], "it is a Payment", ()),
        (Payment | None, ["amnt"], "Payment has no field", "amount"),
        (Short, ["seldom"], "omit_defaults", ()),
        (Model, ["plian"], "Model has no field", "plain"),
        (Model, ["secret"], "Model has no field", ()),
        (Model, [("plain",)], "it is a Model", ()),
        (Root, ["root"], "RootModel", ()),
        (Keyed, ["name"], "it is a Keyed", ()),
        (Keyed, [("nme",)], "has no such key", "['name']"),
        (dict[str, int], ["a"], r"it is a dict\[str, int\]", ()),
        (dict[str, int], [(5,)], "its keys are str, and 5 is a int", ()),
        (dict[int, int], [("5",)], "its keys are int", ()),
        (list[int], [("a",)], r"it is a list\[int\]", ()),
        (list[int], [(True,)], r"has no part", ()),
        (list[int], [(slice(1),)], "a slice", ()),
        (set[int], [(0,)], "no order", ()),
        (tuple[int, str], [(2,)], "has 2 items", ()),
        (int, ["real"], "it is a int, which has no attributes", ()),
        (str, [(0,)], "it is a str", ()),
        (None, ["amount"], "it is a None", ()),
        (TaskError, ["code"], "it is a TaskError", ()),
    ],
)
def test_a_missing_part_is_rejected_with_a_reason(
    annotation: Any, steps: Any, says: str, choices: Any
) -> None:
    with pytest.raises(NoPart, match=says) as caught:
        walk(annotation, steps)
    assert not choices or choices in caught.value.choices


def test_a_part_whose_place_differs_between_alternatives_is_rejected() -> None:
    with pytest.raises(NoPart, match="written differently in each of"):
        attribute(shape_of(Pair | Sided), "left")


def test_a_part_of_one_alternative_is_found_there() -> None:
    assert attribute(shape_of(Line | Pair), "left").step == 0
    assert attribute(shape_of(Renamed | None), "user_name").step == "userName"


@pytest.mark.parametrize(
    ("annotation", "step", "found"),
    [
        (list[int], 3, int),
        (list[int], "a", Any),
        (Sequence[Line], 0, Line),
        (tuple[int, str], 1, str),
        (tuple[int, str], 5, Any),
        (tuple[int, ...], 5, int),
        (dict[str, Line], "x", Line),
        (list[int] | None, 0, int),
        (list[int] | list[str], 0, Any),
        (Keyed, "name", str),
        (Keyed, "other", Any),
        (Any, 0, Any),
        (int, 0, Any),
    ],
)
def test_inner_returns_the_annotation_of_a_part_of_an_argument(
    annotation: Any, step: str | int, found: Any
) -> None:
    assert inner(annotation, step) == found


@pytest.mark.parametrize(
    ("annotation", "found"),
    [
        (list[int], int),
        (set[str], str),
        (tuple[int, ...], int),
        (tuple[int, str], int | str),
        (list[Line] | None, Line),
        (Any, Any),
        (object, Any),
        (Root, Any),
    ],
)
def test_items_of_returns_the_item_shape_of_a_list(annotation: Any, found: Any) -> None:
    assert items_of(shape_of(annotation)) == shape_of(found)


@pytest.mark.parametrize("annotation", [int, str, dict[str, int], Payment, None, Keyed])
def test_items_of_returns_none_for_types_that_are_not_lists(annotation: Any) -> None:
    assert items_of(shape_of(annotation)) is None


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (None, "None"),
        (Any, "Any"),
        (list[Payment], "list[Payment]"),
        (dict[str, int | None], "dict[str, int | None]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (tuple[int, str], "tuple[int, str]"),
        (set[int], "set[int]"),
        (Literal["a"], "Literal['a']"),
        (Colour, "Colour"),
        (Page[Line], "Page[Line]"),
        (UUID, "UUID"),
        (Decimal, "Decimal"),
    ],
)
def test_shapes_are_spelled_like_annotations(annotation: Any, text: str) -> None:
    assert spelled(shape_of(annotation)) == text


def test_a_type_that_cannot_be_described_has_the_shape_any() -> None:
    assert shape_of(lambda: 1) == ANY
