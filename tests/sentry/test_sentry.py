"""The spans, events and check-ins that Sentry's real SDK sends for an app and its worker."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sentry_sdk

from everbeat import App, RetryPolicy, TaskError
from everbeat.domain.tracing.model import TracedAttempt, TracedEnd, TracedRecovery
from everbeat.errors import ConfigurationError
from everbeat.runtime import installed_tracers
from everbeat.sentry import EverbeatIntegration
from tests.client.working import working
from tests.sentry.conftest import NewApp, Sentry

SECRET = "-".join(["4711", "secret"])
"""An argument. The source of the test, which events quote, does not contain it."""
DASHBOARD = "https://ops.example.com/everbeat"


async def test_an_attempt_joins_the_trace_of_its_send(sentry: Sentry, new_app: NewApp) -> None:
    sentry.init()
    app = new_app()

    @app.task(queue="mail")
    async def welcome(user: int) -> None:
        with sentry_sdk.start_span(op="db", name="select"):
            pass

    with sentry_sdk.start_transaction(op="http.server", name="/register"):
        handle = await welcome.asend(42)
    async with working(app):
        await handle.aresult(timeout=30)
    (request,) = sentry.transactions("http.server")
    (publish,) = [span for span in request["spans"] if span["op"] == "queue.publish"]
    assert publish["description"] == welcome.name
    wanted = {
        "messaging.system": "everbeat",
        "messaging.message.id": str(handle.id),
        "messaging.destination.name": "mail",
        "messaging.message.body.size": len(b'{"user":42}'),
    }
    assert wanted.items() <= publish["data"].items()
    (run,) = sentry.transactions()
    trace = run["contexts"]["trace"]
    assert run["transaction"] == welcome.name
    assert trace["trace_id"] == request["contexts"]["trace"]["trace_id"]
    assert trace["parent_span_id"] == publish["span_id"]
    assert trace["status"] == "ok"
    (process,) = [span for span in run["spans"] if span["op"] == "queue.process"]
    assert wanted.items() <= process["data"].items()
    assert 0 <= process["data"]["messaging.message.receive.latency"] < 60_000
    assert process["data"]["messaging.message.retry.count"] == 0
    (query,) = [span for span in run["spans"] if span["op"] == "db"]
    assert query["parent_span_id"] == process["span_id"]
    assert sentry.events == []


async def test_only_the_final_failure_is_an_event_with_a_link(sentry: Sentry, new_app: NewApp) -> None:
    sentry.init()
    app = new_app(dashboard_url=DASHBOARD)

    @app.task(retry=RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=["DOWN"]))
    def flaky() -> None:
        raise TaskError("DOWN", "the server is down")

    handle = await flaky.asend()
    async with working(app):
        await handle.aoutcome(timeout=30)
    (event,) = sentry.events
    (error,) = event["exception"]["values"]
    assert (error["type"], error["mechanism"]["type"]) == ("TaskError", "everbeat")
    assert error["mechanism"]["handled"] is False
    assert error["stacktrace"]["frames"][-1]["function"] == "flaky"
    about = event["contexts"]["everbeat"]
    assert (about["task_id"], about["attempt"]) == (str(handle.id), 2)
    assert about["task_url"] == f"{DASHBOARD}/tasks/{handle.id}"
    assert event["tags"]["everbeat.task"] == flaky.name
    assert event["tags"]["everbeat.code"] == "DOWN"
    runs = sentry.transactions()
    assert [run["contexts"]["trace"]["status"] for run in runs] == ["internal_error", "internal_error"]
    assert event["contexts"]["trace"]["trace_id"] == runs[1]["contexts"]["trace"]["trace_id"]


async def test_failures_that_are_retried_are_events_if_wanted(sentry: Sentry, new_app: NewApp) -> None:
    sentry.init(capture_retries=True)
    app = new_app()

    @app.task(retry=RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=[ValueError]))
    async def flaky() -> None:
        raise ValueError("broken")

    handle = await flaky.asend()
    async with working(app):
        await handle.aoutcome(timeout=30)
    assert [event["contexts"]["everbeat"]["attempt"] for event in sentry.events] == [1, 2]


async def test_a_timeout_is_an_event_although_the_code_raised_nothing(
    sentry: Sentry, new_app: NewApp
) -> None:
    sentry.init()
    app = new_app()

    @app.task(timeout="1s")
    async def slow() -> None:
        await asyncio.Event().wait()

    handle = await slow.asend()
    async with working(app):
        await handle.aoutcome(timeout=30)
    (event,) = sentry.events
    assert event["exception"]["values"][-1]["type"] == "TASK_TIMEOUT"


@pytest.mark.parametrize("rule", ["charge", "*:card", "other"])
async def test_hidden_arguments_are_in_no_event(sentry: Sentry, new_app: NewApp, rule: str) -> None:
    sentry.init(hide=[rule])
    app = new_app()

    @app.task(name="charge")
    async def charge(card: str) -> None:
        logging.getLogger("shop").warning("charging %s", card)
        number = card.upper()
        raise ValueError(f"{number} was refused")

    handle = await charge.asend(SECRET)
    async with working(app):
        await handle.aoutcome(timeout=30)
    (event,) = sentry.events
    frames = event["exception"]["values"][0]["stacktrace"]["frames"]
    if rule == "other":
        assert frames[-1]["vars"]["card"] == repr(SECRET)
        assert SECRET not in str(frames[:-1]), "the frames of everbeat have no variables"
    else:
        assert [name for name, part in event.items() if SECRET in str(part).lower()] == []
        assert frames[-1]["function"] == "charge"


def recovery(**facts: Any) -> TracedRecovery:
    now = datetime.now(UTC)
    return TracedRecovery(
        **{
            "task_id": UUID(int=1), "name": "render", "queue": "films", "attempt": 1, "fence": 1, "worker_id": "web-1", "hostname": "web",
            "pid": 7, "action": "retry", "cause": "SIGKILL", "noticed_by": "child_exit", "recovered_by": "s1", "started_at": now,
            "last_beat_at": now, "recovered_at": now + timedelta(seconds=1),
        } | facts
    )  # fmt: skip


def test_one_event_reports_all_tasks_of_a_death(sentry: Sentry, new_app: NewApp) -> None:
    sentry.init()
    app = new_app(dashboard_url=DASHBOARD)
    assert app._tracing is not None
    tasks = [recovery(task_id=UUID(int=number)) for number in range(150)]
    for first in (0, 100):
        app._tracing.recovered(tasks[first : first + 100])
    (event,) = sentry.events
    assert (event["level"], event["message"]) == ("error", "A worker died while it held render: SIGKILL")
    about = event["contexts"]["everbeat"]
    assert about["workers"] == ["web-1"]
    assert len(about["tasks"]) == 20
    app._tracing.recovered([recovery(worker_id="web-2", action="requeue", started_at=None)])
    assert [each["level"] for each in sentry.events] == ["error", "warning"]


async def test_runs_of_a_schedule_are_check_ins(sentry: Sentry, new_app: NewApp) -> None:
    sentry.init(monitor_schedules=True)
    app = new_app()

    @app.task
    async def report() -> None: ...

    app.schedule("nightly", report.call(), every="1s")
    async with working(app):
        while not any(each["status"] == "ok" for each in sentry.of("check_in")):
            await app.alist_workers()
    first, *others = sentry.of("check_in")
    assert (first["monitor_slug"], first["status"]) == ("nightly", "in_progress")
    done = next(each for each in others if each["check_in_id"] == first["check_in_id"])
    assert done["status"] == "ok"
    assert done["duration"] >= 0


def test_a_send_of_many_has_a_span_for_each_task_and_stores_traces_only_if_wanted(
    sentry: Sentry, new_app: NewApp
) -> None:
    sentry.init(propagate_traces=False)
    app = new_app()

    @app.task
    def work(n: int) -> None: ...

    with sentry_sdk.start_transaction(op="script", name="fill"):
        handles = app.send_many(work.call(n) for n in range(3))
    (run,) = sentry.transactions("script")
    whole, *each = run["spans"]
    assert whole["data"]["messaging.batch.message_count"] == 3
    assert {span["data"]["messaging.message.id"] for span in each} == {str(handle.id) for handle in handles}
    assert all(span["parent_span_id"] == whole["span_id"] for span in each)


def test_an_app_that_was_created_before_the_sdk_is_reported(
    sentry: Sentry, caplog: pytest.LogCaptureFixture
) -> None:
    App("postgresql://x")
    sentry.init()
    assert "tracer_after_app tracer=SentryTracer" in caplog.text


def test_without_a_client_nothing_is_traced(sentry: Sentry, new_app: NewApp) -> None:
    sentry.init()
    app = new_app()
    sentry_sdk.get_global_scope().set_client(None)

    @app.task
    def work() -> None: ...

    work.send()
    assert sentry.transport.items == []


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="capture_retries"):
        EverbeatIntegration(capture_retries="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="TASK:PARAMETER"):
        EverbeatIntegration(hide=["charge:"])


def test_an_app_does_not_import_the_sdk() -> None:
    assert installed_tracers._installed == []
    code = (
        "import sys; from everbeat import App; App('postgresql://x'); sys.exit('sentry_sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(("will_retry", "events"), [(False, 1), (True, 0)])
def test_an_attempt_whose_task_process_was_killed_is_reported_unless_it_runs_again(
    sentry: Sentry, new_app: NewApp, will_retry: bool, events: int
) -> None:
    sentry.init()
    app, now = new_app(), datetime.now(UTC)
    attempt = TracedAttempt(
        task_id=uuid4(), name="render", queue="default", attempt=1, fence=1, worker_id="w1", retry_count=0, crash_count=0, size=2, due_at=now,
        started_at=now,
    )  # fmt: skip
    end = TracedEnd(how="failed", code="TASK_TIMEOUT", message="killed by SIGKILL", will_retry=will_retry)
    assert app._tracing is not None
    app._tracing.killed(attempt, end, now)
    found = sentry.events
    assert len(found) == events
    for event in found:
        assert event["exception"]["values"][0]["type"] == "TASK_TIMEOUT"
        assert event["contexts"]["everbeat"]["task_id"] == str(attempt.task_id)
