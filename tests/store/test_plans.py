"""Every hot statement keeps using its index with 300,000 rows in the table: no sequential scan of tasks, few pages touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.domain.needs import Marked
from everbeat.store import diagnosis, explanation, leases, migrating, sweeping, tasks, workers
from everbeat.store.declining import MarkedPlace, decline, marked
from everbeat.store.foreign_statement import numbered
from everbeat.store.session import KEYED
from everbeat.store.statement import Statement, compose
from everbeat.store.suspects import suspects_wait
from everbeat.store.target import Target
from tests.store.conftest import Hands

ROWS = 100_000
HELD = 500

FILL = """
insert into {schema}.tasks (id, name, queue, priority, state, args, sent_at, enqueued_at, claim_id, claimed_at, claimed_by_worker_id,
    started_at, completed_at, good_until, fence, attempt)
select gen_random_uuid(), 'work', case when n %% 10 = 0 then 'mail' else 'default' end, n %% 3, state, '{{}}', now(), now() + delay, claim_id,
    case when state <> 'PENDING' then now() end, case when state <> 'PENDING' then 'w1' end,
    case when state in ('RUNNING', 'COMPLETED') then now() end, case when state = 'COMPLETED' then now() end,
    case when n %% 1000 = 0 then now() - interval '1 minute' end, 1, 1
from (
    select n, 'COMPLETED' as state, interval '0' as delay, null::uuid as claim_id from generate_series(1, %(rows)s) n
    union all
    select n, 'PENDING', case when n %% 2 = 0 then interval '1 hour' else interval '0' end, null from generate_series(1, %(rows)s) n
    union all
    select n, 'RUNNING', interval '0', gen_random_uuid() from generate_series(1, %(held)s) n
    union all
    select n, 'COMPLETED', interval '0', null from generate_series(1, %(rows)s) n
) s
"""


@contextmanager
def filled(database_url: str, *, rows: int, in_flight: int) -> Iterator[Hands]:
    """A schema of its own with so many tasks that ended (twice), that wait, and that run."""
    schema = f"test_plans_{uuid4().hex[:8]}"
    target = Target.parse(database_url, schema=schema)
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    party = Hands(target, connection)
    party.supervisor("s1", "w1")
    party.supervisor("s2", "w2", "w3")
    connection.execute(sql.SQL(FILL).format(schema=sql.Identifier(schema)), {"rows": rows, "held": in_flight})
    for table in ("tasks", "workers", "supervisors", "attempts"):
        connection.execute(
            sql.SQL("vacuum analyze {}.{}").format(sql.Identifier(schema), sql.Identifier(table))
        )
    yield party
    connection.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(schema)))
    party.database.close()
    connection.close()


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[Hands]:
    with filled(database_url, rows=ROWS, in_flight=HELD) as hands:
        yield hands


def held(hands: Hands, count: int) -> list[tuple[UUID, UUID]]:
    query = sql.SQL("select id, claim_id from {}.tasks where state = 'RUNNING' limit {}")
    found = hands.connection.execute(
        query.format(sql.Identifier(hands.target.schema), sql.Literal(count))
    ).fetchall()
    return [(row[0], row[1]) for row in found]


def plan(hands: Hands, statement: Statement[Any]) -> dict[str, Any]:
    """The plan as it ran; its changes are rolled back."""
    text = b"explain (analyze, buffers, format json) " + compose(statement.name, hands.target.schema)
    with hands.connection.transaction(force_rollback=True):
        row = hands.connection.execute(text, statement.parameters).fetchone()
    assert row is not None
    found = row[0] if isinstance(row[0], list) else json.loads(row[0])
    return dict(found[0])


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from nodes(child)


def check_plan(hands: Hands, statement: Statement[Any], *, pages: int) -> None:
    found = plan(hands, statement)
    scans = [
        node
        for node in nodes(found["Plan"])
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "tasks"
    ]
    assert scans == [], json.dumps(scans, indent=1)[:2000]
    touched = found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"]
    print(f"{statement.name}: {touched} pages, {found['Execution Time']:.2f} ms")
    assert touched <= pages, f"{statement.name} touched {touched} pages"


def a_claim(limit: int, **more: Any) -> Statement[Any]:
    queues, priorities = more.get("queues"), more.get("priorities", {})
    return leases.claim(
        worker_id="w2",
        claim_call=uuid4(),
        names=["work"],
        limit=limit,
        queues=queues,
        queue_priorities=priorities,
        starts=more.get("starts", 0),
        floors=more.get("floors", leases.NO_FLOORS),
        marked=more.get("marked", ()),
    )


def test_claim(loaded: Hands) -> None:
    check_plan(loaded, a_claim(1), pages=400)
    check_plan(loaded, a_claim(100, priorities={"mail": 1}), pages=4_000)
    check_plan(loaded, a_claim(10, queues=["mail"]), pages=600)


def test_claim_and_next_due_of_a_name_that_has_nothing(loaded: Hands) -> None:
    nothing = leases.claim(
        worker_id="w2", claim_call=uuid4(), names=["none"], limit=10, queues=["none"], queue_priorities={}
    )
    check_plan(loaded, nothing, pages=200)
    check_plan(loaded, leases.next_due(names=["work"], queues=None), pages=200)


def test_claim_beside_long_serial_lines(loaded: Hands) -> None:
    """20 lines of 5,000 tasks each: a claim looks at their heads, not at what waits behind them."""
    fill = sql.SQL(
        "insert into {}.tasks (id, name, queue, args, serial, serial_at)"
        " select gen_random_uuid(), 'work', 'default', '{{}}', 'key:' || n %% 20, now() + n * interval '1 ms'"
        " from generate_series(1, %s) n"
    ).format(sql.Identifier(loaded.target.schema))
    with loaded.connection.transaction(force_rollback=True):
        loaded.connection.execute(fill, [ROWS])
        analyze = sql.SQL("analyze {}.tasks").format(sql.Identifier(loaded.target.schema))
        loaded.connection.execute(analyze)
        check_plan(loaded, a_claim(100), pages=4_000)
        check_plan(loaded, leases.next_due(names=["work"], queues=None), pages=400)


def test_looking_for_suspects_where_there_are_none(loaded: Hands) -> None:
    check_plan(loaded, suspects_wait(names=["work"], queues=None), pages=20)


def test_explain_and_doctor_read_marked_tasks_by_their_index(loaded: Hands) -> None:  # J2
    """Beside 100,000 tasks that wait and are not marked."""
    schema = sql.Identifier(loaded.target.schema)
    # The long serial lines of the test before were rolled back, and their index entries are still there.
    loaded.connection.execute(sql.SQL("vacuum {}.tasks").format(schema))
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
        check_plan(loaded, explanation.waiting(row[0], stale_ms=60_000), pages=1_500)
        marked = sql.SQL("select id from {}.tasks where needs_id is not null limit 1").format(schema)
        row = loaded.connection.execute(marked).fetchone()
        assert row is not None
        check_plan(loaded, explanation.waiting(row[0], stale_ms=60_000), pages=1_500)


def test_doctor_looks_at_a_bounded_part_of_many_marked_tasks(loaded: Hands) -> None:  # J2
    """30,000 tasks that all need something else."""
    mark = (
        "update {}.tasks set needs = '{{\"arguments\": []}}', needs_id = gen_random_uuid()"
        " where id = any(array(select id from {}.tasks where state = 'PENDING' limit 30000))"
    )
    schema = sql.Identifier(loaded.target.schema)
    with loaded.connection.transaction(force_rollback=True):
        loaded.connection.execute(sql.SQL(mark).format(schema, schema))
        check_plan(loaded, diagnosis.marked(), pages=40_000)
        assert len(diagnosis_of(loaded)) == 200


def test_doctor_reads_the_newest_failures_beside_100_000_older_ones(loaded: Hands) -> None:  # J4
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


def diagnosis_of(hands: Hands) -> list[Marked]:
    """What `doctor` reads, in the transaction of the test."""
    statement = diagnosis.marked()
    found = hands.connection.execute(hands.text(statement.name), statement.parameters).fetchall()
    return statement.read(found)


def test_start_settle_release_and_check(loaded: Hands) -> None:
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
def test_the_hot_statements_of_a_worker_look_rows_up_whatever_their_number(loaded: Hands, rows: int) -> None:
    """As a worker runs them: prepared, on a session for keyed statements, planned before anybody knows the batch."""
    # What other tests rolled back is out of the way.
    loaded.connection.execute(sql.SQL("vacuum {}.tasks").format(sql.Identifier(loaded.target.schema)))
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
        text, names = numbered(statement.name, loaded.target.schema)
        given = sql.SQL(", ").join(sql.Literal(statement.parameters[name]) for name in names)
        with loaded.connection.transaction(force_rollback=True):
            loaded.connection.execute(KEYED.replace(b"set ", b"set local "))
            loaded.connection.execute(f"prepare as_a_worker_does as {text}".encode())
            row = loaded.connection.execute(
                sql.SQL("explain (analyze, buffers, format json) execute as_a_worker_does ({})").format(given)
            ).fetchone()
            loaded.connection.execute("deallocate as_a_worker_does")
        assert row is not None
        found = [*nodes(dict(row[0][0])["Plan"])]
        kinds = {(node["Node Type"], node.get("Relation Name")) for node in found}
        assert not {kind for kind in kinds if kind[0] in ("Seq Scan", "Hash Join", "Merge Join")}, (
            statement.name
        )
        assert found[0]["Shared Hit Blocks"] + found[0]["Shared Read Blocks"] < 500 + 60 * rows, (
            statement.name
        )


def test_beat_and_watch(loaded: Hands) -> None:
    check_plan(loaded, workers.beat("s1", held(loaded, HELD), draining=False), pages=2_000)
    check_plan(loaded, workers.beat("s2", [], draining=False), pages=100)
    check_plan(loaded, sweeping.silent_supervisors(silent_ms=0), pages=3_000)
    check_plan(loaded, workers.watch_beats(), pages=50)
    check_plan(loaded, workers.watch_sessions(), pages=50)


def test_leases_and_recover(loaded: Hands) -> None:
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


def test_send_cancel_expire_and_outcomes(loaded: Hands) -> None:
    channel = loaded.target.channel
    new = [
        tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}") for _ in range(100)
    ]
    check_plan(loaded, tasks.insert_task(new[0], channel=channel), pages=60)
    check_plan(loaded, tasks.insert_tasks(new, channel=channel), pages=4_000)
    some = [one[0] for one in held(loaded, 100)]
    check_plan(loaded, tasks.outcomes(some), pages=600)
    check_plan(loaded, tasks.cancel(some[0], channel=channel, call=uuid4()), pages=60)
    check_plan(loaded, tasks.expire(channel=channel, limit=200), pages=6_000)


def test_a_plan_that_scans_is_noticed(loaded: Hands) -> None:
    index = sql.Identifier(loaded.target.schema, "tasks_leased")
    with loaded.connection.transaction(force_rollback=True):
        loaded.connection.execute(sql.SQL("drop index {}").format(index))
        with pytest.raises(AssertionError):
            check_plan(loaded, leases.leases_of_worker("w1", limit=100), pages=3_000)


def test_the_server_is_new_enough(loaded: Hands) -> None:
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


def test_marked_tasks_of_others_make_no_claim_longer_and_those_of_a_group_are_found(
    loaded: Hands,
) -> None:  # J2
    """100,000 marked tasks of one group stand before all others of their lanes; 10,000 groups have one task each."""
    schema = sql.Identifier(loaded.target.schema)
    loaded.connection.execute(sql.SQL("vacuum {}.tasks").format(schema))  # what other tests rolled back
    before = plan(loaded, a_claim(10))["Plan"]["Shared Hit Blocks"]
    with loaded.connection.transaction(force_rollback=True):
        for statement in (MARKED, OTHER_GROUPS, "analyze {schema}.tasks"):
            loaded.connection.execute(sql.SQL(statement).format(schema=schema))  # type: ignore[arg-type]
        found = plan(loaded, a_claim(10))["Plan"]
        print(f"{before} pages without marked tasks, {found['Shared Hit Blocks']} with them")
        assert found["Actual Rows"] == 10
        assert found["Shared Hit Blocks"] <= before * 1.2 + 20
        check_plan(loaded, leases.next_due(names=["work"], queues=None), pages=200)
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
        check_plan(loaded, leases.next_due(names=["work"], queues=None, marked=one), pages=400)
        check_plan(loaded, suspects_wait(names=["work"], queues=None, marked=one), pages=20)
    loaded.connection.execute(sql.SQL("vacuum analyze {}.tasks").format(schema))


def test_a_claim_with_a_floor_does_not_walk_through_what_was_claimed_before(loaded: Hands) -> None:
    """While somebody sees the past, dead entries stay: 20,000 of them stand before the next task of the lane."""
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
