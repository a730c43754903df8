"""Tasks that a worker does not understand: handed back with a mark at no cost, and claimed only by whoever understands the mark."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.store import leases, tasks
from everbeat.store.declining import BEGINNING, decline, marked
from everbeat.store.leases import Claimed, MarkedGroup
from everbeat.store.suspects import suspects_wait
from tests.store.conftest import Hands

DEFAULTS = StoredPolicy(max_retries=3)
OF_WORKER = b'{"work":' + (DEFAULTS.default_json() or b"") + b"}"


def declined(hands: Hands, *claimed: Claimed) -> list[str | None]:
    """What the decline of each answered; None where it did not hold its task."""
    asked = [(one.id, one.claim_id) for one in claimed]
    answers = hands.run(decline(asked, channel=hands.target.channel))
    return [answers.get(one.claim_id) for one in claimed]


def groups(hands: Hands, most: int = 100) -> list[MarkedGroup]:
    """All marked groups, page by page."""
    found: list[MarkedGroup] = []
    after = BEGINNING
    for _ in range(100):
        page = hands.run(marked(after, most=most))
        found += page.groups
        if page.after is None:
            return found
        after = page.after
    raise AssertionError("the listing has no end")


def mark(hands: Hands, args: bytes = b'{"b": 1, "a": 2}', **options: Any) -> UUID:
    """A task that another worker has declined."""
    sent = hands.send(args=args, **options)
    (claimed,) = hands.claim("w2", limit=1, starts=1, names=[options.get("name", "work")])
    assert claimed.id == sent
    assert declined(hands, claimed) == ["PENDING"]
    return sent


def begun(hands: Hands, args: bytes = b'{"b": 1, "a": 2}', **options: Any) -> Claimed:
    """A task whose code is about to run, by a claim that began it under the policy of the worker."""
    hands.send(args=args, **options)
    (claimed,) = hands.claim(limit=1, starts=1, policies=OF_WORKER)
    return claimed


def test_a_declined_task_waits_where_it_was_with_a_mark_and_at_no_cost(hands: Hands) -> None:  # J2
    claimed = begun(hands)
    before = hands.record("tasks", "id", claimed.id)
    assert (before["state"], before["attempt"], before["policy"]["max_retries"]) == ("RUNNING", 1, 3)
    assert declined(hands, claimed) == ["PENDING"]
    after = hands.record("tasks", "id", claimed.id)
    assert after["needs"] == {"arguments": ["a", "b"]}
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {
        "state", "needs", "needs_id", "attempt", "policy", "claim_id", "claim_call", "claimed_at", "claimed_by_worker_id", "started_at",
    }  # fmt: skip
    assert after["attempt"] == 0
    assert {after[key] for key in changed - {"state", "needs", "needs_id", "attempt"}} == {None}
    assert hands.table("attempts") == []


def test_a_task_that_was_only_claimed_is_declined_alike(hands: Hands) -> None:  # J2
    hands.send(args=b'{"a": 1}')
    (claimed,) = hands.claim()
    assert declined(hands, claimed) == ["PENDING"]
    assert hands.row(claimed.id, "state, attempt, needs") == ("PENDING", 0, {"arguments": ["a"]})


def test_only_the_holder_declines_and_a_repeated_decline_changes_nothing(hands: Hands) -> None:  # J2
    claimed = begun(hands)
    zombie = Claimed(*[getattr(claimed, name) for name in Claimed.__struct_fields__])
    assert hands.run(decline([(zombie.id, uuid4())], channel="c")) == {}
    assert hands.row(claimed.id, "state") == "RUNNING"
    assert declined(hands, claimed) == ["PENDING"]
    once = hands.record("tasks", "id", claimed.id)
    assert declined(hands, claimed) == [None]
    assert hands.record("tasks", "id", claimed.id) == once


def test_a_cancel_that_was_requested_cancels_a_declined_task(hands: Hands) -> None:  # J2
    claimed = begun(hands)
    assert hands.cancel(claimed.id) == "REQUESTED"
    assert declined(hands, claimed) == ["CANCELLED"]
    row = hands.row(
        claimed.id, "state, attempt, error ->> 'code', cancelled_at is not null, needs_id, claim_id"
    )
    assert row == ("CANCELLED", 0, "TASK_CANCELLED", True, None, None)
    assert hands.table("attempts") == []


def test_a_policy_that_the_sender_gave_is_kept_and_the_workers_own_is_taken_back(hands: Hands) -> None:  # J2
    given = begun(hands, policy=b'{"max_retries":3}')
    own = begun(hands)
    assert declined(hands, given, own) == ["PENDING", "PENDING"]
    assert hands.row(given.id, "policy") == {"max_retries": 3}
    assert hands.row(own.id, "policy") is None


def test_a_policy_that_an_earlier_attempt_ran_under_is_kept(hands: Hands) -> None:  # J2
    first = begun(hands)
    assert hands.settle(first, "FAILED", error=b"{}", retry_in_ms=0) == "PENDING"
    (second,) = hands.claim(limit=1, starts=1, policies=OF_WORKER)
    assert declined(hands, second) == ["PENDING"]
    assert hands.row(first.id, "attempt, retry_count, policy ->> 'max_retries'") == (1, 1, "3")
    assert hands.table("attempts", "attempt, outcome") == [(1, "FAILED")]


def test_finished_parts_of_the_work_and_a_suspicion_outlive_a_decline(hands: Hands) -> None:  # J2
    claimed = begun(hands)
    hands.connection.execute(
        hands.plain("update {schema}.tasks set checkpoint = '{{\"done\": 1}}', suspect = true, alone = true")
    )
    assert declined(hands, claimed) == ["PENDING"]
    assert hands.row(claimed.id, "checkpoint, suspect, alone") == ({"done": 1}, True, False)


def test_no_claim_takes_a_marked_task_unless_it_names_its_group(hands: Hands) -> None:  # J2
    sent = mark(hands)
    assert hands.claim() == []
    other = hands.send()
    assert [one.id for one in hands.claim()] == [other]
    (group,) = groups(hands)
    assert (group.name, group.queue, group.priority) == ("work", "default", 0)
    assert json.loads(group.needs) == {"arguments": ["a", "b"]}
    assert hands.claim(marked=[group], names=["other"]) == []
    (claimed,) = hands.claim(marked=[group], starts=1)
    assert (claimed.id, claimed.attempt, claimed.is_marked) == (sent, 1, True)
    assert hands.settle(claimed, result=b"1") == "COMPLETED"


def test_tasks_with_the_same_name_and_argument_names_are_one_group(hands: Hands) -> None:  # J2
    mark(hands, b'{"a": 1, "b": 2}')
    mark(hands, b'{"b": [3], "a": null}')
    mark(hands, b'{"a": 1}')
    mark(hands, b'{"a": 1, "b": 2}', name="other")
    mark(hands, b"{}")
    assert sorted((group.name, json.loads(group.needs)["arguments"]) for group in groups(hands)) == [
        ("other", ["a", "b"]),
        ("work", []),
        ("work", ["a"]),
        ("work", ["a", "b"]),
    ]


@pytest.mark.parametrize("most", [1, 2, 100])
def test_the_pages_of_the_listing_name_each_group_once(hands: Hands, most: int) -> None:  # J2
    for queue in ("Z", "a", "é"):
        for priority in (-1, 1):
            mark(hands, queue=queue, priority=priority)
            mark(hands, b"{}", queue=queue, priority=priority)
    for key in range(3):
        mark(hands, f'{{"k{key}": 1}}'.encode(), serial=f"line:{key}")
    found = groups(hands, most)
    assert len(found) == len({(each.needs_id, each.queue, each.priority) for each in found}) == 15
    assert [each.queue for each in found].count(None) == 3


def test_a_mark_stays_through_retries_recoveries_and_a_task_given_back(hands: Hands) -> None:  # J2
    sent = mark(hands)
    (group,) = groups(hands)

    def taken() -> Claimed:
        assert hands.claim() == []
        (claimed,) = hands.claim(marked=[group], starts=1)
        assert claimed.id == sent
        return claimed

    assert hands.settle(taken(), "FAILED", error=b"{}", retry_in_ms=0) == "PENDING"
    assert hands.settle(taken(), "RELEASED") == "PENDING"
    assert hands.settle(taken(), "SUSPENDED") == "PENDING"
    taken()
    (lease,) = hands.leases()
    assert [one.state for one in hands.recover(lease, "retry")] == ["PENDING"]
    (claimed,) = hands.claim(marked=[group])
    assert hands.run(leases.release([(claimed.id, claimed.claim_id)], channel="c")) == [sent]
    taken()


def test_an_operators_retry_clears_the_mark(hands: Hands) -> None:  # J2
    sent = mark(hands)
    hands.cancel(sent)
    assert hands.row(sent, "state, needs_id is not null") == ("CANCELLED", True)
    hands.run(tasks.retry(sent, channel="c", call=uuid4()))
    assert hands.row(sent, "state, needs, needs_id") == ("PENDING", None, None)
    assert [one.id for one in hands.claim()] == [sent]


def test_marked_tasks_are_served_in_the_same_order_as_others(hands: Hands) -> None:  # J2
    queues = {"high": 1, "low": 100, "default": 50}
    late = hands.send(queue="low", priority=-5)
    urgent = hands.send(queue="high", priority=3)
    first, second = hands.send(), hands.send()
    third = hands.send(args=b'{"other": 1}')
    most_urgent = hands.send(queue="high", priority=1)
    hurried = hands.send(priority=-1)
    taken = {one.id: one for one in hands.claim()}
    plain = [taken.pop(one) for one in (second, most_urgent)]
    assert declined(hands, *taken.values()) == ["PENDING"] * 5
    hands.run(leases.release([(one.id, one.claim_id) for one in plain], channel="c"))
    known = groups(hands)
    order = [one.id for _ in range(7) for one in hands.claim(limit=1, marked=known, queue_priorities=queues)]
    assert order == [most_urgent, urgent, hurried, first, second, third, late]


def test_pauses_and_queues_hold_for_marked_tasks(hands: Hands) -> None:  # J2
    sent = mark(hands, queue="mail")
    known = groups(hands)
    assert hands.claim(marked=known, queues=["default"]) == []
    for kind, name in (("task", "work"), ("queue", "mail")):
        hands.connection.execute(
            hands.plain(
                "insert into {schema}.pauses (kind, name, paused_at, paused_by) values (%s, %s, now(), 'me')"
            ),
            [kind, name],
        )
        assert hands.claim(marked=known) == []
        hands.connection.execute(hands.plain("delete from {schema}.pauses"))
    assert [one.id for one in hands.claim(marked=known, queues=["mail"])] == [sent]


def test_a_group_without_tasks_of_the_names_asked_for_is_passed_over(hands: Hands) -> None:  # J2
    mark(hands, name="other", queue="mail")
    (group,) = groups(hands)
    assert (
        hands.run(leases.next_due(names=["work"], queues=None, marked=[group], margin_ms=60_000)).due_in_ms
        is None
    )
    head = mark(hands, b'{"x": 1}', serial="line", name="other")
    known = groups(hands)
    assert hands.claim(marked=known) == []
    assert hands.claim(marked=known, names=["other"])[-1].id == head


def test_a_marked_task_that_is_late_is_not_claimed(hands: Hands) -> None:  # J2
    sent = mark(hands, good_until=datetime.now(UTC) + timedelta(minutes=1))
    hands.connection.execute(
        hands.plain("update {schema}.tasks set good_until = now() - interval '1 second'")
    )
    assert hands.claim(marked=groups(hands)) == []
    hands.run(tasks.expire(channel="c", limit=10))
    assert hands.row(sent, "state") == "EXPIRED"


def test_a_marked_head_keeps_its_serial_line_in_order(hands: Hands) -> None:  # J2
    head = mark(hands, serial="line")
    behind = hands.send(serial="line", args=b"{}")
    assert hands.claim() == []
    (group,) = groups(hands)
    assert (group.queue, group.priority) == (None, None)
    (claimed,) = hands.claim(marked=[group], starts=10)
    assert claimed.id == head
    assert hands.claim(marked=[group]) == []
    hands.settle(claimed, result=b"1")
    assert [one.id for one in hands.claim()] == [behind]


def test_a_suspect_that_is_marked_is_left_to_whoever_understands_it(hands: Hands) -> None:  # J2
    sent = mark(hands)
    hands.connection.execute(hands.plain("update {schema}.tasks set suspect = true"))
    known = groups(hands)
    for other in ((), known):
        waits = hands.run(suspects_wait(names=["work"], queues=None, marked=other))
        due = hands.run(leases.next_due(names=["work"], queues=None, marked=other)).suspects
        assert [waits, due] == [bool(other)] * 2
    assert hands.claim(marked=known, suspects=False) == []
    assert hands.claim(suspects=True) == []
    assert [one.id for one in hands.claim(marked=known, suspects=True)] == [sent]


def test_next_due_counts_marked_tasks_only_for_whoever_understands_them(hands: Hands) -> None:  # J2
    sent = mark(hands)
    line = mark(hands, b'{"x": 1}', serial="line")
    known = groups(hands)

    def due_in_ms(other: list[MarkedGroup], **more: Any) -> float | None:
        return hands.run(leases.next_due(names=["work"], queues=more.get("queues"), marked=other)).due_in_ms

    later = "update {schema}.tasks set enqueued_at = now() + case when id = %s then %s end"
    minutes = [timedelta(minutes=1), timedelta(minutes=2)]
    for one, delay in zip((sent, line), minutes, strict=True):
        hands.connection.execute(hands.plain(later + " where id = %s"), [one, delay, one])
    assert due_in_ms([]) is None
    assert 50_000 < (due_in_ms(known) or 0) <= 60_000
    assert 110_000 < (due_in_ms([each for each in known if each.queue is None]) or 0) <= 120_000
    assert due_in_ms([each for each in known if each.queue == "default"], queues=["mail"]) is None


def test_most_bytes_bounds_a_claim_of_marked_tasks(hands: Hands) -> None:  # J2
    large = json.dumps({"a": "x" * 1_000}).encode()
    for _ in range(3):
        mark(hands, large)
    call = leases.claim(
        worker_id="w1", claim_call=uuid4(), names=["work"], limit=10, queues=None, queue_priorities={},
        marked=groups(hands), most_bytes=2_100,
    )  # fmt: skip
    assert [one.is_cut for one in hands.run(call)] == [True, True]


def test_a_repeated_claim_of_marked_tasks_answers_the_same(hands: Hands) -> None:  # J2
    mark(hands)
    known, call = groups(hands), uuid4()
    first = hands.claim(marked=known, call=call)
    assert len(first) == 1
    assert hands.claim(call=call) == first


def test_names_that_no_mark_can_hold_leave_the_task_to_its_holder(hands: Hands) -> None:  # J2
    long = begun(hands, json.dumps({"x" * 5_000: 1}).encode())
    many = begun(hands, json.dumps({f"name_{n}": n for n in range(500)}).encode())
    twice = begun(hands, b'{"a": 1, "a": 2}')
    fits = begun(hands, json.dumps({f"name_{n}": n for n in range(250)}).encode())
    assert declined(hands, long, many, twice, fits) == ["unmarkable"] * 3 + ["PENDING"]
    assert [hands.row(one.id, "state") for one in (long, many, twice)] == ["RUNNING"] * 3


def test_a_task_is_not_declined_twice_for_the_same_names(hands: Hands) -> None:  # J2
    sent = mark(hands)
    (claimed,) = hands.claim(marked=groups(hands), starts=1)
    assert claimed.id == sent
    assert declined(hands, claimed) == ["unmarkable"]


def test_names_that_postgresql_cannot_read_refuse_the_decline(hands: Hands) -> None:  # J2
    claimed = begun(hands, b'{"\\u0000": 1}')
    with pytest.raises(psycopg.DataError):
        hands.connection.execute(
            hands.text("task/decline"), {"ids": [claimed.id], "claim_ids": [claimed.claim_id], "channel": "c"}
        )
    assert hands.row(claimed.id, "state") == "RUNNING"


def test_a_mark_needs_its_id_and_an_id_its_mark(hands: Hands) -> None:  # J2
    hands.send()
    for column, value in (("needs", "'{}'"), ("needs_id", "gen_random_uuid()")):
        with pytest.raises(psycopg.errors.CheckViolation):
            hands.connection.execute(f'update "{hands.target.schema}".tasks set {column} = {value}'.encode())


def test_a_decline_tells_workers_that_marked_tasks_wait(hands: Hands) -> None:  # J2
    claimed, cancelled = begun(hands), begun(hands)
    hands.cancel(cancelled.id)
    with hands.target.connect("everbeat test") as listener:
        listener.execute(f'listen "{hands.target.channel}"'.encode())
        declined(hands, claimed, cancelled)
        found = {note.payload for note in listener.notifies(timeout=10, stop_after=2)}
    assert found >= {"m", f"d:{cancelled.id}"}
