"""Recovery of the leases of dead holders, and the rejection of every statement of a holder that lost its lease (a zombie)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo

from everbeat.store import claims, expiry, leases, retention, tasks, workers
from everbeat.store.database import Database
from everbeat.store.statement import Statement
from everbeat.store.workers import predecessors
from tests.store.conftest import StoreHarness
from tests.store.test_frozen_claims import frozen

T = TypeVar("T")


def test_a_claimed_task_of_a_dead_worker_returns_to_its_old_place(db: StoreHarness) -> None:
    task_id = db.send()
    before = db.row(task_id, "enqueued_at")
    db.claim()
    (lease,) = db.leases()
    (recovered,) = db.recover(lease, "requeue")
    assert (recovered.was, recovered.state) == ("CLAIMED", "PENDING")
    row = db.row(
        task_id, "enqueued_at, retry_count, crash_count, loss_count, claimed_at, claimed_by_worker_id"
    )
    assert row == (before, 0, 0, 0, None, None)
    assert db.table("attempts") == []
    assert db.table("recoveries", "was, action, noticed_by, worker_id, hostname") == [
        ("CLAIMED", "requeue", "age", "w1", "host")
    ]


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("requeue", "Its code had not started, so the task was put back into its queue."),
        ("retry", "Its code had started, and its policy runs it again."),
        ("reschedule", "A recovery hook runs the task again."),
        ("cancel", "A cancel had been requested, so the task is not run again."),
        ("fail", None),
    ],
)
def test_the_error_of_a_recovered_task_states_the_cause_and_the_action(
    db: StoreHarness, action: str, said: str | None
) -> None:  # F5
    claimed = db.running() if action != "requeue" else None
    if claimed is None:
        db.send()
        db.claim()
    (lease,) = db.leases()
    if action == "cancel":
        db.cancel(lease.id)
    error = b'{"code": "WORKER_CRASHED", "message": "Worker w1 died.", "data": {"pid": 3}}'
    retry_in_ms = 0 if action in ("retry", "reschedule") else None
    db.recover(lease, action, error=error, retry_in_ms=retry_in_ms)
    stored = db.row(lease.id, "error")
    assert stored["message"] == ("Worker w1 died." if said is None else f"Worker w1 died. {said}")
    assert stored["code"] == ("TASK_CANCELLED" if action == "cancel" else "WORKER_CRASHED")


def test_a_running_task_of_a_dead_worker_is_charged_and_records_an_attempt(db: StoreHarness) -> None:
    claimed = db.running()
    (lease,) = db.leases()
    assert db.recover(lease, "retry", retry_in_ms=5_000) != []
    assert db.row(claimed.id, "state, retry_count, loss_count, next_retry_at = enqueued_at") == (
        "PENDING",
        1,
        1,
        True,
    )
    assert db.table("attempts", "outcome, will_retry") == [("LOST", True)]


def test_every_statement_of_a_zombie_is_rejected(db: StoreHarness) -> None:  # D5
    old = db.running()
    (lease,) = db.leases()
    db.recover(lease, "retry")
    (new,) = db.claim("w2")
    db.start(new)
    assert new.fence == old.fence + 1
    assert new.claim_id != old.claim_id
    channel = db.target.channel
    assert db.start(old) == ["lost"]
    assert db.settle(old, result=b'"zombie"') == "lost"
    assert db.settle(old, "FAILED", error=b"{}", retry_in_ms=0) == "lost"
    assert db.settle(old, "RELEASED") == "lost"
    assert db.run(leases.release([(old.id, old.claim_id)], channel=channel)) == []
    assert db.run(leases.record_progress(old.id, old.claim_id, b'{"stage": "zombie"}')) is False
    assert db.run(leases.check_leases([(old.id, old.claim_id)])) == [(old.id, old.claim_id, "lost")]
    answer = db.run(workers.beat("s1", [(old.id, old.claim_id)], draining=False))
    assert answer.lost == ((old.id, old.claim_id),)
    assert db.row(new.id, "state, claim_id, progress") == ("RUNNING", new.claim_id, None)
    assert db.settle(new, result=b'"right"') == "COMPLETED"
    assert db.row(new.id, "result") == "right"


def test_a_release_by_a_zombie_changes_nothing(db: StoreHarness) -> None:
    db.send()
    (old,) = db.claim()
    (lease,) = db.leases()
    db.recover(lease, "requeue")
    (new,) = db.claim("w2")
    assert db.run(leases.release([(old.id, old.claim_id)], channel=db.target.channel)) == []
    assert db.row(new.id, "state, claim_id") == ("CLAIMED", new.claim_id)
    db.cancel(new.id)


def test_a_recovery_decision_is_applied_once(db: StoreHarness) -> None:
    db.running()
    (lease,) = db.leases()
    assert len(db.recover(lease, "fail")) == 1
    assert db.recover(lease, "fail") == []
    assert db.recover(lease, "retry") == []


def test_a_recovery_decision_about_an_old_lease_does_not_affect_the_new_one(db: StoreHarness) -> None:
    claimed = db.running()
    (lease,) = db.leases()
    db.settle(claimed, "RELEASED")
    (again,) = db.claim()
    db.start(again)
    assert db.recover(lease, "fail") == []
    assert db.row(claimed.id, "state") == "RUNNING"
    db.settle(again)


def test_a_holder_that_beat_after_it_was_watched_keeps_its_tasks(db: StoreHarness) -> None:
    claimed = db.running()
    (lease,) = db.leases()
    watched = db.run(workers.watch_beats())[0].beat_seq
    db.run(workers.beat("s1", [], draining=False))
    assert db.recover(lease, "fail", last_beat=("s1", watched)) == []
    db.run(workers.beat_worker("w1"))
    assert db.recover(lease, "fail", last_beat=("s1", watched + 1)) == [], "the worker's own beat is newer"
    db.settle(claimed)


def test_a_requested_cancel_overrides_every_other_recovery_decision(db: StoreHarness) -> None:
    claimed = db.running()
    (lease,) = db.leases()
    db.cancel(claimed.id)
    assert [one.action for one in db.recover(lease, "retry")] == ["cancel"]
    assert db.row(claimed.id, "state, retry_count") == ("CANCELLED", 0)


def test_an_ended_worker_cannot_claim_or_beat(db: StoreHarness) -> None:
    db.send()
    assert db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", signal=9)) == ["w1"]
    assert db.run(workers.bury_workers(worker_ids=["w1"], how="again")) == [], "burial is final"
    assert db.claim("w1") == []
    assert db.claim("nobody") == []
    assert db.run(workers.beat_worker("w1")) is False
    assert len(db.claim("w2")) == 1


def test_leases_of_ended_workers_are_found_by_every_sweep_until_recovered(db: StoreHarness) -> None:
    db.running("w1")
    db.running("w2")
    db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed by SIGKILL", signal=9))
    assert db.run(leases.leases_of_ended(limit=10, owner_ms=60_000)) == [], (
        "for now they belong to their own supervisor"
    )
    (lease,) = db.run(leases.leases_of_ended(limit=10))
    assert (lease.worker_id, lease.ended_how, lease.ended_cause) == ("w1", "child_exit", "killed by SIGKILL")
    db.recover(lease, "fail")
    assert db.run(leases.leases_of_ended(limit=10)) == []
    for lease in db.leases():
        db.recover(lease, "fail")


def test_a_burial_waits_for_a_claim_in_flight_and_finds_its_lease(db: StoreHarness) -> None:
    db.send()
    claim = claims.claim(
        worker_id="w1", claim_call=uuid4(), names=["work"], limit=1, queues=None, queue_priorities={}
    )
    bury = workers.bury_workers(worker_ids=["w1"], how="child_exit")
    with (
        closing(db.target.connect("everbeat test claimer")) as claiming,
        closing(db.target.connect("everbeat test burial")) as burying,
        claiming.transaction(),
    ):
        claiming.execute(db.text(claim.name), claim.parameters)
        burying.execute("set lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            burying.execute(db.text(bury.name), bury.parameters)
    assert db.run(bury) == ["w1"]
    (lease,) = db.run(leases.leases_of_ended(limit=10))
    assert lease.worker_id == "w1"
    db.recover(lease, "requeue")


def test_a_beat_returns_lost_leases_requested_cancels_and_unknown_leases(db: StoreHarness) -> None:
    held, phantom = db.running(), db.running("w2")
    db.cancel(held.id)
    stranger = (uuid4(), uuid4())
    answer = db.run(workers.beat("s1", [(held.id, held.claim_id), stranger], draining=False))
    assert answer.seq == 1
    assert answer.lost == (stranger,)
    assert answer.cancel == ((held.id, held.claim_id),)
    assert answer.phantoms == ((phantom.id, phantom.claim_id, "w2"),)
    db.settle(held)
    db.settle(phantom)


def test_one_beat_is_one_history_row_and_covers_every_task_in_flight(db: StoreHarness) -> None:  # D2
    tasks_in_flight = [db.running() for _ in range(3)]
    db.send()
    (claimed,) = db.claim()
    db.run(workers.beat("s1", [(one.id, one.claim_id) for one in tasks_in_flight], draining=False))
    assert len(db.table("beats")) == 1
    seen = db.table("heartbeats", "task_id, sender_id, role, hostname, pid")
    assert {(row[0], row[2]) for row in seen} == {
        *((one.id, role) for one in tasks_in_flight for role in ("claimer", "runner")),
        (claimed.id, "claimer"),
    }
    assert {row[1:2] + row[3:] for row in seen} == {("w1", "host", 2)}
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="cannot delete from view"):
        db.connection.execute(db.plain("delete from {schema}.heartbeats"))
    for one in tasks_in_flight:
        db.settle(one)
    db.run(leases.release([(claimed.id, claimed.claim_id)], channel=db.target.channel))


def test_only_ends_of_processes_count_as_evidence_against_the_code(db: StoreHarness) -> None:  # E13
    task_id = db.send()
    for noticed_by in ("session", "child_exit", "startup", "age", "child_exit"):
        db.start(*db.claim())
        (lease,) = db.leases()
        assert db.recover(lease, "retry", noticed_by=noticed_by) != []
    claimed = (
        db.claim()
    )  # its code has not started, so the next end of its process does not count as evidence
    (lease,) = db.leases()
    assert db.recover(lease, "requeue", noticed_by="child_exit") != []
    assert db.run(tasks.process_ends([task_id])) == [(task_id, "vanished")] * 2
    assert [one.id for one in claimed] == [task_id]


def test_the_beat_of_an_ended_supervisor_returns_no_sequence_number(db: StoreHarness) -> None:
    assert db.run(workers.end_supervisor("s1", how="session", beat_seq=7)) is False
    assert db.run(workers.end_supervisor("s1", how="session", beat_seq=0)) is True
    assert db.run(workers.beat("s1", [], draining=False)).seq is None
    row = workers.WorkerRow(
        id="w9", supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=None
    )
    assert db.run(workers.register_worker(row)) is False


def test_the_lock_of_a_session_is_trusted_as_free_only_after_a_recent_beat(db: StoreHarness) -> None:  # E14
    """The server keeps the session of a silent client for hours, but not forever."""
    for silent_for, expected in (("0", True), ("3 hours", True), ("5 hours", False), ("-1 hour", True)):
        db.connection.execute(
            db.plain("update {schema}.supervisors set last_beat_at = now() - %s::interval"), [silent_for]
        )
        assert {one.beat_lately for one in db.run(workers.watch_sessions())} == {expected}, silent_for


def watched(db: StoreHarness) -> workers.WatchedSession:
    """Return the observer's view of s1."""
    (found,) = (one for one in db.run(workers.watch_sessions()) if one.supervisor_id == "s1")
    return found


def test_a_tree_is_connected_only_if_the_session_of_its_beats_waits_for_its_client(
    db: StoreHarness,
) -> None:  # J12
    """The client of a busy backend may be gone, and then the tree could not reconnect."""
    with db.target.connect("everbeat-s1 supervisor 7.1"):
        assert not watched(db).beats_here
        with db.target.connect("everbeat-s10 supervisor beats 7.1"):
            assert not watched(db).beats_here
        with (
            db.target.connect("everbeat-s1 supervisor beats 7.1") as beats,
            ThreadPoolExecutor(1) as threads,
        ):
            assert watched(db).beats_here
            busy = threads.submit(beats.execute, "select pg_sleep(60)")
            name = "everbeat-s1 supervisor beats 7.1"
            active = "select from pg_stat_activity where application_name = %s and wait_event = 'PgSleep'"
            while db.connection.execute(active, [name]).fetchone() is None:
                pass
            counts_as_connected = watched(db).beats_here
            beats.cancel()
            with pytest.raises(psycopg.errors.QueryCanceled):
                busy.result(timeout=60)
            assert not counts_as_connected


def test_a_session_was_lost_in_a_crash_only_if_all_statistics_were_reset_since(
    db: StoreHarness,
) -> None:  # J16
    """A crash of the server resets the statistics of the whole cluster; operators reset those of one view."""
    db.connection.execute("select pg_stat_reset_shared('bgwriter')")
    assert not watched(db).lost_in_crash
    db.connection.execute("select pg_stat_reset_shared('archiver')")
    assert watched(db).lost_in_crash
    (found,) = db.run(predecessors("nobody", boot_id=None, machine_id=None))
    assert found.lost_in_crash
    with db.target.connect("everbeat-s1 worker 7.1"):
        assert not watched(db).lost_in_crash
    db.connection.execute(
        db.plain("update {schema}.supervisors set session_at = clock_timestamp() where id = 's1'")
    )
    while watched(db).sessions:
        pass
    assert not watched(db).lost_in_crash
    (found,) = db.run(predecessors("nobody", boot_id=None, machine_id=None))
    assert not found.lost_in_crash


def test_a_role_that_sees_only_its_own_sessions_sees_which_trees_are_connected(
    db: StoreHarness,
) -> None:  # J12
    role = f"restricted_{db.target.schema}"
    for text in (
        f"create role {role} login",
        f"grant usage on schema {{schema}} to {role}",
        f"grant select on {{schema}}.supervisors to {role}",
        f"grant select, update on {{schema}}.turns to {role}",
    ):
        db.connection.execute(db.plain(text))
    db.connection.execute("select pg_stat_reset_shared('bgwriter'), pg_stat_reset_shared('archiver')")
    try:
        url = conninfo.make_conninfo(db.target.url, user=role)
        with psycopg.connect(url, autocommit=True) as restricted:
            ask = db.text("worker/watch_sessions")
            parameters = workers.watch_sessions().parameters

            def seen() -> workers.WatchedSession:
                return workers.WatchedSession(*restricted.execute(ask, parameters).fetchall()[0])

            assert (seen().beats_here, seen().lost_in_crash) == (False, True)
            with db.target.connect("everbeat-s1 supervisor beats 7.1"):
                assert (seen().beats_here, seen().lost_in_crash, seen().sessions) == (True, False, 1)
    finally:
        db.connection.execute(db.plain(f"drop owned by {role}"))
        db.connection.execute(db.plain(f"drop role {role}"))


def test_a_turn_belongs_to_one_supervisor_until_it_ends(db: StoreHarness) -> None:
    assert db.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s1")) is True
    assert db.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s2")) is False
    assert db.run(workers.take_turn("reaper", interval_ms=0, taken_by="s2")) is True
    assert db.run(workers.take_turn("reaper", interval_ms=60_000, taken_by="s1")) is True


def at_once(db: StoreHarness, first: Statement[T], second: Statement[T]) -> T:
    """Run the second statement while the first one has not committed, and return its result."""
    with ThreadPoolExecutor(1) as pool:
        with frozen(db, first):
            answer = pool.submit(db.run, second)
            ends_at = time.monotonic() + 30
            while not db.connection.execute("select 1 from pg_locks where not granted").fetchone():
                assert time.monotonic() < ends_at, "the second statement does not wait for the first"
                time.sleep(0.01)  # polls from outside
        return answer.result()


def test_one_of_two_supervisors_that_ask_at_once_gets_a_turn(db: StoreHarness) -> None:
    one, other = (workers.take_turn("expirer", interval_ms=60_000, taken_by=name) for name in ("s1", "s2"))
    assert at_once(db, one, other) is False


def test_one_of_two_supervisors_that_ask_at_once_gets_a_turn_to_watch(db: StoreHarness) -> None:  # R3
    one, other = (
        workers.take_watch_turn(name, kind="k", turn_ms=60_000, by_lock=True) for name in ("s1", "s2")
    )
    assert at_once(db, one, other).turn is None
    assert db.run(other).turn is not None, "there are two more turns"


def test_a_turn_is_free_after_the_clock_was_set_back(db: StoreHarness) -> None:  # I13
    """The holder is dead, and the end that it wrote is more than one turn away."""
    assert db.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s1")) is True
    db.connection.execute(
        db.plain("""update {schema}.turns set taken_at = taken_at + interval '1 hour',
                       taken_until = taken_until + interval '1 hour'""")
    )
    assert db.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s2")) is True
    assert db.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s1")) is False


def test_a_released_turn_is_free_for_every_clock(db: StoreHarness) -> None:
    assert db.run(workers.take_turn("sweep", interval_ms=60_000, taken_by="s1")) is True
    assert db.run(retention.end_turn("sweep", taken_by="s2")) is False
    assert db.run(retention.end_turn("sweep", taken_by="s1")) is True
    (until,) = db.table("turns", "taken_until = '-infinity'")
    assert until == (True,)
    assert db.run(retention.end_turn("sweep", taken_by="s1")) is False


def test_exactly_one_of_many_concurrent_callers_gets_a_turn(db: StoreHarness) -> None:
    """A transaction that began earlier and ran later must not mistake the start of the winner's turn for a time in the future."""
    together = threading.Barrier(8)

    def ask(number: int) -> int:
        database = Database(db.target)
        try:
            database.run(workers.watch_beats())  # connect first, so that they start together
            taken = 0
            for round_number in range(25):
                together.wait(timeout=30)
                turn = workers.take_turn(
                    f"round {round_number}", interval_ms=60_000, taken_by=f"asker {number}"
                )
                taken += database.run(turn)
            return taken
        finally:
            database.close()

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) == 25


def test_watch_sessions_reports_the_session_lock_while_its_connection_lives(db: StoreHarness) -> None:
    key = db.target.lock_key("s1")
    holder = db.target.connect("everbeat-s1 supervisor")
    statement = workers.hold_session("s1", key)
    holder.execute(db.text(statement.name), statement.parameters)
    (seen,) = [one for one in db.run(workers.watch_sessions()) if one.supervisor_id == "s1"]
    assert (seen.held_here, seen.locked, seen.sessions) == (True, True, 1)
    pid = holder.info.backend_pid
    db.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])
    (seen,) = [one for one in db.run(workers.watch_sessions()) if one.supervisor_id == "s1"]
    assert (seen.locked, seen.sessions) == (False, 0)
    holder.close()


def seen_as(db: StoreHarness, name: str) -> tuple[tuple[bool, bool, int], tuple[bool, bool, int]]:
    """Return how an observer and a starting supervisor see it: whether the lock is held here, whether it is locked, its sessions."""
    (watched,) = [one for one in db.run(workers.watch_sessions()) if one.supervisor_id == name]
    candidates = predecessors("nobody", boot_id=None, machine_id=None)
    (former,) = [one for one in db.run(candidates) if one.id == name]
    return (
        (watched.held_here, watched.locked, watched.sessions),
        (former.held_here, former.locked, former.sessions),
    )


def test_the_incarnation_of_the_server_is_its_start_time_without_rights_on_wal_functions(
    db: StoreHarness,
) -> None:  # J16
    incarnation, role = (
        db.plain("select {schema}.server_incarnation()"),
        f"everbeat_test_{uuid4().hex[:8]}",
    )
    row = db.connection.execute(incarnation).fetchone()
    assert row is not None
    start, timeline = row[0].split("/")
    assert int(timeline, 16) >= 1
    with db.connection.transaction(force_rollback=True):
        db.connection.execute("revoke execute on function pg_walfile_name(pg_lsn) from public")
        db.connection.execute(f"create role {role}")
        db.connection.execute(db.plain(f"grant usage on schema {{schema}} to {role}"))
        db.connection.execute(f"set local role {role}")
        assert db.connection.execute(incarnation).fetchone() == (start,)


def test_a_session_lock_proves_nothing_on_another_incarnation_of_the_server(db: StoreHarness) -> None:  # J16
    held, not_held = (True, True, 1), (False, True, 1)
    with db.target.connect("everbeat-s1 supervisor") as holder:
        statement = workers.hold_session("s1", db.target.lock_key("s1"))
        holder.execute(db.text(statement.name), statement.parameters)
        assert seen_as(db, "s1") == (held, held)
        # First a tree of an older release, then a former primary.
        for server in ("null", "'1795391252.744875/00000001'"):
            db.connection.execute(db.plain(f"update {{schema}}.supervisors set session_server = {server}"))
            assert seen_as(db, "s1") == (not_held, not_held)
        holder.execute(db.text(statement.name), statement.parameters)
        assert seen_as(db, "s1") == (held, held), "locked again, on this server"


def test_sessions_and_locks_of_another_role_do_not_count_for_a_tree(db: StoreHarness) -> None:
    role = f"stranger_{db.target.schema}"
    db.connection.execute(db.plain(f"create role {role} login"))
    url = conninfo.make_conninfo(db.target.url, user=role, application_name="everbeat-s1 worker")
    key = db.target.lock_key("s1")
    try:
        with db.target.connect("everbeat-s1 supervisor") as holder:
            statement = workers.hold_session("s1", key)
            holder.execute(db.text(statement.name), statement.parameters)
            pid = holder.info.backend_pid
        db.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])
        assert seen_as(db, "s1") == ((True, False, 0), (True, False, 0))
        with psycopg.connect(url, autocommit=True) as stranger:
            stranger.execute("select pg_advisory_lock(%s)", [key])
            assert seen_as(db, "s1") == ((True, False, 0), (True, False, 0))
        with db.target.connect("everbeat-s1 worker"):
            assert seen_as(db, "s1") == ((True, False, 1), (True, False, 1))
    finally:
        db.connection.execute(db.plain(f"drop role {role}"))


def test_a_recovered_task_that_could_not_start_before_good_until_fails(db: StoreHarness) -> None:  # C3
    db.running(good_until=datetime.now(UTC) + timedelta(seconds=30))
    (lease,) = db.leases()
    assert [one.action for one in db.recover(lease, "retry", retry_in_ms=60_000)] == ["fail"]


def test_expire_ignores_claimed_and_running_tasks(db: StoreHarness) -> None:  # C2
    running = db.running()
    db.connection.execute(f"update \"{db.target.schema}\".tasks set good_until = now() - interval '1 s'")  # type: ignore[arg-type]
    assert db.run(expiry.expire(channel=db.target.channel)) == []
    db.connection.execute(f'update "{db.target.schema}".tasks set good_until = null')  # type: ignore[arg-type]
    db.settle(running)


def test_a_repeated_recovery_returns_its_first_result_and_another_call_returns_nothing(
    db: StoreHarness,
) -> None:
    db.send()
    db.claim("w1", limit=1)
    db.running("w1")
    orders = [
        leases.RecoveryOrder(
            id=lease.id, claim_id=lease.claim_id, state=lease.state, action=action,  # type: ignore[arg-type]
            cause="vanished", last_beat_at=lease.last_beat_at, noticed_after_ms=7, retry_in_ms=retry_in_ms, outcome=outcome,
            error=b'{"code": "WORKER_CRASHED"}', worker_seq=lease.worker_seq,
        )
        for lease in db.leases()
        for action, retry_in_ms, outcome in [("requeue", 0, None) if lease.state == "CLAIMED" else ("fail", None, "LOST")]
    ]  # fmt: skip
    first, second = (
        leases.recover(orders, noticed_by="age", recovered_by="s2", channel=db.target.channel)
        for _ in range(2)
    )
    landed = db.run(first)
    assert {(one.was.value, one.action) for one in landed} == {("CLAIMED", "requeue"), ("RUNNING", "fail")}
    assert {one.id: one for one in db.run(first)} == {one.id: one for one in landed}
    assert db.run(second) == []
    assert len(db.table("recoveries")) == 2
