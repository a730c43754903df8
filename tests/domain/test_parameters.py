"""Reading arguments and claiming tasks agree on whether a function accepts the names of a task's arguments."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.task.context import Context
from everbeat.domain.task.definition import CallCodec
from everbeat.domain.task.needs import Parameters, given_names
from everbeat.errors import PayloadError

NAMES = ("a", "b", "c", "d", "rest", "more")


def function(signature: str) -> Any:
    scope: dict[str, Any] = {"Context": Context}
    exec(f"def made({signature}): ...", scope)
    return scope["made"]


@st.composite
def signatures(draw: st.DrawFn) -> str:
    """Draw a signature of positional-only, ordinary and keyword-only names, defaults, `*rest`, `**more` and a leading Context."""
    names = draw(st.permutations(NAMES[:4]))[: draw(st.integers(0, 4))]
    first, second = sorted((draw(st.integers(0, len(names))), draw(st.integers(0, len(names)))))
    defaults_from = draw(st.integers(0, len(names)))
    parts = ["ctx: Context"] if draw(st.booleans()) else []
    for place, name in enumerate(names[:second]):
        parts.append(f"{name}: int" + (" = 1" if place >= defaults_from else ""))
        if place == first - 1:
            parts.append("/")
    has_rest = draw(st.booleans())
    if has_rest:
        parts.append("*rest: int")
    elif names[second:]:
        parts.append("*")
    parts += [f"{name}: int" + (" = 1" if draw(st.booleans()) else "") for name in names[second:]]
    if draw(st.booleans()):
        parts.append("**more: int")
    return ", ".join(parts)


ARGUMENTS = st.dictionaries(
    st.sampled_from([*NAMES, "e"]), st.sampled_from([1, "text", [1], {"x": 1}, {"a": 1}, None]), max_size=6
)


@given(signatures(), ARGUMENTS)
def test_arguments_that_the_codec_can_read_fit_the_claim_condition(  # J2
    signature: str, arguments: dict[str, Any]
) -> None:
    codec = CallCodec.from_function(function(signature), task_name="made")
    stored = json.dumps(arguments)
    fits = codec.accepts.fits(arguments)
    assert given_names(stored) == set(arguments)
    needs = json.dumps({"arguments": sorted(arguments)})
    assert codec.accepts.fits_needs(needs) is fits
    registered = msgspec.json.decode(json.dumps(codec.accepts.to_json()), type=Parameters)
    assert registered.fits_needs(needs) is fits
    try:
        codec.decode(stored)
    except PayloadError:
        return
    assert fits


@given(signatures(), st.sets(st.sampled_from([*NAMES, "e"])))
def test_valid_values_can_be_read_exactly_if_their_names_fit(signature: str, names: set[str]) -> None:  # J2
    codec = CallCodec.from_function(function(signature), task_name="made")
    values: dict[str, Any] = {"rest": [1], "more": {"x": 1}}
    stored = json.dumps({name: values.get(name, 1) for name in names})
    try:
        codec.decode(stored)
    except PayloadError:
        assert not codec.accepts.fits(names)
    else:
        assert codec.accepts.fits(names)


@pytest.mark.parametrize(
    "needs",
    [
        '{"arguments": ["a"], "answers": []}',
        "{}",
        '{"arguments": "a"}',
        '{"arguments": [1]}',
        "[]",
        "no JSON",
        "",
    ],
)
def test_an_unknown_or_damaged_requirement_never_fits(needs: str) -> None:  # J2
    assert not Parameters(None).fits_needs(needs)


def test_a_function_with_variable_keywords_still_requires_its_own_parameters() -> None:  # J2
    anything = Parameters(None, ("a",))
    assert anything.fits({"a", "b"})
    assert not anything.fits({"b"})


@pytest.mark.parametrize("stored", ["[]", "1", "{", "", "null", '{"a": }'])
def test_json_that_is_not_an_object_has_no_argument_names(stored: str) -> None:
    assert given_names(stored) is None
