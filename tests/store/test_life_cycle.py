"""Every statement of a task's life, played by hand on a real database; the audit checks each move against the one table."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest

from everbeat.domain.failure import error_from_json
from everbeat.domain.pauses import Pause
from everbeat.domain.policy import StoredPolicy
from everbeat.domain.states import TASK_TERMINAL_STATES, TRANSITIONS, TaskState
from everbeat.store import leases, pauses, tasks
from everbeat.store.database import Database
from everbeat.store.statement import source
from everbeat.store.stopped import stop_settlement
from tests.invariants import deadlocks
from tests.store.conftest import Hands


def test_there_are_seven_states_and_four_are_terminal() -> None:  # B1
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
def test_the_header_of_every_statement_names_its_moves(statement: str) -> None:  # B1
    header = " ".join(
        line.removeprefix("-- ") for line in source(statement).splitlines() if line.startswith("--")
    )
    for move in TRANSITIONS:
        if move.statement == statement and move.old is not None:
            assert move.old.value in header, (statement, move)
            assert move.new.value in header, (statement, move)


def test_timestamps_follow_each_other(hands: Hands) -> None:  # B2
    task_id = hands.send()
    (claimed,) = hands.claim()
    assert hands.row(
        task_id, "state, claimed_by_worker_id, claimed_at is not null, claim_id is not null"
    ) == ("CLAIMED", "w1", True, True)
    assert hands.start(claimed) == ["started"]
    assert hands.settle(claimed, result=b'{"a": 1}') == "COMPLETED"
    ordered = hands.row(
        task_id,
        "sent_at <= enqueued_at and enqueued_at <= claimed_at and claimed_at <= started_at and started_at <= completed_at",
    )
    assert ordered is True
    assert hands.row(task_id, "result") == {"a": 1}


def test_a_retry_goes_back_to_pending_with_its_claim_cleared(hands: Hands) -> None:  # B4
    claimed = hands.running()
    sent_at = hands.row(claimed.id, "sent_at")
    assert hands.settle(claimed, "FAILED", error=b'{"code": "X"}', retry_in_ms=60_000) == "PENDING"
    row = hands.row(
        claimed.id,
        "sent_at, retry_count, next_retry_at = enqueued_at, claim_id, claimed_at, claimed_by_worker_id, started_at",
    )
    assert row == (sent_at, 1, True, None, None, None, None)
    assert hands.claim() == []


def test_a_retry_that_could_not_start_in_time_is_not_scheduled(hands: Hands) -> None:  # C3
    claimed = hands.running(good_until=datetime.now(UTC) + timedelta(seconds=30))
    assert hands.settle(claimed, "FAILED", error=b"{}", retry_in_ms=60_000) == "FAILED"
    assert hands.table("attempts", "will_retry") == [(False,)]


def test_claims_follow_queue_priority_then_task_priority_then_age(hands: Hands) -> None:  # B6
    late = hands.send(queue="low", priority=-5)
    urgent = [
        hands.send(queue="high", priority=3),
        hands.send(queue="high", priority=1),
        hands.send(queue="high", priority=1),
    ]
    plain = [hands.send(), hands.send()]
    order = [
        one.id
        for _ in range(6)
        for one in hands.claim(limit=1, queue_priorities={"high": 1, "low": 100, "default": 50})
    ]
    assert order == [urgent[1], urgent[2], urgent[0], *plain, late]


def test_between_queues_of_equal_priority_the_one_that_waited_longest_is_first(hands: Hands) -> None:
    sent = [hands.send(queue=queue) for queue in ("b", "a", "b", "a")]
    assert [one.id for _ in range(4) for one in hands.claim(limit=1)] == sent


def test_a_claim_takes_only_names_and_queues_it_asks_for(hands: Hands) -> None:
    hands.send(name="unknown")
    mine = hands.send(queue="mine")
    hands.send(queue="other")
    assert [one.id for one in hands.claim(queues=["mine"])] == [mine]


def test_a_repeated_claim_answers_the_same(hands: Hands) -> None:
    hands.send()
    hands.send()
    call = uuid4()
    first = hands.claim(limit=1, call=call)
    assert hands.claim(limit=1, call=call) == first
    assert len(hands.claim()) == 1


def test_scheduled_tasks_are_not_claimed_and_next_due_tells_when(hands: Hands) -> None:
    hands.send(delay_ms=90_000)
    hands.send(delay_ms=30_000, priority=5)
    assert hands.claim() == []
    due = hands.run(leases.next_due(names=["work"], queues=None)).due_in_ms
    assert due is not None
    assert 20_000 < due <= 30_000


def test_only_the_holder_can_start_and_a_repeated_start_answers_the_same(hands: Hands) -> None:
    hands.send()
    (claimed,) = hands.claim()
    stranger = leases.Claimed(
        **{field: getattr(claimed, field) for field in claimed.__slots__} | {"claim_id": uuid4()}
    )
    assert hands.start(stranger) == ["lost"]
    assert hands.start(claimed) == ["started"]
    assert hands.start(claimed) == ["started"]
    assert hands.row(claimed.id, "attempt") == 1


def test_a_task_whose_deadline_passes_while_claimed_never_starts(hands: Hands) -> None:  # C2
    task_id = hands.send(good_until=datetime.now(UTC) + timedelta(hours=1))
    (claimed,) = hands.claim()
    hands.connection.execute(
        f"update \"{hands.target.schema}\".tasks set good_until = now() - interval '1 s'"
    )  # type: ignore[arg-type]
    assert hands.start(claimed) == ["expired"]
    assert hands.row(task_id, "state, error ->> 'code', expired_at is not null") == (
        "EXPIRED",
        "TASK_EXPIRED",
        True,
    )
    assert hands.table("attempts") == []
    assert hands.settle(claimed) == "lost"


def test_a_late_pending_task_is_not_claimed_and_expires(hands: Hands) -> None:  # C1
    task_id = hands.send(good_until=datetime.now(UTC) - timedelta(seconds=1))
    assert hands.claim() == []
    assert hands.run(tasks.expire(channel=hands.target.channel)) == [task_id]
    assert hands.row(task_id, "state, error ->> 'code'") == ("EXPIRED", "TASK_EXPIRED")
    assert hands.table("attempts") == []


def make_late(hands: Hands) -> None:
    late = "update {schema}.tasks set good_until = statement_timestamp() where good_until is not null"
    hands.connection.execute(hands.plain(late))


def test_a_stop_that_hands_begun_code_back_does_not_cost_the_task_its_second_run(hands: Hands) -> None:  # J1
    soon = datetime.now(UTC) + timedelta(minutes=1)
    begun, unbegun = hands.running(good_until=soon), hands.running(good_until=soon)
    again = StoredPolicy(on_crash="retry")
    stop = stop_settlement(begun.id, begun.claim_id, policy=again)
    channel = hands.target.channel
    assert hands.run(leases.settle([stop], channel=channel)) == {begun.claim_id: "PENDING"}
    assert hands.run(leases.settle([stop], channel=channel)) == {begun.claim_id: "already"}
    assert hands.settle(unbegun, "RELEASED") == "PENDING"
    make_late(hands)
    assert hands.run(tasks.expire(channel=channel)) == [unbegun.id], "its code never ran"
    assert [claimed.id for claimed in hands.claim()] == [begun.id]
    assert hands.table("attempts", "outcome, will_retry") == [("RELEASED", True)] * 2


@pytest.mark.parametrize("is_claimed", [True, False])
def test_a_retry_that_expires_says_what_came_before(hands: Hands, is_claimed: bool) -> None:  # C1
    claimed = hands.running(good_until=datetime.now(UTC) + timedelta(minutes=1))
    error = b'{"code": "SMTP_DOWN", "message": "m"}'
    assert hands.settle(claimed, "FAILED", error=error, retry_in_ms=0) == "PENDING"
    again = hands.claim() if is_claimed else []
    make_late(hands)
    if is_claimed:
        assert hands.start(again[0]) == ["expired"]
    else:
        assert hands.run(tasks.expire(channel=hands.target.channel)) == [claimed.id]
    state, stored = hands.row(claimed.id, "state, error::text")
    found = error_from_json(stored)
    assert (state, found.code) == ("EXPIRED", "TASK_EXPIRED")
    assert found.message.endswith("before the task started again, after attempt 1")
    assert found.data == {"last_error": {"code": "SMTP_DOWN", "message": "m"}}


def test_a_repeated_settle_answers_already_and_another_outcome_is_lost(hands: Hands) -> None:
    claimed = hands.running()
    assert hands.settle(claimed, result=b"1") == "COMPLETED"
    assert hands.settle(claimed, result=b"1") == "already"
    assert hands.settle(claimed, "FAILED", error=b"{}") == "lost"
    assert hands.row(claimed.id, "result") == 1


def test_a_settle_of_many_changes_only_what_is_still_held(hands: Hands) -> None:
    first, second = hands.running(), hands.running()
    batch = [
        leases.Settlement(id=first.id, claim_id=first.claim_id, outcome="COMPLETED", result=b"1"),
        leases.Settlement(id=second.id, claim_id=uuid4(), outcome="COMPLETED", result=b"2"),
    ]
    assert hands.run(leases.settle(batch, channel=hands.target.channel)) == {
        first.claim_id: "COMPLETED",
        batch[1].claim_id: "lost",
    }
    assert hands.row(second.id, "state") == "RUNNING"
    hands.settle(second)


def test_a_claim_with_floors_looks_behind_them_and_finds_every_other_lane(hands: Hands) -> None:
    lanes = [("a", 0), ("b", 0), ("b", 1), ("c", 0), ("d", 0)]
    sent = {lane: [hands.send(queue=lane[0], priority=lane[1]) for _ in range(3)] for lane in lanes}

    def place(lane: tuple[str, int], n: int) -> leases.Place:
        return hands.row(sent[lane][n], "enqueued_at"), sent[lane][n]

    serial = hands.send(queue="b", serial="line")
    floors = {("b", 0): place(("b", 0), 0), ("c", 0): place(("c", 0), 2), ("nowhere", 7): place(("a", 0), 0)}
    claimed = hands.claim(limit=100, floors=floors)
    expected = {task_id for lane in lanes for task_id in sent[lane]} | {serial}
    expected -= {sent[("b", 0)][0], *sent[("c", 0)]}
    assert {task.id for task in claimed} == expected
    assert [task.id for task in claimed if task.in_line] == [serial]
    assert {task.id for task in hands.claim(limit=100)} == {sent[("b", 0)][0], *sent[("c", 0)]}


def test_a_floor_divides_tasks_of_the_same_moment(hands: Hands) -> None:
    many = [tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}") for _ in range(9)]
    hands.run(tasks.insert_tasks(many, channel=hands.target.channel))
    first = hands.claim(limit=4)
    assert len({task.enqueued_at for task in first}) == 1
    floors = {("default", 0): (first[-1].enqueued_at, first[-1].id)}
    rest = hands.claim(limit=100, floors=floors)
    assert [task.id.int for task in (*first, *rest)] == sorted(task.id.int for task in many)


def test_a_completion_leaves_what_a_settle_leaves(hands: Hands) -> None:
    """The cheaper statement of the two that say so."""
    settled, completed = hands.running(), hands.running()
    for one in (settled, completed):
        hands.cancel(one.id)  # a success that happened is never hidden
    assert hands.settle(settled, result=b'{"a": [1]}') == "COMPLETED"
    assert hands.complete(completed, result=b'{"a": [1]}') == {completed.claim_id}
    own = {"id", "task_id", "claim_id"} | {
        "sent_at",
        "enqueued_at",
        "claimed_at",
        "started_at",
        "completed_at",
        "ended_at",
        "cancel_requested_at",
    }
    rows = [hands.record("tasks", "id", one.id) for one in (settled, completed)]
    attempts = [hands.record("attempts", "task_id", one.id) for one in (settled, completed)]
    for one, other in (rows, attempts):
        assert {name: one[name] for name in one.keys() - own} == {
            name: other[name] for name in one.keys() - own
        }
        assert {name for name in own & one.keys() if one[name] is None} == {
            name for name in own & one.keys() if other[name] is None
        }
    assert attempts[1]["claim_id"] == str(completed.claim_id)
    assert rows[1]["state"] == "COMPLETED"


def test_a_completion_of_many_changes_only_what_is_still_held(hands: Hands) -> None:
    first, second, third = hands.running(), hands.running(), hands.running()
    stale = msgspec.structs.replace(second, claim_id=uuid4())
    assert hands.complete(third, stale, first) == {first.claim_id, third.claim_id}
    assert hands.row(second.id, "state") == "RUNNING"
    assert hands.complete(first, second, third) == {second.claim_id}
    assert hands.settle(first) == "already"
    assert len(hands.table("attempts")) == 3


def test_only_what_has_started_is_completed(hands: Hands) -> None:
    hands.send()
    (claimed,) = hands.claim()
    assert hands.complete(claimed) == set()
    assert hands.row(claimed.id, "state") == "CLAIMED"


def test_a_completion_tells_whoever_waits_and_lets_the_line_go_on(hands: Hands) -> None:
    with hands.target.connect("listener") as listener:
        listener.execute(f'listen "{hands.target.channel}"'.encode())
        first = hands.running()
        hands.complete(first)
        assert f"d:{first.id}" in {each.payload for each in listener.notifies(timeout=5, stop_after=2)}
        serial = hands.running(serial="line")
        hands.complete(serial)
        heard = [each.payload for each in listener.notifies(timeout=5, stop_after=3)]
        assert "t:default" in heard[1:]


def test_a_release_costs_nothing_and_keeps_the_place(hands: Hands) -> None:
    task_id = hands.send()
    hands.send()
    before = hands.row(task_id, "enqueued_at")
    claimed = hands.claim()
    assert (
        hands.run(leases.release([(one.id, one.claim_id) for one in claimed], channel=hands.target.channel))
        != []
    )
    assert hands.row(task_id, "state, enqueued_at, retry_count, attempt, claimed_by_worker_id") == (
        "PENDING",
        before,
        0,
        0,
        None,
    )
    assert hands.claim(limit=1)[0].id == task_id


def test_a_running_task_handed_back_is_not_charged(hands: Hands) -> None:
    claimed = hands.running()
    assert hands.settle(claimed, "RELEASED") == "PENDING"
    assert hands.row(claimed.id, "retry_count, next_retry_at") == (0, None)
    (again,) = hands.claim()
    assert again.fence == claimed.fence + 1


class TestCancel:
    def test_pending_and_claimed_end_at_once(self, hands: Hands) -> None:  # B11
        hands.send()
        (claimed,) = hands.claim()
        pending = hands.send()
        assert hands.cancel(pending) == "CANCELLED"
        assert hands.cancel(claimed.id) == "CANCELLED"
        assert hands.start(claimed) == ["lost"]

    def test_running_is_asked_and_a_failure_afterwards_ends_cancelled_without_a_retry(
        self, hands: Hands
    ) -> None:  # B11
        claimed = hands.running()
        assert hands.cancel(claimed.id) == "REQUESTED"
        assert hands.run(leases.check_leases([(claimed.id, claimed.claim_id)])) == [
            (claimed.id, claimed.claim_id, "cancel")
        ]
        assert hands.settle(claimed, "FAILED", error=b'{"code": "X"}', retry_in_ms=0) == "CANCELLED"
        assert hands.row(claimed.id, "retry_count, cancelled_at is not null") == (0, True)

    def test_a_success_that_happened_is_not_hidden(self, hands: Hands) -> None:
        claimed = hands.running()
        hands.cancel(claimed.id)
        assert hands.settle(claimed, result=b"1") == "COMPLETED"
        assert hands.cancel(claimed.id) == "COMPLETED"

    def test_an_unknown_task_is_said_to_be_unknown(self, hands: Hands) -> None:
        assert hands.run(tasks.cancel(uuid4(), channel=hands.target.channel, call=uuid4())) is None


def test_an_operators_retry_runs_again_with_fresh_budgets(hands: Hands) -> None:
    claimed = hands.running()
    hands.settle(claimed, "FAILED", error=b'{"code": "X"}')
    assert hands.run(tasks.retry(claimed.id, channel=hands.target.channel, call=uuid4())) == (
        None,
        TaskState.FAILED,
        True,
        None,
    )
    assert hands.run(tasks.retry(claimed.id, channel=hands.target.channel, call=uuid4())) == (
        None,
        TaskState.PENDING,
        False,
        None,
    )
    (again,) = hands.claim()
    hands.start(again)
    assert hands.settle(again) == "COMPLETED"
    assert hands.table("attempts", "attempt, outcome") == [(1, "FAILED"), (2, "COMPLETED")]


def test_a_key_that_a_live_task_has_prevents_the_retry_and_the_answer_names_that_task(
    hands: Hands,
) -> None:  # B11
    ended = hands.send(key="k")
    hands.cancel(ended)
    live = hands.send(key="k")

    def retried() -> object:
        return hands.run(tasks.retry(ended, channel=hands.target.channel, call=uuid4()))

    assert retried() == (None, TaskState.CANCELLED, False, live)
    hands.cancel(live)
    assert retried() == (None, TaskState.CANCELLED, True, None)


def test_a_repeated_cancel_answers_the_same_and_another_one_does_not(hands: Hands) -> None:
    task_id, call = hands.send(), uuid4()
    cancel = tasks.cancel(task_id, channel=hands.target.channel, call=call)
    first, second = hands.run(cancel), hands.run(cancel)
    assert first is not None
    assert second is not None
    assert (first[2], second[2]) == (True, True)
    assert hands.run(tasks.cancel(task_id, channel=hands.target.channel, call=uuid4())) == (
        "CANCELLED",
        TaskState.CANCELLED,
        False,
    )
    hands.run(tasks.retry(task_id, channel=hands.target.channel, call=uuid4()))
    hands.run(cancel)
    assert hands.row(task_id, "state") == "PENDING", "a repeated call does not cancel what was retried since"


def test_a_repeated_retry_does_not_run_again_what_it_has_run(hands: Hands) -> None:
    running = hands.running()
    hands.settle(running, "FAILED", error=b'{"code": "X", "message": "failed"}')
    retry = tasks.retry(running.id, channel=hands.target.channel, call=uuid4())
    hands.run(retry)
    (again,) = hands.claim()
    hands.start(again)
    hands.settle(again, "FAILED", error=b'{"code": "X", "message": "failed again"}')
    assert hands.run(retry) == (None, TaskState.FAILED, True, None)
    assert hands.row(running.id, "state") == "FAILED"


def test_a_repeated_pause_is_the_callers_own(hands: Hands) -> None:
    def paused(call: UUID) -> bool:
        found = hands.run(pauses.pause("task", "work", paused_by="operator", reason=None, call=call))
        assert found is not None
        return found.already_paused

    call = uuid4()
    assert (paused(call), paused(call), paused(uuid4())) == (False, False, True)


def test_a_repeated_resume_leaves_a_later_pause_alone(hands: Hands) -> None:
    def pause() -> Pause:
        found = hands.run(pauses.pause("task", "work", paused_by="operator", reason=None, call=uuid4()))
        assert found is not None
        return found

    first = pause()
    hands.run(pauses.resume(first, channel=hands.target.channel))
    later = pause()
    hands.run(pauses.resume(first, channel=hands.target.channel))
    assert hands.run(pauses.pauses()) == [later]


def test_a_send_repeated_after_a_lost_reply_makes_one_task(hands: Hands) -> None:
    task = tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")
    for _ in range(2):
        inserted = hands.run(tasks.insert_task(task, channel=hands.target.channel))
        assert (inserted or hands.run(tasks.sent_before(task))) == task.id
    many = [task, tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")]
    assert hands.run(tasks.insert_tasks(many, channel=hands.target.channel)) == [one.id for one in many]
    assert len(hands.table("tasks")) == 2


def test_a_key_admits_one_live_task(hands: Hands) -> None:
    first = hands.send(key="u42")
    assert hands.send(key="u42") == first
    assert hands.send(key="u42", name="other") != first
    (claimed,) = hands.claim()
    hands.start(claimed)
    hands.settle(claimed)
    assert hands.send(key="u42") != first


def test_hints_about_more_tasks_than_one_payload_holds_are_split(hands: Hands) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    for _ in range(450):
        hands.send(good_until=past)
    assert len(hands.run(tasks.expire(channel=hands.target.channel, limit=1_000))) == 450
    for _ in range(450):
        hands.send()
    claimed = hands.claim(limit=1_000)
    hands.connection.execute(
        f"update \"{hands.target.schema}\".tasks set good_until = now() where state = 'CLAIMED'"
    )  # type: ignore[arg-type]
    assert set(hands.start(*claimed)) == {"expired"}
    for _ in range(450):
        hands.send()
    claimed = hands.claim(limit=1_000)
    hands.start(*claimed)
    settlements = [
        leases.Settlement(id=one.id, claim_id=one.claim_id, outcome="COMPLETED", result=b"1")
        for one in claimed
    ]
    assert set(hands.run(leases.settle(settlements, channel=hands.target.channel)).values()) == {"COMPLETED"}


def test_an_old_claim_gains_nothing_from_its_successor_in_the_same_statement(hands: Hands) -> None:
    """Cancelled, retried by an operator and claimed again by the same worker, which has not heard of the cancel yet."""
    task_id = hands.send()
    (old,) = hands.claim()
    hands.cancel(task_id)
    hands.run(tasks.retry(task_id, channel=hands.target.channel, call=uuid4()))
    (new,) = hands.claim()
    assert hands.start(old, new) == ["lost", "started"]
    batch = [
        leases.Settlement(id=task_id, claim_id=one.claim_id, outcome="COMPLETED", result=b"1")
        for one in (old, new)
    ]
    assert hands.run(leases.settle(batch, channel=hands.target.channel)) == {
        old.claim_id: "lost",
        new.claim_id: "COMPLETED",
    }


def test_two_batches_with_the_same_keys_in_opposite_order_do_not_deadlock(hands: Hands) -> None:  # I27
    def batch(order: int) -> None:
        database = Database(hands.target)
        for turn in range(15):
            keys = [f"{turn}-{number}" for number in range(300)][::order]
            new = [
                tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}", key=key)
                for key in keys
            ]
            database.run(tasks.insert_tasks(new, channel=hands.target.channel))
        database.close()

    with psycopg.connect(hands.target.url, autocommit=True) as connection:
        before = deadlocks(connection)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(batch, (1, -1)))
        connection.execute("select pg_stat_clear_snapshot()")
        assert deadlocks(connection) == before
    assert len(hands.table("tasks")) == 15 * 300


def test_a_large_result_full_of_quotes_is_stored_as_fast_as_any(hands: Hands) -> None:
    """Quoted once more, as an element of an array's text, it took minutes, beyond every timeout, again and again."""
    claimed = hands.running()
    began = time.monotonic()
    assert hands.settle(claimed, result=b'"' + b'\\"' * 10_000_000 + b'"') == "COMPLETED"
    took = time.monotonic() - began
    print(f"20 MB of quotes: {took:.1f} s")
    assert took < 10


def test_many_large_arguments_full_of_quotes_are_sent_as_fast_as_any(hands: Hands) -> None:  # B13
    args = b'{"text": "' + b'\\"' * 5_000_000 + b'"}'
    new = [tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=args) for _ in range(2)]
    began = time.monotonic()
    assert hands.run(tasks.insert_tasks(new, channel=hands.target.channel)) == [task.id for task in new]
    took = time.monotonic() - began
    print(f"two arguments of 10 MB of quotes: {took:.1f} s")
    assert took < 10
