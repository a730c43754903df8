"""Constructed cases of lines and gates that a random storm seldom meets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from everbeat.store import claims, leases, tasks
from everbeat.store.claims import Claimed
from everbeat.store.database import Database
from everbeat.store.leases import Settlement
from tests.invariants import line_breaches, settled_line_breaches
from tests.store.conftest import StoreHarness
from tests.store.lining import apply, gate, put_limit, send, take
from tests.variants import long_except

SLOW_S = 0.1


def ids(taken: list[Claimed]) -> set[Any]:
    return {one.id for one in taken}


def until_taken(db: StoreHarness, wanted: int, *, within_s: float = 5.0) -> list[Claimed]:
    """Claim until this many tasks are held, or the time is over."""
    held, give_up_at = list[Claimed](), time.monotonic() + within_s
    while len(held) < wanted and time.monotonic() < give_up_at:
        held += take(db)
        time.sleep(0.02)  # polls as an idle worker does
    return held


@contextmanager
def other_connection(db: StoreHarness) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection whose transaction is rolled back at the end."""
    with db.target.connect("everbeat other") as connection:
        connection.execute("begin")
        try:
            yield connection
        finally:
            connection.execute("rollback")


def no_breach(db: StoreHarness) -> None:
    assert settled_line_breaches(db.connection, db.target.schema) == []


def test_a_worker_does_not_poll_while_a_gate_is_full(db: StoreHarness) -> None:
    put_limit(db, "a", concurrency=1)
    send(db, "a")
    send(db, "a", priority=1)
    (held,) = take(db)
    take(db)
    apply(db)
    due = db.run(tasks.next_due(names=["work"], queues=None))
    assert due.due_in_ms is None, (
        "nothing becomes due by itself, because only the end of the task frees the permit"
    )
    assert not due.lines_changed
    db.complete(held)
    assert len(take(db)) == 1


def test_a_task_that_costs_more_than_its_limit_allows_does_not_stop_the_others(db: StoreHarness) -> None:
    put_limit(db, "a", concurrency=3)
    send(db, "a", costs=[4])
    assert take(db) == []
    small = send(db, "a", count=2)
    assert ids(until_taken(db, 2)) == set(small)
    put_limit(db, "a", concurrency=6)
    assert len(until_taken(db, 1)) == 1
    no_breach(db)


def test_tasks_that_cost_more_than_a_rate_allows_at_once_do_not_stop_the_others(db: StoreHarness) -> None:
    put_limit(db, "smooth", starts=100, period_s=1.0, burst=2)
    put_limit(db, "slides", starts=2, period_s=0.1, sliding=True)
    for name in ("smooth", "slides"):
        send(db, name, costs=[3])
        assert take(db) == []
        small = send(db, name, count=2)
        assert ids(until_taken(db, 2)) == set(small), name


def test_tasks_with_small_costs_do_not_starve_a_task_with_a_large_cost(db: StoreHarness) -> None:
    put_limit(db, "a", concurrency=2)
    send(db, "a", count=2)
    held = take(db)
    (large,) = send(db, "a", costs=[2])
    assert take(db) == []
    started = set[Any]()
    for _ in range(4):
        if held:
            db.complete(held.pop(0))
        send(db, "a")
        taken = take(db)
        started |= ids(taken)
        held += taken
    assert large in started
    no_breach(db)


def test_permits_that_are_kept_for_a_large_task_reach_the_lines_before_it(db: StoreHarness) -> None:
    put_limit(db, "a", concurrency=3)
    send(db, "a", count=3)
    held = take(db)
    first = send(db, "a", costs=[1], priority=1) + send(db, "a", costs=[1], priority=2)
    (large,) = send(db, "a", costs=[3], priority=3)
    assert take(db) == []
    db.complete(*held)
    assert ids(until_taken(db, 2)) == set(first)
    assert large not in ids(take(db))
    no_breach(db)


@contextmanager
def delayed_claim(db: StoreHarness, **options: Any) -> Iterator[Any]:
    """Start a claim of w2 that waits before it reads anything, and yield a function that lets it continue and returns its tasks."""
    database = Database(db.target)
    claim = claims.claim(
        worker_id="w2", claim_call=uuid4(), names=["work"], limit=options.get("limit", 10), queues=None, queue_priorities={},
        starts=10, channel="c",
    )  # fmt: skip
    with other_connection(db) as lock, ThreadPoolExecutor(1) as threads:
        lock.execute(db.plain("select from {schema}.workers where id = 'w2' for update"))
        claiming = threads.submit(database.run, claim)
        waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like '%%claim_call%%' and pid <> pg_backend_pid()"
        give_up_at = time.monotonic() + 10
        while db.connection.execute(waits).fetchone() is None:
            assert time.monotonic() < give_up_at, "the claim does not wait"
            time.sleep(0.005)  # polls from outside

        def proceed() -> list[Claimed]:
            lock.execute("rollback")
            return claiming.result(10)

        yield proceed
    database.close()


def test_a_claim_that_was_delayed_does_not_shorten_the_window_of_a_sliding_limit(
    db: StoreHarness,
) -> None:  # K5
    put_limit(db, "a", starts=2, period_s=1.0, sliding=True)
    send(db, "a", count=4)
    apply(db)
    with delayed_claim(db, limit=1) as proceed:
        time.sleep(0.5)  # the delay of the claim
        (second,) = take(db, limit=1)
        (first,) = proceed()
    assert first.started_at is not None
    assert second.started_at is not None
    earliest = min(first.started_at, second.started_at).timestamp()
    time.sleep(max(0.0, earliest + 1.01 - time.time()))  # one of the two starts is older than the window
    for priority in range(1, 5):
        send(db, "a", priority=priority)
        take(db)
    assert line_breaches(db.connection, db.target.schema) == []


@pytest.mark.parametrize("serial", [None, "key:a"])
def test_a_claim_that_was_delayed_starts_no_task_after_its_good_until(
    db: StoreHarness, serial: str | None
) -> None:
    put_limit(db, "a", concurrency=1)
    send(db, "a", serial=serial, good_ms=400)
    apply(db)
    with delayed_claim(db) as proceed:
        time.sleep(0.5)  # the delay of the claim
        assert proceed() == []
    no_breach(db)


@contextmanager
def interrupted_claim(db: StoreHarness) -> Iterator[Any]:
    """Start a claim of w2 that waits after it has chosen tasks of lines. The yielded connection's changes are committed before it continues."""
    database = Database(db.target)
    claim = claims.claim(
        worker_id="w2",
        claim_call=uuid4(),
        names=["work"],
        limit=10,
        queues=None,
        queue_priorities={},
        starts=10,
        channel="c",
    )
    with db.target.connect("everbeat other") as lock, ThreadPoolExecutor(1) as threads:
        lock.execute("begin")
        lock.execute(db.plain("lock table {schema}.gates in share mode"))
        claiming = threads.submit(database.run, claim)
        waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like '%%claim_call%%' and pid <> pg_backend_pid()"
        give_up_at = time.monotonic() + 10
        while db.connection.execute(waits).fetchone() is None:
            assert time.monotonic() < give_up_at, "the claim does not wait"
            time.sleep(0.005)  # polls from outside

        def proceed() -> list[Claimed]:
            lock.execute("commit")
            return claiming.result(10)

        yield lock, proceed
    database.close()


@pytest.mark.parametrize(
    "change",
    [
        "enqueued_at = now() + interval '1 hour'", "good_until = now() - interval '1 second'", "gates = array['b']", "costs = array[3]",
        "priority = 3", "queue = 'other'", "name = 'unknown'", "state = 'CANCELLED'", "suspect = true",
    ],
)  # fmt: skip
@pytest.mark.parametrize("serial", long_except([None, "key:a"], None))
def test_a_change_between_the_choice_of_a_task_and_its_lock_keeps_the_gates_right(
    db: StoreHarness, change: str, serial: str | None
) -> None:
    put_limit(db, "a", concurrency=5)
    put_limit(db, "b", concurrency=0)
    send(db, "a", serial=serial)
    apply(db)
    with interrupted_claim(db) as (other, proceed):
        free = "select id from {schema}.tasks for no key update skip locked"
        changed = other.execute(
            db.plain(f"update {{schema}}.tasks set {change} where id in ({free})")
        ).rowcount
        taken = proceed()
    assert changed == (serial is not None), "only the head of a strict line is chosen without a lock"
    if not changed:
        assert len(taken) == 1
    elif not change.startswith(("priority", "queue", "suspect")):
        assert taken == [], "the task must not start as it is now"
    no_breach(db)


def test_a_task_that_names_a_gate_twice_takes_no_more_permits_than_there_are(db: StoreHarness) -> None:
    put_limit(db, "a", concurrency=1)
    try:
        send(db, "a", "a")
    except psycopg.errors.Error:
        return  # the row is rejected, so there is nothing to exceed
    take(db)
    assert gate(db, "a") <= 1


def test_changes_are_found_after_a_restore_into_a_cluster_with_lower_transaction_ids(
    db: StoreHarness,
) -> None:
    db.connection.execute(db.plain("select setval('{schema}.line_changes_floor', 4000000000000)"))
    put_limit(db, "a", concurrency=1)
    send(db, "a")
    assert db.run(tasks.next_due(names=["work"], queues=None)).lines_changed
    assert len(take(db)) == 1


def test_offers_that_a_claim_does_not_use_do_not_use_up_a_rate(db: StoreHarness) -> None:  # K5
    put_limit(db, "a", starts=10, period_s=100.0, burst=10)
    send(db, "a", count=10)
    send(db, count=10)
    taken = list[Claimed]()
    for _ in range(6):
        taken += take(db, limit=10)
    assert len(taken) == 20, "the burst allows ten starts at once"


def test_the_commit_of_applied_changes_is_not_flushed(db: StoreHarness) -> None:
    with db.connection.transaction():
        db.connection.execute("set local synchronous_commit = on")
        db.connection.execute(db.plain("select {schema}.apply_line_changes(10, array['work'], null, null)"))
        send(db, serial="key:a")
        db.connection.execute(db.plain("select {schema}.apply_line_changes(10, array['work'], null, null)"))
        row = db.connection.execute("show synchronous_commit").fetchone()
    assert row == ("off",)


def test_a_rate_that_closed_a_gate_keeps_it_closed_for_all_of_its_lines(db: StoreHarness) -> None:  # K6
    put_limit(db, "a", concurrency=10)
    send(db, "a", count=3)
    (held, *others) = take(db, limit=1)
    assert others == []
    db.connection.execute(
        db.plain(
            "insert into {schema}.line_changes (gates, closed_until) values (array['a'], extract(epoch from clock_timestamp()) + 1)"
        )
    )
    assert db.settle(held, "FAILED", error=b"{}", retry_in_ms=0) == "PENDING"
    send(db, "a", priority=1)
    closed_at = time.monotonic()
    assert take(db) == []
    taken = until_taken(db, 4)
    assert len(taken) == 4
    assert time.monotonic() - closed_at > 1.0 - SLOW_S
    no_breach(db)


def test_a_settlement_counts_the_permits_of_its_own_attempt_once(db: StoreHarness) -> None:
    put_limit(db, "a", concurrency=2)
    send(db, "a", count=2, costs=[1])
    first, second = take(db)
    done = Settlement(id=first.id, claim_id=first.claim_id, outcome="COMPLETED", result=b"1")
    for _ in range(3):
        db.run(leases.complete([done], channel="c"))
        db.run(leases.settle([done], channel="c"))
    apply(db)
    assert gate(db, "a") == 1
    db.complete(second)
    no_breach(db)


@pytest.mark.parametrize("permits", [1, 2])
def test_of_tasks_that_were_sent_together_only_the_newest_waits(db: StoreHarness, permits: int) -> None:
    put_limit(db, "preview", concurrency=permits, when_full="newest")
    ids = send(db, "preview", count=6)
    taken = {one.id for one in take(db, limit=10)}
    apply(db)
    states = {each: db.row(each, "state") for each in ids}
    assert taken == {each for each, state in states.items() if state == "RUNNING"}
    assert sorted(states.values()) == ["CANCELLED"] * (5 - permits) + ["PENDING"] + ["RUNNING"] * permits


def test_of_tasks_that_waited_while_no_worker_claimed_only_the_newest_waits(db: StoreHarness) -> None:
    put_limit(db, "preview", concurrency=1, when_full="newest")
    ids = [*send(db, "preview"), *send(db, "preview")]
    apply(db)
    ids += send(db, "preview")
    taken = take(db, limit=10)
    ids += send(db, "preview")
    apply(db)
    assert [one.id for one in taken] == ids[:1]
    assert [db.row(each, "state") for each in ids] == ["RUNNING", "CANCELLED", "CANCELLED", "PENDING"]


def test_older_tasks_are_cancelled_when_another_line_takes_the_permit_they_could_have_had(
    db: StoreHarness,
) -> None:
    put_limit(db, "preview", concurrency=1, when_full="newest")
    (urgent,) = send(db, "preview", priority=-1)
    older, newest = send(db, "preview", count=2)
    (taken,) = take(db, limit=10)
    apply(db)
    assert taken.id == urgent
    assert {db.row(older, "state"), db.row(newest, "state")} == {"CANCELLED", "PENDING"}


def test_rows_of_lines_contain_no_value_that_doctor_reports(db: StoreHarness) -> None:
    put_limit(db, "a", concurrency=1)
    send(db, "a", count=2)
    send(db, serial="key:a")
    db.complete(*take(db))
    apply(db)
    assert db.connection.execute(db.plain("select * from {schema}.bad_rows(10)")).fetchall() == []


def test_a_claim_without_lines_leaves_their_tasks_and_permits(db: StoreHarness) -> None:
    put_limit(db, "a", concurrency=2)
    lined = [*send(db, "a"), db.send(serial="s")]
    plain = [db.send() for _ in range(3)]
    apply(db)
    assert ids(taken := take(db, limit=10, with_lines=False)) == {*plain}
    assert {one.lines_changed for one in taken} == {None}
    assert gate(db, "a") == 0
    assert ids(take(db, limit=10)) == {*lined}
    no_breach(db)
