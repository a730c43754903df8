"""Test that ended tasks move to `history` with all their records, exactly as they were, and back; and each reason to stay."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.client.options import call_patience
from everbeat.domain.inspection import AttemptInfo
from everbeat.errors import ConfigurationError
from everbeat.maintenance.history import unit_of
from everbeat.store import history, inspection, retention, tasks, workers
from everbeat.store.patience import LONGEST_PATIENCE_S
from tests.maintenance.moving import ids_in, move, records_left, stored
from tests.maintenance.pruning import ended
from tests.store.conftest import StoreHarness, db

__all__ = ["db"]


def test_a_task_moves_an_hour_after_its_end_with_all_its_records(db: StoreHarness) -> None:  # X1
    states = ("COMPLETED", "FAILED", "CANCELLED", "EXPIRED")
    old = {ended(db, hours=1.01, state=state) for state in states}
    young = {ended(db, hours=0.99, state=state, sent_hours=5_000) for state in states}
    live = db.send()
    assert move(db) == 4
    assert ids_in(db, "history") == old
    assert ids_in(db, "tasks") == young | {live}
    assert {row[0] for row in db.table("attempts", "task_id")} <= young
    assert {row[0] for row in db.table("recoveries", "task_id")} <= young
    assert {row[0] for row in db.table("signals", "target")} == young
    assert move(db) == 0


def test_a_task_comes_back_exactly_as_it_was(db: StoreHarness) -> None:  # X1
    """Also text in JSON that `jsonb` rejects, and values that only later columns have."""
    task_id = ended(db, hours=2, state="FAILED")
    strange = r'{"b":  1, "a": "\u0000", "a": 2}'
    for table, column, key in (
        ("steps", "result", "task_id"), ("signals", "value", "target"), ("attempts", "error", "task_id"), ("recoveries", "certificate", "task_id"),
        ("tasks", "result", "id"), ("tasks", "checkpoint", "id"),
    ):  # fmt: skip
        db.connection.execute(
            sql.SQL("update {}.{} set {} = %s::json where {} = %s").format(
                *(sql.Identifier(name) for name in (db.target.schema, table, column, key))
            ),
            [strange, task_id],
        )
    schema = sql.Identifier(db.target.schema)
    db.connection.execute(
        sql.SQL("update {}.tasks set priority = 7, flags = '{{}}', serial = 'key:x', serial_at = now(), retry_call = %s,"
                " gates = array['a', 'b'], costs = array[1, 2], last_send = %s, schedule = 's' where id = %s").format(schema),
        [uuid4(), uuid4(), task_id],
    )  # fmt: skip
    before = stored(db, task_id)
    assert all(before.values())
    assert move(db) == 1
    assert stored(db, task_id) == {table: [] for table in before}
    assert set(records_left(db).values()) == {0}
    assert db.run(history.recall_task(task_id)) == 1
    assert stored(db, task_id) == before
    assert ids_in(db, "history") == set()
    assert db.run(history.recall_task(task_id)) == 0


def test_history_has_every_column_of_tasks_and_so_has_the_view(db: StoreHarness) -> None:
    """A later migration that adds a column to one of them must add it to the others."""

    def columns(table: str) -> dict[str, str]:
        found = db.connection.execute(
            "select a.attname, format_type(a.atttypid, a.atttypmod) from pg_attribute a"
            " where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped",
            [f'"{db.target.schema}".{table}'],
        )
        return dict(found.fetchall())

    documents = {"ended_at", "attempts", "steps", "signals", "recoveries"}
    assert columns("history").keys() - columns("tasks").keys() == documents
    assert columns("tasks").items() <= columns("history").items()
    assert columns("all_tasks") == columns("history")
    types = {"attempts": "attempt", "steps": "step", "signals": "signal", "recoveries": "recovery"}
    for table, one in types.items():
        assert columns(f"history_{one}") == columns(table)


def test_a_task_of_a_live_workflow_stays(db: StoreHarness) -> None:
    task_id, workflow_id = ended(db, hours=2), uuid4()
    schema = sql.Identifier(db.target.schema)
    db.connection.execute(
        sql.SQL("insert into {}.workflows (id, name, state, on_error, node_count) values (%s, 'w', 'RUNNING', 'fail', 1)").format(schema),
        [workflow_id],
    )  # fmt: skip
    db.connection.execute(
        sql.SQL("update {}.tasks set workflow_id = %s, node = 0 where id = %s").format(schema),
        [workflow_id, task_id],
    )
    assert move(db) == 0
    db.connection.execute(
        sql.SQL("update {}.workflows set state = 'COMPLETED', ended_at = now() where id = %s").format(schema),
        [workflow_id],
    )
    with db.connection.transaction():  # a retry has locked the workflow
        db.connection.execute(
            sql.SQL("select from {}.workflows where id = %s for no key update").format(schema), [workflow_id]
        )
        assert move(db) == 0
    assert move(db) == 1
    assert db.run(history.recall_task(task_id)) == 0  # its workflow is retried instead
    assert db.run(history.recall_workflows([workflow_id])) == 1


def test_a_task_stays_as_long_as_its_parent_lives(db: StoreHarness) -> None:
    child, parent = ended(db, hours=2), db.send()
    db.connection.execute(db.plain("update {schema}.tasks set parent_id = %s where id = %s"), [parent, child])
    assert move(db) == 0
    assert db.cancel(parent) == "CANCELLED"
    assert move(db) == 1
    assert ids_in(db, "history") == {child}


@pytest.mark.parametrize(
    ("scope", "until", "moved"),
    [
        ("kept", "null", 0),
        ("90000000 milliseconds", "now() + '1 day'", 0),
        ("1000 milliseconds", "now() - interval '1 s'", 1),
    ],
)
def test_a_task_stays_as_long_as_its_key_is_taken(
    db: StoreHarness, scope: str, until: str, moved: int
) -> None:
    task_id = ended(db, hours=2)
    db.connection.execute(
        db.plain("update {schema}.tasks set unique_key = 'k', unique_for = %s where id = %s"),
        [scope, task_id],
    )
    db.connection.execute(
        db.plain(f"insert into {{schema}}.unique_keys values ('work', 'k', %s, {until})"), [task_id]
    )
    assert move(db) == moved
    assert len(db.table("unique_keys", "1")) == 1 - moved


def test_a_task_stays_as_long_as_its_result_is_stored_for_a_time(db: StoreHarness) -> None:
    task_id = ended(db, hours=2)
    db.connection.execute(
        db.plain("""update {schema}.tasks set result = '1', policy = '{{"keep_result_ms": 90000000}}' where id = %s"""), [task_id]
    )  # fmt: skip
    assert move(db) == 0
    db.connection.execute(db.plain("update {schema}.tasks set result = null where id = %s"), [task_id])
    assert move(db) == 1


def test_a_locked_task_stays_and_no_session_waits(db: StoreHarness) -> None:
    task_id = ended(db, hours=2)
    with db.connection.transaction():
        db.connection.execute(db.plain("select from {schema}.tasks where id = %s for key share"), [task_id])
        assert move(db) == 0
    assert move(db) == 1


def test_a_task_whose_retention_is_over_stays_for_the_pruner(db: StoreHarness) -> None:
    ended(db, hours=101)
    assert move(db, terminal_record_retention_hours=100) == 0
    assert db.table("history_parts", "name") == []
    assert move(db, terminal_record_retention_hours=102) == 1


def test_nothing_moves_while_a_tree_with_older_code_lives(db: StoreHarness) -> None:  # J3
    """Older code would not find the tasks."""
    ended(db, hours=2)
    db.supervisor("old")
    db.connection.execute(db.plain("update {schema}.supervisors set code = null where id = 'old'"))
    assert move(db) == 0
    db.run(workers.end_supervisor("old", how="left"))
    assert move(db) == 1


def test_partitions_are_days_in_utc_and_are_created_when_they_are_needed(db: StoreHarness) -> None:
    first, second = ended(db, hours=2), ended(db, hours=50)
    assert move(db, step_rows=1) == 2
    parts = sorted(db.table("history_parts", "since, until, name"))
    assert [until - since for since, until, _ in parts] == [timedelta(days=1)] * 2
    today = (datetime.now(UTC) - timedelta(hours=2)).replace(hour=0, minute=0, second=0, microsecond=0)
    assert parts[-1][0] == today
    assert parts[-1][2] == f"history_{today:%Y%m%d}"
    assert ids_in(db, parts[-1][2]) == {first}
    assert ids_in(db, parts[0][2]) == {second}


def test_a_month_leaves_out_the_days_that_have_partitions(db: StoreHarness) -> None:
    for day, unit in ((10, "day"), (20, "day"), (15, "month"), (3, "month"), (25, "month"), (16, "month")):
        assert db.run(history.add_part(datetime(2026, 2, day, 12, tzinfo=UTC), unit=unit))  # type: ignore[arg-type]
    assert [(since.day, until.day) for since, until in sorted(db.table("history_parts", "since, until"))] == [
        (1, 10), (10, 11), (11, 20), (20, 21), (21, 1)
    ]  # fmt: skip
    assert [unit_of(hours) for hours in (720, 24 * 62, 24 * 63, None)] == ["day", "day", "month", "month"]


def test_no_patience_is_longer_than_half_of_the_time_for_which_a_task_stays() -> None:
    """A statement that the server answers late can renew the patience once."""
    assert 2 * LONGEST_PATIENCE_S <= history.SHORTEST_AGE_S
    assert call_patience("30m", subject="App.patience") == LONGEST_PATIENCE_S
    with pytest.raises(ConfigurationError, match="patience"):
        call_patience("31m", subject="App.patience")


def test_lists_and_lookups_find_moved_tasks(db: StoreHarness) -> None:
    failed, completed = ended(db, hours=3, state="FAILED"), ended(db, hours=2, state="COMPLETED")
    before = [db.run(inspection.tasks(limit=10)), db.run(inspection.tasks(limit=10, latest=True))]
    attempts: tuple[AttemptInfo, ...] = db.run(inspection.attempts(failed))
    recoveries = db.run(inspection.recoveries(limit=10)), db.run(inspection.recoveries(failed, limit=10))
    whole = db.run(inspection.task(failed))
    assert attempts
    assert all(recoveries)
    assert whole is not None
    assert move(db) == 2
    assert [db.run(inspection.tasks(limit=10)), db.run(inspection.tasks(limit=10, latest=True))] == before
    assert db.run(inspection.attempts(failed)) == attempts
    assert (
        db.run(inspection.recoveries(limit=10)),
        db.run(inspection.recoveries(failed, limit=10)),
    ) == recoveries
    again = db.run(inspection.task(failed))
    assert again is not None
    assert (again.summary, again.result, again.arguments) == (whole.summary, whole.result, whole.arguments)
    assert set(db.run(history.outcomes([failed, completed, UUID(int=1)]))) == {failed, completed}
    assert db.run(tasks.outcomes([failed, completed])) == {}
    by_worker = db.run(inspection.tasks(worker="w1", limit=10))
    assert {each.id for each in by_worker} == {failed, completed}
    found = db.run(inspection.tasks_between(failed, failed, limit=10))
    assert [each.id for each in found] == [str(failed)]


def test_the_items_of_a_task_stay_while_it_moves_to_history_and_back_and_go_after_it(
    db: StoreHarness,
) -> None:
    task_id = ended(db, hours=800, state="FAILED")
    kept = ended(db, hours=2, state="COMPLETED")
    insert = "insert into {}.stream_items (task_id, name, number, attempt, value) select %s, 'n', n, 1, '1' from generate_series(1, 3) n"
    for each in (task_id, kept):
        db.connection.execute(sql.SQL(insert).format(sql.Identifier(db.target.schema)), [each])

    def left_by_pruning() -> set[UUID]:
        after: UUID | None = UUID(int=0)
        while after is not None:
            step = retention.prune_stray_items(limit=2, after=after, until=UUID(int=(1 << 128) - 1))
            after = db.run(step).next_after
        return {row[0] for row in db.table("stream_items", "task_id")}

    assert move(db, terminal_record_retention_hours=None) == 2
    assert left_by_pruning() == {task_id, kept}
    assert db.run(history.recall_task(task_id)) == 1
    assert left_by_pruning() == {task_id, kept}
    bounds = db.run(retention.task_id_bounds(hours=720))
    db.run(retention.prune_tasks(hours=720, limit=100, after=UUID(int=0), until=bounds.old))
    assert left_by_pruning() == {kept}
    assert db.table("stream_items", "count(*)") == [(3,)]
