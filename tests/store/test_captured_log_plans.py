"""Statements about captured logs use their index among many logs: few pages, no table scan."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

from everbeat.domain.task.captured_log import LogLine, UnwrittenPart
from everbeat.store import attempt_logs, retention
from everbeat.store.attempt_logs import LogPlace, LogSummary
from tests.store import test_stream_plans
from tests.store.plans import filled, held
from tests.store.test_stream_plans import HIGHEST, LOWEST, check_plan

pytestmark = pytest.mark.timeout(900)  # filling a million rows takes minutes

PARTS = 100_000

# One task has 6,000 attempts with a full log of 16 parts; others have one part. Each part has about 2 kB inline.
FILL = (
    """insert into {{schema}}.attempt_logs (task_id, attempt, claim_id, part, first, last, lines)
       select '{busy}', 1 + n / 16, md5((n / 16)::text)::uuid, n % 16, 1 + n % 16 * 10, 10 + n % 16 * 10, to_json(repeat('line', 400))
       from generate_series(0, {parts} - 1) n""",
    """insert into {{schema}}.attempt_logs (task_id, attempt, claim_id, part, first, last, lines)
       select t.id, 1, t.id, 0, 1, 10, '[]' from (select id from {{schema}}.tasks where id <> '{busy}' limit {parts}) t""",
    "vacuum analyze {{schema}}.attempt_logs",
)


class Logged(test_stream_plans.Loaded):
    """The harness, and a running task with the logs of many attempts."""


@pytest.fixture(scope="module")
def logged(database_url: str) -> Iterator[Logged]:
    with filled(database_url, rows=100_000, in_flight=500) as db:
        one = Logged.__new__(Logged)
        one.db = db
        one.task_id, one.claim_id = held(db, 1)[0]
        for text in FILL:
            query = text.format(busy=one.task_id, parts=PARTS).replace("{schema}", f'"{db.target.schema}"')
            db.connection.execute(query.encode())
        yield one


@pytest.fixture(autouse=True)
def with_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_stream_plans, "TABLES", {"tasks", "attempt_logs", "history"})


def test_writing_parts_reads_a_bounded_number_of_pages(logged: Logged) -> None:
    line = LogLine(1, datetime(2030, 1, 1, tzinfo=UTC), "INFO", "shop", "x" * 100)
    new = [
        (LogPlace(task_id, 1, claim_id), UnwrittenPart(0, [line]))
        for task_id, claim_id in held(logged.db, 100)
    ]
    check_plan(logged, attempt_logs.write_parts(new), pages=3_000)
    known = LogPlace(logged.task_id, 6_000, UUID("0" * 32))
    check_plan(logged, attempt_logs.write_parts([(known, UnwrittenPart(0, [line]))]), pages=60)


def test_reading_logs_reads_a_bounded_number_of_pages(logged: Logged) -> None:
    check_plan(logged, attempt_logs.list_logs(logged.task_id), pages=500)
    check_plan(logged, attempt_logs.list_logs(logged.task_id, attempt=3_000), pages=60)
    newest = logged.db.run(attempt_logs.list_logs(logged.task_id))[0]
    assert newest.attempt == PARTS // 16
    check_plan(logged, attempt_logs.list_parts(logged.task_id, newest, after=0), pages=60)
    check_plan(logged, attempt_logs.list_parts(uuid4(), LogSummary(1, uuid4(), 1), after=0), pages=10)


def test_pruning_logs_reads_a_bounded_number_of_pages(logged: Logged) -> None:
    check_plan(logged, retention.prune_logs(hours=1, limit=1_000, after=LOWEST, until=HIGHEST), pages=4_000)
    check_plan(logged, retention.prune_logs(hours=0, limit=1_000, after=LOWEST, until=HIGHEST), pages=20_000)
