"""Retries many tasks at once in the middle of a run, seals the batches at its end, and judges what is around the work."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from psycopg import Connection, sql

from everbeat import App, EverbeatError

EMITTED: Final = 30
"""The number of items that each attempt of a streaming task emits."""
UNENDED: Final = """
    (select count(*) from {0}.batches where ended_at is null and sealed_at is not null)
        + (select count(*) from {0}.bulk_actions where ended_at is null)
"""
"""The number of sealed batches and of bulk actions that have not ended."""
_NAME: Final = "handled"
_TRY_EVERY_S: Final = 0.5


def retry_in_bulk(url: str, schema: str, *, over: threading.Event) -> None:
    """Request the retry of all failed tasks with a handler twice, and try until both requests are acknowledged."""
    own = App(url, schema=schema)
    try:
        for _ in range(2):
            while not over.is_set():
                with suppress(EverbeatError):
                    own.retry_all(name=_NAME, state="FAILED", by="chaos")
                    break
                over.wait(_TRY_EVERY_S)
    finally:
        own.close()


def seal_all(url: str, schema: str) -> bool:
    """Seal the batches that the producers have left open. Return whether all are sealed."""
    own = App(url, schema=schema)
    try:
        for batch in own.list_batches(live=True, limit=10_000):
            own.open_batch(batch.id).seal()
    except EverbeatError:
        return False
    finally:
        own.close()
    return True


_ALWAYS_COMPLETED: Final = """
    select t.name, t.id, t.state, t.error ->> 'code' as code from {schema}.all_tasks t
    where t.name in ('gathering', 'leaf', 'streaming', 'member', 'grown', 'closed', 'noticed') and t.state <> 'COMPLETED'
"""
_ITEMS: Final = """
    select t.id, array_agg(i.value::text::integer order by i.number) from {schema}.all_tasks t
    left join {schema}.stream_items i on i.task_id = t.id and i.name = 'numbers' and i.attempt = t.attempt
    where t.name = 'streaming' and t.state = 'COMPLETED' group by t.id
"""
_BULK: Final = """
    select
        b.id, b.state, b.matched, b.done, b.skipped, (select count(*) from {schema}.all_tasks t where t.retry_call = b.id) as retried,
        (select array_agg(l.outcome order by l.id) from {schema}.audit_log l where l.target = b.id::text) as noted
    from {schema}.bulk_actions b order by b.requested_at
"""


def problems(connection: Connection[Any], schema: str) -> Iterator[tuple[str, str]]:
    """Yield the promises about the work around that the tables break, in addition to the invariants I35 to I39."""

    def found(text: str) -> Sequence[tuple[Any, ...]]:
        return connection.execute(sql.SQL(text).format(schema=sql.Identifier(schema))).fetchall()  # type: ignore[arg-type]

    for name, task_id, state, code in found(_ALWAYS_COMPLETED):
        yield "L3", f"task {task_id} ({name}) ended {state} with {code}, although its policy runs it again"
    for task_id, values in found(_ITEMS):
        if values != [*range(EMITTED)]:
            yield "I37", f"the attempt that completed task {task_id} has the items {values}"
    actions = found(_BULK)
    for action_id, state, matched, done, skipped, retried, noted in actions:
        # A task of an earlier action can be retried by a later one, too, if a reply was lost.
        is_last = action_id == actions[-1][0]
        if (
            state != "COMPLETED"
            or done + skipped != matched
            or retried > done
            or (is_last and retried < done)
        ):
            yield (
                "K10",
                f"bulk action {action_id} is {state}: {matched} matched, {done} done, {skipped} skipped, {retried} retried",
            )
        if noted != ["requested", "completed"]:
            yield "K10", f"the audit log has {noted} about bulk action {action_id}"
    if not actions:
        yield "K10", "no bulk action was requested, so the run shows nothing about them"
