"""What the dead leave behind, and the zombies that come back: every verb of a lost holder is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo

from everbeat.store import leases, suspects, sweeping, tasks, workers
from everbeat.store.database import Database
from everbeat.store.predecessors import predecessors
from tests.store.conftest import Hands


def test_a_claimed_task_of_the_dead_is_pending_again_in_its_old_place(hands: Hands) -> None:
    task_id = hands.send()
    before = hands.row(task_id, "enqueued_at")
    hands.claim()
    (lease,) = hands.leases()
    (recovered,) = hands.recover(lease, "requeue")
    assert (recovered.was, recovered.state) == ("CLAIMED", "PENDING")
    row = hands.row(
        task_id, "enqueued_at, retry_count, crash_count, loss_count, claimed_at, claimed_by_worker_id"
    )
    assert row == (before, 0, 0, 0, None, None)
    assert hands.table("attempts") == []
    assert hands.table("recoveries", "was, action, noticed_by, worker_id, hostname") == [
        ("CLAIMED", "requeue", "age", "w1", "host")
    ]


def test_a_running_task_of_the_dead_is_charged_and_leaves_an_attempt(hands: Hands) -> None:
    claimed = hands.running()
    (lease,) = hands.leases()
    assert hands.recover(lease, "retry", retry_in_ms=5_000) != []
    assert hands.row(claimed.id, "state, retry_count, loss_count, next_retry_at = enqueued_at") == (
        "PENDING",
        1,
        1,
        True,
    )
    assert hands.table("attempts", "outcome, will_retry") == [("LOST", True)]


def test_every_verb_of_a_zombie_is_refused(hands: Hands) -> None:  # D5
    old = hands.running()
    (lease,) = hands.leases()
    hands.recover(lease, "retry")
    (new,) = hands.claim("w2")
    hands.start(new)
    assert new.fence == old.fence + 1
    assert new.claim_id != old.claim_id
    channel = hands.target.channel
    assert hands.start(old) == ["lost"]
    assert hands.settle(old, result=b'"zombie"') == "lost"
    assert hands.settle(old, "FAILED", error=b"{}", retry_in_ms=0) == "lost"
    assert hands.settle(old, "RELEASED") == "lost"
    assert hands.run(leases.release([(old.id, old.claim_id)], channel=channel)) == []
    assert hands.run(leases.record_progress(old.id, old.claim_id, b'{"stage": "zombie"}')) is False
    assert hands.run(leases.check_leases([(old.id, old.claim_id)])) == [(old.id, old.claim_id, "lost")]
    answer = hands.run(workers.beat("s1", [(old.id, old.claim_id)], draining=False))
    assert answer.lost == ((old.id, old.claim_id),)
    assert hands.row(new.id, "state, claim_id, progress") == ("RUNNING", new.claim_id, None)
    assert hands.settle(new, result=b'"right"') == "COMPLETED"
    assert hands.row(new.id, "result") == "right"


def test_a_zombie_gives_nothing_back(hands: Hands) -> None:
    hands.send()
    (old,) = hands.claim()
    (lease,) = hands.leases()
    hands.recover(lease, "requeue")
    (new,) = hands.claim("w2")
    assert hands.run(leases.release([(old.id, old.claim_id)], channel=hands.target.channel)) == []
    assert hands.row(new.id, "state, claim_id") == ("CLAIMED", new.claim_id)
    hands.cancel(new.id)


def test_a_decision_lands_once(hands: Hands) -> None:
    hands.running()
    (lease,) = hands.leases()
    assert len(hands.recover(lease, "fail")) == 1
    assert hands.recover(lease, "fail") == []
    assert hands.recover(lease, "retry") == []


def test_a_decision_on_an_old_lease_does_not_touch_the_new_one(hands: Hands) -> None:
    claimed = hands.running()
    (lease,) = hands.leases()
    hands.settle(claimed, "RELEASED")
    (again,) = hands.claim()
    hands.start(again)
    assert hands.recover(lease, "fail") == []
    assert hands.row(claimed.id, "state") == "RUNNING"
    hands.settle(again)


def test_a_holder_that_beat_after_it_was_watched_keeps_its_tasks(hands: Hands) -> None:
    claimed = hands.running()
    (lease,) = hands.leases()
    watched = hands.run(workers.watch_beats())[0].beat_seq
    hands.run(workers.beat("s1", [], draining=False))
    assert hands.recover(lease, "fail", holder=("s1", watched)) == []
    hands.run(workers.beat_worker("w1"))
    assert hands.recover(lease, "fail", holder=("s1", watched + 1)) == [], "the worker beat for itself"
    hands.settle(claimed)


def test_a_cancel_request_beats_every_other_decision(hands: Hands) -> None:
    claimed = hands.running()
    (lease,) = hands.leases()
    hands.cancel(claimed.id)
    assert [one.action for one in hands.recover(lease, "retry")] == ["cancel"]
    assert hands.row(claimed.id, "state, retry_count") == ("CANCELLED", 0)


def test_an_ended_worker_claims_nothing(hands: Hands) -> None:
    hands.send()
    assert hands.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", signal=9)) == ["w1"]
    assert hands.run(workers.bury_workers(worker_ids=["w1"], how="again")) == [], "burial is final"
    assert hands.claim("w1") == []
    assert hands.claim("nobody") == []
    assert hands.run(workers.beat_worker("w1")) is False
    assert len(hands.claim("w2")) == 1


def test_leases_of_the_ended_are_found_again_by_every_sweep(hands: Hands) -> None:
    hands.running("w1")
    hands.running("w2")
    hands.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed by SIGKILL", signal=9))
    assert hands.run(leases.leases_of_ended(limit=10, owner_ms=60_000)) == [], "its supervisor's own, for now"
    (lease,) = hands.run(leases.leases_of_ended(limit=10))
    assert (lease.worker_id, lease.ended_how, lease.ended_cause) == ("w1", "child_exit", "killed by SIGKILL")
    hands.recover(lease, "fail")
    assert hands.run(leases.leases_of_ended(limit=10)) == []
    for lease in hands.leases():
        hands.recover(lease, "fail")


def test_a_claim_in_flight_makes_the_burial_wait_and_is_found_by_it(hands: Hands) -> None:
    hands.send()
    claim = leases.claim(
        worker_id="w1", claim_call=uuid4(), names=["work"], limit=1, queues=None, queue_priorities={}
    )
    bury = workers.bury_workers(worker_ids=["w1"], how="child_exit")
    with (
        closing(hands.target.connect("everbeat test claimer")) as claiming,
        closing(hands.target.connect("everbeat test burial")) as burying,
        claiming.transaction(),
    ):
        claiming.execute(hands.text(claim.name), claim.parameters)
        burying.execute("set lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            burying.execute(hands.text(bury.name), bury.parameters)
    assert hands.run(bury) == ["w1"]
    (lease,) = hands.run(leases.leases_of_ended(limit=10))
    assert lease.worker_id == "w1"
    hands.recover(lease, "requeue")


def test_a_beat_tells_of_losses_cancels_and_phantoms(hands: Hands) -> None:
    held, phantom = hands.running(), hands.running("w2")
    hands.cancel(held.id)
    stranger = (uuid4(), uuid4())
    answer = hands.run(workers.beat("s1", [(held.id, held.claim_id), stranger], draining=False))
    assert answer.seq == 1
    assert answer.lost == (stranger,)
    assert answer.cancel == ((held.id, held.claim_id),)
    assert answer.phantoms == ((phantom.id, phantom.claim_id, "w2"),)
    hands.settle(held)
    hands.settle(phantom)


def test_one_beat_is_one_history_row_and_shows_for_every_task_in_flight(hands: Hands) -> None:  # D2
    tasks_in_flight = [hands.running() for _ in range(3)]
    hands.send()
    (claimed,) = hands.claim()
    hands.run(workers.beat("s1", [(one.id, one.claim_id) for one in tasks_in_flight], draining=False))
    assert len(hands.table("beats")) == 1
    seen = hands.table("heartbeats", "task_id, sender_id, role, hostname, pid")
    assert {(row[0], row[2]) for row in seen} == {
        *((one.id, role) for one in tasks_in_flight for role in ("claimer", "runner")),
        (claimed.id, "claimer"),
    }
    assert {row[1:2] + row[3:] for row in seen} == {("w1", "host", 2)}
    for one in tasks_in_flight:
        hands.settle(one)
    hands.run(leases.release([(claimed.id, claimed.claim_id)], channel=hands.target.channel))


def test_only_ends_of_processes_are_evidence_against_the_code(hands: Hands) -> None:  # E13
    task_id = hands.send()
    for noticed_by in ("session", "child_exit", "startup", "age", "child_exit"):
        hands.start(*hands.claim())
        (lease,) = hands.leases()
        assert hands.recover(lease, "retry", noticed_by=noticed_by) != []
    claimed = hands.claim()  # its code has not started: what ends its process now is no evidence
    (lease,) = hands.leases()
    assert hands.recover(lease, "requeue", noticed_by="child_exit") != []
    assert hands.run(suspects.process_ends([task_id])) == [(task_id, "vanished")] * 2
    assert [one.id for one in claimed] == [task_id]


def test_an_ended_supervisor_is_told_by_its_own_beat(hands: Hands) -> None:
    assert hands.run(workers.end_supervisor("s1", how="session", beat_seq=7)) is False
    assert hands.run(workers.end_supervisor("s1", how="session", beat_seq=0)) is True
    assert hands.run(workers.beat("s1", [], draining=False)).seq is None
    row = workers.WorkerRow(
        id="w9", supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=None
    )
    assert hands.run(workers.register_worker(row)) is False


def test_a_session_is_surely_closed_only_if_its_supervisor_beat_lately(hands: Hands) -> None:  # E14
    """The server keeps the session of a silent network for hours, but not for ever."""
    for silent_for, expected in (("0", True), ("3 hours", True), ("5 hours", False), ("-1 hour", True)):
        hands.connection.execute(
            hands.plain("update {schema}.supervisors set last_beat_at = now() - %s::interval"), [silent_for]
        )
        assert {one.beat_lately for one in hands.run(workers.watch_sessions())} == {expected}, silent_for


def watched(hands: Hands) -> workers.WatchedSession:
    """What an observer sees of s1."""
    (found,) = (one for one in hands.run(workers.watch_sessions()) if one.supervisor_id == "s1")
    return found


def test_a_tree_is_connected_only_if_the_session_of_its_beats_waits_for_its_client(
    hands: Hands,
) -> None:  # J12
    """A backend that works on a statement may have lost its client, and the tree could not connect again."""
    with hands.target.connect("everbeat-s1 supervisor 7.1"):
        assert not watched(hands).beats_here
        with hands.target.connect("everbeat-s10 supervisor beats 7.1"):
            assert not watched(hands).beats_here
        with (
            hands.target.connect("everbeat-s1 supervisor beats 7.1") as beats,
            ThreadPoolExecutor(1) as threads,
        ):
            assert watched(hands).beats_here
            busy = threads.submit(beats.execute, "select pg_sleep(60)")
            name = "everbeat-s1 supervisor beats 7.1"
            active = "select from pg_stat_activity where application_name = %s and wait_event = 'PgSleep'"
            while hands.connection.execute(active, [name]).fetchone() is None:
                pass
            assert not watched(hands).beats_here
            beats.cancel()
            with pytest.raises(psycopg.errors.QueryCanceled):
                busy.result(timeout=60)


def test_a_session_was_lost_in_a_crash_only_if_all_statistics_began_anew_since(hands: Hands) -> None:  # J16
    """A crash of the server discards those of the whole cluster. Operators reset those of one view."""
    hands.connection.execute("select pg_stat_reset_shared('bgwriter')")
    assert not watched(hands).lost_in_crash
    hands.connection.execute("select pg_stat_reset_shared('archiver')")
    assert watched(hands).lost_in_crash
    (found,) = hands.run(predecessors("nobody", boot_id=None, machine_id=None))
    assert found.lost_in_crash
    with hands.target.connect("everbeat-s1 worker 7.1"):
        assert not watched(hands).lost_in_crash
    hands.connection.execute(
        hands.plain("update {schema}.supervisors set session_at = clock_timestamp() where id = 's1'")
    )
    while watched(hands).sessions:
        pass
    assert not watched(hands).lost_in_crash
    (found,) = hands.run(predecessors("nobody", boot_id=None, machine_id=None))
    assert not found.lost_in_crash


def test_a_role_that_may_see_only_its_own_sessions_sees_which_trees_are_connected(
    hands: Hands,
) -> None:  # J12
    role = f"restricted_{hands.target.schema}"
    for text in (
        f"create role {role} login",
        f"grant usage on schema {{schema}} to {role}",
        f"grant select on {{schema}}.supervisors to {role}",
    ):
        hands.connection.execute(hands.plain(text))
    hands.connection.execute("select pg_stat_reset_shared('bgwriter'), pg_stat_reset_shared('archiver')")
    try:
        url = conninfo.make_conninfo(hands.target.url, user=role)
        with psycopg.connect(url, autocommit=True) as restricted:
            ask, parameters = hands.text("worker/watch_sessions"), {"silence_kept_ms": 1}

            def seen() -> workers.WatchedSession:
                return workers.WatchedSession(*restricted.execute(ask, parameters).fetchall()[0])

            assert (seen().beats_here, seen().lost_in_crash) == (False, True)
            with hands.target.connect("everbeat-s1 supervisor beats 7.1"):
                assert (seen().beats_here, seen().lost_in_crash, seen().sessions) == (True, False, 1)
    finally:
        hands.connection.execute(hands.plain(f"drop owned by {role}"))
        hands.connection.execute(hands.plain(f"drop role {role}"))


def test_a_turn_belongs_to_one_until_it_ends(hands: Hands) -> None:
    assert hands.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s1")) is True
    assert hands.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s2")) is False
    assert hands.run(workers.take_turn("reaper", interval_ms=0, taken_by="s2")) is True
    assert hands.run(workers.take_turn("reaper", interval_ms=60_000, taken_by="s1")) is True


def test_a_turn_is_free_after_the_clock_was_set_back(hands: Hands) -> None:  # I13
    """Its holder is dead, and the end that it wrote is an hour and a turn away."""
    assert hands.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s1")) is True
    hands.connection.execute(
        hands.plain("""update {schema}.turns set taken_at = taken_at + interval '1 hour',
                       taken_until = taken_until + interval '1 hour'""")
    )
    assert hands.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s2")) is True
    assert hands.run(workers.take_turn("expirer", interval_ms=60_000, taken_by="s1")) is False


def test_a_turn_that_was_given_back_is_free_for_every_clock(hands: Hands) -> None:
    assert hands.run(workers.take_turn("sweep", interval_ms=60_000, taken_by="s1")) is True
    assert hands.run(sweeping.end_turn("sweep", taken_by="s2")) is False
    assert hands.run(sweeping.end_turn("sweep", taken_by="s1")) is True
    (until,) = hands.table("turns", "taken_until = '-infinity'")
    assert until == (True,)
    assert hands.run(sweeping.end_turn("sweep", taken_by="s1")) is False


def test_one_of_many_that_ask_at_once_gets_a_turn(hands: Hands) -> None:
    """One that began earlier and came later must not take the winner's start for a moment that lies ahead."""
    together = threading.Barrier(8)

    def ask(number: int) -> int:
        database = Database(hands.target)
        try:
            database.run(workers.watch_beats())  # connected, so that they begin together
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


def test_the_session_lock_is_seen_while_its_connection_lives(hands: Hands) -> None:
    key = hands.target.lock_key("s1")
    holder = hands.target.connect("everbeat-s1 supervisor")
    statement = workers.hold_session("s1", key)
    holder.execute(hands.text(statement.name), statement.parameters)
    (seen,) = [one for one in hands.run(workers.watch_sessions()) if one.supervisor_id == "s1"]
    assert (seen.held_here, seen.locked, seen.sessions) == (True, True, 1)
    pid = holder.info.backend_pid
    hands.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])
    (seen,) = [one for one in hands.run(workers.watch_sessions()) if one.supervisor_id == "s1"]
    assert (seen.locked, seen.sessions) == (False, 0)
    holder.close()


def seen_as(hands: Hands, name: str) -> tuple[tuple[bool, bool, int], tuple[bool, bool, int]]:
    """What an observer and a starting supervisor see of one: whether it holds its lock here, the lock, its sessions."""
    (watched,) = [one for one in hands.run(workers.watch_sessions()) if one.supervisor_id == name]
    candidates = predecessors("nobody", boot_id=None, machine_id=None)
    (former,) = [one for one in hands.run(candidates) if one.id == name]
    return (
        (watched.held_here, watched.locked, watched.sessions),
        (former.held_here, former.locked, former.sessions),
    )


def test_the_start_of_the_server_is_its_incarnation_where_functions_of_the_log_are_refused(
    hands: Hands,
) -> None:  # J16
    incarnation, role = (
        hands.plain("select {schema}.server_incarnation()"),
        f"everbeat_test_{uuid4().hex[:8]}",
    )
    row = hands.connection.execute(incarnation).fetchone()
    assert row is not None
    start, timeline = row[0].split("/")
    assert int(timeline, 16) >= 1
    with hands.connection.transaction(force_rollback=True):
        hands.connection.execute("revoke execute on function pg_walfile_name(pg_lsn) from public")
        hands.connection.execute(f"create role {role}")
        hands.connection.execute(hands.plain(f"grant usage on schema {{schema}} to {role}"))
        hands.connection.execute(f"set local role {role}")
        assert hands.connection.execute(incarnation).fetchone() == (start,)


def test_a_session_lock_proves_nothing_on_another_incarnation_of_the_server(hands: Hands) -> None:  # J16
    held, not_held = (True, True, 1), (False, True, 1)
    with hands.target.connect("everbeat-s1 supervisor") as holder:
        statement = workers.hold_session("s1", hands.target.lock_key("s1"))
        holder.execute(hands.text(statement.name), statement.parameters)
        assert seen_as(hands, "s1") == (held, held)
        # A tree of an older release, then a former primary.
        for server in ("null", "'1795391252.744875/00000001'"):
            hands.connection.execute(
                hands.plain(f"update {{schema}}.supervisors set session_server = {server}")
            )
            assert seen_as(hands, "s1") == (not_held, not_held)
        holder.execute(hands.text(statement.name), statement.parameters)
        assert seen_as(hands, "s1") == (held, held), "taken again, on this one"


def test_sessions_and_locks_of_another_role_are_not_the_trees(hands: Hands) -> None:
    role = f"stranger_{hands.target.schema}"
    hands.connection.execute(hands.plain(f"create role {role} login"))
    url = conninfo.make_conninfo(hands.target.url, user=role, application_name="everbeat-s1 worker")
    key = hands.target.lock_key("s1")
    try:
        with hands.target.connect("everbeat-s1 supervisor") as holder:
            statement = workers.hold_session("s1", key)
            holder.execute(hands.text(statement.name), statement.parameters)
            pid = holder.info.backend_pid
        hands.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])
        assert seen_as(hands, "s1") == ((True, False, 0), (True, False, 0))
        with psycopg.connect(url, autocommit=True) as stranger:
            stranger.execute("select pg_advisory_lock(%s)", [key])
            assert seen_as(hands, "s1") == ((True, False, 0), (True, False, 0))
        with hands.target.connect("everbeat-s1 worker"):
            assert seen_as(hands, "s1") == ((True, False, 1), (True, False, 1))
    finally:
        hands.connection.execute(hands.plain(f"drop role {role}"))


def test_a_recovered_task_that_could_not_start_in_time_fails(hands: Hands) -> None:  # C3
    hands.running(good_until=datetime.now(UTC) + timedelta(seconds=30))
    (lease,) = hands.leases()
    assert [one.action for one in hands.recover(lease, "retry", retry_in_ms=60_000)] == ["fail"]


def test_expiring_leaves_claimed_and_running_alone(hands: Hands) -> None:  # C2
    running = hands.running()
    hands.connection.execute(
        f"update \"{hands.target.schema}\".tasks set good_until = now() - interval '1 s'"
    )  # type: ignore[arg-type]
    assert hands.run(tasks.expire(channel=hands.target.channel)) == []
    hands.connection.execute(f'update "{hands.target.schema}".tasks set good_until = null')  # type: ignore[arg-type]
    hands.settle(running)


def test_a_repeated_recovery_answers_what_its_first_try_has_recovered_and_another_call_nothing(
    hands: Hands,
) -> None:
    hands.send()
    hands.claim("w1", limit=1)
    hands.running("w1")
    orders = [
        leases.RecoveryOrder(
            id=lease.id, claim_id=lease.claim_id, state=lease.state, action=action,  # type: ignore[arg-type]
            cause="vanished", last_beat_at=lease.last_beat_at, noticed_after_ms=7, retry_in_ms=retry_in_ms, outcome=outcome,
            error=b'{"code": "WORKER_CRASHED"}', worker_seq=lease.worker_seq,
        )
        for lease in hands.leases()
        for action, retry_in_ms, outcome in [("requeue", 0, None) if lease.state == "CLAIMED" else ("fail", None, "LOST")]
    ]  # fmt: skip
    first, second = (
        leases.recover(orders, noticed_by="age", recovered_by="s2", channel=hands.target.channel)
        for _ in range(2)
    )
    landed = hands.run(first)
    assert {(one.was.value, one.action) for one in landed} == {("CLAIMED", "requeue"), ("RUNNING", "fail")}
    assert {one.id: one for one in hands.run(first)} == {one.id: one for one in landed}
    assert hands.run(second) == []
    assert len(hands.table("recoveries")) == 2
