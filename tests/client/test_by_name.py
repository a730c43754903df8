"""A task may be sent by its name alone; where the function is known, it checks the arguments."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat import App, ConfigurationError, PayloadError


def test_a_known_task_checks_and_completes_what_is_sent(app: App) -> None:
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
        ({"user": 1}, "user"),
        ({}, "user_id"),
        ({"user_id": object()}, "user_id"),
        ([1], "not a mapping"),
    ],
)
def test_a_known_task_refuses_what_does_not_fit(app: App, arguments: Any, said: str) -> None:  # B13
    @app.task
    def welcome(user_id: int) -> None: ...

    with pytest.raises(PayloadError, match=said) as refusal:
        app.send_by_name("welcome", arguments)
    assert "stored" not in refusal.value.message
    assert app.list_tasks() == []


def test_an_unknown_task_is_stored_as_it_is_and_waits(app: App) -> None:  # B13
    handle = app.send_by_name("mail.welcome", {"user_id": 42, "tags": ["a", None]})
    info = handle.info()
    assert (info.name, info.queue, info.arguments) == (
        "mail.welcome",
        "default",
        {"user_id": 42, "tags": ["a", None]},
    )
    assert info.waiting_because == "no live worker"


def test_options_and_a_moment_go_with_it(app: App) -> None:
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
def test_wrong_names_and_options_are_refused(app: App, name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        app.send_by_name(name, {}, **options)


@pytest.mark.parametrize("value", [object(), float("nan"), "\ud800", {1, 2}.__iter__()])
def test_what_json_cannot_hold_is_refused_by_name(app: App, value: Any) -> None:  # B13
    with pytest.raises(PayloadError) as refusal:
        app.send_by_name("elsewhere", {"fine": 1, "odd": value})
    assert refusal.value.parameter == "odd"
