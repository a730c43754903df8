"""Spans of attempts that were stopped or lost their lease, and log lines, runs of schedules and limits in traces."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from psycopg import sql

from everbeat import App, Context, FinalFailure, Limit, RetryPolicy, Schedule
from everbeat.runtime.events import ZombieRefused
from everbeat.store.address import DatabaseAddress
from everbeat.store.target import Target
from everbeat.tracing import OpenTelemetry, PreviousAttempt, TracedAttempt, TracedEnd
from everbeat.worker.traced_attempts import _previous, next_context
from tests.client.working import working
from tests.otel.conftest import Exported, NewApp
from tests.otel.test_spans import attributes, linked, span_id, stored


def take_away(target: Target, task_id: UUID) -> None:
    """Give the lease to another claim, as a recovery and a second claim do."""
    query = sql.SQL("update {}.tasks set claim_id = gen_random_uuid(), fence = fence + 1 where id = %s")
    with target.connect("everbeat test") as connection:
        connection.execute(query.format(sql.Identifier(target.schema)), [task_id])
        connection.execute("select pg_notify(%s, %s)", [target.channel, f"l:{task_id}"])


async def test_an_attempt_that_lost_its_lease_does_not_claim_success(
    new_app: NewApp, exported: Exported, migrated: Target
) -> None:
    app = new_app()
    running, ended = asyncio.Event(), asyncio.Event()

    @app.task
    async def stubborn() -> int:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
        return 7

    async with working(app):
        handle = await stubborn.asend()
        await asyncio.wait_for(running.wait(), 30)
        take_away(migrated, handle.id)
        await asyncio.wait_for(ended.wait(), 30)
    span = exported.one("process default")
    assert attributes(span)["everbeat.outcome"] == "failed"
    assert attributes(span)["error.type"] == "LEASE_LOST"
    assert span.status.status_code is StatusCode.ERROR


async def test_the_refused_settlement_of_a_zombie_is_logged_with_the_ids_of_its_span(
    new_app: NewApp, exported: Exported, migrated: Target, caplog: pytest.LogCaptureFixture
) -> None:
    app = new_app()

    @app.task
    async def zombie() -> None:
        take_away(migrated, Context.current().task_id)

    def refused() -> list[logging.LogRecord]:
        return [each for each in caplog.records if "zombie_refused" in each.message]

    async with working(app):
        await zombie.asend()
        async with asyncio.timeout(30):
            while not refused():
                await asyncio.sleep(0.01)  # the log has no event to wait for
    (record,) = refused()
    span = exported.one("process default").get_span_context()
    assert span is not None
    ids = trace.format_trace_id(span.trace_id), trace.format_span_id(span.span_id)
    assert (record.__dict__["trace_id"], record.__dict__["span_id"]) == ids
    assert record.message.endswith(f"verb=settle trace_id={ids[0]} span_id={ids[1]}")
    assert ZombieRefused(task_id=UUID(int=0), verb="settle").shown == {
        "task_id": UUID(int=0),
        "verb": "settle",
    }


@pytest.mark.parametrize("traced", [True, False])
async def test_the_log_lines_of_failures_have_the_ids_of_the_span_if_there_is_one(
    new_app: NewApp, exported: Exported, database_url: str, migrated: Target, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    app = new_app() if traced else App(database_url, schema=migrated.schema)

    @app.task
    async def on_loop() -> None:
        raise ValueError("no stock")

    @app.task
    def in_thread() -> None:
        raise ValueError("no stock")

    async with working(app):
        for task in (on_loop, in_thread):
            with pytest.raises(Exception, match="no stock"):
                await (await task.asend()).aresult(timeout=30)
    await app.aclose()
    failures = [each for each in caplog.records if "task_failure" in each.message]
    spans = [span.get_span_context() for span in exported.named("process default")]
    found = [getattr(each, "span_id", None) for each in failures]
    assert found == [trace.format_span_id(each.span_id) for each in spans if each is not None] or [None] * 2
    assert len(spans) == 2 * traced
    assert all(
        ("span_id=" in each.message) == traced and "trace_ids" not in each.message for each in failures
    )


async def test_code_that_returns_after_its_timeout_does_not_claim_success(
    new_app: NewApp, exported: Exported
) -> None:
    app = new_app()

    @app.task(timeout="1s")
    async def slow() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7
        return 8

    async with working(app):
        with pytest.raises(Exception, match="TASK_TIMEOUT"):
            await (await slow.asend()).aresult(timeout=30)
    found = attributes(exported.one("process default"))
    assert (found["everbeat.outcome"], found["error.type"]) == ("failed", "TASK_TIMEOUT")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def attempt() -> TracedAttempt:
    now = datetime.now(UTC)
    return TracedAttempt(
        task_id=uuid4(), name="work", queue="default", attempt=1, fence=1, worker_id="w1", retry_count=0, crash_count=0, size=2, due_at=now,
        started_at=now,
    )  # fmt: skip


@pytest.mark.parametrize(
    "error", [Unprintable(), ValueError("file \udcff")], ids=["unprintable", "surrogate"]
)
def test_an_exception_without_a_proper_text_does_not_cost_the_span(
    exported: Exported, error: Exception
) -> None:
    tracer, end = OpenTelemetry(provider=exported.provider), TracedEnd()
    with tracer.running(attempt(), end):
        with pytest.raises(type(error)), tracer.step("step"):
            raise error
        end.how, end.exception = "failed", error
    for name in ("process default", "everbeat.step step"):
        (event,) = exported.one(name).events
        assert event.name == "exception"
        for text in (event.attributes or {}).values():
            assert str(text).encode(), "an exporter encodes it"


async def test_a_schedule_that_is_run_by_hand_continues_the_trace_of_the_caller(
    new_app: NewApp, exported: Exported, migrated: Target
) -> None:
    app = new_app()

    @app.task
    async def report(n: int) -> int:
        return n

    await app.aput_schedule(Schedule("nightly", report.call(3), every="1h"))
    with exported.provider.get_tracer("test").start_as_current_span("request"):
        handle = await app.arun_schedule("nightly")
    sent, request = exported.one("send default"), exported.one("request")
    assert sent.parent is not None
    assert sent.parent.span_id == span_id(request)
    assert attributes(sent)["messaging.message.id"] == str(handle.id)
    assert attributes(sent)["messaging.message.body.size"] == len(b'{"n":3}')
    assert "traceparent" in stored(migrated, handle.id)
    async with working(app):
        assert await handle.aresult(timeout=30) == 3
    assert linked(exported.one("process default")) == [span_id(sent)]


async def test_each_further_attempt_is_linked_to_the_send_and_to_the_attempt_before_it(
    new_app: NewApp, exported: Exported, migrated: Target
) -> None:
    app = new_app()

    @app.task
    async def handle_failure(failure: FinalFailure) -> None: ...

    @app.task(
        retry=RetryPolicy(auto_retry_for=[ValueError], max_retries=1, intervals=[1]),
        on_failure=handle_failure,
    )
    async def work(ctx: Context) -> None:
        await ctx.await_event("go")
        raise ValueError("no stock")

    async with working(app):
        handle = await work.asend()
        async with asyncio.timeout(30):
            while not exported.named("process default"):
                await asyncio.sleep(0.01)  # spans end without an event to wait for
        await app.asignal(handle, "go")
        with pytest.raises(Exception, match="no stock"):
            await handle.aresult(timeout=30)
        async with asyncio.timeout(30):
            while len(exported.named("process default")) < 4:
                await asyncio.sleep(0.01)  # as above
    sent = exported.one("send default")
    *runs, handler = exported.named("process default")
    assert [attributes(run)["everbeat.outcome"] for run in runs] == ["suspended", "failed", "failed"]
    assert [linked(run) for run in runs] == [
        [span_id(sent)], [span_id(sent), span_id(runs[0])], [span_id(sent), span_id(runs[1])],
    ]  # fmt: skip
    assert linked(handler) == [span_id(sent)], "the attempts of the failed task are not its own"
    assert stored(migrated, handle.id)["traceparent"]


HOSTILE = ["", "1", "1-x-y", "0-" + "a" * 32 + "-" + "b" * 16, "9-" + "a" * 32 + "-" + "b" * 16, "1-" + "A" * 32 + "-" + "b" * 16,
           "-1-" + "a" * 32 + "-" + "b" * 16, "1" * 5_000, "１-" + "a" * 32 + "-" + "b" * 16]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_that_does_not_name_an_earlier_attempt_gives_no_link(text: str) -> None:
    assert _previous(text, before=2) is None


def test_a_carrier_names_the_attempt_before_it() -> None:
    assert _previous("1-" + "a" * 32 + "-" + "b" * 16, before=2) == PreviousAttempt(1, "a" * 32, "b" * 16)


@pytest.mark.parametrize(("size", "stored_keys"), [(10, {"baggage", "everbeat-previous"}), (8_150, None)])
def test_the_link_to_the_next_attempt_is_left_out_before_the_baggage(
    size: int, stored_keys: set[str] | None
) -> None:
    facts = json.dumps({"carrier": {"baggage": "b" * size}})
    ended = SimpleNamespace(number=1, trace_ids=("a" * 32, "b" * 16), task=SimpleNamespace(context=facts))
    found = next_context(ended)  # type: ignore[arg-type]
    assert (None if found is None else json.loads(found).keys()) == stored_keys


async def test_the_span_of_an_attempt_names_its_limits_without_their_keys(
    database_url: str, migrated: Target, exported: Exported
) -> None:
    limits = [Limit("stripe", concurrency=2), Limit("tenant", concurrency=1, key="tenant")]
    tracing = OpenTelemetry(provider=exported.provider)
    app = App(database_url, schema=migrated.schema, limits=limits, tracing=tracing)

    @app.task(limits=["stripe", "tenant"])
    async def pay(tenant: str) -> None: ...

    async with working(app):
        await (await pay.asend("secret")).aresult(timeout=30)
    await app.aclose()
    assert attributes(exported.one("process default"))["everbeat.limit"] == ("stripe", "tenant")


def test_the_server_is_named_only_if_it_is_known_and_all_apps_of_a_tracer_share_it(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGHOST", raising=False)
    monkeypatch.delenv("PGPORT", raising=False)

    def server(url: str) -> tuple[str, int] | None:
        return DatabaseAddress.parse(url, schema="everbeat", environment={}).server

    assert server("postgresql://db.internal:6543/shop") == ("db.internal", 6543)
    assert server("host=/run/postgresql dbname=shop") == ("/run/postgresql", 5432)
    assert server("postgresql://a,b/shop") is None
    assert server("postgresql:///shop") is None
    assert server("embedded") is None
    tracer = OpenTelemetry(provider=exported.provider)
    App("postgresql://db.internal/shop", tracing=tracer)
    App("postgresql://db.internal/shop", tracing=tracer)
    assert tracer._server == {"server.address": "db.internal", "server.port": 5432}
    App("postgresql://other.internal/shop", tracing=tracer)
    App("postgresql://db.internal/shop", tracing=tracer)
    assert tracer._server == {}
