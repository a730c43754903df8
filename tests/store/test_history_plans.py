"""The statements of `history` among 1,000,000 tasks in 30 partitions: no table is scanned, and few pages are touched."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat import App
from everbeat.domain.task.states import TaskState
from everbeat.store import diagnosis, history, inspection, migrating, retention, state_counts
from everbeat.store.failures import MOST_GROUPED, failure_groups
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.store.conftest import StoreHarness
from tests.store.plans import nodes, plan

pytestmark = pytest.mark.long  # inserting the old rows takes longer than most rooms of tests

PARTS, ROWS, LIVE = 30, 33_334, 100_000
LOWEST, HIGHEST = UUID(int=0), UUID(int=(1 << 128) - 1)
FILL = """
insert into {schema}.history (id, name, queue, priority, state, args, policy, sent_at, enqueued_at, fence, attempt, counted_from, retry_count,
    crash_count, loss_count, claimed_at, claimed_by_worker_id, started_at, completed_at, failed_at, result, error, suspect, alone,
    checkpoint_number, ended_at, batch_id, attempts)
select x.id, 'task' || n %% 20, 'default', 0, case when n %% 100 = 0 then 'FAILED' else 'COMPLETED' end,
    '{{"customer": 12345678, "kind": "invoice"}}', '{{}}',
    x.at - interval '3 s', x.at - interval '3 s', 1, 1, 0, 0, 0, 0, x.at - interval '2 s', 'host-1-worker-1', x.at - interval '1 s',
    case when n %% 100 > 0 then x.at end, case when n %% 100 = 0 then x.at end, '{{"total": 12345.67}}',
    case when n %% 100 = 0 then '{{"code": "BROKEN", "message": "no"}}'::json end, false, false, 0, x.at,
    case when n %% 1000 = 0 then '00000000-0000-0000-0000-00000000000b'::uuid end,
    array[row(x.id, 1, gen_random_uuid(), 1, 'host-1-worker-1', x.at - interval '2 s', x.at - interval '1 s', x.at,
        case when n %% 100 = 0 then 'FAILED' else 'COMPLETED' end, false, null)::{schema}.history_attempt]
from generate_series(1, %(rows)s) n
cross join lateral (select %(since)s::timestamptz + n * (interval '23 h' / %(rows)s) as at) a
cross join lateral (
    select a.at, (lpad(to_hex((extract(epoch from a.at - interval '3 s') * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text || %(since)s), 1, 3)
        || '8' || substr(md5(n::text || %(since)s), 4, 15))::uuid as id
) x
"""


@pytest.fixture(scope="module")
def filled(database_url: str) -> Iterator[StoreHarness]:
    target = Target.parse(database_url, schema=f"test_history_{uuid4().hex[:8]}")
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    db = StoreHarness(target, connection)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    for day in range(1, PARTS + 1):
        since = today - timedelta(days=day)
        assert db.run(history.add_part(since, unit="day"))
        connection.execute(db.plain(FILL), {"rows": ROWS, "since": since})
    # Tasks that stay: they wait, or ended a moment ago.
    connection.execute(
        db.plain(
            "insert into {schema}.tasks (id, name, queue, args, state, completed_at, enqueued_at)"
            " select gen_random_uuid(), 'work', 'default', '{{}}', case when n %% 2 = 0 then 'COMPLETED' else 'PENDING' end,"
            " case when n %% 2 = 0 then now() end, now() + interval '1 day' from generate_series(1, %s) n"
        ),
        [LIVE],
    )
    connection.execute(
        db.plain(
            "insert into {schema}.tasks (id, name, queue, args, state, completed_at, enqueued_at)"
            " select encode(int8send(n) || int8send(n), 'hex')::uuid, 'work', 'default', '{{}}', 'COMPLETED',"
            " now() - interval '2 days', now() from generate_series(1, 5000) n"
        )
    )
    for table in ("tasks", "history"):
        connection.execute(db.plain(f"analyze {{schema}}.{table}"))
    connection.execute(db.plain("vacuum {schema}.history"))
    yield db
    connection.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(target.schema)))
    db.database.close()
    connection.close()


def touched(db: StoreHarness, statement: Statement[Any]) -> int:
    """Return how many pages the statement touches. No table of tasks may be scanned."""
    found = plan(db, statement)
    scans = [
        node.get("Relation Name")
        for node in nodes(found["Plan"])
        if node["Node Type"] == "Seq Scan"
        and str(node.get("Relation Name")).startswith(("tasks", "history_2"))
    ]
    pages = found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"]
    print(
        f"{statement.name}: {pages} pages, planned in {found['Planning Time']:.2f} ms, ran in {found['Execution Time']:.2f} ms"
    )
    assert scans == [], statement.name
    return int(pages)


def test_the_tasks_of_a_batch_are_found_by_their_index(filled: StoreHarness) -> None:
    query = inspection.TaskQuery(batch=UUID(int=11))
    assert len(filled.run(inspection.list_tasks(query, limit=100))) == 100
    assert touched(filled, inspection.list_tasks(query, limit=100)) < 3_000
    assert touched(filled, inspection.list_tasks(inspection.TaskQuery(batch=UUID(int=12)), limit=100)) < 300


def old_id(db: StoreHarness) -> UUID:
    row = db.connection.execute(
        db.plain("select id from {schema}.history where ended_at < now() - interval '20 days' limit 1")
    ).fetchone()
    assert row is not None
    found: UUID = row[0]
    return found


def test_a_lookup_by_id_touches_a_few_pages_of_each_partition(filled: StoreHarness) -> None:
    task_id = old_id(filled)
    assert touched(filled, history.outcomes([task_id])) <= 5 * PARTS
    assert touched(filled, inspection.task(task_id)) <= 5 * PARTS
    assert touched(filled, inspection.attempts(task_id)) <= 5 * PARTS


def test_a_page_of_a_list_touches_a_few_pages_of_each_partition(filled: StoreHarness) -> None:
    assert touched(filled, inspection.tasks(limit=50)) <= 10 * PARTS
    assert touched(filled, inspection.tasks(limit=50, before=old_id(filled))) <= 10 * PARTS


@pytest.mark.parametrize(
    "filters",
    [
        {"name": "rare"},
        {"name": "rare", "latest": True},
        {"name": "rare", "latest": True, "states": [TaskState.FAILED]},
        {"error": "RARE", "states": [TaskState.FAILED]},
        {"queue": "rare", "since": timedelta(days=29)},
        {"worker": "rare"},
    ],
)
def test_a_list_that_finds_nothing_examines_a_limited_number_of_tasks(
    filled: StoreHarness, filters: dict[str, Any]
) -> None:
    """Among a million tasks, it touches at most two pages for each task that it examines.

    The filter by worker also looks up the attempts of each pending task, which takes two pages of an index. Half of the tasks are pending.
    """
    most = inspection.MOST_EXAMINED
    pages = (3 if "worker" in filters else 2) * most
    assert touched(filled, inspection.tasks(limit=50, **filters)) <= pages
    query = inspection.TaskQuery(**filters)
    assert touched(filled, inspection.last_examined(query, most=most)) <= pages
    last = filled.run(inspection.last_examined(query, most=most))
    assert touched(filled, inspection.list_tasks(query, limit=50, most=None, oldest=last)) <= pages


def test_a_list_of_failures_examines_only_failures(filled: StoreHarness) -> None:
    """One of 100 tasks failed. The search reads each failure once."""
    query = inspection.TaskQuery(states=[TaskState.FAILED], name="rare", latest=True)
    assert query.is_of_failures
    every = inspection.latest_failures(query, limit=50, most=inspection.MOST_EXAMINED)
    assert filled.run(every) == ([], True)
    assert touched(filled, every) <= 2 * PARTS * ROWS // 100
    some = inspection.latest_failures(query, limit=50, most=1_000)
    assert filled.run(some) == ([], False)
    assert touched(filled, some) <= 2_000


def test_a_list_of_live_tasks_does_not_read_the_history(filled: StoreHarness) -> None:
    running = inspection.tasks(limit=50, states=[TaskState.RUNNING], name="rare")
    assert touched(filled, running) <= 20


def test_the_children_of_a_task_and_the_tasks_of_a_workflow_are_found_by_their_indexes(
    filled: StoreHarness,
) -> None:
    assert touched(filled, inspection.tasks(limit=50, parent=uuid4())) <= 5 * PARTS
    assert touched(filled, inspection.tasks(limit=50, workflow=uuid4())) <= 5 * PARTS


def test_the_newest_failures_are_read_by_their_index(filled: StoreHarness) -> None:
    assert touched(filled, diagnosis.failures(within_s=3 * 86_400, most=100)) <= 20 * PARTS


def test_groups_of_failures_examine_a_limited_number_of_tasks(filled: StoreHarness) -> None:  # K12
    """They touch at most two pages for each task that they examine."""
    assert touched(filled, failure_groups(limit=50)) <= 4 * MOST_GROUPED
    assert touched(filled, failure_groups(limit=50, name="rare")) <= 4 * MOST_GROUPED
    assert touched(filled, failure_groups(limit=50, most=100)) <= 4 * 100 + 20 * PARTS
    assert touched(filled, diagnosis.unsent_handlers(within_s=29 * 86_400, most=1_000)) <= 2_000


def test_the_numbers_of_tabs_examine_a_limited_number_of_tasks(filled: StoreHarness) -> None:
    assert touched(filled, state_counts.newest()) <= 2 * state_counts.MOST_COUNTED + 20 * PARTS
    assert touched(filled, state_counts.live()) <= 3 * state_counts.MOST_COUNTED
    assert touched(filled, state_counts.estimates(filled.target.schema)) <= 2_000


def test_dead_tasks_are_found_like_other_tasks(filled: StoreHarness) -> None:  # K12
    dead = inspection.tasks(limit=50, states=[TaskState.FAILED, TaskState.EXPIRED], latest=True)
    assert touched(filled, dead) <= 2 * inspection.MOST_EXAMINED


def test_recoveries_are_read_by_their_index(filled: StoreHarness) -> None:
    assert touched(filled, inspection.recoveries(limit=50)) <= 5 * PARTS
    assert touched(filled, inspection.recoveries(old_id(filled), limit=50)) <= 5 * PARTS


def test_before_a_drop_at_most_10000_tasks_of_the_partition_are_read(filled: StoreHarness) -> None:
    first, *_ = filled.run(history.old_parts(hours=25 * 24))
    bounds = filled.run(retention.task_id_bounds(hours=25 * 24))
    sample = history.count_part(first, hours=25 * 24, bounds=bounds, limit=10_000, after=LOWEST)
    assert touched(filled, sample) <= 3_000
    counted = filled.run(sample)
    assert (counted.deleted["tasks"], counted.deleted["attempts"]) == (10_000, 10_000)
    assert counted.next_after is not None
    assert touched(filled, history.is_part_needed(first, hours=25 * 24, bounds=bounds)) <= 20


def test_a_step_of_the_caretaker_reads_only_its_portion(filled: StoreHarness) -> None:
    """5,000 tasks can move. A step of 1,000 touches about 15 pages for each of them, of which most are in the indexes."""
    assert filled.run(history.add_part(datetime.now(UTC) - timedelta(days=2), unit="day"))
    step = history.move_tasks(age_ms=3_600_000, hours=None, limit=1_000, after=LOWEST, until=HIGHEST)
    assert touched(filled, step) <= 20 * 1_000
    beyond = UUID(int=1 << 100)
    idle = history.move_tasks(age_ms=3_600_000, hours=None, limit=1_000, after=beyond, until=HIGHEST)
    assert touched(filled, idle) <= 4 * 1_000


def test_a_search_with_a_rare_filter_finds_all_tasks_if_it_is_continued(filled: StoreHarness) -> None:
    rare = set()
    for days in (2, 15, 29):
        rare |= {
            row[0]
            for row in filled.connection.execute(
                filled.plain(
                    "update {schema}.history set name = 'rare' where (id, ended_at) in ("
                    " select h.id, h.ended_at from {schema}.history h where h.ended_at < now() - %s limit 1) returning id"
                ),
                [timedelta(days=days)],
            )
        }
    app = App(filled.target.url, schema=filled.target.schema)
    page, pages = app.list_tasks(name="rare", order="happened"), 1
    found = [task.id for task in page]
    while page.continue_before is not None:
        assert page.examined == inspection.MOST_EXAMINED
        page, pages = app.list_tasks(name="rare", before=page.continue_before), pages + 1
        found += [task.id for task in page]
    app.close()
    assert len(rare) == 3
    assert sorted(found) == sorted(rare)
    assert pages <= (PARTS * ROWS + LIVE + 5_000) // inspection.MOST_EXAMINED + 1


def test_a_list_of_recoveries_examines_a_limited_number_of_recovered_tasks(filled: StoreHarness) -> None:
    filled.connection.execute(
        filled.plain(
            "update {schema}.history h set recoveries = array[jsonb_populate_record(null::{schema}.history_recovery,"
            " jsonb_build_object('id', 1, 'cause', 'vanished', 'noticed_by', 'age', 'noticed_at', h.ended_at))]"
            " where h.ended_at > now() - interval '2 days'"
        )
    )
    filled.connection.execute(filled.plain("vacuum analyze {schema}.history"))
    query, most = inspection.RecoveryQuery(cause="rare"), inspection.MOST_RECOVERED
    assert touched(filled, inspection.list_recoveries(query, limit=50)) <= 2 * most
    assert touched(filled, inspection.last_recovered(query, most=most)) <= 2 * most
    last = filled.run(inspection.last_recovered(query, most=most))
    assert last is not None
    assert touched(filled, inspection.list_recoveries(query, limit=50, most=None, oldest=last)) <= 2 * most
    assert touched(filled, inspection.recoveries(old_id(filled), limit=50)) <= 5 * PARTS
