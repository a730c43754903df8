"""Test that a step of the move to `history` has a limit in bytes, and that a failed pass is not repeated at once."""

from __future__ import annotations

import base64
import logging
import os
from uuid import UUID

import psycopg
import pytest
from msgspec.structs import replace

from everbeat.maintenance.cleanup import HIGHEST_ID
from everbeat.maintenance.counting import LOWEST_ID
from everbeat.maintenance.history import HistoryKeeper, TasksMoved, TasksNotMoved
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import event_text
from everbeat.store import history
from everbeat.store.history import MoveStep
from everbeat.store.session import Session
from tests.maintenance.moving import ids_in, move, records_left
from tests.maintenance.pruning import ended
from tests.recovering.conftest import ManualObserver
from tests.store.conftest import StoreHarness, db

__all__ = ["db"]

MB = 1 << 20


def in_order(db: StoreHarness, count: int) -> list[UUID]:
    """Create tasks that ended long enough ago to move, in the order of their ids, and the partition for them."""
    found = [ended(db, hours=2 - n / 1_000) for n in range(count)]
    assert found == sorted(found)
    db.connection.execute(
        db.plain("update {schema}.tasks set completed_at = now() - interval '2 hours' where completed_at is not null")
    )  # fmt: skip
    assert db.run(history.add_part(db.row(found[0], "completed_at"), unit="day"))
    return found


def give_result(db: StoreHarness, task_id: UUID, size: int) -> None:
    """Give the task a result of this size that cannot be compressed."""
    text = base64.b64encode(os.urandom(size * 3 // 4)).decode()
    db.connection.execute(
        db.plain("update {schema}.tasks set result = to_json(%s::text) where id = %s"), [text, task_id]
    )


def give_steps(db: StoreHarness, task_id: UUID, *, megabytes: int) -> None:
    """Give the task steps whose results are 80 times smaller when they are compressed."""
    db.connection.execute(
        db.plain(
            "insert into {schema}.steps (task_id, kind, name, state, result, attempt, recorded_at)"
            " select %s, 'step', 's' || n, 'DONE', r.result, 1, now()"
            " from generate_series(1, %s) n cross join (select to_json(repeat('x', 1048576)) as result) r"
        ),
        [task_id, megabytes],
    )


def results(db: StoreHarness) -> dict[UUID, str]:
    """Return a digest of each result, wherever its task is."""
    return dict(db.table("all_tasks", "id, md5(result::text)"))


def steps_of_a_pass(db: StoreHarness) -> list[MoveStep]:
    """Run the steps of a pass, at most 20."""
    found: list[MoveStep] = []
    after: UUID | None = LOWEST_ID
    while after is not None and len(found) < 20:
        found.append(
            db.run(
                history.move_tasks(age_ms=3_600_000, hours=None, limit=1_000, after=after, until=HIGHEST_ID)
            )
        )
        after = found[-1].next_after
    return found


def test_a_step_moves_a_limited_number_of_bytes(db: StoreHarness) -> None:
    """Five results of 10 MB: three of them fit into the 32 MB of a step. The next step begins behind the last one that moved."""
    tasks = in_order(db, 9)
    for task_id in tasks[::2]:
        give_result(db, task_id, 10 * MB)
    before = results(db)
    found = steps_of_a_pass(db)
    assert [(step.moved, step.next_after) for step in found] == [(6, tasks[5]), (3, None)]
    assert ids_in(db, "history") == set(tasks)
    assert ids_in(db, "tasks") == set()
    assert results(db) == before
    assert set(records_left(db).values()) == {0}


def test_a_task_larger_than_a_step_moves_alone(db: StoreHarness) -> None:
    tasks = in_order(db, 4)
    give_result(db, tasks[1], 40 * MB)
    give_result(db, tasks[2], 40 * MB)
    assert [step.moved for step in steps_of_a_pass(db)] == [1, 1, 1, 1]
    assert ids_in(db, "history") == set(tasks)


@pytest.mark.long
def test_a_step_moves_a_limited_number_of_uncompressed_bytes(db: StoreHarness) -> None:
    """The arrays of `history` contain large values uncompressed, at most 128 MB of them in a step."""
    tasks = in_order(db, 4)
    for task_id in tasks[1:]:
        give_steps(db, task_id, megabytes=50)
    found = steps_of_a_pass(db)
    assert [(step.moved, step.next_after) for step in found] == [(3, tasks[2]), (1, None)]
    assert ids_in(db, "history") == set(tasks)
    (sizes,) = db.table("history", "array_agg(cardinality(steps) order by id)")
    assert sizes == ([1, 51, 51, 51],)


def test_a_task_whose_records_are_too_large_stays_and_those_behind_it_move(db: StoreHarness) -> None:
    """Its row in `history` could be larger than any value of PostgreSQL. The pruner deletes such a task from `tasks`."""
    tasks = in_order(db, 6)
    large = {tasks[0], tasks[3]}
    for task_id in large:
        give_steps(db, task_id, megabytes=257)
    give_result(db, tasks[2], 20 * MB)
    give_result(db, tasks[4], 20 * MB)
    assert move(db) == 4
    assert ids_in(db, "tasks") == large
    assert ids_in(db, "history") == set(tasks) - large
    assert move(db) == 0
    assert len(db.table("steps", "1")) == 2 * 258


async def test_a_pass_that_fails_ends_and_is_repeated_after_the_interval(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """The step waits for a lock until its statement timeout. An error of the tick would be repeated a second later."""
    (task_id,) = in_order(db, 1)
    environment = replace(observer.environment(), clock=SystemClock())
    keeper = HistoryKeeper(
        environment, open_spare=lambda: Session(db.target, "everbeat test", statement_timeout_ms=300)
    )
    with psycopg.connect(db.target.url) as other:
        other.execute(db.plain("lock table {schema}.history in access exclusive mode"))
        assert await keeper.tick() is None
    assert [event.statements for event in observer.told(TasksMoved)] == [0]  # type: ignore[attr-defined]
    (failed,) = observer.told(TasksNotMoved)
    assert failed.loudness == logging.WARNING
    text = event_text(failed)
    assert text.startswith(f"tasks_not_moved statement=history/move_tasks after={LOWEST_ID} tasks=0 error=")
    assert "did not finish a statement: canceling statement due to statement timeout" in text
    assert "cannot be reached" not in text
    assert text.endswith(f" retry_in_s={keeper.interval_s:.3f}")
    await keeper.tick()
    assert ids_in(db, "history") == {task_id}
    assert len(observer.told(TasksNotMoved)) == 1
