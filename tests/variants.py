"""Helpers for parametrised tests of which `make test` runs only some variants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the values, of which all except the `quick` ones are marked for `make test-long`.

    A tuple contains the values of several parameters.

    Raises: ValueError if a quick value is not among the values.
    """
    listed = [*values]
    if missing := [one for one in quick if one not in listed]:
        raise ValueError(f"no such variants: {missing}")
    return [one if one in quick else _long(one) for one in listed]


def _long(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)


def every_nth_quick(step: int, values: Iterable[Any]) -> list[Any]:
    """Return the values, of which `make test` runs the first and every `step`-th after it."""
    return [one if number % step == 0 else _long(one) for number, one in enumerate(values)]
