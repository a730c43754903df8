"""The column `context`: its migration, the statements that write and read it, and the statements of programs without a tracer."""

from __future__ import annotations

import json
from random import Random
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.domain.recovery.decision import RecoveryRules
from everbeat.recovering.orders import Death, LostLease, order_for
from everbeat.store import claims, leases, migrating
from everbeat.store.statement import compose, without
from everbeat.store.target import Target
from everbeat.store.traced import traced_recoveries
from tests.maintenance.moving import move
from tests.store.conftest import StoreHarness
from tests.store.plans import nodes, pages_of, plan

CARRIER = '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'
TRACED = (
    "task/insert_task", "task/insert_tasks", "task/insert_unique_tasks", "task/insert_unless_full", "task/claim_tasks",
    "step/send_child", "step/send_children",
)  # fmt: skip


def set_context(db: StoreHarness, task_id: UUID, text: str) -> None:
    query = sql.SQL("update {}.tasks set context = %s::json where id = %s").format(
        sql.Identifier(db.target.schema)
    )
    db.connection.execute(query, [text, task_id])


def context_in(db: StoreHarness, table: str, task_id: UUID) -> Any:
    query = sql.SQL("select context from {}.{} where id = %s").format(
        sql.Identifier(db.target.schema), sql.Identifier(table)
    )
    row = db.connection.execute(query, [task_id]).fetchone()
    return None if row is None else row[0]


@pytest.mark.parametrize("name", TRACED)
def test_a_statement_without_its_part_does_not_mention_the_column(name: str) -> None:
    assert b"context" in compose(name, "everbeat")
    text = compose(without("context", name=name), "everbeat").decode()
    code = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    assert "context" not in code


def claim_traced(db: StoreHarness, **more: Any) -> list[claims.Claimed]:
    return db.run(
        claims.claim(
            worker_id="w1",
            claim_call=more.pop("call", uuid4()),
            names=["work"],
            limit=10,
            queues=None,
            queue_priorities={},
            with_context=True,
            **more,
        )
    )


@pytest.mark.parametrize("with_lines", [True, False])
def test_a_claim_returns_the_carrier_and_a_repeated_claim_returns_it_again(
    db: StoreHarness, with_lines: bool
) -> None:
    task_id, call = db.send(key="k"), uuid4()
    set_context(db, task_id, CARRIER)
    (first,) = claim_traced(db, call=call, with_lines=with_lines)
    (again,) = claim_traced(db, call=call, with_lines=with_lines)
    assert first.context == again.context
    assert first.id == again.id == task_id
    found = json.loads(first.context or "")
    assert found["carrier"] == json.loads(CARRIER)
    assert found["key"] == "k"
    assert first.looked_s is None or first.looked_s > 0
    assert first.line_floors is None


def test_a_claim_leaves_out_a_carrier_that_is_too_large(db: StoreHarness) -> None:
    set_context(db, db.send(), json.dumps({"baggage": "b" * 20_000}))
    (claimed,) = claim_traced(db)
    assert json.loads(claimed.context or "")["carrier"] is None


def test_the_carrier_moves_to_the_history_and_back(db: StoreHarness) -> None:
    claimed = db.running()
    set_context(db, claimed.id, CARRIER)
    assert db.settle(claimed) == "COMPLETED"
    assert move(db, age_s=0) == 1
    assert context_in(db, "tasks", claimed.id) is None
    assert (
        context_in(db, "history", claimed.id)
        == context_in(db, "all_tasks", claimed.id)
        == json.loads(CARRIER)
    )


def test_tracers_read_the_recoveries_of_their_own_process_with_the_carrier(db: StoreHarness) -> None:
    claimed = db.running()
    set_context(db, claimed.id, CARRIER)
    (lease,) = db.run(leases.leases_by_id([claimed.id]))
    order = order_for(
        LostLease(lease, Death(noticed_by="session", cause="its session has ended")),
        rules=RecoveryRules(),
        random=Random(1),
    )
    assert order is not None
    (landed,) = db.run(leases.recover([order], noticed_by="session", recovered_by="s2", channel="c"))
    assert landed.action == "fail"
    assert db.run(traced_recoveries([claimed.id], recovered_by="s1")) == {}
    found = db.run(traced_recoveries([claimed.id], recovered_by="s2"))[claimed.id]
    assert found.carrier == json.loads(CARRIER)
    assert found.started_at == lease.started_at
    assert found.certificate["noticed_by"] == "session"
    assert (found.action, found.worker_id, found.attempt) == ("fail", "w1", 1)
    set_context(db, claimed.id, "[7]")
    assert db.run(traced_recoveries([claimed.id], recovered_by="s2"))[claimed.id].carrier == {}


def test_the_migration_from_version_20_keeps_the_tasks_and_the_view(database_url: str) -> None:
    target = Target.parse(database_url, schema=f"test_traced_{uuid4().hex[:8]}")
    with target.connect("everbeat test") as connection:
        schema = sql.Identifier(target.schema)
        try:
            migrating.migrate(connection, target, to=20)
            task_id = uuid4()
            connection.execute(
                sql.SQL("insert into {}.tasks (id, name, queue, args) values (%s, 'work', 'default', '{{}}')").format(schema),
                [task_id],
            )  # fmt: skip
            before = connection.execute(sql.SQL("select * from {}.all_tasks").format(schema))
            columns = [column.name for column in before.description or ()]
            assert migrating.migrate(connection, target, to=21) == (21,)
            after = connection.execute(sql.SQL("select * from {}.all_tasks").format(schema))
            assert [column.name for column in after.description or ()] == [*columns, "context"]
            (row,) = after.fetchall()
            assert row[0] == task_id
            assert row[-1] is None
        finally:
            connection.execute(sql.SQL("drop schema {} cascade").format(schema))


def test_the_recoveries_of_tracers_are_found_by_their_index_among_100_000(db: StoreHarness) -> None:
    schema = sql.Identifier(db.target.schema)
    fill = sql.SQL(
        "insert into {}.recoveries (task_id, name, queue, fence, claim_id, attempt, worker_id, was, cause, noticed_by, action, recovered_by)"
        " select gen_random_uuid(), 'work', 'default', 1, gen_random_uuid(), 1, 'w1', 'RUNNING', 'killed', 'session', 'retry', 's2'"
        " from generate_series(1, 100000)"
    ).format(schema)
    with db.connection.transaction(force_rollback=True):
        db.connection.execute(fill)
        db.connection.execute(sql.SQL("analyze {}.recoveries").format(schema))
        ids = [row[0] for row in db.table("recoveries", "task_id")[:100]]
        statement = traced_recoveries(ids, recovered_by="s2")
        found = plan(db, statement)
    scans = [node for node in nodes(found["Plan"]) if node.get("Relation Name") == "recoveries"]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Bitmap Heap Scan"}
    assert pages_of(found, statement) <= 1_500
