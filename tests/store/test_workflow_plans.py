"""Statements of workflows use their indexes with 200,000 nodes and as many edges: few pages, no table scan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.domain.workflow.graph import Edge, Graph
from everbeat.domain.workflow.states import WorkflowRetryPlan, WorkflowVerdict
from everbeat.store import inspection, workflows
from everbeat.store import workflow_control as control
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.store.flows import task
from tests.store.plans import check_plans, filled, vacuum

TABLES = ("tasks", "workflows", "nodes", "edges", "outbox")
WIDE = 10_000
"""Nodes of the one workflow that all statements target; node 0 has ended, and node 1 waits for all of them."""

FILL = (
    """insert into {schema}.workflows (id, name, key, state, on_error, node_count, sent_at)
       select gen_random_uuid(), 'flow', 'k' || n, case when n %% 10 = 0 then 'RUNNING' else 'COMPLETED' end, 'fail', 10, now()
       from generate_series(1, 20000) n""",
    """insert into {schema}.workflows (id, name, key, on_error, node_count) values (%(wide)s, 'wide', 'wide', 'fail', 10000)""",
    """insert into {schema}.nodes (workflow_id, number, name, kind, state, task_id, task, queue, priority, args)
       select w.id, n, 'n' || n, 'task', case when w.state = 'RUNNING' and n %% 10 > 0 then 'PENDING' else 'COMPLETED' end,
           gen_random_uuid(), 'work', 'default', 100, '{{}}'
       from {schema}.workflows w cross join generate_series(0, 9) n where w.name = 'flow'""",
    """insert into {schema}.edges (workflow_id, parent, child, state)
       select n.workflow_id, n.number, n.number + 1, case when n.state = 'COMPLETED' then 'MET' else 'OPEN' end
       from {schema}.nodes n where n.number < 9""",
    """insert into {schema}.nodes (workflow_id, number, name, kind, state, task_id, task, queue, priority, args)
       select %(wide)s, n, 'n' || n, 'task', case n when 0 then 'COMPLETED' when 1 then 'PENDING' else 'ENQUEUED' end,
           gen_random_uuid(), 'work', 'default', 100, '{{}}'
       from generate_series(0, 9999) n""",
    """insert into {schema}.edges (workflow_id, parent, child, state)
       select %(wide)s, n, 1, case n when 0 then 'MET' else 'OPEN' end from generate_series(0, 9999) n where n <> 1""",
    """insert into {schema}.tasks (id, name, queue, priority, state, args, sent_at, enqueued_at, started_at, completed_at, result,
           fence, attempt, workflow_id, node)
       select n.task_id, 'work', 'default', 100, 'COMPLETED', '{{}}', now(), now(), now(), now(), '1', 1, 1, n.workflow_id, n.number
       from {schema}.nodes n where n.workflow_id = %(wide)s""",
    """insert into {schema}.outbox (workflow_id, node)
       select n.workflow_id, n.number from {schema}.nodes n where n.workflow_id <> %(wide)s and n.state = 'COMPLETED' limit 20000""",
    "insert into {schema}.outbox (workflow_id, node) select %(wide)s, n from generate_series(2, 9999) n",
    *(f"vacuum analyze {{schema}}.{table}" for table in TABLES),
)  # fmt: skip


@dataclass
class Loaded:
    """The harness, and the id of the wide workflow."""

    db: StoreHarness
    wide: UUID

    @property
    def channel(self) -> str:
        return self.db.target.channel

    def check_plan(
        self, statement: Statement[Any], *, pages: int, by: str = "both", tables: Sequence[str] = TABLES
    ) -> None:
        check_plans(self.db, statement, pages=pages, tables=tables, by=by)


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[Loaded]:
    with filled(database_url, rows=50_000, in_flight=10) as db:
        # The highest id: a page of live workflows in the order of their ids never contains the wide one by chance.
        wide = UUID(int=2**128 - 1)
        for text in FILL:
            used = {"wide": wide} if "%(wide)s" in text or "%%" in text else None
            composed = sql.SQL(text).format(schema=sql.Identifier(db.target.schema))  # type: ignore[arg-type]
            db.connection.execute(composed, used)
        yield Loaded(db, wide)


@pytest.fixture(autouse=True)
def vacuumed(loaded: Loaded) -> None:
    """Remove the rows that other tests rolled back, so that these tests can run in any order."""
    vacuum(loaded.db, *TABLES)


def test_finding_and_absorbing_events_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    loaded.check_plan(workflows.lock(entries=2_000, limit=100), by="tree", pages=2_500)
    loaded.check_plan(workflows.lock_these([loaded.wide]), by="tree", pages=20)
    loaded.check_plan(workflows.absorb([loaded.wide], limit=500), by="tree", pages=30_000)
    loaded.check_plan(control.forget(limit=1_000), pages=12_000)


def test_the_end_of_one_of_10_000_parents_reads_as_few_pages_as_that_of_one_of_few(loaded: Loaded) -> None:
    """The cost of a wide fan-in is linear: the end of one of 10,000 parents needs one lookup."""
    loaded.check_plan(workflows.absorb([loaded.wide], limit=1), by="tree", pages=150)
    loaded.check_plan(workflows.resolve([(loaded.wide, 1)]), by="tree", pages=60)


def test_counting_live_workflows_reads_none_that_have_ended(loaded: Loaded) -> None:  # O5
    loaded.check_plan(inspection.live_workflows(most=1_000), by="client", pages=1_100)
    counted = loaded.db.run(inspection.live_workflows())
    assert counted == {"RUNNING": 2_001}
    assert loaded.db.run(inspection.live_workflows(most=100)) == {"RUNNING": 100}


LARGE = (
    "alter table {schema}.tasks alter column result set storage external",
    """update {schema}.tasks t set result = to_json(repeat('large', 40000))
       from {schema}.nodes n where n.workflow_id = {wide} and n.number between 2 and 101 and t.id = n.task_id""",
)  # fmt: skip


def test_absorbing_events_does_not_read_results(loaded: Loaded) -> None:  # W12
    """An update reads every row of its source CTE completely: with the results in it, 300 of 1.5 MB took 1.3 s under a lock."""
    connection, schema = loaded.db.connection, sql.Identifier(loaded.db.target.schema)
    with connection.transaction(force_rollback=True):
        for text in LARGE:
            connection.execute(sql.SQL(text).format(schema=schema, wide=sql.Literal(loaded.wide)))
        loaded.check_plan(workflows.absorb([loaded.wide], limit=100), by="tree", pages=7_500)


def test_enqueueing_nodes_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    places = [(loaded.wide, number) for number in range(2, 502)]
    loaded.check_plan(workflows.resolve(places), by="tree", pages=12_000)
    put_back = sql.SQL(
        "update {}.nodes set state = 'PENDING', iteration = 7 where workflow_id = {} and number < 502"
    )
    with loaded.db.connection.transaction(force_rollback=True):
        schema = sql.Identifier(loaded.db.target.schema)
        loaded.db.connection.execute(put_back.format(schema, sql.Literal(loaded.wide)))
        loaded.check_plan(
            workflows.enqueue(places, [None] * 500, channel=loaded.channel), by="tree", pages=40_000
        )
        loaded.check_plan(workflows.hold(places, again=[True] * 500), by="tree", pages=20_000)
    of_two = [(loaded.wide, 0), (loaded.wide, 9)]
    for read in (workflows.values, workflows.sources, workflows.results):
        loaded.check_plan(read(of_two), by="tree", pages=60)
    loaded.check_plan(workflows.compositions(places), by="tree", pages=4_000)


def test_starting_and_finishing_workflows_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    graph = Graph(
        name="new",
        nodes=tuple(task(f"n{n}") for n in range(100)),
        edges=tuple(Edge(n, n + 1) for n in range(99)),
    )
    loaded.check_plan(workflows.insert(uuid4(), graph, channel=loaded.channel, key="k10"), pages=3_000)
    loaded.check_plan(workflows.ended([loaded.wide]), pages=60)
    verdict = WorkflowVerdict(workflow_id=loaded.wide, state="COMPLETED", result="1")
    loaded.check_plan(workflows.finish([verdict], channel=loaded.channel), by="tree", pages=60)


def test_inspecting_workflows_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    loaded.check_plan(control.info([loaded.wide]), pages=800)
    loaded.check_plan(control.nodes(loaded.wide, limit=100), pages=1_500)
    loaded.check_plan(control.edges(loaded.wide), pages=800)
    loaded.check_plan(control.node(loaded.wide, "n77"), pages=800)
    loaded.check_plan(control.ends([loaded.wide]), pages=20)
    loaded.check_plan(control.listing(control.WorkflowQuery(), limit=20), pages=2_000)
    loaded.check_plan(control.listing(control.WorkflowQuery(parent=uuid4()), limit=20), by="client", pages=40)


def test_stopping_and_retrying_workflows_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    for verb in (control.pause, control.resume, control.cancel):
        loaded.check_plan(verb(loaded.wide, channel=loaded.channel), pages=60)
    some = WorkflowRetryPlan(
        states=dict.fromkeys(range(2, 502), "PENDING"),
        emptied=frozenset(),
        children={},
        again=(),
        completed=(),
        kept=(),
    )
    again = control.retry(loaded.wide, {loaded.wide: some}, call=uuid4(), channel=loaded.channel)
    loaded.check_plan(again, by="client", pages=20_000)
    loaded.check_plan(control.retry_hold(loaded.wide, call=uuid4(), from_node=None), by="client", pages=60)
    loaded.check_plan(control.retry_nodes(loaded.wide), by="client", pages=1_500)
    loaded.check_plan(control.mark_for_review([loaded.wide]), pages=20)
    loaded.check_plan(control.restore([loaded.wide]), pages=60_000)
    with loaded.db.connection.transaction(force_rollback=True):
        update = sql.SQL("update {}.workflows set state = 'CANCELLING' where id = {}")
        schema = sql.Identifier(loaded.db.target.schema)
        loaded.db.connection.execute(update.format(schema, sql.Literal(loaded.wide)))
        loaded.check_plan(workflows.withdraw([loaded.wide], channel=loaded.channel), by="tree", pages=200_000)
    loaded.check_plan(workflows.let_go([loaded.wide]), by="tree", pages=2_000)


def test_a_pass_of_the_reconciler_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    """First a page of 200 live workflows, then one with 10,000 ended tasks. The outbox is small, so it can be read completely."""
    kept = tuple(table for table in TABLES if table != "outbox")
    loaded.check_plan(control.stuck(after=UUID(int=0), limit=200, grace_ms=0), tables=kept, pages=80_000)
    loaded.check_plan(
        control.stuck(after=UUID(int=0), limit=200, grace_ms=0, only=loaded.wide), tables=kept, pages=120_000
    )
