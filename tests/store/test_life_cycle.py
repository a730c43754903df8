"""Every statement of a task's life on a real database; the audit checks each transition against the one table of transitions."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest

from everbeat.domain.inspection import Pause
from everbeat.domain.task.outcome import error_from_json
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.task.states import TASK_TERMINAL_STATES, TRANSITIONS, TaskState
from everbeat.store import claims, expiry, leases, tasks
from everbeat.store.database import Database
from everbeat.store.leases import stop_settlement
from everbeat.store.statement import source
from tests.invariants import deadlocks
from tests.store.conftest import StoreHarness


def test_a_task_has_seven_states_and_four_are_terminal() -> None:  # B1
    assert [state.value for state in TaskState] == [
        "PENDING",
        "CLAIMED",
        "RUNNING",
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "EXPIRED",
    ]
    assert {state.value for state in TASK_TERMINAL_STATES} == {"COMPLETED", "FAILED", "CANCELLED", "EXPIRED"}


@pytest.mark.parametrize("statement", sorted({move.statement for move in TRANSITIONS}))
def test_the_header_of_every_statement_names_its_transitions(statement: str) -> None:  # B1
    header = " ".join(
        line.removeprefix("-- ") for line in source(statement).splitlines() if line.startswith("--")
    )
    for move in TRANSITIONS:
        if move.statement == statement and move.old is not None:
            assert move.old.value in header, (statement, move)
            assert move.new.value in header, (statement, move)


def test_the_timestamps_of_a_task_are_in_order(db: StoreHarness) -> None:  # B2
    task_id = db.send()
    (claimed,) = db.claim()
    assert db.row(task_id, "state, claimed_by_worker_id, claimed_at is not null, claim_id is not null") == (
        "CLAIMED",
        "w1",
        True,
        True,
    )
    assert db.start(claimed) == ["started"]
    assert db.settle(claimed, result=b'{"a": 1}') == "COMPLETED"
    ordered = db.row(
        task_id,
        "sent_at <= enqueued_at and enqueued_at <= claimed_at and claimed_at <= started_at and started_at <= completed_at",
    )
    assert ordered is True
    assert db.row(task_id, "result") == {"a": 1}


def test_a_retry_returns_the_task_to_pending_without_a_claim(db: StoreHarness) -> None:  # B4
    claimed = db.running()
    sent_at = db.row(claimed.id, "sent_at")
    assert db.settle(claimed, "FAILED", error=b'{"code": "X"}', retry_in_ms=60_000) == "PENDING"
    row = db.row(
        claimed.id,
        "sent_at, retry_count, next_retry_at = enqueued_at, claim_id, claimed_at, claimed_by_worker_id, started_at",
    )
    assert row == (sent_at, 1, True, None, None, None, None)
    assert db.claim() == []


def test_a_retry_that_could_not_start_before_good_until_is_not_scheduled(db: StoreHarness) -> None:  # C3
    claimed = db.running(good_until=datetime.now(UTC) + timedelta(seconds=30))
    assert db.settle(claimed, "FAILED", error=b"{}", retry_in_ms=60_000) == "FAILED"
    assert db.table("attempts", "will_retry") == [(False,)]


def test_claims_follow_queue_priority_then_task_priority_then_age(db: StoreHarness) -> None:  # B6
    late = db.send(queue="low", priority=-5)
    urgent = [
        db.send(queue="high", priority=3),
        db.send(queue="high", priority=1),
        db.send(queue="high", priority=1),
    ]
    plain = [db.send(), db.send()]
    order = [
        one.id
        for _ in range(6)
        for one in db.claim(limit=1, queue_priorities={"high": 1, "low": 100, "default": 50})
    ]
    assert order == [urgent[1], urgent[2], urgent[0], *plain, late]


def test_a_claim_takes_the_oldest_task_of_queues_with_equal_priority(db: StoreHarness) -> None:
    sent = [db.send(queue=queue) for queue in ("b", "a", "b", "a")]
    assert [one.id for _ in range(4) for one in db.claim(limit=1)] == sent


def test_a_claim_takes_only_its_names_and_queues(db: StoreHarness) -> None:
    db.send(name="unknown")
    mine = db.send(queue="mine")
    db.send(queue="other")
    assert [one.id for one in db.claim(queues=["mine"])] == [mine]


def test_a_repeated_claim_returns_the_same_tasks(db: StoreHarness) -> None:
    db.send()
    db.send()
    call = uuid4()
    first = db.claim(limit=1, call=call)
    assert db.claim(limit=1, call=call) == first
    assert len(db.claim()) == 1


def test_a_claim_skips_scheduled_tasks_and_next_due_returns_their_time(db: StoreHarness) -> None:
    db.send(delay_ms=90_000)
    db.send(delay_ms=30_000, priority=5)
    assert db.claim() == []
    due = db.run(tasks.next_due(names=["work"], queues=None)).due_in_ms
    assert due is not None
    assert 20_000 < due <= 30_000


def test_next_due_returns_a_time_for_each_of_the_queues_that_come_first(
    db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:  # R4
    for delay_ms, queue in ((90_000, "a"), (40_000, "b"), (30_000, "a"), (20_000, "c")):
        db.send(delay_ms=delay_ms, queue=queue, priority=delay_ms // 10_000)
    found = db.run(tasks.next_due(names=["work"], queues=None))
    assert (list(found.by_queue), found.others_in_ms) == (["c", "a", "b"], None)
    assert [round(ms, -4) for ms in found.by_queue.values()] == [20_000, 30_000, 40_000]
    monkeypatch.setattr(tasks, "MOST_DUE", 2)
    found = db.run(tasks.next_due(names=["work"], queues=None))
    assert list(found.by_queue) == ["c", "a"]
    assert found.others_in_ms is not None
    assert 30_000 < found.others_in_ms <= 40_000
    of_one = db.run(tasks.next_due(names=["work"], queues=["a"]))
    assert (list(of_one.by_queue), of_one.others_in_ms) == (["a"], None)


def test_only_the_holder_can_start_a_task_and_a_repeated_start_returns_the_same(db: StoreHarness) -> None:
    db.send()
    (claimed,) = db.claim()
    stranger = claims.Claimed(
        **{field: getattr(claimed, field) for field in claimed.__slots__} | {"claim_id": uuid4()}
    )
    assert db.start(stranger) == ["lost"]
    assert db.start(claimed) == ["started"]
    assert db.start(claimed) == ["started"]
    assert db.row(claimed.id, "attempt") == 1


def test_a_claimed_task_whose_good_until_passes_expires_at_its_start(db: StoreHarness) -> None:  # C2
    task_id = db.send(good_until=datetime.now(UTC) + timedelta(hours=1))
    (claimed,) = db.claim()
    db.connection.execute(f"update \"{db.target.schema}\".tasks set good_until = now() - interval '1 s'")  # type: ignore[arg-type]
    assert db.start(claimed) == ["expired"]
    assert db.row(task_id, "state, error ->> 'code', expired_at is not null") == (
        "EXPIRED",
        "TASK_EXPIRED",
        True,
    )
    assert db.table("attempts") == []
    assert db.settle(claimed) == "lost"


def test_a_pending_task_past_its_good_until_is_not_claimed_and_expires(db: StoreHarness) -> None:  # C1
    task_id = db.send(good_until=datetime.now(UTC) - timedelta(seconds=1))
    assert db.claim() == []
    assert [each.id for each in db.run(expiry.expire(channel=db.target.channel))] == [task_id]
    assert db.row(task_id, "state, error ->> 'code'") == ("EXPIRED", "TASK_EXPIRED")
    assert db.table("attempts") == []


def make_late(db: StoreHarness) -> None:
    late = "update {schema}.tasks set good_until = statement_timestamp() where good_until is not null"
    db.connection.execute(db.plain(late))


def test_a_task_that_a_stopping_worker_returned_after_its_start_is_not_expired(
    db: StoreHarness,
) -> None:  # J1
    soon = datetime.now(UTC) + timedelta(minutes=1)
    begun, unbegun = db.running(good_until=soon), db.running(good_until=soon)
    again = StoredPolicy(on_crash="retry")
    stop = stop_settlement(begun.id, begun.claim_id, policy=again)
    channel = db.target.channel
    assert db.run(leases.settle([stop], channel=channel)) == {begun.claim_id: "PENDING"}
    assert db.run(leases.settle([stop], channel=channel)) == {begun.claim_id: "already"}
    assert db.settle(unbegun, "RELEASED") == "PENDING"
    make_late(db)
    assert [each.id for each in db.run(expiry.expire(channel=channel))] == [unbegun.id], "its code never ran"
    assert [claimed.id for claimed in db.claim()] == [begun.id]
    assert db.table("attempts", "outcome, will_retry") == [("RELEASED", True)] * 2


@pytest.mark.parametrize("is_claimed", [True, False])
def test_the_error_of_an_expired_retry_contains_the_last_error(
    db: StoreHarness, is_claimed: bool
) -> None:  # C1
    claimed = db.running(good_until=datetime.now(UTC) + timedelta(minutes=1))
    error = b'{"code": "SMTP_DOWN", "message": "m"}'
    assert db.settle(claimed, "FAILED", error=error, retry_in_ms=0) == "PENDING"
    again = db.claim() if is_claimed else []
    make_late(db)
    if is_claimed:
        assert db.start(again[0]) == ["expired"]
    else:
        assert [each.id for each in db.run(expiry.expire(channel=db.target.channel))] == [claimed.id]
    state, stored = db.row(claimed.id, "state, error::text")
    found = error_from_json(stored)
    assert (state, found.code) == ("EXPIRED", "TASK_EXPIRED")
    assert found.message.endswith("before the task started again, after attempt 1")
    assert found.data == {"last_error": {"code": "SMTP_DOWN", "message": "m"}}


@pytest.mark.parametrize("is_claimed", [True, False])
@pytest.mark.parametrize("has_failed", [True, False])
def test_a_start_released_before_its_code_ran_does_not_count_as_an_attempt_of_an_expired_task(
    db: StoreHarness, has_failed: bool, is_claimed: bool
) -> None:  # C1
    """A worker starts fast tasks before they have a slot, and releases those that get none in time."""
    held = db.running(good_until=datetime.now(UTC) + timedelta(minutes=1))
    if has_failed:
        db.settle(held, "FAILED", error=b'{"code": "SMTP_DOWN", "message": "m"}', retry_in_ms=0)
        (held,) = db.claim()
        db.start(held)
    assert db.settle(held, "RELEASED") == "PENDING"
    again = db.claim() if is_claimed else []
    make_late(db)
    if is_claimed:
        assert db.start(again[0]) == ["expired"]
    else:
        assert [each.id for each in db.run(expiry.expire(channel=db.target.channel))] == [held.id]
    state, stored = db.row(held.id, "state, error::text")
    found = error_from_json(stored)
    assert (state, found.code) == ("EXPIRED", "TASK_EXPIRED")
    if has_failed:
        assert found.message.endswith("before the task started again, after attempt 1")
        assert found.data == {"last_error": {"code": "SMTP_DOWN", "message": "m"}}
    else:
        assert found.message.endswith("before the task started")
        assert not found.data


def test_a_repeated_settle_returns_already_and_a_different_outcome_returns_lost(db: StoreHarness) -> None:
    claimed = db.running()
    assert db.settle(claimed, result=b"1") == "COMPLETED"
    assert db.settle(claimed, result=b"1") == "already"
    assert db.settle(claimed, "FAILED", error=b"{}") == "lost"
    assert db.row(claimed.id, "result") == 1


def test_a_settle_of_many_tasks_changes_only_those_that_are_still_held(db: StoreHarness) -> None:
    first, second = db.running(), db.running()
    batch = [
        leases.Settlement(id=first.id, claim_id=first.claim_id, outcome="COMPLETED", result=b"1"),
        leases.Settlement(id=second.id, claim_id=uuid4(), outcome="COMPLETED", result=b"2"),
    ]
    assert db.run(leases.settle(batch, channel=db.target.channel)) == {
        first.claim_id: "COMPLETED",
        batch[1].claim_id: "lost",
    }
    assert db.row(second.id, "state") == "RUNNING"
    db.settle(second)


def test_a_claim_with_floors_starts_behind_them_and_still_finds_every_other_lane(db: StoreHarness) -> None:
    lanes = [("a", 0), ("b", 0), ("b", 1), ("c", 0), ("d", 0)]
    sent = {lane: [db.send(queue=lane[0], priority=lane[1]) for _ in range(3)] for lane in lanes}

    def place(lane: tuple[str, int], n: int) -> claims.ClaimPlace:
        return db.row(sent[lane][n], "enqueued_at"), sent[lane][n]

    serial = db.send(queue="b", serial="line")
    floors = {("b", 0): place(("b", 0), 0), ("c", 0): place(("c", 0), 2), ("nowhere", 7): place(("a", 0), 0)}
    claimed = db.claim(limit=100, floors=floors)
    expected = {task_id for lane in lanes for task_id in sent[lane]} | {serial}
    expected -= {sent[("b", 0)][0], *sent[("c", 0)]}
    assert {task.id for task in claimed} == expected
    assert [task.id for task in claimed if task.in_line] == [serial]
    assert {task.id for task in db.claim(limit=100)} == {sent[("b", 0)][0], *sent[("c", 0)]}


def test_a_floor_divides_tasks_of_the_same_moment_by_their_ids(db: StoreHarness) -> None:
    many = [tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}") for _ in range(9)]
    db.run(tasks.insert_tasks(many, channel=db.target.channel))
    first = db.claim(limit=4)
    assert len({task.enqueued_at for task in first}) == 1
    floors = {("default", 0): (first[-1].enqueued_at, first[-1].id)}
    rest = db.claim(limit=100, floors=floors)
    assert [task.id.int for task in (*first, *rest)] == sorted(task.id.int for task in many)


def test_complete_attempts_writes_the_same_rows_as_settle_attempts(db: StoreHarness) -> None:
    """Both statements record a success; complete_attempts is the cheaper one."""
    settled, completed = db.running(), db.running()
    for one in (settled, completed):
        db.cancel(one.id)  # a success that happened is never hidden
    assert db.settle(settled, result=b'{"a": [1]}') == "COMPLETED"
    assert db.complete(completed, result=b'{"a": [1]}') == {completed.claim_id}
    own = {"id", "task_id", "claim_id"} | {
        "sent_at",
        "enqueued_at",
        "claimed_at",
        "started_at",
        "completed_at",
        "ended_at",
        "cancel_requested_at",
    }
    rows = [db.record("tasks", "id", one.id) for one in (settled, completed)]
    attempts = [db.record("attempts", "task_id", one.id) for one in (settled, completed)]
    for one, other in (rows, attempts):
        assert {name: one[name] for name in one.keys() - own} == {
            name: other[name] for name in one.keys() - own
        }
        assert {name for name in own & one.keys() if one[name] is None} == {
            name for name in own & one.keys() if other[name] is None
        }
    assert attempts[1]["claim_id"] == str(completed.claim_id)
    assert rows[1]["state"] == "COMPLETED"


def test_a_completion_of_many_tasks_changes_only_those_that_are_still_held(db: StoreHarness) -> None:
    first, second, third = db.running(), db.running(), db.running()
    stale = msgspec.structs.replace(second, claim_id=uuid4())
    assert db.complete(third, stale, first) == {first.claim_id, third.claim_id}
    assert db.row(second.id, "state") == "RUNNING"
    assert db.complete(first, second, third) == {second.claim_id}
    assert db.settle(first) == "already"
    assert len(db.table("attempts")) == 3


def test_complete_attempts_ignores_a_task_that_has_not_started(db: StoreHarness) -> None:
    db.send()
    (claimed,) = db.claim()
    assert db.complete(claimed) == set()
    assert db.row(claimed.id, "state") == "CLAIMED"


def test_a_completion_notifies_waiters_and_the_queue_of_the_next_task_in_the_line(db: StoreHarness) -> None:
    with db.target.connect("listener") as listener:
        listener.execute(f'listen "{db.target.channel}"'.encode())
        first = db.running()
        db.complete(first)
        assert f"d:{first.id}" in {each.payload for each in listener.notifies(timeout=5, stop_after=2)}
        serial = db.running(serial="line")
        db.complete(serial)
        heard = [each.payload for each in listener.notifies(timeout=5, stop_after=3)]
        assert "t:default" in heard[1:]


def test_a_release_keeps_the_place_of_the_task_and_costs_no_attempt(db: StoreHarness) -> None:
    task_id = db.send()
    db.send()
    before = db.row(task_id, "enqueued_at")
    claimed = db.claim()
    assert (
        db.run(leases.release([(one.id, one.claim_id) for one in claimed], channel=db.target.channel)) != []
    )
    assert db.row(task_id, "state, enqueued_at, retry_count, attempt, claimed_by_worker_id") == (
        "PENDING",
        before,
        0,
        0,
        None,
    )
    assert db.claim(limit=1)[0].id == task_id


def test_a_released_running_task_is_not_charged_a_retry(db: StoreHarness) -> None:
    claimed = db.running()
    assert db.settle(claimed, "RELEASED") == "PENDING"
    assert db.row(claimed.id, "retry_count, next_retry_at") == (0, None)
    (again,) = db.claim()
    assert again.fence == claimed.fence + 1


class TestCancel:
    def test_a_cancel_ends_pending_and_claimed_tasks_at_once(self, db: StoreHarness) -> None:  # B11
        db.send()
        (claimed,) = db.claim()
        pending = db.send()
        assert db.cancel(pending) == "CANCELLED"
        assert db.cancel(claimed.id) == "CANCELLED"
        assert db.start(claimed) == ["lost"]

    def test_a_running_task_with_a_requested_cancel_ends_cancelled_at_its_next_failure(
        self, db: StoreHarness
    ) -> None:  # B11
        claimed = db.running()
        assert db.cancel(claimed.id) == "REQUESTED"
        assert db.run(leases.check_leases([(claimed.id, claimed.claim_id)])) == [
            (claimed.id, claimed.claim_id, "cancel")
        ]
        assert db.settle(claimed, "FAILED", error=b'{"code": "X"}', retry_in_ms=0) == "CANCELLED"
        assert db.row(claimed.id, "retry_count, cancelled_at is not null") == (0, True)

    def test_a_requested_cancel_does_not_hide_a_success(self, db: StoreHarness) -> None:
        claimed = db.running()
        db.cancel(claimed.id)
        assert db.settle(claimed, result=b"1") == "COMPLETED"
        assert db.cancel(claimed.id) == "COMPLETED"

    def test_a_cancel_of_an_unknown_task_returns_none(self, db: StoreHarness) -> None:
        assert db.run(tasks.cancel(uuid4(), channel=db.target.channel, call=uuid4())) is None


def test_an_operator_retry_runs_the_task_again_with_fresh_retries(db: StoreHarness) -> None:
    claimed = db.running()
    db.settle(claimed, "FAILED", error=b'{"code": "X"}')
    assert db.run(tasks.retry(claimed.id, channel=db.target.channel, call=uuid4())) == tasks.RetryVerdict(
        None, TaskState.FAILED, retried=True, other=None
    )
    assert db.run(tasks.retry(claimed.id, channel=db.target.channel, call=uuid4())) == tasks.RetryVerdict(
        None, TaskState.PENDING, retried=False, other=None
    )
    (again,) = db.claim()
    db.start(again)
    assert db.settle(again) == "COMPLETED"
    assert db.table("attempts", "attempt, outcome") == [(1, "FAILED"), (2, "COMPLETED")]


def test_a_key_of_a_live_task_prevents_an_operator_retry_and_the_reply_names_that_task(
    db: StoreHarness,
) -> None:  # B11
    ended = db.send(key="k")
    db.cancel(ended)
    live = db.send(key="k")

    def retried() -> object:
        return db.run(tasks.retry(ended, channel=db.target.channel, call=uuid4()))

    assert retried() == tasks.RetryVerdict(None, TaskState.CANCELLED, retried=False, other=live)
    db.cancel(live)
    assert retried() == tasks.RetryVerdict(None, TaskState.CANCELLED, retried=True, other=None)


def test_a_repeated_cancel_returns_the_same_and_does_not_cancel_a_retried_task(db: StoreHarness) -> None:
    task_id, call = db.send(), uuid4()
    cancel = tasks.cancel(task_id, channel=db.target.channel, call=call)
    first, second = db.run(cancel), db.run(cancel)
    assert first is not None
    assert second is not None
    assert (first[2], second[2]) == (True, True)
    assert db.run(tasks.cancel(task_id, channel=db.target.channel, call=uuid4())) == (
        "CANCELLED",
        TaskState.CANCELLED,
        False,
    )
    db.run(tasks.retry(task_id, channel=db.target.channel, call=uuid4()))
    db.run(cancel)
    assert db.row(task_id, "state") == "PENDING", "a repeated call does not cancel what was retried since"


def test_a_repeated_operator_retry_does_not_run_the_task_twice(db: StoreHarness) -> None:
    running = db.running()
    db.settle(running, "FAILED", error=b'{"code": "X", "message": "failed"}')
    retry = tasks.retry(running.id, channel=db.target.channel, call=uuid4())
    db.run(retry)
    (again,) = db.claim()
    db.start(again)
    db.settle(again, "FAILED", error=b'{"code": "X", "message": "failed again"}')
    assert db.run(retry) == tasks.RetryVerdict(None, TaskState.FAILED, retried=True, other=None)
    assert db.row(running.id, "state") == "FAILED"


def test_a_repeated_pause_is_not_reported_as_already_paused(db: StoreHarness) -> None:
    def paused(call: UUID) -> bool:
        found = db.run(tasks.pause("task", "work", paused_by="operator", reason=None, call=call))
        assert found is not None
        return found.already_paused

    call = uuid4()
    assert (paused(call), paused(call), paused(uuid4())) == (False, False, True)


def test_a_repeated_resume_keeps_a_later_pause(db: StoreHarness) -> None:
    def pause() -> Pause:
        found = db.run(tasks.pause("task", "work", paused_by="operator", reason=None, call=uuid4()))
        assert found is not None
        return found

    first = pause()
    db.run(tasks.resume(first, channel=db.target.channel))
    later = pause()
    db.run(tasks.resume(first, channel=db.target.channel))
    assert db.run(tasks.pauses()) == [later]


def test_a_send_repeated_after_a_lost_reply_creates_one_task(db: StoreHarness) -> None:
    task = tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")
    for _ in range(2):
        inserted = db.run(tasks.insert_task(task, channel=db.target.channel))
        assert (inserted or db.run(tasks.sent_before(task))) == task.id
    many = [task, tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")]
    assert db.run(tasks.insert_tasks(many, channel=db.target.channel)) == [one.id for one in many]
    assert len(db.table("tasks")) == 2


def test_a_key_admits_one_live_task(db: StoreHarness) -> None:
    first = db.send(key="u42")
    assert db.send(key="u42") == first
    assert db.send(key="u42", name="other") != first
    (claimed,) = db.claim()
    db.start(claimed)
    db.settle(claimed)
    assert db.send(key="u42") != first


def test_hints_about_hundreds_of_tasks_are_split_over_several_notifications(db: StoreHarness) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    for _ in range(450):
        db.send(good_until=past)
    assert len(db.run(expiry.expire(channel=db.target.channel, limit=1_000))) == 450
    for _ in range(450):
        db.send()
    claimed = db.claim(limit=1_000)
    db.connection.execute(
        f"update \"{db.target.schema}\".tasks set good_until = now() where state = 'CLAIMED'"
    )  # type: ignore[arg-type]
    assert set(db.start(*claimed)) == {"expired"}
    for _ in range(450):
        db.send()
    claimed = db.claim(limit=1_000)
    db.start(*claimed)
    settlements = [
        leases.Settlement(id=one.id, claim_id=one.claim_id, outcome="COMPLETED", result=b"1")
        for one in claimed
    ]
    assert set(db.run(leases.settle(settlements, channel=db.target.channel)).values()) == {"COMPLETED"}


def test_an_old_claim_gains_nothing_from_its_successor_in_the_same_statement(db: StoreHarness) -> None:
    """The task is cancelled, retried by an operator and claimed again by a worker that has not heard of the cancel yet."""
    task_id = db.send()
    (old,) = db.claim()
    db.cancel(task_id)
    db.run(tasks.retry(task_id, channel=db.target.channel, call=uuid4()))
    (new,) = db.claim()
    assert db.start(old, new) == ["lost", "started"]
    batch = [
        leases.Settlement(id=task_id, claim_id=one.claim_id, outcome="COMPLETED", result=b"1")
        for one in (old, new)
    ]
    assert db.run(leases.settle(batch, channel=db.target.channel)) == {
        old.claim_id: "lost",
        new.claim_id: "COMPLETED",
    }


def test_two_batches_with_the_same_keys_in_opposite_order_do_not_deadlock(db: StoreHarness) -> None:  # I27
    def batch(order: int) -> None:
        database = Database(db.target)
        for turn in range(15):
            keys = [f"{turn}-{number}" for number in range(300)][::order]
            new = [
                tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}", key=key)
                for key in keys
            ]
            database.run(tasks.insert_tasks(new, channel=db.target.channel))
        database.close()

    with psycopg.connect(db.target.url, autocommit=True) as connection:
        before = deadlocks(connection)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(batch, (1, -1)))
        connection.execute("select pg_stat_clear_snapshot()")
        assert deadlocks(connection) == before
    assert len(db.table("tasks")) == 15 * 300


def test_a_large_result_full_of_quotes_is_stored_within_seconds(db: StoreHarness) -> None:
    """Quoted again as an element of an array literal, such a result took minutes and exceeded every timeout."""
    claimed = db.running()
    began = time.monotonic()
    assert db.settle(claimed, result=b'"' + b'\\"' * 10_000_000 + b'"') == "COMPLETED"
    took = time.monotonic() - began
    print(f"20 MB of quotes: {took:.1f} s")
    assert took < 10


def test_large_arguments_full_of_quotes_are_sent_within_seconds(db: StoreHarness) -> None:  # B13
    args = b'{"text": "' + b'\\"' * 5_000_000 + b'"}'
    new = [tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=args) for _ in range(2)]
    began = time.monotonic()
    assert db.run(tasks.insert_tasks(new, channel=db.target.channel)) == [task.id for task in new]
    took = time.monotonic() - began
    print(f"two arguments of 10 MB of quotes: {took:.1f} s")
    assert took < 10
