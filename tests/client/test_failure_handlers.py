"""Which failure handler a task has, and which tasks can be one."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from everbeat import App, FinalFailure, Limit, QueueConfig, RetryPolicy, TaskError
from everbeat.app import definition_of
from everbeat.domain.task.failure_handler import StoredHandler
from everbeat.errors import ConfigurationError, EverbeatError, RegistrationError

NOWHERE = "postgresql://nowhere.example"


def handler_of(task: Any) -> str | None:
    """Return the name of the handler that a send of this task stores."""
    policy, _ = task._sender._stored.of(task._call_of(b"{}", when=None))
    found = json.loads(policy or b"{}").get("on_failure")
    return None if found is None else str(found["name"])


def test_the_task_decides_before_the_app_and_none_means_no_handler() -> None:
    app = App(NOWHERE)

    @app.task
    def early() -> None: ...

    assert handler_of(early) is None

    @app.on_failure
    @app.task
    def alert(failure: FinalFailure) -> None: ...

    @app.task
    def other(failure: FinalFailure) -> None: ...

    @app.task(on_failure=other)
    def own() -> None: ...

    @app.task(on_failure=None)
    def silent() -> None: ...

    @app.task(on_failure="later")
    def named() -> None: ...

    @app.task
    def later(failure: FinalFailure) -> None: ...

    assert [handler_of(each) for each in (early, own, silent, named)] == ["alert", "other", None, "later"]
    assert handler_of(own.with_options(queue="x", retry=RetryPolicy(max_retries=1))) == "other"
    known = definition_of(app).failure_handlers
    assert {name: handler.name for name, handler in known.items()} == {
        "early": "alert", "alert": "alert", "other": "alert", "own": "other", "named": "later", "later": "alert",
    }  # fmt: skip


def test_a_handler_is_stored_with_all_its_options_but_without_its_own_handler() -> None:
    app = App(
        NOWHERE, queues=[QueueConfig("default"), QueueConfig("alerts")], limits=[Limit("mail", concurrency=2)]
    )

    @app.on_failure
    @app.task(
        queue="alerts",
        priority=3,
        retry=RetryPolicy(max_retries=2, intervals=[5], jitter=0),
        timeout="30s",
        flags=["loud"],
        serial=True,
        limits=["mail"],
        costs={"mail": 2},
    )
    def alert(failure: FinalFailure) -> None: ...

    (stored,) = {*definition_of(app).failure_handlers.values()}
    assert isinstance(stored, StoredHandler)
    assert (stored.name, stored.parameter, stored.queue, stored.priority) == ("alert", "failure", "alerts", 3)
    assert (stored.serial, stored.flags, stored.costs) == ("task:alert", '{"loud":true}', (2,))
    assert [gate.gate for gate in stored.gates or ()] == ["mail"]
    policy = json.loads(stored.policy)
    assert (policy["timeout_ms"], policy["max_retries"]) == (30_000, 2)
    assert "on_failure" not in policy


def wrong_key(app: App) -> Any:
    @app.task
    def alert(failure: FinalFailure) -> None: ...

    return alert.with_options(key="k")


def wrong_deadline(app: App) -> Any:
    @app.task
    def alert(failure: FinalFailure) -> None: ...

    return alert.with_options(good_until=datetime(2100, 1, 1, tzinfo=UTC))


def wrong_uniqueness(app: App) -> Any:
    @app.task(unique_for="kept")
    def alert(failure: FinalFailure) -> None: ...

    return alert


def no_parameter(app: App) -> Any:
    @app.task
    def alert() -> None: ...

    return alert


def other_parameter(app: App) -> Any:
    @app.task
    def alert(failure: str) -> None: ...

    return alert


def two_parameters(app: App) -> Any:
    @app.task
    def alert(failure: FinalFailure, more: int) -> None: ...

    return alert


def other_app(app: App) -> Any:
    elsewhere = App(NOWHERE)

    @elsewhere.task
    def alert(failure: FinalFailure) -> None: ...

    return alert


def no_task(app: App) -> Any:
    return print


def dropping(app: App) -> Any:
    @app.task(limits=["narrow"])
    def alert(failure: FinalFailure) -> None: ...

    return alert


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (wrong_key, "key of task 'alert'"), (wrong_deadline, "good_until of task 'alert'"), (wrong_uniqueness, "a failure handler supports only"),
        (no_parameter, "FinalFailure"), (other_parameter, "FinalFailure"), (two_parameters, "no other parameter"),
        (other_app, "a task of this app"), (no_task, "must be a task"), (dropping, "a failure handler cannot leave out a task"),
    ],
)  # fmt: skip
def test_an_unsuitable_handler_is_rejected_where_it_is_declared(
    make: Callable[[App], Any], says: str
) -> None:
    app = App(NOWHERE, limits=[Limit("narrow", concurrency=1, when_full="drop")])
    handler = make(app)
    with pytest.raises(EverbeatError, match=says):

        @app.task(on_failure=handler)
        def work() -> None: ...

    assert "work" not in app.tasks
    if make is not no_task:
        with pytest.raises(EverbeatError):
            app.on_failure(handler)


def test_a_handler_that_is_never_registered_is_reported_by_the_send_and_by_the_worker() -> None:
    app = App(NOWHERE)

    @app.task(on_failure="alrt")
    def work() -> None: ...

    @app.task
    def alert(failure: FinalFailure) -> None: ...

    with pytest.raises(ConfigurationError, match=r"'alrt': is not a registered task\. Fix: use 'alert'"):
        handler_of(work)
    with pytest.raises(ConfigurationError, match="on_failure of task 'work'"):
        definition_of(app)


def test_an_app_has_one_default_handler() -> None:
    app = App(NOWHERE)

    @app.on_failure
    @app.task
    def alert(failure: FinalFailure) -> None: ...

    @app.task
    def other(failure: FinalFailure) -> None: ...

    assert app.on_failure(alert) is alert
    with pytest.raises(RegistrationError, match="already has a default failure handler: 'alert'"):
        app.on_failure(other)
    with pytest.raises(RegistrationError, match=r"write @app.on_failure above @app.task"):
        app.on_failure(print)  # type: ignore[type-var]


def test_a_handler_can_be_called_and_sent_like_any_task() -> None:
    app = App(NOWHERE)
    told: list[FinalFailure] = []

    @app.task
    def alert(failure: FinalFailure) -> None:
        told.append(failure)

    stored = {
        "task_id": "01234567-89ab-7def-8123-456789abcdef", "name": "work", "queue": "default", "state": "FAILED",
        "error": {"code": "BROKEN", "message": "no", "type": "OSError"}, "attempt": 1, "fence": 2,
        "failed_at": "2026-11-28T12:00:00.5+00:00", "later": "of a later version", "labels": {"tenant": "acme"},
    }  # fmt: skip
    args, kwargs = alert._definition.codec.decode(json.dumps({"failure": stored}))
    alert(*args, **kwargs)
    (failure,) = told
    assert failure.error == TaskError("BROKEN", "no")
    assert (failure.error.type, failure.fence, failure.labels) == ("OSError", 2, {"tenant": "acme"})
    assert alert._definition.codec.decode(alert.call(failure).payload) == ((failure,), {})


def test_children_nodes_and_schedules_carry_the_handler() -> None:
    app = App(NOWHERE)

    @app.task
    def alert(failure: FinalFailure) -> None: ...

    @app.task(on_failure=alert)
    def work() -> None: ...

    sender = work._sender
    policies = {
        "child": sender.new_child(work.call()).policy,
        "node": sender.spec(work).policy,
        "schedule": sender.scheduled_call(work.call()).policy,
    }
    for kind, policy in policies.items():
        assert json.loads(policy or "{}")["on_failure"]["name"] == "alert", kind
