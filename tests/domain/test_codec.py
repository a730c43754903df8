"""Arguments and results travel as JSON by their annotations, and the decoded value equals the sent value."""

from __future__ import annotations

import collections
import inspect
import json
import timeit
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal, Unpack
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from everbeat.domain.task.context import Context
from everbeat.domain.task.definition import CallCodec, encode_any
from everbeat.domain.task.outcome import Completed, Failed, TaskResult
from everbeat.errors import PayloadError, TaskError
from tests.domain.codec_types import (
    Address,
    Cat,
    Colour,
    Derived,
    Dog,
    Doubling,
    Incomparable,
    Item,
    Level,
    MarkedAddress,
    Model,
    Options,
    Point,
    SecretModel,
    SpecialItem,
    SpecialModel,
    Tree,
    Weird,
)

ZONE = timezone(timedelta(hours=5, minutes=30))


def codec_of(annotation: Any) -> CallCodec:
    def task(value): ...

    task.__annotations__ = {"value": annotation, "return": annotation}
    return CallCodec.from_function(task, task_name="task")


def codec(function: Callable[..., Any]) -> CallCodec:
    return CallCodec.from_function(function, task_name=function.__name__)


CARRIED = [
    (int, -(2**200)),
    (float, 0.1),
    (bool, True),
    (str, "a\x00b 😀"),
    (None, None),
    (bytes, b"\x00\xff"),
    (datetime, datetime(2024, 1, 2, 3, 4, 5, 678, tzinfo=ZONE)),
    (datetime, datetime(2024, 1, 2)),  # noqa: DTZ001 - a naive one arrives naive
    (date, date(2024, 2, 29)),
    (time, time(1, 2, 3, tzinfo=UTC)),
    (timedelta, timedelta(days=-3, microseconds=7)),
    (UUID, UUID(int=7)),
    (Decimal, Decimal("1.10")),
    (Colour, Colour.RED),
    (Level, Level.LOW),
    (Address, Address("x", 2.5)),
    (Derived, Derived(3)),
    (Incomparable, Incomparable([1])),
    (Options, {"depth": 1}),
    (Point, Point(1, 2)),
    (Item, Item("a", {"x", "y"})),
    (Cat | Dog, Dog("rex")),
    (Tree, Tree(1, [Tree(2), Tree(3)])),
    (Model, Model(id=1, share=0.5, Label="x")),
    (list[Model | None], [Model(id=1), None]),
    (dict[str, Model], {"a": Model(id=1)}),
    (Literal["a", 1], 1),
    (int | str | None, None),
    (list[Address], [Address("a"), Address("b")]),
    (dict[int, date], {7: date(2024, 1, 1)}),
    (dict[UUID, int], {UUID(int=1): 1}),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2)),
    (set[UUID], {UUID(int=1), UUID(int=2)}),
    (frozenset[int], frozenset({1})),
    (Sequence[int], [1, 2]),
    (Mapping[str, int], {"a": 1}),
    (Any, {"a": [1, 2.5, None, True, "x", {"b": []}]}),
    (object, [1, {"a": None}]),
    (dict[str, object], {"a": [1]}),
    (Annotated[int, msgspec.Meta(gt=3)], 4),
    (TaskResult[Address], Completed(Address("a"))),
    (TaskResult[Address], Failed(TaskError("DECLINED", "no money", {"need": 3}))),
    (TaskResult[None], Completed(None)),
    (TaskResult[Any], Completed({"a": 1})),
    (TaskResult[int] | None, None),
    (list[TaskResult[Decimal]], [Completed(Decimal("1.5")), Failed(TaskError("DECLINED"))]),
    (dict[int, TaskResult[date]], {1: Completed(date(2024, 1, 1))}),
    (tuple[TaskResult[int], ...], (Completed(1), Failed(TaskError("X")))),
    (TaskResult[list[TaskResult[int]]], Completed([Completed(1), Failed(TaskError("X"))])),
    (Annotated[TaskResult[int], "an outcome"], Completed(1)),
]


@pytest.mark.parametrize(
    ("annotation", "value"),
    CARRIED,
    ids=[f"{number}-{str(one[0])[:40]}" for number, one in enumerate(CARRIED)],
)
def test_a_decoded_value_equals_the_encoded_value(annotation: Any, value: Any) -> None:
    tested = codec_of(annotation)
    (arrived,), named = tested.decode(tested.encode((value,), {}))
    result = tested.decode_result(tested.encode_result(value))
    for each in (arrived, result):
        assert type(each) is type(value)
        assert each == value or vars(each) == vars(value)
    assert named == {}


@given(
    some.recursive(
        some.none()
        | some.booleans()
        | some.integers()
        | some.floats(allow_nan=False, allow_infinity=False)
        | some.text(),
        lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    )
)
def test_plain_json_values_survive_the_codec_unchanged(value: Any) -> None:
    tested = codec_of(Any)
    assert tested.decode(tested.encode((value,), {})) == ((value,), {})
    assert json.loads(tested.encode((value,), {})) == {"value": value}


REFUSED = [
    (int, "1", "expected `int`, got `str`"),
    (int, True, "expected `int`, got `bool`"),
    (int, 1.5, "expected `int`, got `float`"),
    (float, float("nan"), "is nan, which JSON does not have"),
    (float | None, float("inf"), "is inf, which JSON does not have"),
    (Any, [1, {"a": float("nan")}], "is nan, which JSON does not have (at value[1]['a'])"),
    (list[float], [1.0, float("-inf")], "is -inf, which JSON does not have (at value[1])"),
    (Model, Model(id=1, share=float("nan")), "is nan, which JSON does not have (at value.share)"),
    (str, "a\udc80", "holds the lone surrogate '\\udc80'"),
    (Any, {"a": {"\ud800": 1}}, "holds the lone surrogate '\\ud800'"),
    (UUID, str(UUID(int=1)), "is of type str and would arrive as UUID"),
    (datetime, "2024-01-01T00:00:00Z", "is of type str and would arrive as datetime"),
    (date, datetime(2024, 1, 1, tzinfo=UTC), "nvalid RFC3339 encoded date"),
    (Annotated[datetime, msgspec.Meta(tz=True)], datetime(2024, 1, 1), "timezone"),  # noqa: DTZ001
    (Any, datetime(2024, 1, 1, tzinfo=UTC), "is of type datetime and would arrive as str"),
    (Any, {1: "a"}, "has the key 1, which would arrive as a str"),
    (Any, {1, 2}, "is of type set and would arrive as list"),
    (Any, Address("a"), "is of type Address and would arrive as dict"),
    (Any, [Point(1)], "is of type Point and would arrive as list (at value[0])"),
    (Any, Weird(), "is of type Weird, which cannot be JSON"),
    (dict[str, Any], {"a": [Weird()]}, "is of type Weird, which cannot be JSON (at value['a'][0])"),
    (Any, (each for each in "ab"), "is of type generator, which cannot be JSON"),
    (Any, {None: 1}, "has keys that JSON cannot carry"),
    (Address, MarkedAddress("a"), "is of type MarkedAddress, would arrive as Address and lose mark"),
    (list[Item], [Item("a"), SpecialItem("b")], "would arrive as Item and lose price (at value[1])"),
    (Model, SpecialModel(id=1), "would arrive as Model and lose more"),
    (Model, Address("a"), "1 validation error for Model id Field required"),
    (SecretModel, SecretModel(token="hush"), "would arrive changed"),
    (Options, {"depth": 1, "width": 2}, "has the key 'width', which its annotation does not know"),
    (Address, {"street": "a"}, "is of type dict and would arrive as Address"),
    (Address, Address(1), "expected `str`, got `int` (at value.street)"),  # type: ignore[arg-type]
    (Doubling, Doubling(1), "would arrive changed"),
    (list[int], [1, "2"], "expected `int`, got `str` (at value[1])"),
    (set[int], [1, 2], "is of type list and would arrive as set"),
    (Literal["a"], "b", "invalid enum value 'b'"),
    (Annotated[int, msgspec.Meta(gt=3)], 1, "expected `int` >= 4"),
    (list[int], collections.deque([1]), "is of type deque"),
]


@pytest.mark.parametrize(("annotation", "value", "message"), REFUSED, ids=lambda each: type(each).__name__)
def test_a_value_that_json_would_change_is_rejected_with_its_parameter_name(
    annotation: Any, value: Any, message: str
) -> None:  # B13
    with pytest.raises(PayloadError) as caught:
        codec_of(annotation).encode((value,), {})
    assert message in str(caught.value)
    assert caught.value.parameter == "value"
    assert "task 'task'" in str(caught.value)
    assert caught.value.fix
    with pytest.raises(PayloadError, match="result of task 'task'"):
        codec_of(annotation).encode_result(value)


def test_the_codec_accepts_a_tuple_where_a_list_arrives() -> None:
    def task(rows, pairs: list[list[int]]): ...

    sent = ({"a": (1, 2)}, [(1, 2), (3, 4)])
    assert codec(task).decode(codec(task).encode(sent, {})) == (({"a": [1, 2]}, [[1, 2], [3, 4]]), {})


def test_subclasses_of_str_arrive_as_plain_str() -> None:
    class SafeText(str): ...

    def task(text: str, anything): ...

    (text, anything), _ = codec(task).decode(codec(task).encode((SafeText("a"), SafeText("b")), {}))
    assert (text, anything) == ("a", "b")
    assert type(text) is type(anything) is str


def test_the_codec_rejects_a_value_that_contains_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(PayloadError, match="nested too deeply, or contains itself"):
        codec_of(Any).encode((endless,), {})
    with pytest.raises(PayloadError, match="nested too deeply, or contains itself"):
        encode_any({"value": endless}, task_name="task")


async def welcome(user_id: int, locale: str = "en") -> str:
    return f"{user_id} {locale}"


def context_first(context: Context, a: int, *, b: int = 2) -> None: ...


def optional_context(context: Context | None, a: int = 1) -> None: ...


def rest(a: int, /, b: int = 2, *xs: int, c: int = 3, **kw: date) -> None: ...


def unpacked(**kw: Unpack[Options]) -> None: ...


def gaps(a: int = 1, b: int = 2, c: int = 3) -> None: ...


def no_parameters() -> None: ...


BOUND: list[tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
    (welcome, (42,), {}, {"user_id": 42}),
    (welcome, (), {"locale": "de", "user_id": 1}, {"user_id": 1, "locale": "de"}),
    (context_first, (1,), {"b": 5}, {"a": 1, "b": 5}),
    (optional_context, (), {}, {}),
    (rest, (1,), {}, {"a": 1}),
    (rest, (1, 2, 3, 4), {"c": 5}, {"a": 1, "b": 2, "xs": [3, 4], "c": 5}),
    (rest, (1,), {"a": date(2024, 1, 1)}, {"a": 1, "kw": {"a": "2024-01-01"}}),
    (unpacked, (), {"depth": 1}, {"kw": {"depth": 1}}),
    (gaps, (5,), {"c": 6}, {"a": 5, "c": 6}),
    (no_parameters, (), {}, {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "stored"), BOUND)
def test_the_codec_stores_arguments_by_parameter_name_and_restores_the_same_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stored: dict[str, Any]
) -> None:
    tested = codec(function)
    data = tested.encode(args, kwargs)
    assert json.loads(data) == stored
    again, named = tested.decode(data)
    context = (None,) if tested.takes_context else ()
    seen = _seen_by(function, *context, *again, **named)
    assert seen == _seen_by(function, *context, *args, **kwargs)


def _seen_by(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


MISCALLED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str | None, str]] = [
    (welcome, (), {}, "user_id", "missing a required argument: 'user_id'"),
    (welcome, (1, "en", 3), {}, None, "too many positional arguments"),
    (welcome, (1,), {"local": "de"}, "local", "did you mean 'locale'?"),
    (welcome, (), {"usr_id": 1}, "usr_id", "unexpected keyword argument 'usr_id'"),
    (welcome, (), {"usr_id": 1}, "usr_id", "did you mean 'user_id'?"),
    (welcome, (1,), {"colour": 1}, "colour", "call it as welcome(user_id: int, locale: str = 'en')"),
    (welcome, (1,), {"user_id": 2}, "user_id", "multiple values for argument 'user_id'"),
    (context_first, (1, 2), {}, None, "too many positional arguments"),
    (context_first, (None, 1), {}, None, "too many positional arguments"),
    (rest, (), {"a": date(2024, 1, 1)}, "a", "'a'"),
    (rest, (1, 2, "x"), {}, "xs", "expected `int`, got `str` (at xs[0])"),
    (rest, (1,), {"z": "tomorrow"}, "kw", "(at kw[...])"),
    (no_parameters, (1,), {}, None, "call it as no_parameters()"),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "parameter", "message"), MISCALLED)
def test_the_codec_rejects_a_wrong_call_like_python_and_names_the_task(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parameter: str | None, message: str
) -> None:  # B13
    with pytest.raises(PayloadError) as caught:
        codec(function).encode(args, kwargs)
    assert message in str(caught.value)
    assert caught.value.parameter == parameter
    assert f"task '{function.__name__}'".lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    ("stored", "parameter", "message"),
    [
        (b'{"locale": "en"}', "user_id", "missing required field `user_id`"),
        (b'{"user_id": 1, "name": "x"}', "name", "unknown field `name`"),
        (b'{"user_id": "1"}', "user_id", "expected `int`, got `str` (at user_id)"),
        (b"[1]", None, "expected `object`, got `array`"),
        (b'{"user_id": 1', None, "is not JSON"),
        (b"\xff\xfe", None, "is not JSON"),
        (b'{"user_id": 1, "locale": "\xff"}', None, "is not JSON"),
    ],
)
def test_the_codec_rejects_stored_arguments_that_no_longer_fit_the_function(
    stored: bytes, parameter: str | None, message: str
) -> None:
    with pytest.raises(PayloadError) as caught:
        codec(welcome).decode(stored)
    assert message in str(caught.value)
    assert caught.value.parameter == parameter


def test_the_codec_rejects_stored_extra_keywords_that_repeat_a_parameter() -> None:
    with pytest.raises(PayloadError, match="'c' is given twice") as caught:
        codec(rest).decode(b'{"a": 1, "kw": {"c": "2024-01-01"}}')
    assert caught.value.parameter == "c"


def test_the_codec_rejects_deeply_nested_stored_arguments_without_a_crash() -> None:
    stored = b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(PayloadError, match="nested too deeply"):
        codec_of(Any).decode(stored)


def test_a_parameter_default_does_not_have_to_be_json() -> None:
    nothing = object()

    def task(a: int = nothing) -> None: ...  # type: ignore[assignment]

    assert codec(task).decode(codec(task).encode((), {})) == ((), {})


def test_a_function_annotated_to_return_none_stores_null_and_rejects_other_results() -> None:
    assert codec(no_parameters).encode_result(None) == b"null"
    with pytest.raises(PayloadError, match="result of task 'no_parameters'"):
        codec(no_parameters).encode_result(1)


def test_the_codec_rejects_a_stored_result_that_no_longer_fits_the_annotation() -> None:
    with pytest.raises(PayloadError, match="stored result of task 'welcome'"):
        codec(welcome).decode_result(b"1")


def test_the_codec_handles_twenty_megabytes_in_seconds() -> None:  # B13
    text, numbers = "é" * 10_000_000, list(range(2_500_000))

    def task(text: str, numbers: list[int]) -> None: ...

    started = timeit.default_timer()
    data = codec(task).encode((text, numbers), {})
    arrived = codec(task).decode(data)
    seconds = timeit.default_timer() - started
    print(f"{len(data):,} bytes in {seconds:.2f} s")
    assert arrived == ((text, numbers), {})
    assert seconds < 6  # three times the promise, for a slow machine


def test_the_codec_adds_only_microseconds_to_msgspec_for_a_small_call() -> None:
    tested = codec(welcome)
    kind = msgspec.defstruct("Bare", [("user_id", int), ("locale", str, "en")])
    decoder, encoder = msgspec.json.Decoder(kind), msgspec.json.Encoder()
    bare = _microseconds(lambda: decoder.decode(encoder.encode(kind(42, "de"))))
    ours = _microseconds(lambda: tested.decode(tested.encode((42, "de"), {})))
    print(f"bare msgspec {bare:.2f} µs, codec {ours:.2f} µs")
    assert ours - bare < 15  # three times the promise of 5 µs, for a slow machine


def _microseconds(function: Callable[[], object]) -> float:
    # Take the shortest of many short runs: other programs on the machine disturb some of them.
    return min(timeit.repeat(function, number=100, repeat=300)) / 100 * 1e6


def test_the_codec_encodes_unannotated_arguments_as_standard_json() -> None:
    data = encode_any(
        {"at": datetime(2024, 1, 1, tzinfo=UTC), "id": UUID(int=1), "none": None}, task_name="t"
    )
    assert json.loads(data) == {"at": "2024-01-01T00:00:00Z", "id": str(UUID(int=1)), "none": None}


@pytest.mark.parametrize(
    ("arguments", "parameter", "message"),
    [
        ({"a": 1, "b": [float("nan")]}, "b", "is nan, which JSON does not have (at b[0])"),
        ({"b": {"c": "\udc80"}}, "b", "lone surrogate"),
        ({"b": Weird()}, "b", "is of type Weird"),
        ({"b\udc80": 1}, None, "lone surrogate"),
        ({1: 1}, None, "must be str"),
    ],
)
def test_the_codec_rejects_unannotated_arguments_that_json_would_change(
    arguments: dict[Any, Any], parameter: str | None, message: str
) -> None:
    with pytest.raises(PayloadError) as caught:
        encode_any(arguments, task_name="t")
    assert message in str(caught.value)
    assert caught.value.parameter == parameter
