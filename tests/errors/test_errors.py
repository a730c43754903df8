"""Test the error classes: codes, texts, copies, and that they show no passwords."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path
from uuid import UUID

import pytest

from everbeat import errors
from everbeat.errors import (
    AppNotFound,
    BlockingCallInLoop,
    ConfigurationError,
    EverbeatError,
    LimitFull,
    PayloadError,
    Problem,
    RegistrationError,
    SendError,
    TaskNotFound,
    UnknownTask,
    WaitTimeout,
)
from everbeat.errors.wording import nearest

TASK = UUID("01890000-0000-7000-8000-000000000001")
PROBLEM = Problem(code="X", subject="a.b", value="1", rule="must be 2", fix="use 2")
EXAMPLES: list[EverbeatError] = [
    ConfigurationError([PROBLEM]),
    RegistrationError("no", fix="yes.", where="app.py:3"),
    PayloadError("no", parameter="locale"),
    SendError("no", task_id=TASK),
    UnknownTask("welcom", known=["welcome"]),
    TaskNotFound(TASK),
    WaitTimeout(TASK, 3.0, state="RUNNING"),
    BlockingCallInLoop("send", "asend"),
    LimitFull("gpu", task="train", concurrency=0, cost=2),
    AppNotFound("no", locator="a:b"),
]


def test_every_error_has_its_own_code() -> None:
    kinds = [
        kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, EverbeatError)
    ]
    codes = [kind.code for kind in kinds]
    assert len(kinds) > 20
    assert len(set(codes)) == len(codes)
    assert all(kind.__doc__ for kind in kinds)


def test_every_error_is_used_outside_its_package() -> None:
    kinds = {
        name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, EverbeatError)
    }
    package = Path(errors.__file__).parent
    others = [path for path in package.parent.rglob("*.py") if package not in path.parents]
    words = {word for path in others for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    assert kinds - words - {"EverbeatError"} == set()


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickle_and_copy(error: EverbeatError) -> None:
    pickled = pickle.loads(pickle.dumps(error))  # noqa: S301 - process pools of user code do this to errors
    for twin in (pickled, copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_the_text_of_an_error_is_its_message_and_its_fix() -> None:
    assert str(EverbeatError("It broke.", fix="mend it.")) == "It broke. Fix: mend it."
    assert str(EverbeatError("It broke.")) == "It broke."


def test_a_configuration_error_shows_one_problem_inline_and_several_as_a_list() -> None:
    one = ConfigurationError([PROBLEM])
    assert (one.message, one.fix) == ("a.b = 1: must be 2.", "use 2.")
    assert str(one) == "a.b = 1: must be 2. Fix: use 2."
    assert str(ConfigurationError([PROBLEM, PROBLEM])).splitlines() == [
        "2 problems:",
        "  1. a.b = 1: must be 2. Fix: use 2.",
        "  2. a.b = 1: must be 2. Fix: use 2.",
    ]


def test_wait_timeout_is_a_timeout_error() -> None:
    assert isinstance(WaitTimeout(TASK, 3.0), TimeoutError)
    assert "3 s" in str(WaitTimeout(TASK, 3.0))


def test_the_error_of_an_unknown_task_names_the_nearest_one() -> None:
    assert "use 'welcome'" in str(UnknownTask("welcom", known=["render", "welcome"]))
    assert "and 90 more" in str(UnknownTask("x", known=[f"task_{number:02}" for number in range(100)]))


@pytest.mark.parametrize(
    ("name", "found"), [("prioriy", "priority"), ("PRIORITY", "priority"), ("zzz", None), ("", None)]
)
def test_nearest_finds_the_most_similar_name(name: str, found: str | None) -> None:
    assert nearest(name, ["name", "priority", "queue"]) == found
