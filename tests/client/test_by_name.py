"""Test sending a task by its name; the app checks the arguments if it knows the function."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat import App
from everbeat.errors import ConfigurationError, PayloadError


def test_send_by_name_encodes_the_arguments_of_a_known_task_with_its_options(app: App) -> None:
    @app.task(queue="mail", priority=4)
    def welcome(user_id: int, at: datetime, *tags: str, **options: int) -> None: ...

    at = datetime(2030, 1, 1, tzinfo=UTC)
    as_python = app.send_by_name("welcome", {"user_id": 1, "at": at, "tags": ["a"], "options": {"x": 1}})
    as_json = app.send_by_name(
        "welcome", {"user_id": 1, "at": at.isoformat(), "tags": ["a"], "options": {"x": 1}}
    )
    directly = welcome.send(1, at, "a", x=1)
    found = [handle.info() for handle in (as_python, as_json, directly)]
    assert found[0].arguments == found[1].arguments == found[2].arguments
    assert {(info.queue, info.priority) for info in found} == {("mail", 4)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"user_id": "one"}, "user_id"),
        ({"user": 1}, "no parameter 'user'; it takes: user_id. Fix: did you mean 'user_id'?"),
        ({"user_id": 1, "kk": 3}, "Task 'welcome' has no parameter 'kk'; it takes: user_id"),
        ({}, "user_id"),
        ({"user_id": object()}, "user_id"),
        ([1], "not a mapping"),
    ],
)
def test_send_by_name_refuses_arguments_that_do_not_fit_a_known_task(
    app: App, arguments: Any, said: str
) -> None:  # B13
    @app.task
    def welcome(user_id: int) -> None: ...

    with pytest.raises(PayloadError) as refusal:
        app.send_by_name("welcome", arguments)
    assert said in str(refusal.value)
    assert "stored" not in refusal.value.message
    assert app.list_tasks() == []


def test_send_by_name_stores_a_task_that_the_app_does_not_know(app: App) -> None:  # B13
    handle = app.send_by_name("mail.welcome", {"user_id": 42, "tags": ["a", None]})
    info = handle.info()
    assert (info.name, info.queue, info.arguments) == (
        "mail.welcome",
        "default",
        {"user_id": 42, "tags": ["a", None]},
    )
    assert info.waiting_because == "no live worker"


def test_send_by_name_stores_options_and_a_delay(app: App) -> None:
    handle = app.send_by_name(
        "report", {}, when=timedelta(minutes=1), queue="big", priority=7, key="r1", timeout="5s"
    )
    info = handle.info()
    assert (info.queue, info.priority, info.key, info.policy.timeout_ms) == ("big", 7, "r1", 5_000)
    assert info.enqueued_at - info.sent_at == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("", {}, "name of the task"),
        ("two words", {}, "without spaces"),
        ("fine", {"prioriti": 1}, "use priority"),
        ("fine", {"queue": "no spaces"}, "queue"),
        ("fine", {"when": 5}, "when"),
        ("fine", {"when": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001
    ],
)
def test_send_by_name_refuses_invalid_names_and_options(
    app: App, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        app.send_by_name(name, {}, **options)


@pytest.mark.parametrize("value", [object(), float("nan"), "\ud800", {1, 2}.__iter__()])
def test_send_by_name_names_the_argument_that_json_cannot_represent(app: App, value: Any) -> None:  # B13
    with pytest.raises(PayloadError) as refusal:
        app.send_by_name("elsewhere", {"fine": 1, "odd": value})
    assert refusal.value.parameter == "odd"
