"""Items of streams in the database: stored once, in order, only for the attempt that holds the task, and deleted with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from psycopg import sql

from everbeat.domain.task.context_backend import EmittedItem, StreamInfo
from everbeat.store import leases, retention, streams
from everbeat.store.claims import Claimed
from everbeat.store.leases import Settlement
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.store.plans import pages_of, plan
from tests.store.test_signals import overlapping

LOWEST, HIGHEST = UUID(int=0), UUID(int=(1 << 128) - 1)


def items(*values: int, name: str = "numbers", first: int = 1) -> list[EmittedItem]:
    return [EmittedItem(name, number, str(value)) for number, value in enumerate(values, first)]


def insertion(
    db: StoreHarness, *portions: tuple[Claimed, Sequence[EmittedItem]]
) -> Statement[frozenset[UUID]]:
    given = [((held.id, held.claim_id), emitted) for held, emitted in portions]
    return streams.insert_items(given, channel=db.target.items_channel)


def insert(db: StoreHarness, held: Claimed, emitted: Sequence[EmittedItem]) -> bool:
    return db.run(insertion(db, (held, emitted))) == {held.claim_id}


def stored(db: StoreHarness, task_id: UUID, name: str = "numbers") -> list[tuple[int, str, int]]:
    found = db.run(streams.list_items(task_id, name, after=0))
    return [(each.number, each.value, each.attempt) for each in found]


def settlement(db: StoreHarness, held: Claimed, outcome: leases.AttemptOutcome) -> Statement[Any]:
    error = b'{"code": "WORKER_CRASHED"}' if outcome == "FAILED" else None
    retry_in_ms = 0 if outcome == "FAILED" else None
    one = Settlement(
        id=held.id, claim_id=held.claim_id, outcome=outcome, error=error, retry_in_ms=retry_in_ms
    )
    return leases.settle([one], channel=db.target.channel)


def test_a_repeated_portion_is_stored_once(db: StoreHarness) -> None:
    held = db.running()
    assert insert(db, held, items(10, 20))
    assert insert(db, held, items(11, 21, 31))
    assert stored(db, held.id) == [(1, "10", 1), (2, "20", 1), (3, "31", 1)]


def test_a_portion_stores_the_items_of_the_attempts_that_hold_their_tasks(db: StoreHarness) -> None:  # I2
    first, lost, second = db.running(), db.running(), db.running()
    db.run(settlement(db, lost, "FAILED"))
    (again,) = db.claim("w2", limit=1)
    assert (again.id, db.start(again)) == (lost.id, ["started"])
    assert insert(db, again, items(1))
    found = db.run(insertion(db, (second, items(2)), (lost, items(9, first=2)), (first, items(3))))
    assert found == {first.claim_id, second.claim_id}
    assert [stored(db, held.id) for held in (first, second)] == [[(1, "3", 1)], [(1, "2", 1)]]
    assert stored(db, lost.id) == [(1, "1", 2)]


def test_a_claimed_or_ended_attempt_stores_no_items(db: StoreHarness) -> None:
    db.send()
    (claimed,) = db.claim(limit=1)
    assert not insert(db, claimed, items(1))
    held = db.running()
    db.settle(held)
    assert not insert(db, held, items(1))
    assert db.table("stream_items", "count(*)") == [(0,)]


def test_a_portion_waits_for_a_change_of_the_lease_and_then_stores_nothing(db: StoreHarness) -> None:  # I2
    held = db.running()
    assert overlapping(db, settlement(db, held, "FAILED"), lambda: insert(db, held, items(1))) is False
    assert stored(db, held.id) == []


def test_a_change_of_the_lease_waits_for_a_portion(db: StoreHarness) -> None:  # I2
    held = db.running()
    settled = overlapping(db, insertion(db, (held, items(1))), lambda: db.run(settlement(db, held, "FAILED")))
    assert settled == {held.claim_id: "PENDING"}
    assert stored(db, held.id) == [(1, "1", 1)]


def test_a_portion_makes_no_new_version_of_the_row_of_its_task(db: StoreHarness) -> None:
    held = db.running()
    before = db.row(held.id, "ctid::text, claim_id")
    assert insert(db, held, items(*range(100)))
    assert db.row(held.id, "ctid::text, claim_id") == before


def test_the_streams_of_a_task_are_listed_with_their_last_numbers(db: StoreHarness) -> None:
    held, other = db.running(), db.running()
    assert db.run(streams.list_streams(held.id)) == []
    for name, count in (("b", 3), ("a", 1), ("c", 20)):
        assert insert(db, held, items(*range(count), name=name))
    assert insert(db, other, items(1, name="d"))
    assert db.run(streams.list_streams(held.id)) == [
        StreamInfo("a", 1),
        StreamInfo("b", 3),
        StreamInfo("c", 20),
    ]


def test_a_page_of_items_has_a_bounded_size(db: StoreHarness) -> None:
    held = db.running()
    large = [EmittedItem("large", number, f'"{"x" * 1_000_000}"') for number in range(1, 8)]
    for item in large:
        assert insert(db, held, [item])
    page = db.run(streams.list_items(held.id, "large", after=0))
    assert [each.number for each in page] == [1, 2, 3, 4]
    rest = db.run(streams.list_items(held.id, "large", after=4))
    assert [each.number for each in rest] == [5, 6, 7]


def prune(db: StoreHarness, *, limit: int = 1_000, until: UUID = HIGHEST) -> int:
    """Delete the items of deleted tasks as a retention pass does, and return the number of its steps."""
    after: UUID | None = LOWEST
    steps = 0
    while after is not None:
        after = db.run(retention.prune_stray_items(limit=limit, after=after, until=until)).next_after
        steps += 1
        assert steps < 100
    return steps


def delete_task(db: StoreHarness, task_id: UUID) -> None:
    query = sql.SQL("delete from {}.tasks where id = %s").format(sql.Identifier(db.target.schema))
    db.connection.execute(query, [task_id])


def test_the_items_of_deleted_tasks_are_pruned_in_small_steps(db: StoreHarness) -> None:
    *deleted, kept = sorted((db.running() for _ in range(6)), key=lambda held: held.id)
    for held in (*deleted, kept):
        assert insert(db, held, items(*range(40)))
        assert insert(db, held, items(*range(7), name="others"))
    assert prune(db) == 1
    assert db.table("stream_items", "count(*)") == [(6 * 47,)]
    for held in deleted[1:]:
        delete_task(db, held.id)
    assert prune(db, until=deleted[2].id) == 1
    assert db.table("stream_items", "count(*)") == [(5 * 47,)]
    assert prune(db, limit=30) == 5
    assert {row[0] for row in db.table("stream_items", "task_id")} == {deleted[0].id, kept.id}


def test_pruning_walks_past_any_number_of_tasks_that_are_kept(db: StoreHarness) -> None:
    schema = sql.Identifier(db.target.schema)
    kept = db.running()
    fill = """insert into {}.stream_items (task_id, name, number, attempt, value)
              select gen_random_uuid(), 'n', 1, 1, '1' from generate_series(1, 250)"""
    db.connection.execute(sql.SQL(fill).format(schema))
    copy = "insert into {0}.tasks (id, name, queue, priority, args) select i.task_id, 'n', 'q', 0, '{{}}' from {0}.stream_items i"
    db.connection.execute(sql.SQL(copy).format(schema))
    assert insert(db, kept, items(1))
    for stray in (UUID(int=1), UUID(int=(1 << 128) - 2), uuid4()):
        one = (
            "insert into {}.stream_items (task_id, name, number, attempt, value) values (%s, 'n', 1, 1, '1')"
        )
        db.connection.execute(sql.SQL(one).format(schema), [stray])
    assert prune(db) == 3
    assert db.table("stream_items", "count(*)") == [(251,)]


def test_a_page_reads_only_its_own_items_however_large_the_others_are(db: StoreHarness) -> None:
    """Items are random texts, so that each takes many pages of the table."""
    task_id = uuid4()
    db.connection.execute(
        db.plain(
            "insert into {schema}.stream_items (task_id, name, number, attempt, value)"
            " select %s, 'large', n, 1, to_json(v.text) from generate_series(1, 120) n"
            " cross join lateral (select string_agg(md5(random()::text || n || i), '') as text from generate_series(1, 7000) i) v"
        ),
        [task_id],
    )
    page = streams.list_items(task_id, "large", after=0)
    assert [each.number for each in db.run(page)] == [*range(1, 19)], "4 MB of 224 kB each"
    touched = pages_of(plan(db, page), page)
    assert touched < 26 * 224_000 // 8_192 * 2, f"{touched} pages; all 120 items take about 3,400"
