"""The spans of sends, attempts, steps and commits, as a real OpenTelemetry SDK exports them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from psycopg import conninfo

from everbeat import App, Context, FinalFailure, RetryPolicy, TaskError
from everbeat.logging import task_fields
from everbeat.store.target import Target
from tests.client.working import working
from tests.otel.conftest import Exported, NewApp


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def stored(target: Target, task_id: UUID) -> Any:
    with target.connect("everbeat test") as connection:
        query = psycopg.sql.SQL("select context from {}.all_tasks where id = %s").format(
            psycopg.sql.Identifier(target.schema)
        )
        return connection.execute(query, [task_id]).fetchone()[0]  # type: ignore[index]


def traceparent(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}-{context.trace_flags:02x}"


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    found, context = span.parent, parent.get_span_context()
    return found is not None and context is not None and found.span_id == context.span_id


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def test_a_send_is_a_producer_span_whose_context_is_stored_with_the_task(
    new_app: NewApp, exported: Exported, migrated: Target
) -> None:
    app = new_app(labels=["tenant"])

    @app.task(queue="mail")
    def welcome(user: int) -> None: ...

    with exported.provider.get_tracer("test").start_as_current_span("request"):
        handle = welcome.with_options(key="k", labels={"tenant": "acme", "secret": "x"}).send(42)
    span = exported.one("send mail")
    info = conninfo.conninfo_to_dict(migrated.url)
    assert span.kind is SpanKind.PRODUCER
    assert is_child(span, exported.one("request"))
    assert stored(migrated, handle.id)["traceparent"] == traceparent(span)
    assert attributes(span) == {
        "messaging.system": "everbeat",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "mail",
        "messaging.message.id": str(handle.id),
        "messaging.message.body.size": len(b'{"user":42}'),
        "everbeat.task.name": welcome.name,
        "everbeat.key": "k",
        "everbeat.label.tenant": "acme",
        "server.address": info["host"],
        "server.port": int(info["port"]),
    }


def test_each_task_of_a_send_of_many_has_a_span_up_to_a_hundred(
    new_app: NewApp, exported: Exported, migrated: Target
) -> None:
    app = new_app()

    @app.task
    def work(n: int) -> None: ...

    handles = app.send_many(work.call(n) for n in range(100))
    whole = exported.one("send default")
    created = exported.named("create default")
    assert whole.kind is SpanKind.CLIENT
    assert attributes(whole)["messaging.batch.message_count"] == 100
    assert len(created) == 100
    assert all(is_child(span, whole) and span.kind is SpanKind.PRODUCER for span in created)
    assert stored(migrated, handles[7].id)["traceparent"] == traceparent(created[7])

    exported.exporter.clear()
    handles = app.send_many(work.call(n) for n in range(101))
    whole = exported.one("send default")
    assert exported.named("create default") == []
    assert {stored(migrated, handle.id)["traceparent"] for handle in handles[::50]} == {traceparent(whole)}


def test_every_kind_of_send_stores_a_carrier(new_app: NewApp, exported: Exported, migrated: Target) -> None:
    app = new_app()

    @app.task
    def work(n: int) -> None: ...

    def carriers(*ids: UUID) -> None:
        assert all("traceparent" in stored(migrated, task_id) for task_id in ids)

    unique = work.with_options(key="u", unique_for="1h", on_duplicate="replace")
    carriers(unique.send(1).id)
    before = stored(migrated, unique.send(2).id)
    carriers(unique.send(3).id)
    assert stored(migrated, unique.send(3).id) != before, "a replaced task has the carrier of the last send"
    carriers(app.send_by_name(work.name, {"n": 4}).id)
    batch = app.batch("b")
    with batch:
        carriers(batch.send(work.call(5)).id)
    with migrated.connect("everbeat test") as connection, connection.transaction():
        joined = work.with_options(connection=connection).send(6)
    carriers(joined.id)
    assert all(span.end_time is not None for span in exported.spans)


async def test_the_span_of_an_attempt_is_current_in_the_code_and_linked_to_the_send(
    new_app: NewApp, exported: Exported
) -> None:
    app = new_app()
    seen: dict[str, int] = {}
    fields: dict[str, Any] = {}

    @app.task
    async def on_loop() -> None:
        seen["on_loop"] = trace.get_current_span().get_span_context().span_id
        fields.update(task_fields())

    @app.task
    def in_thread() -> None:
        seen["in_thread"] = trace.get_current_span().get_span_context().span_id

    async with working(app):
        for task in (on_loop, in_thread):
            exported.exporter.clear()
            handle = await task.asend()
            await handle.aresult(timeout=30)
            sent, span = exported.one("send default"), exported.one("process default")
            assert span.kind is SpanKind.CONSUMER
            assert span.parent is None
            assert linked(span) == [span_id(sent)]
            assert seen[task.name.rpartition(".")[2]] == span_id(span)
            found = attributes(span)
            assert found["messaging.message.id"] == str(handle.id)
            assert found["everbeat.attempt"] == 1
            assert found["everbeat.outcome"] == "completed"
            assert found["messaging.client.id"]
            assert found["everbeat.wait_ms"] >= 0
            assert span.status.status_code is StatusCode.UNSET
            if task is on_loop:
                assert fields["span_id"] == trace.format_span_id(span_id(span))
                assert len(fields["trace_id"]) == 32
    assert trace.get_current_span() is trace.INVALID_SPAN, "nothing leaks into the program"


async def test_attempts_are_children_of_the_send_on_request_and_failures_are_errors(
    new_app: NewApp, exported: Exported
) -> None:
    app = new_app(trace="parent")

    @app.task(retry=RetryPolicy(auto_retry_for=[ValueError], max_retries=1, intervals=[1]))
    async def failing() -> None:
        if Context.current().attempt == 1:
            raise ValueError("not yet")
        raise TaskError("BROKEN", "for good")

    async with working(app):
        handle = await failing.asend()
        with pytest.raises(Exception, match="for good"):
            await handle.aresult(timeout=30)
    first, second = exported.named("process default")
    sent = exported.one("send default")
    assert is_child(first, sent)
    assert is_child(second, sent)
    assert first.links == ()
    assert linked(second) == [span_id(first)]
    assert dict(second.links[0].attributes or {}) == {"everbeat.link": "attempt", "everbeat.attempt": 1}
    assert [attributes(span)["error.type"] for span in (first, second)] == ["ValueError", "BROKEN"]
    assert [attributes(span)["everbeat.attempt"] for span in (first, second)] == [1, 2]
    assert first.status.status_code is StatusCode.ERROR
    assert first.events[0].name == "exception"
    assert attributes(second)["everbeat.outcome"] == "failed"


async def test_steps_and_children_have_spans_and_a_recorded_step_is_an_event(
    new_app: NewApp, exported: Exported, migrated: Target
) -> None:
    app = new_app()
    children: list[UUID] = []

    def charge() -> int:
        return 7

    async def ship() -> int:
        return 8

    @app.task
    async def small(n: int) -> int:
        return n

    @app.task(retry=RetryPolicy(auto_retry_for=[ValueError], max_retries=1, intervals=[1]))
    async def order(ctx: Context) -> list[int]:
        found = [await ctx.astep(charge), await ctx.astep(ship)]
        children.append((await ctx.asend(small.call(1))).id)
        if ctx.attempt == 1:
            raise ValueError("again")
        return [*found, *await ctx.agather(small.call(2), small.call(3))]

    async with working(app):
        assert await (await order.asend()).aresult(timeout=30) == [7, 8, 2, 3]
    runs = [
        span
        for span in exported.named("process default")
        if attributes(span)["everbeat.task.name"] == order.name
    ]
    first, last = runs[0], runs[-1]
    assert is_child(exported.one("everbeat.step charge"), first)
    assert is_child(exported.one("everbeat.step ship"), first)
    for name in ("charge", "ship"):
        found = attributes(exported.one(f"everbeat.step {name}"))
        assert found["messaging.message.id"] == attributes(first)["messaging.message.id"]
    recorded = [event for event in last.events if event.name == "everbeat.step_recorded"]
    assert [dict(event.attributes or {}) for event in recorded] == [
        {"everbeat.step": "charge"},
        {"everbeat.step": "ship"},
    ]
    sent = next(span for span in exported.named("send default") if is_child(span, first))
    assert stored(migrated, children[0])["traceparent"] == traceparent(sent)
    assert children[0] == children[1]
    assert len(exported.named("create default")) == 2
    assert {attributes(span)["everbeat.outcome"] for span in runs[1:-1]} <= {"suspended"}


async def test_a_commit_has_a_span(new_app: NewApp, exported: Exported, migrated: Target) -> None:
    app = new_app()

    @app.task
    async def pay(ctx: Context) -> None:
        async with (
            await migrated.aconnect("everbeat test") as connection,
            ctx.commit(connection) as completion,
        ):
            completion.result = None

    async with working(app):
        await (await pay.asend()).aresult(timeout=30)
    assert is_child(exported.one("everbeat.commit"), exported.one("process default"))


async def test_the_nodes_of_a_workflow_and_failure_handlers_have_the_carrier_of_their_cause(
    new_app: NewApp, exported: Exported
) -> None:
    app = new_app()
    handled = asyncio.Event()

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task
    async def note(failure: FinalFailure) -> None:
        handled.set()

    @app.task(on_failure=note)
    async def break_down() -> None:
        raise RuntimeError

    wf = app.workflow("doubling")
    last = wf.add(double, wf.add(double, 1).result)
    async with working(app):
        handle = await wf.astart(output=last)
        assert await handle.aresult(timeout=30) == 4
        start = exported.one("start doubling")
        nodes = exported.named("process default")
        assert [linked(span) for span in nodes] == [[span_id(start)]] * 2
        assert attributes(nodes[0])["messaging.message.conversation_id"] == str(handle.id)
        exported.exporter.clear()
        await break_down.asend()
        await asyncio.wait_for(handled.wait(), 30)
    sent = exported.one("send default")
    assert [linked(span) for span in exported.named("process default")] == [[span_id(sent)]] * 2


@pytest.fixture
def untraced(database_url: str, migrated: Target) -> Iterator[App]:
    opened = App(database_url, schema=migrated.schema)
    yield opened
    opened.close()


async def test_traced_and_untraced_programs_work_together(
    new_app: NewApp, untraced: App, exported: Exported, migrated: Target, caplog: pytest.LogCaptureFixture
) -> None:
    traced = new_app()

    @traced.task(name="work")
    async def work() -> str:
        return "traced"

    @untraced.task(name="work")
    async def plain() -> str:
        return "untraced"

    async with working(untraced):
        handle = await work.asend()
        assert await handle.aresult(timeout=30) == "untraced"
    assert exported.named("process default") == []
    async with working(traced):
        handle = await plain.asend()
        assert await handle.aresult(timeout=30) == "traced"
    assert stored(migrated, handle.id) is None
    span = exported.one("process default")
    assert span.links == ()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
