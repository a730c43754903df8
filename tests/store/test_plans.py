"""Every hot statement uses its index with 300,000 rows in the table: no sequential scan of tasks, few pages touched."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.domain.identifiers import bounds
from everbeat.domain.task.needs import MarkedTasks
from everbeat.domain.task.states import TaskState
from everbeat.store import (
    claims,
    diagnosis,
    expiry,
    inspection,
    leases,
    lines,
    retention,
    state_counts,
    tasks,
    workers,
)
from everbeat.store.claims import suspects_wait
from everbeat.store.leases import decline
from everbeat.store.statement import Statement, compose
from everbeat.store.tasks import MarkedPlace, marked
from tests.store import claim_page
from tests.store.conftest import StoreHarness
from tests.store.plans import HELD, ROWS, check_plan, held, loaded, nodes, plan, vacuum

__all__ = ["loaded"]


def a_claim(limit: int, **more: Any) -> Statement[Any]:
    queues, priorities = more.get("queues"), more.get("priorities", {})
    return claims.claim(
        worker_id="w2",
        claim_call=uuid4(),
        names=["work"],
        limit=limit,
        queues=queues,
        queue_priorities=priorities,
        starts=more.get("starts", 0),
        floors=more.get("floors", claims.NO_FLOORS),
        marked=more.get("marked", ()),
        with_lines=more.get("with_lines", True),
    )


@pytest.fixture(autouse=True)
def vacuumed(loaded: StoreHarness) -> None:
    """Remove the rows that other tests rolled back, so that these tests can run in any order."""
    vacuum(loaded, "tasks", "line_changes", "lines", "gates")
    loaded.connection.execute(loaded.plain("analyze {schema}.tasks"))


def apply_all(db: StoreHarness) -> None:
    """Apply all changes of lines in the transaction of the test."""
    statement = lines.apply_changes(readers=["work"], queues=None, channel=None)
    while True:
        found = db.connection.execute(db.text(statement.name), statement.parameters).fetchall()
        if statement.read(found).applied == 0:
            return


def test_a_claim_reads_a_bounded_number_of_pages(loaded: StoreHarness) -> None:
    check_plan(loaded, a_claim(1), pages=400)
    check_plan(loaded, a_claim(100, priorities={"mail": 1}), pages=4_000)
    check_plan(loaded, a_claim(10, queues=["mail"]), pages=600)
    check_plan(loaded, a_claim(100, with_lines=False), pages=4_000)


def test_a_claim_that_finds_nothing_and_next_due_read_a_bounded_number_of_pages(loaded: StoreHarness) -> None:
    nothing = claims.claim(
        worker_id="w2", claim_call=uuid4(), names=["none"], limit=10, queues=["none"], queue_priorities={}
    )
    check_plan(loaded, nothing, pages=200)
    check_plan(loaded, tasks.next_due(names=["work"], queues=None), pages=200)


def test_a_claim_reads_only_the_heads_of_long_serial_lines(loaded: StoreHarness) -> None:
    """There are 20 lines of 5,000 tasks each: a claim reads their heads and no task behind them."""
    fill = sql.SQL(
        "insert into {}.tasks (id, name, queue, args, serial, serial_at)"
        " select gen_random_uuid(), 'work', 'default', '{{}}', 'key:' || n %% 20, now() + n * interval '1 ms'"
        " from generate_series(1, %s) n"
    ).format(sql.Identifier(loaded.target.schema))
    with loaded.connection.transaction(force_rollback=True):
        loaded.connection.execute(fill, [ROWS])
        analyze = sql.SQL("analyze {}.tasks").format(sql.Identifier(loaded.target.schema))
        loaded.connection.execute(analyze)
        apply_all(loaded)
        check_plan(loaded, a_claim(100), pages=6_000)
        # It reads the index entries of the changes that were applied in the same transaction.
        check_plan(loaded, tasks.next_due(names=["work"], queues=None), pages=2_000)


def test_a_claim_reads_only_the_heads_of_short_serial_lines(loaded: StoreHarness) -> None:
    """The planner could prefer to read and sort a line of 100 tasks; the index must determine the order for any length."""
    schema = sql.Identifier(loaded.target.schema)
    fill = sql.SQL(
        "insert into {}.tasks (id, name, queue, args, serial, serial_at)"
        " select gen_random_uuid(), 'work', 'lines', '{{}}', 'key:' || n % 20, now() + n * interval '1 ms'"
        " from generate_series(1, 2000) n"
    ).format(schema)
    with loaded.connection.transaction(force_rollback=True):
        loaded.connection.execute(fill)
        loaded.connection.execute(sql.SQL("analyze {}.tasks").format(schema))
        apply_all(loaded)
        check_plan(
            loaded, a_claim(20, queues=["lines"]), pages=3_000
        )  # the changes were applied in the same transaction
        check_plan(loaded, tasks.next_due(names=["work"], queues=None), pages=300)


def test_a_check_for_suspects_without_any_reads_few_pages(loaded: StoreHarness) -> None:
    check_plan(loaded, suspects_wait(names=["work"], queues=None), pages=20)


def test_explain_and_doctor_read_marked_tasks_by_their_index(loaded: StoreHarness) -> None:  # J2
    """There are 100,000 more tasks that wait and are not marked."""
    schema = sql.Identifier(loaded.target.schema)
    # The long serial lines of another test were rolled back, and their index entries are still there.
    pending = sql.SQL("select id from {}.tasks where state = 'PENDING' limit 1").format(schema)
    mark = (
        "update {}.tasks set needs = json_build_object('arguments', array['a' || priority]),"
        " needs_id = {}.mark_of(name, json_build_object('arguments', array['a' || priority]))"
        " where id = any(array(select id from {}.tasks where state = 'PENDING' and enqueued_at < now() limit %s))"
    )
    with loaded.connection.transaction(force_rollback=True):
        check_plan(loaded, diagnosis.marked(), pages=20)
        loaded.connection.execute(sql.SQL(mark).format(schema, schema, schema), [300])
        assert sum(each.waiting for each in diagnosis_of(loaded)) == 300
        check_plan(loaded, diagnosis.marked(), pages=400)
        check_plan(loaded, diagnosis.knowing(["work"], stale_ms=60_000), pages=100)
        row = loaded.connection.execute(pending).fetchone()
        assert row is not None
        check_plan(loaded, diagnosis.waiting(row[0], stale_ms=60_000), pages=1_500)
        marked = sql.SQL("select id from {}.tasks where needs_id is not null limit 1").format(schema)
        row = loaded.connection.execute(marked).fetchone()
        assert row is not None
        check_plan(loaded, diagnosis.waiting(row[0], stale_ms=60_000), pages=1_500)


def test_the_doctor_reads_a_bounded_part_of_many_marked_tasks(loaded: StoreHarness) -> None:  # J2
    """There are 30,000 tasks with different needs."""
    mark = (
        "update {}.tasks set needs = '{{\"arguments\": []}}', needs_id = gen_random_uuid()"
        " where id = any(array(select id from {}.tasks where state = 'PENDING' limit 30000))"
    )
    schema = sql.Identifier(loaded.target.schema)
    with loaded.connection.transaction(force_rollback=True):
        loaded.connection.execute(sql.SQL(mark).format(schema, schema))
        check_plan(loaded, diagnosis.marked(), pages=40_000)
        assert len(diagnosis_of(loaded)) == 200


def test_the_doctor_reads_the_newest_failures_without_100_000_older_ones(loaded: StoreHarness) -> None:  # J4
    fail = (
        "insert into {}.tasks (id, name, queue, priority, state, args, sent_at, enqueued_at, failed_at, error, fence, attempt)"
        " select gen_random_uuid(), 'work', 'default', 0, 'FAILED', '{{}}', now(), now(), now() - n * interval '1 second',"
        """ '{{"code": "UNHANDLED_EXCEPTION", "type": "KeyError"}}', 1, 1 from generate_series(1, %s) n"""
    )
    schema = sql.Identifier(loaded.target.schema)
    looks = diagnosis.failures(within_s=600, most=1_000)
    with loaded.connection.transaction(force_rollback=True):
        check_plan(loaded, looks, pages=5)
        loaded.connection.execute(sql.SQL(fail).format(schema), [ROWS])
        loaded.connection.execute(sql.SQL("analyze {}.tasks").format(schema))
        check_plan(loaded, looks, pages=700)
        everything = diagnosis.failures(within_s=10 * ROWS, most=1_000)
        check_plan(loaded, everything, pages=1_100)
        found = everything.read(
            loaded.connection.execute(loaded.text(everything.name), everything.parameters).fetchall()
        )
        assert [(each.name, each.code, each.type, each.count) for each in found] == [
            ("work", "UNHANDLED_EXCEPTION", "KeyError", 1_000)
        ]


def test_the_known_queues_are_found_without_the_tasks(loaded: StoreHarness) -> None:
    """1,000 workers serve ten queues each, of which 2,000 are different, and as many others are paused or limited."""
    with loaded.connection.transaction(force_rollback=True):
        for text in (
            "insert into {schema}.workers (id, supervisor_id, hostname, pid, queues) select 'served-' || n, 's1', 'host', n,"
            " array(select 'queue-' || (n * 10 + k) %% 2000 from generate_series(0, 9) k) from generate_series(1, %s) n",
            "insert into {schema}.pauses (kind, name, paused_by) select 'queue', 'paused-' || n, 'ann' from generate_series(1, %s) n",
            "insert into {schema}.limits (name, concurrency) select 'queue:limited-' || n, 1 from generate_series(1, %s) n",
        ):
            loaded.connection.execute(loaded.plain(text), [1_000])
        statement = diagnosis.known_queues(stale_ms=86_400_000)
        text = compose(statement.name, loaded.target.schema)
        assert loaded.connection.execute(text, statement.parameters).rowcount == 4_000
        check_plan(loaded, statement, pages=300)


def test_a_search_by_the_start_of_an_id_uses_the_primary_key(loaded: StoreHarness) -> None:  # J10
    (one, _), *_ = held(loaded, 1)
    for digits in (4, 8, 13):
        between = bounds(str(one)[:digits])
        assert between is not None
        check_plan(loaded, inspection.tasks_between(*between, limit=6), pages=20)
        check_plan(loaded, inspection.workflows_between(*between, limit=6), pages=5)
    check_plan(loaded, inspection.neighbours([one for one, _ in held(loaded, 50)]), pages=1_000)


def test_the_list_by_latest_events_reads_a_bounded_part_of_the_tasks(loaded: StoreHarness) -> None:  # J10
    """The ids of the 300,000 tasks are random, so each row is on a different page, and some have an attempt to read."""
    check_plan(loaded, inspection.tasks(latest=True, limit=50), pages=2 * inspection.MOST_EXAMINED)
    failed = inspection.tasks(latest=True, states=[TaskState.FAILED], limit=50, most=0)
    check_plan(loaded, failed, pages=3_000)  # of 1,000 that failed


def diagnosis_of(db: StoreHarness) -> list[MarkedTasks]:
    """Return the rows that `doctor` reads, in the transaction of the test."""
    statement = diagnosis.marked()
    found = db.connection.execute(db.text(statement.name), statement.parameters).fetchall()
    return statement.read(found)


def test_the_numbers_of_tabs_read_a_bounded_part_of_the_tasks(loaded: StoreHarness) -> None:
    """Each part stops at its limit, and reads at most a page of the table for each task. The leases of the one worker are sorted."""
    for most in (100, state_counts.MOST_COUNTED):
        check_plan(loaded, state_counts.newest(most=most), pages=2 * most + 50)
        check_plan(loaded, state_counts.live(most=most), pages=3 * most + 700)
    check_plan(loaded, state_counts.estimates(loaded.target.schema), pages=500)


def test_start_settle_release_and_check_read_a_bounded_number_of_pages(loaded: StoreHarness) -> None:
    some = held(loaded, 200)
    channel = loaded.target.channel
    check_plan(loaded, leases.start(some, channel=channel), pages=4_000)
    check_plan(loaded, leases.release(some, channel=channel), pages=4_000)
    check_plan(loaded, leases.check_leases(some), pages=2_000)
    settlements = [
        leases.Settlement(id=one[0], claim_id=one[1], outcome="COMPLETED", result=b"1") for one in some
    ]
    check_plan(loaded, leases.settle(settlements, channel=channel), pages=12_000)
    check_plan(loaded, leases.complete(settlements, channel=channel), pages=12_000)


@pytest.mark.parametrize("rows", [10, 200])
def test_the_hot_statements_of_a_worker_use_index_lookups_for_any_batch_size(
    loaded: StoreHarness, rows: int
) -> None:
    """The statements are prepared as in a worker, on a session for keyed statements, and planned before the batch is known."""
    leased = held(loaded, rows)
    settled = [
        leases.Settlement(id=one, claim_id=claim, outcome="COMPLETED", result=b"1") for one, claim in leased
    ]
    for statement in (
        a_claim(rows, starts=rows // 2),
        leases.start(leased, channel="c"),
        leases.settle(settled, channel="c"),
        leases.complete(settled, channel="c"),
        leases.release(leased, channel="c"),
        decline(leased, channel="c"),
    ):
        with loaded.connection.transaction(force_rollback=True):
            ((explained,),) = claim_page.as_a_worker(
                loaded, statement, options="analyze, buffers, format json"
            )
        found = [*nodes(explained["Plan"])]
        kinds = {(node["Node Type"], node.get("Relation Name")) for node in found}
        kinds.discard(("Seq Scan", "line_changes_floor"))  # a sequence has one row
        assert not {kind for kind in kinds if kind[0] in ("Seq Scan", "Hash Join", "Merge Join")}, (
            statement.name
        )
        assert found[0]["Shared Hit Blocks"] + found[0]["Shared Read Blocks"] < 500 + 60 * rows, (
            statement.name
        )


def test_beats_and_watches_read_a_bounded_number_of_pages(loaded: StoreHarness) -> None:
    check_plan(loaded, workers.beat("s1", held(loaded, HELD), draining=False), pages=2_000)
    check_plan(loaded, workers.beat("s2", [], draining=False), pages=100)
    check_plan(loaded, retention.silent_supervisors(silent_ms=0), pages=3_000)
    check_plan(loaded, workers.watch_beats(), pages=50)
    check_plan(loaded, workers.watch_sessions(), pages=100)
    turn = workers.take_watch_turn("s1", kind="", turn_ms=1_000, by_lock=True)
    check_plan(loaded, turn, pages=100)


def test_lists_of_leases_and_recoveries_read_a_bounded_number_of_pages(loaded: StoreHarness) -> None:
    check_plan(loaded, leases.leases_of_worker("w1", limit=100), pages=3_000)
    check_plan(loaded, leases.leases_of_ended(limit=100), pages=3_000)
    with loaded.connection.transaction(force_rollback=True):
        workers_table = sql.Identifier(loaded.target.schema, "workers")
        end = sql.SQL("update {} set ended_at = now(), ended_how = 'child_exit' where id = 'w1'")
        loaded.connection.execute(end.format(workers_table))
        check_plan(loaded, leases.leases_of_ended(limit=100, owner_ms=300_000), pages=6_000)
    check_plan(loaded, leases.leases_of_supervisor("s1", limit=100), pages=3_000)
    check_plan(loaded, leases.leases_orphaned(silent_ms=1_000, limit=100), pages=3_000)
    found = loaded.leases()[:100]
    check_plan(loaded, leases.leave([(lease.id, lease.claim_id) for lease in found]), pages=4_000)
    check_plan(loaded, leases.leases_by_id([lease.id for lease in found]), pages=2_000)
    orders = [
        leases.RecoveryOrder(
            id=lease.id, claim_id=lease.claim_id, state=lease.state, action="retry", retry_in_ms=0, outcome="LOST", error=b"{}",
            cause="test", last_beat_at=lease.last_beat_at, noticed_after_ms=1, worker_seq=lease.worker_seq,
        )
        for lease in found
    ]  # fmt: skip
    check_plan(loaded, leases.recover(orders, noticed_by="age", recovered_by="s2", channel="c"), pages=10_000)


def test_send_cancel_expire_and_outcomes_read_a_bounded_number_of_pages(loaded: StoreHarness) -> None:
    channel = loaded.target.channel
    new = [
        tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}") for _ in range(100)
    ]
    check_plan(loaded, tasks.insert_task(new[0], channel=channel), pages=60)
    check_plan(loaded, tasks.insert_tasks(new, channel=channel), pages=4_000)
    some = [one[0] for one in held(loaded, 100)]
    check_plan(loaded, tasks.outcomes(some), pages=600)
    check_plan(loaded, tasks.cancel(some[0], channel=channel, call=uuid4()), pages=60)
    check_plan(loaded, expiry.expire(channel=channel, limit=200), pages=6_000)


def test_check_plan_fails_for_a_plan_with_a_sequential_scan(loaded: StoreHarness) -> None:
    index = sql.Identifier(loaded.target.schema, "tasks_leased")
    with loaded.connection.transaction(force_rollback=True):
        loaded.connection.execute(sql.SQL("drop index {}").format(index))
        with pytest.raises(AssertionError):
            check_plan(loaded, leases.leases_of_worker("w1", limit=100), pages=3_000)


def test_the_server_has_at_least_version_14(loaded: StoreHarness) -> None:
    assert isinstance(loaded.connection, psycopg.Connection)
    assert loaded.connection.info.server_version >= 140_000


MARKED = """
insert into {schema}.tasks (id, name, queue, priority, args, sent_at, enqueued_at, needs, needs_id)
select gen_random_uuid(), 'work', case when n % 10 = 0 then 'mail' else 'default' end, n % 3, '{{}}', now(), now() - interval '1 year',
    mark.needs, {schema}.mark_of('work', mark.needs)
from generate_series(1, 100000) n cross join (select json_build_object('arguments', json_build_array('new')) as needs) mark
"""
OTHER_GROUPS = """
insert into {schema}.tasks (id, name, queue, priority, args, sent_at, enqueued_at, needs, needs_id)
select gen_random_uuid(), 'work', 'default', n % 3, '{{}}', now(), now(), mark.needs, {schema}.mark_of('work', mark.needs)
from generate_series(1, 10000) n
cross join lateral (select json_build_object('arguments', json_build_array('x' || n)) as needs) mark
"""


def test_marked_tasks_of_other_groups_do_not_lengthen_a_claim(
    loaded: StoreHarness,
) -> None:  # J2
    """A group has 100,000 marked tasks ahead of all others in their lanes; 10,000 more groups have one task each."""
    schema = sql.Identifier(loaded.target.schema)
    before = plan(loaded, a_claim(10))["Plan"]["Shared Hit Blocks"]
    with loaded.connection.transaction(force_rollback=True):
        for statement in (MARKED, OTHER_GROUPS, "analyze {schema}.tasks"):
            loaded.connection.execute(sql.SQL(statement).format(schema=schema))  # type: ignore[arg-type]
        found = plan(loaded, a_claim(10))["Plan"]
        print(f"{before} pages without marked tasks, {found['Shared Hit Blocks']} with them")
        assert found["Actual Rows"] == 10
        assert found["Shared Hit Blocks"] <= before * 1.2 + 20
        check_plan(loaded, tasks.next_due(names=["work"], queues=None), pages=200)
        new = "select {schema}.mark_of('work', json_build_object('arguments', json_build_array('new')))"
        row = loaded.connection.execute(sql.SQL(new).format(schema=schema)).fetchone()
        assert row is not None
        first = marked(MarkedPlace(needs_id=UUID(int=row[0].int - 1)), most=200)
        text = compose(first.name, loaded.target.schema)
        page = first.read(loaded.connection.execute(text, first.parameters).fetchall())
        assert len(page.groups) == 200
        assert page.after is not None
        check_plan(loaded, first, pages=3_000)
        check_plan(loaded, marked(most=200), pages=3_000)
        check_plan(loaded, marked(page.after, most=200), pages=3_000)
        one = [each for each in page.groups if each.needs_id == row[0]]
        assert len(one) == 6  # two queues with three priorities each
        check_plan(loaded, a_claim(100, marked=one), pages=4_000)
        check_plan(loaded, a_claim(10, marked=page.groups), pages=6_000)
        check_plan(loaded, tasks.next_due(names=["work"], queues=None, marked=one), pages=400)
        check_plan(loaded, suspects_wait(names=["work"], queues=None, marked=one), pages=20)
    loaded.connection.execute(sql.SQL("vacuum analyze {}.tasks").format(schema))


def test_a_claim_with_a_floor_skips_rows_that_were_claimed_before(loaded: StoreHarness) -> None:
    """An old snapshot keeps dead index entries: 20,000 of them precede the next task of the lane."""
    schema = sql.Identifier(loaded.target.schema)
    insert = (
        "insert into {}.tasks (id, name, queue, args, enqueued_at)"
        " select gen_random_uuid(), 'work', 'busy', '{{}}', now() - interval '1 hour' + n * interval '1 ms' from generate_series(1, 20100) n"
    )
    place = "select enqueued_at, id from {}.tasks where queue = 'busy' order by enqueued_at, id offset 19999 limit 1"
    end = "update {}.tasks set state = 'COMPLETED' where queue = 'busy' and (enqueued_at, id) <= (%s, %s)"
    try:
        loaded.connection.execute(sql.SQL(insert).format(schema))
        floor = loaded.connection.execute(sql.SQL(place).format(schema)).fetchone()
        assert floor is not None
        with loaded.target.connect("sees the past") as observer:
            observer.autocommit = False
            observer.execute("set transaction isolation level repeatable read")
            observer.execute("select 1")
            loaded.connection.execute(sql.SQL(end).format(schema), floor)
            walked = plan(loaded, a_claim(1, queues=["busy"]))["Plan"]["Shared Hit Blocks"]
            floors = {("busy", 0): (floor[0], floor[1])}
            found = plan(loaded, a_claim(1, queues=["busy"], floors=floors))["Plan"]
            print(f"{walked} pages without a floor, {found['Shared Hit Blocks']} with one")
            assert found["Actual Rows"] == 1
            assert found["Shared Hit Blocks"] < 500 < 1_000 < walked
    finally:
        loaded.connection.execute(sql.SQL("delete from {}.tasks where queue = 'busy'").format(schema))


def test_the_page_about_the_claim_shows_the_nodes_and_indexes_of_its_plan(loaded: StoreHarness) -> None:
    with claim_page.beside_lines_and_suspects(loaded) as claim:
        real = claim_page.nodes_of(
            claim_page.as_a_worker(loaded, claim, options="analyze, buffers, costs off, timing off")
        )
    shown = claim_page.nodes_on_the_page()
    assert len(shown) == 11
    for part, those in shown.items():
        assert those <= real[part], part
        assert {index for _, index in those} == {index for _, index in real[part]}, part


def test_a_claim_reads_no_leases_of_its_worker_to_recognise_a_repetition(loaded: StoreHarness) -> None:
    """An old snapshot keeps the index entries of all leases that the worker has ended."""
    found = [
        node
        for node in nodes(plan(loaded, a_claim(10))["Plan"])
        if node.get("Subplan Name") == "CTE again" and node.get("Index Name") == "tasks_leased"
    ]
    assert [("claim_call" in node["Index Cond"], node["Shared Hit Blocks"] < 50) for node in found] == [
        (True, True)
    ]


def test_older_statements_read_leases_through_the_wider_index(loaded: StoreHarness) -> None:  # J3
    check_plan(loaded, leases.leases_of_worker("w1", limit=100), pages=3_000)
    names = {
        node.get("Index Name")
        for node in nodes(plan(loaded, leases.leases_of_worker("w1", limit=100))["Plan"])
    }
    assert "tasks_leased" in names
