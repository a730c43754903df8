"""A changed limit applies to every task that waits, whichever claim is under way while it changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from everbeat.store import expiry, limits, migrating, retention, tasks
from everbeat.store.target import Target
from tests.invariants import settled_line_breaches
from tests.store.conftest import StoreHarness
from tests.store.lining import apply, gate, put_limit, send, take
from tests.store.test_frozen_claims import claim, frozen

Change = Callable[[StoreHarness], None]


def until_taken(db: StoreHarness, count: int, **options: Any) -> list[Any]:
    """Claim until this many tasks have been taken. A line that continues soon needs 50 ms."""
    taken: list[Any] = []
    ends_at = time.monotonic() + 10
    while len(taken) < count:
        taken += take(db, **options)
        assert time.monotonic() < ends_at, f"{len(taken)} of {count} tasks were taken"
    return taken


def raised(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=3)


def removed(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=None)


def set_by_an_operator(db: StoreHarness) -> None:
    db.run(
        limits.set_limit(
            "l", channel=db.target.channel, set_by="x", sets_concurrency=True, concurrency=3, sets_rate=False, rate=None, burst=None,
            sets_reason=False, reason=None, sets_until=False, until=None,
        )
    )  # fmt: skip


def ended(db: StoreHarness) -> None:
    """The time of an operator's number ends."""
    db.connection.execute(
        db.plain(
            "update {schema}.limits set until = statement_timestamp(), set_by = 'x', set_at = now(), declared = '{{\"concurrency\": 3}}'"
        )
    )


@pytest.mark.parametrize("change", [raised, removed, set_by_an_operator, ended])
@pytest.mark.parametrize("held", [0, 1])
def test_a_line_that_began_to_wait_during_a_change_is_judged_by_the_new_numbers(
    db: StoreHarness, change: Change, held: int
) -> None:  # K4
    put_limit(db, "l", concurrency=held)
    running = send(db, "l", count=held) if held else []
    assert len(take(db)) == held
    waiting = send(db, "l")
    if not held:
        apply(db)
    with frozen(db, claim("work")):
        change(db)
        apply(db)
    assert {one.id for one in until_taken(db, 1)} == set(waiting)
    assert settled_line_breaches(db.connection, db.target.schema) == []
    assert len(running) == held


def test_all_gates_of_a_changed_limit_are_judged_once(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=0)
    keys = [f"l/{number}" for number in range(30)]
    for key in keys:
        send(db, key)
    assert take(db) == []
    put_limit(db, "l", concurrency=1)
    assert len(until_taken(db, 30)) == 30
    apply(db)
    versions = db.table("gates", "limit_name, version")
    assert set(versions) == {("l", db.table("limits", "version")[0][0])}
    assert not db.run(tasks.next_due(names=["work"], queues=None, margin_ms=0, marked=())).lines_changed


def test_gates_of_a_changed_limit_beyond_one_portion_are_judged_later(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=0)
    for number in range(10):
        send(db, f"l/{number}")
    assert take(db) == []
    put_limit(db, "l", concurrency=1)
    portions = 0
    while True:
        found = db.connection.execute(
            db.plain("select is_busy from {schema}.apply_line_changes(4, array['work'], null, null)")
        ).fetchone()
        portions += 1
        if found == (False,):
            break
    assert portions >= 3
    assert len(take(db)) == 10


def test_a_change_that_no_worker_saw_for_days_is_applied(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=0)
    (waiting,) = send(db, "l")
    assert take(db) == []
    put_limit(db, "l", concurrency=1)
    db.connection.execute(db.plain("update {schema}.limits set changed_at = now() - interval '3 days'"))
    assert db.run(tasks.next_due(names=["work"], queues=None, margin_ms=0, marked=())).lines_changed
    assert [one.id for one in until_taken(db, 1)] == [waiting]


def test_a_limit_is_compared_with_its_gates_for_a_day_after_a_change(db: StoreHarness) -> None:
    """A claim that was under way during the change can commit later. A claim that began a day ago is not expected to."""
    put_limit(db, "l", concurrency=1)
    send(db, "l")
    take(db)
    apply(db)
    assert db.table("limits", "has_old_gates") == [(True,)]
    db.connection.execute(db.plain("update {schema}.limits set changed_at = now() - interval '3 days'"))
    send(db, "l")
    apply(db)
    assert db.table("limits", "has_old_gates") == [(False,)]


def test_a_limit_that_is_declared_anew_has_a_later_version_than_its_gates(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=1)
    put_limit(db, "l", concurrency=2)
    send(db, "l")
    take(db)
    db.connection.execute(db.plain("delete from {schema}.limits"))
    put_limit(db, "l", concurrency=1)
    assert db.table("limits", "version")[0][0] > gate(db, "l", "version")


def test_a_faster_rate_applies_to_a_gate_that_the_slower_rate_closed(db: StoreHarness) -> None:  # K5
    put_limit(db, "l", starts=1, period_s=86_400.0)
    send(db, "l", count=5)
    assert len(take(db)) == 1
    put_limit(db, "l", starts=100, period_s=1.0)
    assert len(until_taken(db, 4)) == 4


def test_a_slower_rate_permits_no_more_than_its_burst_at_once(db: StoreHarness) -> None:
    put_limit(db, "l", starts=100, period_s=1.0, burst=50)
    send(db, "l", count=60)
    assert len(take(db)) >= 50
    put_limit(db, "l", starts=1, period_s=3_600.0, burst=2)
    apply(db)
    assert len(take(db)) <= 2


def test_a_task_with_a_large_cost_starts_after_its_limit_is_removed(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=4_000)
    send(db, "l", count=4, costs=[1_500])
    assert len(take(db)) == 2
    put_limit(db, "l", concurrency=None)
    assert len(until_taken(db, 2)) == 2


def holders_and_a_large_task(db: StoreHarness) -> Any:
    """Hold two of four permits, and let a task wait that needs three."""
    put_limit(db, "l", concurrency=4)
    send(db, "l", count=2)
    assert len(take(db)) == 2
    (large,) = send(db, "l", costs=[3], good_ms=60_000)
    assert take(db) == []
    assert gate(db, "l", "reserved")
    return large


@pytest.mark.parametrize("end", ["cancelled", "expired", "deleted"])
def test_permits_are_not_kept_for_a_task_that_has_ended(db: StoreHarness, end: str) -> None:
    large = holders_and_a_large_task(db)
    match end:
        case "cancelled":
            assert db.cancel(large) == "CANCELLED"
        case "expired":
            past = db.plain("update {schema}.tasks set good_until = now() - interval '1 s' where id = %s")
            db.connection.execute(past, [large])
            assert [each.id for each in db.run(expiry.expire(channel=db.target.channel))] == [large]
        case _:
            db.connection.execute(db.plain("delete from {schema}.tasks where id = %s"), [large])
    (small,) = send(db, "l")
    assert [one.id for one in take(db)] == [small]


def test_lines_whose_tasks_were_cancelled_do_not_delay_others(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=1)
    send(db, "l")
    (running,) = take(db)
    dead = [send(db, "l", "other/" + str(number))[0] for number in range(20)]
    assert take(db) == []
    (last,) = send(db, "l")
    assert take(db) == []
    for each in dead:
        assert db.cancel(each) == "CANCELLED"
    db.complete(running)
    assert [one.id for one in take(db)] == [last]


def test_a_gate_is_kept_as_long_as_its_window(db: StoreHarness) -> None:
    put_limit(db, "long", starts=2, period_s=30 * 86_400.0, sliding=True)
    put_limit(db, "short", starts=2, period_s=60.0, sliding=True)
    for name in ("long", "short"):
        send(db, name, count=2)
    db.complete(*take(db))
    apply(db)
    db.connection.execute(
        db.plain(
            "update {schema}.gates set used_at = now() - interval '3 days', recent = array(select r - 259200 from unnest(recent) r)"
        )
    )
    db.run(retention.prune_gates(after="", limit=100))
    assert db.table("gates", "gate") == [("long",)]


def test_a_rate_alone_drops_no_task(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=3, starts=1, period_s=3_600.0, when_full="drop")
    sent = send(db, "l", count=3)
    assert len(take(db)) == 1
    apply(db)
    assert [db.row(task, "state") for task in sent].count("CANCELLED") == 0


@pytest.mark.parametrize("line_waits", [False, True])
def test_a_new_fairness_reaches_the_lines_that_wait(db: StoreHarness, line_waits: bool) -> None:
    put_limit(db, "l", concurrency=0 if line_waits else 1)
    send(db, "l/a", count=2)
    take(db)
    apply(db)
    put_limit(db, "l", concurrency=0 if line_waits else 1, fair=True, weights='{"a": 3}')
    assert db.run(tasks.next_due(names=["work"], queues=None, margin_ms=0, marked=())).lines_changed
    apply(db)
    apply(db)
    assert db.table("lines", "fair, weight") == [(True, 3)]
    assert not db.run(tasks.next_due(names=["work"], queues=None, margin_ms=0, marked=())).lines_changed


def test_an_idle_worker_wakes_up_when_the_time_of_a_number_ends(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=1)
    db.connection.execute(
        db.plain("update {schema}.limits set until = %s"), [datetime.now(UTC) + timedelta(seconds=60)]
    )
    due = db.run(tasks.next_due(names=["work"], queues=None, margin_ms=0, marked=()))
    assert due.due_in_ms is not None
    assert 30_000 < due.due_in_ms < 90_000


@pytest.mark.parametrize("locked", [0, 1, 2])
def test_an_open_transaction_of_a_sender_delays_only_its_own_task(db: StoreHarness, locked: int) -> None:
    """A send that replaces or delays a waiting task holds its lock until the sender commits."""
    put_limit(db, "l", concurrency=1)
    waiting = sorted(send(db, "l", count=3))
    held = waiting.pop(locked)
    with db.target.connect("everbeat test sender") as sender, sender.transaction():
        sender.execute(db.plain("update {schema}.tasks set args = '{{}}' where id = %s"), [held])
        for expected in waiting:
            (taken,) = take(db)
            assert taken.id == expected
            db.complete(taken)
        assert take(db) == []
    assert [one.id for one in until_taken(db, 1)] == [held]


def test_a_closure_is_applied_with_the_permit_of_its_task_behind_many_changes(
    db: StoreHarness,
) -> None:  # K6
    put_limit(db, "l", concurrency=1)
    put_limit(db, "other", concurrency=10)
    send(db, "l", count=2)
    (running,) = take(db)
    send(db, "other", count=50)
    with db.connection.transaction():
        db.connection.execute(
            db.plain("select {schema}.close_gate('l', extract(epoch from now() + interval '1 h'))")
        )
        db.complete(running)
    db.connection.execute(db.plain("select {schema}.apply_line_changes(10, array['work'], null, null)"))
    assert gate(db, "l", "held, closed_until > 0") == (0, True)


def test_clear_limit_opens_a_limit_that_its_tasks_have_closed(db: StoreHarness) -> None:  # K6
    put_limit(db, "l", concurrency=1)
    send(db, "l")
    db.complete(*take(db))
    db.connection.execute(
        db.plain("select {schema}.close_gate('l', extract(epoch from now() + interval '30 days'))")
    )
    (waiting,) = send(db, "l")
    assert take(db) == []
    db.run(limits.clear_limit("l", channel=db.target.channel))
    assert [one.id for one in until_taken(db, 1)] == [waiting]


def test_permits_are_not_kept_for_a_serial_line_that_no_longer_needs_them(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=4)
    send(db, "l", count=2)
    assert len(take(db)) == 2
    send(db, "l", costs=[3], serial="key:s")
    assert take(db) == []
    (small,) = send(db, "l")
    assert take(db) == []
    assert gate(db, "l", "reserved")
    (earlier,) = send(db, serial="key:s", delay_ms=-5_000)  # its transaction was committed late
    assert {one.id for one in until_taken(db, 2)} == {earlier, small}


def test_a_later_good_until_makes_an_overdue_task_ready_again(db: StoreHarness) -> None:
    put_limit(db, "l", concurrency=5)
    (late,) = send(db, "l", good_ms=1)
    (other,) = send(db, "l")
    time.sleep(0.01)  # until the first task is overdue
    assert [one.id for one in take(db)] == [other]
    db.connection.execute(
        db.plain("update {schema}.tasks set good_until = now() + interval '1 h' where id = %s"), [late]
    )
    assert [one.id for one in take(db)] == [late]


def test_a_truncated_table_of_tasks_leaves_no_key(db: StoreHarness) -> None:
    (sent,) = send(db)
    db.connection.execute(
        db.plain("insert into {schema}.unique_keys (name, key, task_id) values ('work', 'k', %s)"),
        [sent],
    )
    db.connection.execute(db.plain("truncate {schema}.tasks cascade"))
    assert db.table("unique_keys") == []


@pytest.mark.parametrize(
    "call",
    [
        "select {schema}.move_floor(9223372036854775807)",
        "select {schema}.close_gate('l', 'infinity')",
        "select {schema}.use_messages('c')",
    ],
)
def test_a_role_that_may_only_read_changes_nothing_through_functions(db: StoreHarness, call: str) -> None:
    role = f"reader_{db.target.schema}"
    name = sql.Identifier(role)
    with db.connection.transaction(force_rollback=True):
        db.connection.execute(sql.SQL("create role {}").format(name))
        db.connection.execute(
            sql.SQL("grant usage on schema {} to {}").format(sql.Identifier(db.target.schema), name)
        )
        db.connection.execute(
            sql.SQL("grant select on all tables in schema {} to {}").format(
                sql.Identifier(db.target.schema), name
            )
        )
        db.connection.execute(sql.SQL("set local role {}").format(name))
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied to"):
            db.connection.execute(db.plain(call))


def test_an_upgrade_starts_the_lines_that_an_earlier_version_left_waiting(
    database_url: str, schema: str
) -> None:
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target, to=14)
        db = StoreHarness(target, connection)
        put_limit(db, "l", concurrency=1)
        (waiting,) = send(db, "l")
        connection.execute(db.plain("select {schema}.apply_line_changes(10, array['work'], null, null)"))
        connection.execute(db.plain("update {schema}.lines set state = 'B', blocked = 'l'"))
        migrating.migrate(connection, target)
        db.supervisor("s1", "w1")
        assert [one.id for one in until_taken(db, 1)] == [waiting]
        db.database.close()
