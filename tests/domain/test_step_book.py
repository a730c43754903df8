"""Names of steps, codecs of their results, and the errors for unusable ones; all without a database."""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

import pytest

from everbeat.domain.task.context_backend import Recorded, is_suspension
from everbeat.domain.task.steps import StepBook, checked_name, codec_of, encode_result, inside, name_of
from everbeat.errors import PayloadError, TaskStopped, TaskSuspended

T = TypeVar("T")
MOMENT = datetime(2030, 1, 1, tzinfo=UTC)


def plain(n: int) -> int:
    return n


def unannotated(n):  # type: ignore[no-untyped-def]
    return n


async def coroutine() -> datetime:
    return MOMENT


def wrapper() -> Awaitable[datetime]:
    return coroutine()


def generic(value: T) -> T:
    return value


def never() -> NoReturn:
    raise AssertionError


@functools.wraps(plain)
def wrapped(*args: Any) -> int:
    return plain(*args)


class Service:
    def method(self) -> datetime:
        return MOMENT

    @classmethod
    def of_class(cls) -> datetime:
        return MOMENT

    def __call__(self) -> datetime:
        return MOMENT


class TestNames:
    def test_steps_are_numbered_by_kind_and_name(self) -> None:
        book = StepBook()
        drawn = [
            book.draw("step", "a"),
            book.draw("step", "a"),
            book.draw("sleep", "a"),
            book.draw("step", "b"),
        ]
        assert drawn == ["a", "a#2", "a", "b"]

    def test_a_nested_step_is_named_after_its_outer_step(self) -> None:
        book = StepBook()
        with inside(book.draw("step", "a")):
            inner = book.draw("step", "b")
            with inside(inner):
                assert book.draw("step", "c") == "a#1/b#1/c"
        with inside(book.draw("step", "a")):
            assert (inner, book.draw("step", "b")) == ("a#1/b", "a#2/b")
        assert book.draw("step", "b") == "b"

    def test_concurrent_threads_never_draw_the_same_name(self) -> None:
        book, drawn = StepBook(), list[str]()
        threads = [
            threading.Thread(target=lambda: drawn.extend(book.draw("step", "a") for _ in range(500)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(drawn)) == 2_000

    @pytest.mark.parametrize(
        ("function", "name"),
        [(plain, "plain"), (functools.partial(functools.partial(plain, 1)), "plain"), (wrapped, "plain"),
         (Service().method, "method"), (len, "len"), (Service, "Service")],
    )  # fmt: skip
    def test_a_step_is_named_after_its_function(self, function: Callable[..., Any], name: str) -> None:
        assert name_of(function, task_name="t") == name

    @pytest.mark.parametrize("function", [lambda: 1, functools.partial(lambda: 1), Service()])
    def test_a_function_without_a_name_is_rejected_as_a_step(self, function: Callable[..., Any]) -> None:
        with pytest.raises(PayloadError, match="has no name") as refusal:
            name_of(function, task_name="t")
        assert "ctx.named(" in str(refusal.value.fix)

    @pytest.mark.parametrize("name", ["", "a#2", "a/b", "a\n", "x" * 201, 7, None])
    def test_ambiguous_step_names_are_rejected(self, name: object) -> None:
        with pytest.raises(PayloadError, match="of a step in task 't' is not a printable string of 1 to 200"):
            checked_name(name, owner="a step in task 't'")


class TestRecords:
    def test_find_ignores_sleeps_and_events_that_have_not_ended(self) -> None:
        book = StepBook()
        book.take(
            [
                Recorded("step", "a", "DONE", "1", None),
                Recorded("sleep", "over", "DONE", None, 0.0),
                Recorded("sleep", "sleeps", "DONE", None, 3.5),
                Recorded("event", "open", "OPEN", None, None),
                Recorded("event", "late", "TIMED_OUT", None, 0.0),
            ]
        )
        assert book.find("step", "a") is not None
        assert book.find("sleep", "a") is None
        assert [book.find("sleep", name) is not None for name in ("over", "sleeps")] == [True, False]
        assert [book.find("event", name) is not None for name in ("open", "late")] == [False, True]


class TestCodecs:
    @pytest.mark.parametrize(
        "function", [coroutine, wrapper, Service().method, Service.of_class, Service(), functools.partial(coroutine)]
    )  # fmt: skip
    def test_the_codec_of_a_step_follows_the_annotation_of_its_function(
        self, function: Callable[..., Any]
    ) -> None:
        codec = codec_of(function, step="s", task_name="t")
        assert codec.decode(encode_result(codec, MOMENT, step="s", task_name="t")) == MOMENT

    def test_a_step_without_an_annotation_returns_plain_json(self) -> None:
        codec = codec_of(unannotated, step="s", task_name="t")
        assert codec.decode(encode_result(codec, {"a": [1]}, step="s", task_name="t")) == {"a": [1]}
        with pytest.raises(PayloadError, match="The result of step 's' of task 't'"):
            encode_result(codec, MOMENT, step="s", task_name="t")

    def test_a_step_that_never_returns_stores_null(self) -> None:
        assert (
            encode_result(codec_of(never, step="s", task_name="t"), None, step="s", task_name="t") == b"null"
        )

    def test_a_step_with_a_generic_result_is_rejected(self) -> None:
        with pytest.raises(PayloadError, match="its annotation"):
            codec_of(generic, step="s", task_name="t")

    def test_the_codec_of_a_step_is_created_once(self) -> None:
        assert codec_of(plain, step="s", task_name="t") is codec_of(plain, step="other", task_name="t")


def test_an_exception_group_is_a_suspension_only_if_all_members_are() -> None:
    suspended, other = TaskSuspended(), ValueError()
    assert is_suspension(suspended)
    assert is_suspension(BaseExceptionGroup("", [suspended, BaseExceptionGroup("", [suspended])]))
    assert not is_suspension(BaseExceptionGroup("", [suspended, other]))
    assert not is_suspension(other)
    assert not is_suspension(TaskStopped("cancelled"))
