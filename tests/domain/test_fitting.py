"""The result type of one node is rejected as an argument of another only if it clearly cannot fit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, TypedDict
from uuid import UUID

import msgspec
import pytest

from everbeat.domain.task.outcome import TaskResult
from everbeat.domain.workflow.shapes import fits, shape_of
from everbeat.errors import TaskError
from tests.domain.codec_types import Tree
from tests.domain.test_codec import CARRIED
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
    SpecialPayment,
    TaggedPacked,
)


class SameKeys(TypedDict):
    name: str


class MoreKeys(TypedDict):
    name: str
    price: int


class OtherKeys(TypedDict):
    name: int


FITTING = [
    (int, float),
    (int, Decimal),
    (bool, bool),
    (bool, Literal[True]),
    (int, Any),
    (Any, int),
    (object, UUID),
    (int, object),
    (int, int | None),
    (int | None, int),
    (int | str, str | None),
    (int, Annotated[int, msgspec.Meta(ge=1)]),
    (Annotated[int, msgspec.Meta(description="a number")], int),
    (list[int], Sequence[float]),
    (list[int], tuple[int, ...]),
    (tuple[int, ...], list[int]),
    (tuple[int, str], tuple[float, str]),
    (tuple[int, int], list[int]),
    (list[int], tuple[int, int]),
    (set[int], list[int]),
    (Pair, list[Any]),
    (dict[str, int], dict[str, float]),
    (dict[str, Any], Line),
    (Line, dict[str, Any]),
    (SpecialPayment, Payment),
    (Page[int], Page[float]),
    (Page[Page[int]], Page[Page[int]]),
    (Tree, Tree),
    (Payment, Payment),
    (Keyed, SameKeys),
    (SameKeys, dict[str, str]),
    (Line, OtherKeys | None | Line),
    (Colour, str),
    (str, Colour),
    (Colour, Literal["red"]),
    (Literal["a", "b"], str),
    (str, Literal["a"]),
    (Literal["a", "b"], Literal["b", "c"]),
    (Model, dict[str, Any]),
    (Root, list[int]),
    (TaggedPacked, list[Any]),
    (TaskResult[int], TaskResult[float]),
    (TaskResult[int], TaskResult[Any]),
    (list[TaskResult[int]], list[TaskResult[int]]),
    (None, None),
    (None, int | None),
]

MISFITTING = [
    (int, str),
    (str, int),
    (bool, int),
    (int, bool),
    (float, int),
    (None, int),
    (str, UUID),
    (UUID, str),
    (date, datetime),
    (list[int], int),
    (int, list[int]),
    (list[int], list[str]),
    (list[int] | None, list[str]),
    (list[list[int]], list[list[str]]),
    (tuple[int, int], tuple[int, int, int]),
    (tuple[int, str], list[int]),
    (dict[str, int], dict[str, str]),
    (dict[str, int], dict[int, int]),
    (dict[str, int], list[int]),
    (Line, Payment),
    (Payment, SpecialPayment),
    (Line, Renamed),
    (Line, list[Any]),
    (Page[int], Page[str]),
    (Page[Page[int]], Page[Page[str]]),
    (Pair, Payment),
    (Packed, TaggedPacked),
    (Packed, Line),
    (SameKeys, MoreKeys),
    (SameKeys, OtherKeys),
    (Colour, int),
    (Literal["a"], int),
    (Literal["a"], Literal["b"]),
    (Literal[1], Literal[True]),
    (Colour, Literal["green"]),
    (Model, Line),
    (Model, int),
    (TaskError, int),
    (TaskResult[int], int),
    (int, TaskResult[int]),
    (TaskResult[int], TaskResult[str]),
    (TaskResult[Line], TaskResult[Payment]),
    (list[TaskResult[int]], list[int]),
    (int | str, list[int] | None),
]


@pytest.mark.parametrize(("given", "wanted"), FITTING)
def test_a_result_type_that_can_fit_the_parameter_is_accepted(given: Any, wanted: Any) -> None:
    assert fits(shape_of(given), shape_of(wanted))


@pytest.mark.parametrize(("given", "wanted"), MISFITTING)
def test_a_result_type_that_cannot_fit_the_parameter_is_rejected(given: Any, wanted: Any) -> None:
    assert not fits(shape_of(given), shape_of(wanted))


@pytest.mark.parametrize("annotation", [annotation for annotation, _ in CARRIED], ids=str)
def test_every_supported_type_fits_itself(annotation: Any) -> None:
    assert fits(msgspec.inspect.type_info(annotation), msgspec.inspect.type_info(annotation))
