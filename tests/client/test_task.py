"""Test task objects: they check and encode the arguments of a send and can be called like their function."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from everbeat.client.handle import Handle
from everbeat.client.registry import define, make_task
from everbeat.client.task import AsyncTask, Call, SyncTask, local_context
from everbeat.domain.task.context import Context, entered
from everbeat.domain.task.policy import TaskOptions
from everbeat.domain.task.retry import RetryPolicy
from everbeat.errors import ConfigurationError, PayloadError, RegistrationError


class Outbox:
    """A sender that records the calls; other tests send with a database."""

    def __init__(self) -> None:
        self.calls: list[Call[Any]] = []

    def send(self, call: Call[Any], /) -> Handle[Any]:
        return self.send_many([call])[0]

    async def asend(self, call: Call[Any], /) -> Handle[Any]:
        return self.send(call)

    def send_many(
        self, calls: Sequence[Call[Any]], /, *, connection: object = None, patience_s: float | None = None
    ) -> list[Handle[Any]]:
        assert connection is None
        assert patience_s is None
        self.calls += calls
        return [Handle.__new__(Handle) for _ in calls]

    async def asend_many(
        self, calls: Sequence[Call[Any]], /, *, connection: object = None, patience_s: float | None = None
    ) -> list[Handle[Any]]:
        return self.send_many(calls, connection=connection)


def add(a: int, b: int = 2) -> int:
    """Adds two numbers."""
    return a + b


async def fence(context: Context, plus: int = 0) -> int:
    assert Context.current() is context
    return context.fence + plus


def name_of_context(context: Context) -> str:
    return f"{context.name} {context.queue}"


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def task(outbox: Outbox) -> Any:
    options = TaskOptions(queue="mail", priority=5, timeout="30s", retry=RetryPolicy(auto_retry_for=["X"]))
    return make_task(add, options=options, sender=outbox)


def test_a_send_passes_an_encoded_call_with_the_registered_options(task: Any, outbox: Outbox) -> None:
    task.send(1, b=3)
    (call,) = outbox.calls
    assert (call.name, call.payload, call.when, call.task) == ("add", b'{"a":1,"b":3}', None, task)
    assert (call.settings.queue, call.settings.priority, call.settings.timeout_ms) == ("mail", 5, 30_000)
    assert call.settings.retry is not None
    assert (call.settings.key, call.settings.good_until) == (None, None)


async def test_every_way_to_send_produces_the_same_call(task: Any, outbox: Outbox) -> None:
    later = timedelta(minutes=5)
    task.send(1)
    await task.asend(1)
    task.send_many(task.call(1) for _ in range(1))
    await task.asend_many([task.call(1)])
    assert all(call == outbox.calls[0] for call in outbox.calls)
    task.schedule(later, 1)
    await task.aschedule(later, 1)
    assert [call.when for call in outbox.calls] == [None] * 4 + [later] * 2


def test_options_of_one_send_override_the_registered_ones(task: Any, outbox: Outbox) -> None:
    deadline = datetime(2030, 1, 1, tzinfo=UTC)
    other = task.with_options(priority=-1, key="u42", good_until=deadline).with_options(
        timeout=None, retry=None
    )
    other.send(1)
    task.send(1)
    changed, plain = (call.settings for call in outbox.calls)
    assert (changed.queue, changed.priority, changed.key, changed.good_until) == ("mail", -1, "u42", deadline)
    assert (changed.timeout_ms, changed.retry) == (None, None)
    assert (plain.priority, plain.timeout_ms) == (5, 30_000)
    assert type(other) is SyncTask
    assert repr(task.with_options(priority=1)) == "<SyncTask 'add', priority=1>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prioriti": 1}, "has no setting of this name. Fix: use priority"),
        (
            {"stall_timeout": "5m"},
            r"stall_timeout = '5m': .*registered.*Fix: write @app.task\(stall_timeout=...\)",
        ),
        ({"run_in": "process"}, r"Fix: write @app.task\(run_in=...\)"),
        ({"priority": "high"}, "must be a whole number"),
        ({"priority": 40_000}, "-32768 to 32767"),
        ({"queue": "a b"}, "must be 1 to 63"),
        ({"key": ""}, "must be a string of 1 to 500 bytes"),
        ({"key": "a\x00"}, "must be a string of 1 to 500 bytes"),
        ({"key": "é" * 251}, "must be a string of 1 to 500 bytes"),
        ({"good_until": datetime(2030, 1, 1)}, "without a time zone"),  # noqa: DTZ001
        ({"timeout": "5 parsecs"}, "is not a duration"),
        ({"retry": 3}, "must be a RetryPolicy"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(task: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        task.with_options(**options)
    assert str(caught.value.problems[0].where).startswith(__file__)


def test_all_wrong_options_are_reported_together(task: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        task.with_options(prioriti=1, queue="", key=5)
    assert len(caught.value.problems) == 3


def test_a_send_with_wrong_arguments_or_times_sends_nothing(task: Any, outbox: Outbox) -> None:  # B13
    with pytest.raises(PayloadError, match="Argument 'a' = 'x' of task 'add'"):
        task.send("x")
    with pytest.raises(ConfigurationError, match="without a time zone"):
        task.schedule(datetime(2030, 1, 1), 1)  # noqa: DTZ001
    with pytest.raises(ConfigurationError, match="must be a timedelta or a datetime"):
        task.schedule(5, 1)
    with pytest.raises(ConfigurationError, match="must not be negative"):
        task.schedule(timedelta(seconds=-1), 1)
    with pytest.raises(ConfigurationError, match="is after good_until"):
        task.with_options(good_until=datetime(2030, 1, 1, tzinfo=UTC)).schedule(
            datetime(2031, 1, 1, tzinfo=UTC), 1
        )
    assert outbox.calls == []


def test_a_task_object_can_be_called_like_its_function(task: Any, outbox: Outbox) -> None:
    assert task(1) == 3
    assert (task.__name__, task.__doc__, task.__wrapped__) == ("add", "Adds two numbers.", add)
    assert inspect.signature(task) == inspect.signature(add)
    assert outbox.calls == []


async def test_a_direct_call_gets_a_detached_context(outbox: Outbox) -> None:
    waiting = make_task(fence, options=TaskOptions(), sender=outbox)
    working = make_task(name_of_context, options=TaskOptions(name="n", queue="q"), sender=outbox)
    assert isinstance(waiting, AsyncTask)
    assert await waiting(plus=1) == 1
    assert working() == "n q"
    assert Context.current_or_none() is None


async def test_a_direct_call_inside_a_task_gets_that_tasks_context(outbox: Outbox) -> None:
    running = local_context(task_id=UUID(int=1), name="outer", queue="outer")
    working = make_task(name_of_context, options=TaskOptions(), sender=outbox)
    with entered(running):
        assert working() == "outer outer"


def test_a_task_definition_has_the_mode_the_place_and_the_codec_of_its_function() -> None:
    definition = define(fence, options=TaskOptions(name="other"))
    assert (definition.name, definition.is_async, definition.run_in) == ("other", True, "async")
    assert definition.where == f"{__file__}:{fence.__code__.co_firstlineno}"
    assert definition.codec.takes_context
    assert define(add, options=TaskOptions(run_in="process")).run_in == "process"


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (add, TaskOptions(run_in="async"), "Task 'add' is a `def`"),
        (fence, TaskOptions(run_in="thread"), "Task 'fence' is an `async def`"),
        (lambda: 1, TaskOptions(), "A lambda has no name"),
        (make_task(add, options=TaskOptions(), sender=Outbox()), TaskOptions(), "not a SyncTask"),
    ],
)
def test_a_function_that_contradicts_its_options_is_refused(
    function: Any, options: TaskOptions, message: str
) -> None:
    with pytest.raises(RegistrationError, match=message) as caught:
        define(function, options=options)
    assert str(caught.value.where).startswith(__file__)
