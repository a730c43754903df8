"""Every exception can be recorded, however broken it is (B3 within one process)."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

import everbeat
from everbeat.domain.settings.units import to_seconds
from everbeat.domain.task.outcome import (
    DATA_BYTES,
    MESSAGE_BYTES,
    TRACEBACK_BYTES,
    Completed,
    Failed,
    error_from_exception,
    error_from_json,
    error_to_json,
)
from everbeat.errors import (
    RESULT_NOT_AVAILABLE,
    UNHANDLED_EXCEPTION,
    ConfigurationError,
    TaskError,
    TaskFailed,
)
from everbeat.errors.wording import storable
from tests.domain.codec_types import Weird

CUT_MARK_BYTES = 60


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Leaves(Exception):
    def __init__(self, how: type[BaseException]) -> None:
        self.how = how

    def __str__(self) -> str:
        raise self.how

    __repr__ = __str__


class NotText(Exception):
    def __str__(self) -> Any:
        return 5  # noqa: PLE0307 - the mistake under test


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


class Broken(TaskError):
    def __init__(self) -> None:
        """Forgets to call super().__init__."""


class Unruly(Exception):
    notes: Leaves | None = None

    @property
    def __notes__(self) -> Any:
        if self.notes is not None:
            raise self.notes.how
        return [NoText(), "a note"]


def raised(exception: BaseException) -> BaseException:
    try:
        raise exception
    except BaseException as caught:  # noqa: BLE001 - the test wants any
        return caught


def test_an_exception_gives_code_message_type_and_traceback() -> None:  # B3
    error = error_from_exception(raised(ValueError("bad 5")))
    assert (error.code, error.message, error.type) == (UNHANDLED_EXCEPTION, "bad 5", "ValueError")
    assert error.traceback.startswith("Traceback (most recent call last):\n")
    assert "in raised\n    raise exception\n" in error.traceback
    assert error.traceback.endswith("ValueError: bad 5\n")


def files(text: str) -> list[str]:
    """Return the names of the files of a traceback."""
    return [Path(file).name for file in re.findall(r'File "([^"]+)"', text)]


def test_a_traceback_begins_with_the_frame_of_the_user_and_keeps_the_cause() -> None:
    def code() -> None:
        try:
            to_seconds("soon", subject="x")  # everbeat's code, which the user calls
        except ConfigurationError as problem:
            raise ValueError("no such time") from problem

    text = error_from_exception(raised_below_everbeat(code)).traceback
    cause, link, last = text.partition("direct cause of the following exception")
    assert link
    assert files(last) == ["test_failure.py"]
    assert files(cause)[0] == "test_failure.py"
    assert "units.py" in files(cause), "what the user called stays"


def test_a_traceback_of_everbeats_own_failure_is_complete() -> None:
    assert files(error_from_exception(raised_below_everbeat(None)).traceback) == ["x.py"]


def raised_below_everbeat(code: Callable[[], None] | None) -> BaseException:
    """Return the error of code that a file of everbeat calls, as its executors do, or that of the file if there is no code."""
    scope: dict[str, Any] = {}
    caller = str(Path(everbeat.__file__).parent / "worker" / "x.py")
    exec(compile("def call(code):\n    code()\n", caller, "exec"), scope)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the test wants any
        scope["call"](code)
    trace = caught.value.__traceback__
    assert trace is not None
    return caught.value.with_traceback(trace.tb_next)  # without the frame of this function


def test_a_task_error_keeps_its_code_and_data() -> None:  # B3
    error = error_from_exception(raised(TaskError("SMTP_DOWN", "no answer", {"port": 25})))
    stored = error_from_json(error_to_json(error))
    assert stored == TaskError("SMTP_DOWN", "no answer", {"port": 25})
    assert stored.type == "everbeat.errors.TaskError"
    assert "raise exception" in stored.traceback


def test_the_first_matching_class_of_exception_codes_gives_the_code() -> None:
    codes = {ConnectionError: "SMTP_DOWN", OSError: "DISK", Exception: "OTHER"}
    assert error_from_exception(ConnectionResetError(), codes=codes).code == "SMTP_DOWN"
    assert error_from_exception(FileNotFoundError(), codes=codes).code == "DISK"
    assert error_from_exception(KeyError("x"), codes=codes).code == "OTHER"
    assert error_from_exception(KeyboardInterrupt(), codes=codes).code == UNHANDLED_EXCEPTION


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        (NoText(), "<str() of a tests.domain.test_failure.NoText raised RuntimeError>"),
        (NotText(), "<str() of a tests.domain.test_failure.NotText raised TypeError>"),
        (Endless(), "<str() of a tests.domain.test_failure.Endless is endless>"),
        (ValueError("a\x00b"), "a\\x00b"),
        (ValueError("a\udc80b"), "a\\udc80b"),
        (Unruly("x"), "x"),
        (ValueError(Weird()), "<str() of a ValueError raised RuntimeError>"),
    ],
)
def test_exceptions_that_cannot_be_printed_are_recorded(exception: Exception, message: str) -> None:  # B3
    error = error_from_exception(raised(exception))
    assert error.message == message
    assert message in error.traceback
    assert b"\\u0000" not in error_to_json(error)
    assert error_from_json(error_to_json(error)).message == message


@pytest.mark.parametrize("how", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_exceptions_whose_text_raises_base_exceptions_are_recorded(how: type[BaseException]) -> None:
    leaves = Leaves(how)
    for each in (leaves, BaseExceptionGroup("many", [leaves, leaves]), ValueError(leaves)):
        error = error_from_exception(raised(each))
        assert how.__name__ in error.traceback
    each = TaskError("CODE", "message", {"found": leaves})
    stored = error_from_json(error_to_json(error_from_exception(raised(each))))
    assert (stored.code, stored.message) == ("CODE", "message")
    ruinous = Unruly("x")
    ruinous.notes = leaves
    error = error_from_exception(raised(ruinous))
    assert error.message == "x"


def test_a_huge_exception_message_is_cut_without_a_copy() -> None:  # B3
    exception = raised(ValueError("é" * 200_000_000))
    tracemalloc.start()
    error = error_from_exception(exception)
    data = error_to_json(error)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 5_000_000
    assert len(error.message.encode()) < MESSAGE_BYTES + CUT_MARK_BYTES
    assert "characters cut]" in error.message
    assert len(error.traceback.encode()) < TRACEBACK_BYTES + CUT_MARK_BYTES
    assert len(data) < 2 * (MESSAGE_BYTES + TRACEBACK_BYTES)


def test_a_broken_subclass_of_task_error_is_recorded() -> None:
    error = error_from_exception(raised(Broken()))
    assert (error.code, error.type) == (UNHANDLED_EXCEPTION, "tests.domain.test_failure.Broken")


def test_a_recursion_error_is_recorded_with_its_innermost_frames() -> None:
    def deeper(n: int) -> int:
        return deeper(n + 1)

    try:
        deeper(0)
    except RecursionError as caught:
        error = error_from_exception(caught)
    assert error.type == "RecursionError"
    assert "outer frames left out" in error.traceback
    assert len(error.traceback) < TRACEBACK_BYTES


def test_tracebacks_contain_causes_groups_and_notes() -> None:
    inner = raised(KeyError("inner"))
    inner.add_note("look here")
    group = ExceptionGroup("several", [raised(ValueError(str(n))) for n in range(20)])  # type: ignore[type-var]
    group.__cause__ = inner
    text = error_from_exception(raised(group)).traceback
    assert "KeyError: 'inner'\nlook here\n" in text
    assert "direct cause" in text
    assert "| ValueError: 7\n" in text
    assert "12 more members left out" in text


def test_a_cycle_of_exception_causes_ends() -> None:
    first, second = raised(ValueError("1")), raised(ValueError("2"))
    first.__cause__, second.__cause__ = second, first
    assert error_from_exception(first).traceback.count("ValueError: 1") == 1
    chained = ValueError("start")
    for n in range(1_000):
        later = ValueError(str(n))
        later.__cause__, chained = chained, later
    assert "earlier exceptions left out" in error_from_exception(chained).traceback


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (object(), "object could not be stored as JSON"),
        ({"a": float("nan")}, "dict could not be stored as JSON"),
        ({"a": [None, float("inf")]}, "dict could not be stored as JSON"),
        ("a\x00", "str could not be stored as JSON"),
        (["a\udc80"], "list could not be stored as JSON"),
        (Weird(), "Weird could not be stored as JSON"),
        ("x" * (DATA_BYTES + 1), "above the limit of 1,048,576"),
    ],
)
def test_error_data_that_json_cannot_hold_is_stored_as_its_repr(data: Any, note: str) -> None:
    stored = error_from_json(error_to_json(TaskError("X", "m", data)))
    assert stored.code == "X"
    assert note in stored.data["note"]
    assert len(stored.data["repr"].encode()) <= MESSAGE_BYTES + CUT_MARK_BYTES


def test_error_data_with_none_is_stored_unchanged() -> None:
    assert error_from_json(error_to_json(TaskError("X", data={"a": [None, 1.5]}))).data == {"a": [None, 1.5]}


@pytest.mark.parametrize(
    "stored", [b"", b"null", b"{}", b"[1]", b'{"code": 5}', b"\xff", "no json \x00", b"[" * 99_999]
)
def test_an_unreadable_stored_error_becomes_result_not_available(stored: bytes | str) -> None:
    error = error_from_json(stored)
    assert error.code == RESULT_NOT_AVAILABLE
    assert "cannot be read" in error.message


def test_an_error_written_by_sql_can_omit_fields() -> None:
    error = error_from_json('{"code": "WORKER_CRASHED", "data": {"pid": 1}, "poison": true}')
    assert (error.code, error.message, error.data) == ("WORKER_CRASHED", "", {"pid": 1})


@given(some.text(some.characters(codec=None)), some.integers(1, 50), some.integers(0, 50))
def test_storable_text_has_no_zero_byte_and_stays_within_its_limit(text: str, limit: int, tail: int) -> None:
    stored = storable(text, limit=limit, tail=min(tail, limit))
    assert "\x00" not in stored
    assert len(stored.encode()) <= limit + CUT_MARK_BYTES
    if len(text.encode("utf-8", "backslashreplace")) <= limit and "\x00" not in text:
        assert stored == text.encode("utf-8", "backslashreplace").decode()


def test_errors_and_outcomes_compare_by_value_and_survive_pickling() -> None:
    error = TaskError("X", "m", {"a": 1}, type="T", traceback="…")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (again, again.type, again.traceback) == (error, "T", "…")
    assert Failed(error) == Failed(again) != Failed(TaskError("Y"))
    assert Completed([1]) == Completed([1])
    assert str(error) == "X: m"
    assert len({error, again}) == 1


def test_task_failed_names_the_code_and_the_message() -> None:
    failed = TaskFailed(TaskError("SMTP_DOWN", "no answer"), task_id=None)
    assert str(failed) == "The task ended without a result: SMTP_DOWN: no answer"
    assert failed.error.code == "SMTP_DOWN"
    assert json.loads(error_to_json(failed.error))["code"] == "SMTP_DOWN"


def test_the_text_of_an_unhandled_exception_names_its_class() -> None:  # J4
    plain = error_from_json(error_to_json(error_from_exception(KeyError("k"))))
    assert str(plain) == "UNHANDLED_EXCEPTION (KeyError): 'k'"
    assert str(TaskFailed(plain)) == "The task ended without a result: UNHANDLED_EXCEPTION (KeyError): 'k'"
    coded = error_from_exception(KeyError("k"), codes={KeyError: "KEY_MISSING"})
    assert str(coded) == "KEY_MISSING: 'k'"
    silent = error_from_exception(KeyboardInterrupt())
    assert str(silent) == "UNHANDLED_EXCEPTION (KeyboardInterrupt)"
