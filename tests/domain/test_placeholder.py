"""A placeholder can be passed as an argument and indexed, and rejects every use that needs the value."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest

from everbeat.domain.workflow.placeholders import Placeholder, Promise, promise_of
from everbeat.domain.workflow.shapes import shape_of
from everbeat.errors import EverbeatError, NoSuchPart, PlaceholderUsed
from tests.domain.workflow_types import Payment


class Pay:
    owner = object()
    source = 3
    title = "node 'pay'"


def placeholder(annotation: Any = Payment, **facts: Any) -> Any:
    return Placeholder(Promise(origin=Pay(), shape=shape_of(annotation), **facts))


async def awaited(value: Any) -> None:
    await value


USES: list[tuple[Callable[[Any], object], str]] = [
    (bool, "tested for truth"),
    (lambda it: it or 1, "tested for truth"),
    (lambda it: not it, "tested for truth"),
    (lambda it: it == 1, "compared"),
    (lambda it: it != 1, "compared"),
    (lambda it: it == 1, "compared"),
    (lambda it: it < 1, "compared"),
    (lambda it: sorted([it, it]), "compared"),
    (list, "looped over"),
    (lambda it: [*it], "looped over"),
    (reversed, "looped over"),
    (len, "measured"),
    (lambda it: 1 in it, "searched"),
    (lambda it: it(), "called"),
    (lambda it: awaited(it).send(None), "awaited"),
    (str, "written as text"),
    (lambda it: f"{it}", "written as text"),
    (lambda it: f"{it:>5}", "written as text"),
    (lambda it: f"{it}", "written as text"),
    (bytes, "written as text"),
    (int, "used as a number"),
    (float, "used as a number"),
    (round, "used as a number"),
    (lambda it: [1, 2][it], "used as a number"),
    (lambda it: it + 1, "calculated with"),
    (lambda it: 1 + it, "calculated with"),
    (lambda it: operator.iadd(it, 1), "calculated with"),
    (lambda it: "a" + it, "calculated with"),
    (lambda it: it**2, "calculated with"),
    (lambda it: -it, "calculated with"),
    (lambda it: it | 1, "calculated with"),
    (lambda it: operator.setitem(it, 0, 1), "changed"),
]


@pytest.mark.parametrize(("use", "says"), USES)
def test_using_a_placeholder_as_a_value_names_the_node_and_the_fix(
    use: Callable[[Any], object], says: str
) -> None:
    with pytest.raises(EverbeatError) as caught:
        use(placeholder())
    assert isinstance(caught.value, TypeError | AttributeError)
    assert says in str(caught.value)
    assert "node 'pay'" in str(caught.value)
    assert caught.value.fix


async def test_a_placeholder_cannot_be_entered_or_iterated() -> None:
    with pytest.raises(PlaceholderUsed, match="entered"), placeholder():
        pass
    with pytest.raises(PlaceholderUsed, match="looped over"):
        async for _ in placeholder():
            pass


def test_placeholders_can_be_printed_hashed_and_compared() -> None:
    one, other = placeholder(), placeholder()
    assert repr(one) == "<result of node 'pay'>"
    assert repr(one.lines[0].amount) == "<result.lines[0].amount of node 'pay'>"
    assert repr(placeholder(wants="outcome")) == "<outcome of node 'pay'>"
    assert len({one, other, one}) == 2
    assert [one, other].index(one) == 0
    assert promise_of(one) is not promise_of(other)
    assert promise_of(Payment) is None


def test_parts_of_a_placeholder_are_placeholders() -> None:
    promise = promise_of(placeholder().lines[2].amount)
    assert promise is not None
    assert promise.path == ("lines", 2, "amount")
    assert promise.shape == shape_of(int)
    assert promise.origin.source == 3


def test_a_missing_part_of_a_placeholder_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(NoSuchPart, match=r"<result.line of node 'pay'> has no .nte.*did you mean note\?"):
        placeholder().line.nte  # noqa: B018 - it raises
    with pytest.raises(NoSuchPart, match=r"has no \[5\].*pass it as a whole"):
        placeholder(int)[5]
    assert not hasattr(placeholder(), "nothing")
    with pytest.raises(NoSuchPart, match="for a reason"):
        placeholder(whole="for a reason").amount  # noqa: B018 - it raises


def test_a_placeholder_cannot_be_an_index() -> None:
    with pytest.raises(NoSuchPart, match="node 'pay'"):
        placeholder(list[int])[placeholder(int)]


def test_a_placeholder_can_be_copied_but_not_assigned_to() -> None:
    half_made = Placeholder.__new__(Placeholder)
    with pytest.raises(AttributeError):
        half_made.amount  # noqa: B018 - it raises
    assert repr(copy.copy(placeholder())) == "<result of node 'pay'>"
    with pytest.raises(AttributeError):
        placeholder().amount = 3
