"""A function that cannot be a task is rejected at registration with its name, parameter, file and line."""

import asyncio
import functools
import math
import pathlib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import pytest

from everbeat.domain.task.context import Context
from everbeat.domain.task.definition import CallCodec
from everbeat.domain.task.signature import is_async_function
from everbeat.errors import RegistrationError
from tests.domain import future_annotations
from tests.domain.codec_types import Address, MarkedAddress, Weird

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Holder:
    where: pathlib.Path


@dataclass
class Box(Generic[R]):
    content: R


def of(annotation: Any) -> Callable[[Any], None]:
    def task(value: Any) -> None: ...

    task.__annotations__["value"] = annotation
    return task


REFUSED = [
    (Callable[[int], int], "Callable cannot be carried by JSON", "send the name of what to call"),
    (pathlib.Path, "Path cannot be carried by JSON", "annotate it as str"),
    (complex, "complex cannot be carried", "tuple[float, float]"),
    (Weird, "Weird cannot be carried", "annotate a dataclass"),
    (list[dict[str, pathlib.Path]], "Path cannot be carried", "annotate it as str"),
    (Holder | None, "field 'where' of Holder: Path cannot be carried", "annotate it as str"),
    (Iterable[int], "Iterable cannot be carried", "annotate it as list"),
    (type[int], "type cannot be carried", "name of the class"),
    (Address | MarkedAddress, "more than one dataclass", "tag=True"),
    (bytes | str, "more than one str-like type", "use one of them"),
    (dict[tuple[int, int], str], "has keys that JSON cannot carry", "plain key"),
    (dict[Address, str], "has keys that JSON cannot carry", "plain key"),
    (R, "is generic in R", "name a concrete type"),
    (list[R], "is generic in R", "name a concrete type"),  # type: ignore[valid-type]
    (Exception, "Exception cannot be carried", "dataclass"),
]


@pytest.mark.parametrize(("annotation", "reason", "fix"), REFUSED, ids=lambda each: str(each)[:30])
def test_annotations_that_json_cannot_carry_are_rejected(annotation: Any, reason: str, fix: str) -> None:
    function = of(annotation)
    with pytest.raises(RegistrationError) as caught:
        CallCodec.from_function(function, task_name="task")
    assert f"Task 'task' cannot be sent: parameter 'value': {reason}" in re.sub(
        r"cannot be carried by JSON: Type unions may not contain ", "", str(caught.value)
    )
    assert fix in str(caught.value.fix)
    assert caught.value.where == f"{__file__}:{function.__code__.co_firstlineno}"
    assert str(caught.value).startswith(caught.value.where)


def test_a_concrete_generic_class_is_accepted() -> None:
    tested = CallCodec.from_function(of(Box[int]), task_name="task")
    assert tested.decode(tested.encode((Box(1),), {})) == ((Box(1),), {})


def test_all_wrong_parameters_are_named_at_once() -> None:
    def task(a: pathlib.Path, b: int, c: complex, ctx: Context, __d: int) -> range: ...

    with pytest.raises(RegistrationError) as caught:
        CallCodec.from_function(task, task_name="task")
    message = str(caught.value)
    for part in (
        "'a': Path",
        "'c': complex",
        "'ctx': Context is only passed as the first",
        "its result: range",
    ):
        assert part in message
    assert "'b'" not in message
    assert "two underscores" in message


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (future_annotations.with_a_local_class(), "parameter 'order' is annotated 'Order'"),
        (future_annotations.only_for_checkers, "parameter 'amount' is annotated 'Decimal'"),
        (future_annotations.unknown_result, "its result is annotated 'Decimal'"),
        (future_annotations.broken, "parameter 'amount' has an annotation that cannot be read: TypeError"),
    ],
)
def test_annotations_that_python_cannot_resolve_are_rejected_with_a_fix(function: Any, message: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        CallCodec.from_function(function, task_name="pay")
    assert message in str(caught.value)
    assert caught.value.__cause__ is None
    if "is annotated" in message:
        assert "at module level, not inside a function or under TYPE_CHECKING" in str(caught.value.fix)
    assert str(caught.value.where).startswith(future_annotations.__file__)


class Till:
    def count(self, coins: int) -> int:
        return coins

    @staticmethod
    def total(coins: int) -> int:
        return coins


def yielding() -> Iterator[int]:
    yield 1


async def yielding_async() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (yielding, "is a generator function"),
        (yielding_async, "is a generator function"),
        (Address, "must be a function, not a type"),
        (functools.partial(math.sqrt, 1), "must be a function, not a partial"),
        (max, "has no signature"),
        (Till.count, "'task' is a method"),
    ],
)
def test_only_plain_functions_can_be_tasks(function: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        CallCodec.from_function(function, task_name="task")


def test_bound_and_static_methods_can_be_tasks() -> None:
    assert CallCodec.from_function(Till().count, task_name="count").parameters == ("coins",)
    assert CallCodec.from_function(Till.total, task_name="total").parameters == ("coins",)


def test_a_context_is_only_accepted_as_the_first_parameter() -> None:
    def plain(ctx: Context, a: int) -> None: ...
    def optional(ctx: Context | None, a: int) -> None: ...
    def named(*, ctx: Context) -> None: ...
    def without(a: int) -> None: ...

    assert CallCodec.from_function(plain, task_name="t").takes_context
    assert CallCodec.from_function(optional, task_name="t").takes_context
    assert not CallCodec.from_function(without, task_name="t").takes_context
    assert CallCodec.from_function(plain, task_name="t").parameters == ("a",)
    with pytest.raises(RegistrationError, match="'ctx': Context is only passed as the first positional"):
        CallCodec.from_function(named, task_name="t")


def test_a_function_that_never_returns_can_be_a_task() -> None:
    def never() -> NoReturn:
        raise ValueError

    assert CallCodec.from_function(never, task_name="never").encode_result(None) == b"null"


def logged(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return inner


def test_a_decorated_function_keeps_its_signature_and_kind() -> None:
    @logged
    async def waiting(n: int) -> int:
        return n

    @logged
    def working(n: int) -> int:
        return n

    assert CallCodec.from_function(waiting, task_name="t").encode((1,), {}) == b'{"n":1}'
    assert is_async_function(waiting)
    assert not is_async_function(working)
    assert is_async_function(asyncio.sleep)
