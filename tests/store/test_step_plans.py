"""Statements about steps, signals and children use their indexes with 100,000 rows of each: few pages, no table scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.domain.task.context_backend import NewChild
from everbeat.store import inspection, recorded, retention, steps, tasks
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.store.plans import check_plans, filled, held, nodes, plan, vacuum

ROWS = 100_000

# One task has 2,000 steps and 2,000 signals, one workflow has 1,000 waiting tasks; the rest is spread over all tasks.
FILL = (
    """insert into {schema}.steps (task_id, kind, name, result, attempt)
       select t.id, 'step', 'charge', '1', 1 from (select id from {schema}.tasks limit %(rows)s) t""",
    """insert into {schema}.signals (id, target, name, value)
       select gen_random_uuid(), t.id, 'approved', '1' from (select id from {schema}.tasks limit %(rows)s) t""",
    """insert into {schema}.steps (task_id, kind, name, result, attempt, signal_id)
       select %(busy)s, case when n %% 2 = 0 then 'step' else 'event' end, 'n' || n, '1', 1, case when n %% 2 = 1 then gen_random_uuid() end
       from generate_series(1, 2000) n""",
    """insert into {schema}.signals (id, target, name, value)
       select gen_random_uuid(), %(busy)s, 'n' || n, '1' from generate_series(1, 2000) n""",
    """insert into {schema}.workflows (id, name, on_error, node_count)
       select case when n = 1 then %(workflow)s else gen_random_uuid() end, 'w', 'fail', 1 from generate_series(1, 1000) n""",
    """update {schema}.tasks set workflow_id = %(workflow)s, node = 1, waits_for = case when fence %% 1 = 0 then 'approved' end
       where id in (select id from {schema}.tasks where state = 'PENDING' limit 1000)""",
    """update {schema}.tasks set parent_id = %(busy)s
       where id in (select id from {schema}.tasks where state = 'PENDING' and waits_for is null limit 100)""",
    "vacuum analyze {schema}.tasks",
    "vacuum analyze {schema}.steps",
    "vacuum analyze {schema}.signals",
    "vacuum analyze {schema}.workflows",
)


class Loaded:
    """The harness, a running task with many records, and a workflow with many waiting tasks."""

    def __init__(self, db: StoreHarness) -> None:
        self.db = db
        self.task_id, self.claim_id = held(db, 1)[0]
        self.workflow = uuid4()
        names = {"schema": sql.Identifier(db.target.schema)}
        given = {"rows": ROWS, "busy": self.task_id, "workflow": self.workflow}
        for text in FILL:
            used = {name: value for name, value in given.items() if f"%({name})s" in text}
            db.connection.execute(sql.SQL(text).format(**names), used or None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[Loaded]:
    with filled(database_url, rows=ROWS, in_flight=500) as db:
        yield Loaded(db)


@pytest.fixture(autouse=True)
def vacuumed(loaded: Loaded) -> None:
    """Remove the rows that other tests rolled back, so that these tests can run in any order."""
    vacuum(loaded.db, "tasks", "steps", "signals", "workflows")


def check_plan(loaded: Loaded, statement: Statement[Any], *, pages: int) -> None:
    check_plans(loaded.db, statement, pages=pages, tables=("tasks", "steps", "signals", "workflows"))


def test_statements_that_record_and_read_steps_read_a_bounded_number_of_pages(loaded: Loaded) -> None:
    lease = loaded.task_id, loaded.claim_id
    check_plan(loaded, steps.record_step(*lease, name="new", result=b"1"), pages=60)
    check_plan(loaded, steps.load_steps(*lease), pages=600)
    check_plan(loaded, steps.load_steps(*lease, after=("step", "n1000")), pages=600)
    check_plan(loaded, steps.begin_sleep(*lease, name="sleep", duration_ms=1_000), pages=60)


def test_the_records_of_one_task_are_shown_by_its_key(loaded: Loaded) -> None:
    check_plan(loaded, recorded.list_steps(loaded.task_id), pages=900)
    check_plan(loaded, recorded.read_checkpoint(loaded.task_id), pages=60)


def test_waits_and_signals_read_a_bounded_number_of_pages(loaded: Loaded) -> None:
    lease = loaded.task_id, loaded.claim_id
    for event in ("approved", "unheard", "n77"):
        check_plan(loaded, steps.wait_for_signal(*lease, name=event, event=event, timeout_ms=None), pages=120)
    channel = loaded.db.target.channel
    one = tasks.send_signal(uuid4(), target=loaded.task_id, name="approved", value=b"1", channel=channel)
    check_plan(loaded, one, pages=280)
    none_waits = tasks.send_signal(uuid4(), target=loaded.workflow, name="other", value=b"1", channel=channel)
    check_plan(loaded, none_waits, pages=200)
    thousand = tasks.send_signal(
        uuid4(), target=loaded.workflow, name="approved", value=b"1", channel=channel
    )
    check_plan(loaded, thousand, pages=60_000)


def test_statements_about_children_read_a_bounded_number_of_pages(loaded: Loaded) -> None:
    child = NewChild(name="work", queue="default", priority=0, args="{}", key="k")
    channel = loaded.db.target.channel
    sent = steps.send_child(loaded.task_id, loaded.claim_id, step="work", child=child, channel=channel)
    check_plan(loaded, sent, pages=120)
    lease = loaded.task_id, loaded.claim_id
    check_plan(loaded, steps.hold_parent(*lease, step="work"), pages=60)
    check_plan(loaded, steps.record_child(*lease, step="work", child_id=uuid4(), digest="d"), pages=60)
    check_plan(loaded, steps.cancel_started(loaded.task_id, channel=channel), pages=8_000)
    check_plan(loaded, steps.cancel_started(uuid4(), channel=channel), pages=40)
    check_plan(loaded, tasks.cancel_children(loaded.task_id, channel=channel), pages=8_000)
    check_plan(loaded, tasks.cancel_children(uuid4(), channel=channel), pages=40)
    with loaded.db.connection.transaction(force_rollback=True):
        listed = plan(loaded.db, inspection.tasks(parent=loaded.task_id, limit=50))["Plan"]
    assert listed["Shared Hit Blocks"] + listed["Shared Read Blocks"] < 300


RETRIED = (
    "update {schema}.tasks set workflow_id = %(workflow)s, node = 2 where id in (%(busy)s, %(earlier)s)",
    "update {schema}.tasks set parent_id = %(earlier)s where parent_id = %(busy)s",
    """insert into {schema}.steps (task_id, kind, name, result, attempt)
       select %(busy)s, 'child', t.id, to_json(t.id), 1 from {schema}.tasks t where t.parent_id = %(earlier)s""",
)


def test_a_cancel_of_a_node_that_ran_before_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    db, channel = loaded.db, loaded.db.target.channel
    earlier = next(one for one, _ in held(db, 2) if one != loaded.task_id)
    with db.connection.transaction(force_rollback=True):
        for text in RETRIED:
            names = {"busy": loaded.task_id, "earlier": earlier, "workflow": loaded.workflow}
            given = {name: sql.Literal(value) for name, value in names.items()}
            filled_in = text.replace("%(", "{").replace(")s", "}")
            db.connection.execute(
                sql.SQL(filled_in).format(schema=sql.Identifier(db.target.schema), **given)  # type: ignore[arg-type]
            )
        check_plan(loaded, steps.cancel_started(loaded.task_id, channel=channel), pages=12_000)
        check_plan(loaded, tasks.cancel_children(loaded.task_id, channel=channel), pages=12_000)


def test_pruning_steps_and_signals_uses_indexes(loaded: Loaded) -> None:
    between: dict[str, Any] = {
        "hours": 1, "limit": 1_000, "after": UUID(int=0), "until": UUID(int=2**128 - 1)
    }  # fmt: skip
    db = loaded.db
    with db.connection.transaction(force_rollback=True):
        old = sql.SQL(
            "update {schema}.tasks set completed_at = now() - interval '2 h'"
            " where id in (select id from {schema}.tasks where state = 'COMPLETED' order by id limit 1000)"
        )
        db.connection.execute(old.format(schema=sql.Identifier(db.target.schema)))
        for statement in (
            retention.prune_tasks(**between),
            retention.prune_stray_steps(**between),
            retention.prune_stray_signals(**between),
        ):
            found = plan(db, statement)["Plan"]
            scans = {
                node.get("Relation Name")
                for node in nodes(found)
                if node["Node Type"] == "Seq Scan"
                and node.get("Relation Name") in ("tasks", "steps", "signals")
            }
            assert scans == set(), statement.name
            touched = found["Shared Hit Blocks"] + found["Shared Read Blocks"]
            print(f"{statement.name}: {touched} pages")
            assert touched <= 40_000, statement.name
