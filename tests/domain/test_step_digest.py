"""A step's digest is equal for equal arguments in every process, differs for other arguments, and never raises."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import threading
import uuid
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.task.argument_digest import MOST_VALUES, digest_of_call

Point = namedtuple("Point", ["x", "y"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def charge(order: int, cents: int = 100, *, currency: str = "EUR", **more: Any) -> int:
    return order


def everything(*args: Any, **kwargs: Any) -> None: ...


def digest(*args: Any, **kwargs: Any) -> str:
    return digest_of_call(everything, args, kwargs)


class Level(Enum):
    LOW = 1
    HIGH = 2


class Word(StrEnum):
    A = "a"


class Number(IntEnum):
    ONE = 1


@dataclass
class Order:
    number: int
    note: str = ""
    seen: float = field(default=0.0, compare=False)


class Line(msgspec.Struct):
    number: int
    note: str | None = None


class Model(pydantic.BaseModel):
    number: int
    note: str | None = None


class Shop:
    """Not a dataclass: its digest contains only its class name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def charge(self, order: int) -> int:
        return order

    @classmethod
    def make(cls, order: int) -> int:
        return order


class TestCalls:
    def test_the_digest_binds_arguments_like_python(self) -> None:
        first = digest_of_call(charge, (1, 5), {})
        assert (
            first
            == digest_of_call(charge, (1,), {"cents": 5})
            == digest_of_call(charge, (), {"cents": 5, "order": 1})
        )
        assert first == digest_of_call(functools.partial(charge, cents=5), (1,), {})
        assert first == digest_of_call(functools.partial(functools.partial(charge, 1), 5), (), {})
        others = [
            digest_of_call(charge, args, kwargs)
            for args, kwargs in [
                ((1,), {}),
                ((5, 1), {}),
                ((1, 5), {"currency": "USD"}),
                ((1, 5), {"a": 1}),
                ((1, 5), {"b": 1}),
            ]
        ]
        assert len({first, *others}) == 6

    def test_the_digest_of_a_method_includes_its_object(self) -> None:
        assert digest_of_call(Shop("a").charge, (1,), {}) == digest_of_call(
            Shop("b").charge, (), {"order": 1}
        )
        assert digest_of_call(Shop("a").charge, (1,), {}) != digest_of_call(Shop("a").charge, (2,), {})
        assert digest_of_call(Shop.make, (1,), {}) == digest_of_call(Shop("b").make, (1,), {})
        assert digest_of_call(Order(1).__eq__, (1,), {}) != digest_of_call(Order(2).__eq__, (1,), {})

    def test_the_digest_binds_a_wrapped_function_by_the_wrapped_parameters(self) -> None:
        @functools.wraps(charge)
        def wrapper(*args: Any, **kwargs: Any) -> int:
            return charge(*args, **kwargs)

        cached = functools.lru_cache(charge)
        for function in (wrapper, cached):
            assert digest_of_call(function, (1,), {"cents": 5}) == digest_of_call(charge, (1, 5), {})

    def test_the_digest_accepts_a_call_that_python_would_reject(self) -> None:
        assert len(digest_of_call(charge, (), {})) == 32
        assert digest_of_call(charge, (1, 2, 3), {}) != digest_of_call(charge, (1, 2, 4), {})
        assert len(digest_of_call(min, (1, 2), {"key": abs})) == 32


class TestValues:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ((1, [2]), [1, (2,)]),
            (1, 1.0),
            (1, Decimal("1.00")),
            (1.5, Decimal("1.5")),
            (0.0, -0.0),
            (Decimal("1e30"), 10**30),
            (math.nan, -math.nan),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
            ({"a": 1}, OrderedDict(a=1)),
            ({"one", "two", "three"}, frozenset(["three", "two", "one"])),
            (Point(1, 2), [1, 2]),
            (b"ab", bytearray(b"ab")),
            (Word.A, "a"),
            (Number.ONE, 1),
            (datetime(2030, 1, 1, 12, tzinfo=UTC), datetime(2030, 1, 1, 14, tzinfo=timezone(timedelta(hours=2)))),
            (Path("/a/b"), PurePosixPath("/a/b")),
            (Order(1), Order(1, seen=7.0)),
            (threading.Lock(), threading.Lock()),
            (object(), object()),
            (Shop("a"), Shop("b")),
        ],
    )  # fmt: skip
    def test_equivalent_values_have_the_same_digest(self, one: object, other: object) -> None:
        assert digest(one) == digest(other)

    def test_different_values_have_different_digests(self) -> None:
        values: list[Any] = [
            None, True, False, 1, -1, 2**200, 0.1, math.inf, -math.inf, math.nan, "", "1", "a", b"a", [], {}, set(), [1], [[1]], [1, 2], [2, 1],
            {"a": 1}, {"a": "1"}, {1: "a"}, {1}, {(1,)}, Decimal("0.1"), Decimal("1e1000000"), Decimal("1.1"), Level.LOW, Level.HIGH,
            datetime.fromisoformat("2030-01-01"), datetime(2030, 1, 1, tzinfo=UTC), date(2030, 1, 1), timedelta(seconds=1), uuid.UUID(int=1),
            Path("a"),
            Order(1), Order(2), Order(1, "x"), Line(1), Line(2), Model(number=1), Model(number=2), 1j, range(3), charge, everything, Order,
            object(), threading.Lock(), functools.partial(charge, 1), functools.partial(charge, 2),
        ]  # fmt: skip
        digests = [digest(value) for value in values]
        assert len(set(digests)) == len(values)
        assert digest(1, 2) != digest([1, 2]) != digest(1) != digest()

    @pytest.mark.parametrize("kind", [Order, Line, Model])
    def test_the_digest_omits_fields_with_default_values(self, kind: Any) -> None:
        grown = (
            dataclass(type("Order", (), {"__annotations__": {"number": int}}))
            if kind is Order
            else msgspec.defstruct("Line", [("number", int)])
            if kind is Line
            else pydantic.create_model("Model", number=(int, ...))
        )
        assert digest(kind(number=1)) == digest(grown(number=1)) != digest(kind(number=1, note="x"))

    def test_cyclic_deep_and_large_values_have_a_digest(self) -> None:
        cycle: list[Any] = [1]
        cycle.append(cycle)
        deep: list[Any] = []
        wide: list[Any] = [1]
        for _ in range(200):
            deep, wide = [deep], [wide, wide]
        ring = Order(1)
        ring.note = ring  # type: ignore[assignment]
        for value in (cycle, deep, wide, ring, "\ud800", 10**6000):
            assert digest(value) == digest(value)
        assert digest(cycle) != digest([2, cycle])

    def test_the_digest_of_a_very_large_argument_uses_its_type_and_length(self) -> None:
        large = list(range(MOST_VALUES + 1))
        assert digest(large) == digest(large[::-1]) != digest(large[1:])
        assert digest(large[2:]) != digest([*large[3:], 7])

    def test_the_digest_of_an_object_that_raises_uses_its_type(self) -> None:
        class Hostile:
            def __getattribute__(self, name: str) -> Any:
                raise RuntimeError(name)

        @dataclass
        class Lazy:
            number: int

            @property
            def loaded(self) -> int:
                raise RuntimeError

        del Lazy.__eq__
        lazy = Lazy(1)
        object.__delattr__(lazy, "number")
        assert digest(Hostile()) == digest(Hostile()) != digest(lazy)

    @given(JSON, JSON)
    def test_json_values_have_equal_digests_if_and_only_if_they_are_equal(self, one: Any, other: Any) -> None:
        assert digest(one) == digest(json.loads(json.dumps(one)))
        if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
            assert digest(one) == digest(other)
        elif one != other:
            assert digest(one) != digest(other)

    @given(st.dictionaries(st.text(), JSON, min_size=2), st.randoms())
    def test_the_digest_ignores_the_order_of_dict_keys(self, value: dict[str, Any], random: Any) -> None:
        keys = list(value)
        random.shuffle(keys)
        assert digest(value) == digest({key: value[key] for key in keys})


def test_the_digest_is_the_same_in_each_process() -> None:
    program = (
        "from everbeat.domain.task.argument_digest import digest_of_call as d\n"
        "def f(*a, **k): ...\n"
        "print(d(f, ({'one', 'two', 'three'}, {'a': frozenset('xyz')}, object(), 1.5, len), {'b': b'1', 'a': None}))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("0", "1", "2")
    }  # fmt: skip
    assert found == {"a0a3625e993fce3b4a79324bf4d01fbf"}, (
        "records of running tasks hold digests, so the form must not change"
    )


def test_the_digest_of_an_object_with_identity_equality_uses_its_class() -> None:
    @dataclass(eq=False)
    class Client:
        token: str

    class Attempt(msgspec.Struct, eq=False):
        number: int

    assert digest_of_call(everything, (Client("a"),), {}) == digest_of_call(everything, (Client("b"),), {})
    assert digest_of_call(everything, (Attempt(1),), {}) == digest_of_call(everything, (Attempt(2),), {})
