"""The metrics that a real OpenTelemetry SDK collects from an app and its worker."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from everbeat import App, RetryPolicy, TaskError
from everbeat.errors import ConfigurationError
from everbeat.metrics import Meters, OpenTelemetryMetrics
from everbeat.store.target import Target
from tests.client.working import working

Points = dict[tuple[tuple[str, Any], ...], Any]
EVERBEAT = ("messaging.system", "everbeat")


class Collected:
    """The numbers that the SDK has collected, by the names of the instruments."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def read(self) -> dict[str, Points]:
        data = self.reader.get_metrics_data()
        found: dict[str, Points] = {}
        for resource in [] if data is None else data.resource_metrics:
            for scope in resource.scope_metrics:
                assert scope.scope.name == "everbeat"
                for metric in scope.metrics:
                    points = metric.data.data_points
                    found[metric.name] = {
                        tuple(sorted((point.attributes or {}).items())): point for point in points
                    }
        return found

    def unit(self, name: str) -> str | None:
        data = self.reader.get_metrics_data()
        assert data is not None
        (scope,) = data.resource_metrics[0].scope_metrics
        return next(metric.unit for metric in scope.metrics if metric.name == name)


def key(**labels: str) -> tuple[tuple[str, str], ...]:
    names = {
        "queue": "messaging.destination.name",
        "task": "everbeat.task.name",
        "op": "messaging.operation.name",
        "kind": "messaging.operation.type",
        "outcome": "everbeat.outcome",
        "error": "error.type",
    }
    return tuple(sorted([EVERBEAT, *((names[label], value) for label, value in labels.items())]))


@pytest.fixture
def collected() -> Iterator[Collected]:
    made = Collected()
    yield made
    made.provider.shutdown()


@pytest.fixture
def app(database_url: str, migrated: Target, collected: Collected) -> Iterator[App]:
    meters = OpenTelemetryMetrics(provider=collected.provider)
    made = App(database_url, schema=migrated.schema, metrics=meters)
    yield made
    made.close()


async def test_the_five_instruments_equal_what_was_sent_and_ran(app: App, collected: Collected) -> None:
    @app.task(queue="mail")
    async def welcome(user: int) -> None: ...

    @app.task(
        queue="mail", retry=RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=["DOWN"])
    )
    def flaky() -> None:
        raise TaskError("DOWN", "the server is down")

    @app.task(queue="films")
    async def break_down() -> None:
        raise ValueError("broken")

    sent = [await welcome.asend(user) for user in range(3)]
    sent.append(await flaky.asend())
    await app.asend_many([break_down.call(), break_down.call()])
    async with working(app):
        for handle in sent:
            await handle.aoutcome(timeout=30)
        while sum(point.count for point in collected.read()["messaging.process.duration"].values()) < 7:
            await sent[0].ainfo()  # the worker records an end after the reply
    found = collected.read()
    assert found.keys() == {
        "messaging.client.sent.messages",
        "messaging.client.consumed.messages",
        "messaging.client.operation.duration",
        "messaging.process.duration",
        "everbeat.task.wait.duration",
    }
    tasks = {
        key(queue=queue, task=task.name, op="send", kind="send"): count
        for queue, task, count in (("mail", welcome, 3), ("mail", flaky, 1), ("films", break_down, 2))
    }
    assert {each: point.value for each, point in found["messaging.client.sent.messages"].items()} == tasks
    assert {each: point.value for each, point in found["messaging.client.consumed.messages"].items()} == {
        key(queue="mail", op="receive", kind="receive"): 5,
        key(queue="films", op="receive", kind="receive"): 2,
    }
    waits = found["everbeat.task.wait.duration"]
    assert {each: point.count for each, point in waits.items()} == {
        key(queue="mail"): 5,
        key(queue="films"): 2,
    }
    assert all(0 <= point.min <= point.max < 60 for point in waits.values())
    runs = {each: point.count for each, point in found["messaging.process.duration"].items()}
    assert runs == {
        key(queue="mail", task=welcome.name, op="process", outcome="completed"): 3,
        key(queue="mail", task=flaky.name, op="process", outcome="retried", error="DOWN"): 1,
        key(queue="mail", task=flaky.name, op="process", outcome="failed", error="DOWN"): 1,
        key(queue="films", task=break_down.name, op="process", outcome="failed", error="ValueError"): 2,
    }
    operations = {each: point.count for each, point in found["messaging.client.operation.duration"].items()}
    assert operations[key(queue="mail", op="send", kind="send")] == 4
    assert operations[key(queue="films", op="send", kind="send")] == 1
    assert sum(n for each, n in operations.items() if dict(each)["messaging.operation.name"] == "settle") >= 2
    assert (
        sum(n for each, n in operations.items() if dict(each)["messaging.operation.name"] == "receive") >= 2
    )
    assert collected.unit("messaging.process.duration") == "s"
    assert collected.unit("messaging.client.sent.messages") == "{message}"


def test_a_send_that_fails_has_an_error_type(app: App, collected: Collected, migrated: Target) -> None:
    @app.task
    def welcome() -> None: ...

    with migrated.connect("everbeat test") as connection:
        connection.autocommit = False
        with pytest.raises(psycopg.Error):
            connection.execute("select 1 / 0")
        with pytest.raises(psycopg.Error):
            welcome.with_options(connection=connection).send()
        connection.rollback()
    found = collected.read()
    assert "messaging.client.sent.messages" not in found
    (labels,) = found["messaging.client.operation.duration"]
    assert dict(labels)["error.type"].endswith("InFailedSqlTransaction")


class Broken(Meters):
    """A recorder whose methods raise errors."""

    def sent(self, queue: str, name: str, /) -> None:
        raise ValueError("sent")

    def started(self, queue: str, name: str, /, *, wait_s: float) -> None:
        raise ValueError("started")


async def test_the_errors_of_a_recorder_are_logged_once_and_break_nothing(
    database_url: str, migrated: Target, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(database_url, schema=migrated.schema, metrics=Broken())

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    with caplog.at_level(logging.ERROR):
        sent = [await double.asend(n) for n in range(3)]
        async with working(app):
            assert [await each.aresult(timeout=30) for each in sent] == [0, 2, 4]
    await app.aclose()
    failed = [record.getMessage() for record in caplog.records if "meters_failed" in record.getMessage()]
    assert len(failed) == 2


def test_a_wrong_recorder_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"App\.metrics"):
        App("postgresql://x", metrics="otel")  # type: ignore[arg-type]


def test_without_a_recorder_opentelemetry_is_not_imported() -> None:
    code = "import sys, everbeat, everbeat.metrics; from everbeat import App; App('postgresql://x'); sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
