"""Tasks that a worker does not understand are declined with a mark at no cost, and claimed only by workers that understand the mark."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.store import claims, expiry, leases, lines, tasks
from everbeat.store.claims import Claimed, suspects_wait
from everbeat.store.leases import decline
from everbeat.store.tasks import BEGINNING, MarkedGroup, marked
from tests.store.conftest import StoreHarness

DEFAULTS = StoredPolicy(max_retries=3)
OF_WORKER = b'{"work":' + (DEFAULTS.default_json() or b"") + b"}"


def declined(db: StoreHarness, *claimed: Claimed) -> list[str | None]:
    """Return the reply to the decline of each task; None if the worker did not hold it."""
    asked = [(one.id, one.claim_id) for one in claimed]
    answers = db.run(decline(asked, channel=db.target.channel))
    return [answers.get(one.claim_id) for one in claimed]


def groups(db: StoreHarness, most: int = 100) -> list[MarkedGroup]:
    """Return all marked groups, page by page."""
    found: list[MarkedGroup] = []
    after = BEGINNING
    for _ in range(100):
        page = db.run(marked(after, most=most))
        found += page.groups
        if page.after is None:
            return found
        after = page.after
    raise AssertionError("the listing has no end")


def mark(db: StoreHarness, args: bytes = b'{"b": 1, "a": 2}', **options: Any) -> UUID:
    """Send a task and let another worker decline it."""
    sent = db.send(args=args, **options)
    (claimed,) = db.claim("w2", limit=1, starts=1, names=[options.get("name", "work")])
    assert claimed.id == sent
    assert declined(db, claimed) == ["PENDING"]
    return sent


def begun(db: StoreHarness, args: bytes = b'{"b": 1, "a": 2}', **options: Any) -> Claimed:
    """Return a task whose code is about to run, claimed and started under the policy of the worker."""
    db.send(args=args, **options)
    (claimed,) = db.claim(limit=1, starts=1, policies=OF_WORKER)
    return claimed


def test_a_declined_task_keeps_its_place_and_gets_a_mark_at_no_cost(db: StoreHarness) -> None:  # J2
    claimed = begun(db)
    before = db.record("tasks", "id", claimed.id)
    assert (before["state"], before["attempt"], before["policy"]["max_retries"]) == ("RUNNING", 1, 3)
    assert declined(db, claimed) == ["PENDING"]
    after = db.record("tasks", "id", claimed.id)
    assert after["needs"] == {"arguments": ["a", "b"]}
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {
        "state", "needs", "needs_id", "attempt", "policy", "claim_id", "claim_call", "claimed_at", "claimed_by_worker_id", "started_at",
    }  # fmt: skip
    assert after["attempt"] == 0
    assert {after[key] for key in changed - {"state", "needs", "needs_id", "attempt"}} == {None}
    assert db.table("attempts") == []


def test_a_claimed_task_is_declined_like_a_started_one(db: StoreHarness) -> None:  # J2
    db.send(args=b'{"a": 1}')
    (claimed,) = db.claim()
    assert declined(db, claimed) == ["PENDING"]
    assert db.row(claimed.id, "state, attempt, needs") == ("PENDING", 0, {"arguments": ["a"]})


def test_only_the_holder_can_decline_and_a_repeated_decline_changes_nothing(db: StoreHarness) -> None:  # J2
    claimed = begun(db)
    zombie = Claimed(*[getattr(claimed, name) for name in Claimed.__struct_fields__])
    assert db.run(decline([(zombie.id, uuid4())], channel="c")) == {}
    assert db.row(claimed.id, "state") == "RUNNING"
    assert declined(db, claimed) == ["PENDING"]
    once = db.record("tasks", "id", claimed.id)
    assert declined(db, claimed) == [None]
    assert db.record("tasks", "id", claimed.id) == once


def test_a_requested_cancel_cancels_a_declined_task(db: StoreHarness) -> None:  # J2
    claimed = begun(db)
    assert db.cancel(claimed.id) == "REQUESTED"
    assert declined(db, claimed) == ["CANCELLED"]
    row = db.row(claimed.id, "state, attempt, error ->> 'code', cancelled_at is not null, needs_id, claim_id")
    assert row == ("CANCELLED", 0, "TASK_CANCELLED", True, None, None)
    assert db.table("attempts") == []


def test_a_decline_keeps_the_policy_of_the_sender_and_removes_that_of_the_worker(
    db: StoreHarness,
) -> None:  # J2
    given = begun(db, policy=b'{"max_retries":3}')
    own = begun(db)
    assert declined(db, given, own) == ["PENDING", "PENDING"]
    assert db.row(given.id, "policy") == {"max_retries": 3}
    assert db.row(own.id, "policy") is None


def test_a_decline_keeps_the_policy_of_an_earlier_attempt(db: StoreHarness) -> None:  # J2
    first = begun(db)
    assert db.settle(first, "FAILED", error=b"{}", retry_in_ms=0) == "PENDING"
    (second,) = db.claim(limit=1, starts=1, policies=OF_WORKER)
    assert declined(db, second) == ["PENDING"]
    assert db.row(first.id, "attempt, retry_count, policy ->> 'max_retries'") == (1, 1, "3")
    assert db.table("attempts", "attempt, outcome") == [(1, "FAILED")]


def test_a_decline_keeps_the_checkpoint_and_the_suspicion_of_a_task(db: StoreHarness) -> None:  # J2
    claimed = begun(db)
    db.connection.execute(
        db.plain("update {schema}.tasks set checkpoint = '{{\"done\": 1}}', suspect = true, alone = true")
    )
    assert declined(db, claimed) == ["PENDING"]
    assert db.row(claimed.id, "checkpoint, suspect, alone") == ({"done": 1}, True, False)


def test_a_claim_takes_a_marked_task_only_if_it_names_its_group(db: StoreHarness) -> None:  # J2
    sent = mark(db)
    assert db.claim() == []
    other = db.send()
    assert [one.id for one in db.claim()] == [other]
    (group,) = groups(db)
    assert (group.name, group.queue, group.priority) == ("work", "default", 0)
    assert json.loads(group.needs) == {"arguments": ["a", "b"]}
    assert db.claim(marked=[group], names=["other"]) == []
    (claimed,) = db.claim(marked=[group], starts=1)
    assert (claimed.id, claimed.attempt, claimed.is_marked) == (sent, 1, True)
    assert db.settle(claimed, result=b"1") == "COMPLETED"


def test_tasks_with_the_same_name_and_argument_names_form_one_group(db: StoreHarness) -> None:  # J2
    mark(db, b'{"a": 1, "b": 2}')
    mark(db, b'{"b": [3], "a": null}')
    mark(db, b'{"a": 1}')
    mark(db, b'{"a": 1, "b": 2}', name="other")
    mark(db, b"{}")
    assert sorted((group.name, json.loads(group.needs)["arguments"]) for group in groups(db)) == [
        ("other", ["a", "b"]),
        ("work", []),
        ("work", ["a"]),
        ("work", ["a", "b"]),
    ]


@pytest.mark.parametrize("most", [1, 2, 100])
def test_the_pages_of_the_listing_name_each_group_once(db: StoreHarness, most: int) -> None:  # J2
    for queue in ("Z", "a", "é"):
        for priority in (-1, 1):
            mark(db, queue=queue, priority=priority)
            mark(db, b"{}", queue=queue, priority=priority)
    for key in range(3):
        mark(db, f'{{"k{key}": 1}}'.encode(), serial=f"line:{key}")
    found = groups(db, most)
    assert len(found) == len({(each.needs_id, each.queue, each.priority) for each in found}) == 15
    assert [each.queue for each in found].count(None) == 3


def test_a_mark_survives_retries_recoveries_and_releases(db: StoreHarness) -> None:  # J2
    sent = mark(db)
    (group,) = groups(db)

    def taken() -> Claimed:
        assert db.claim() == []
        (claimed,) = db.claim(marked=[group], starts=1)
        assert claimed.id == sent
        return claimed

    assert db.settle(taken(), "FAILED", error=b"{}", retry_in_ms=0) == "PENDING"
    assert db.settle(taken(), "RELEASED") == "PENDING"
    assert db.settle(taken(), "SUSPENDED") == "PENDING"
    taken()
    (lease,) = db.leases()
    assert [one.state for one in db.recover(lease, "retry")] == ["PENDING"]
    (claimed,) = db.claim(marked=[group])
    assert db.run(leases.release([(claimed.id, claimed.claim_id)], channel="c")) == [sent]
    taken()


def test_an_operator_retry_clears_the_mark(db: StoreHarness) -> None:  # J2
    sent = mark(db)
    db.cancel(sent)
    assert db.row(sent, "state, needs_id is not null") == ("CANCELLED", True)
    db.run(tasks.retry(sent, channel="c", call=uuid4()))
    assert db.row(sent, "state, needs, needs_id") == ("PENDING", None, None)
    assert [one.id for one in db.claim()] == [sent]


def test_marked_tasks_are_claimed_in_the_same_order_as_others(db: StoreHarness) -> None:  # J2
    queues = {"high": 1, "low": 100, "default": 50}
    late = db.send(queue="low", priority=-5)
    urgent = db.send(queue="high", priority=3)
    first, second = db.send(), db.send()
    third = db.send(args=b'{"other": 1}')
    most_urgent = db.send(queue="high", priority=1)
    hurried = db.send(priority=-1)
    taken = {one.id: one for one in db.claim()}
    plain = [taken.pop(one) for one in (second, most_urgent)]
    assert declined(db, *taken.values()) == ["PENDING"] * 5
    db.run(leases.release([(one.id, one.claim_id) for one in plain], channel="c"))
    known = groups(db)
    order = [one.id for _ in range(7) for one in db.claim(limit=1, marked=known, queue_priorities=queues)]
    assert order == [most_urgent, urgent, hurried, first, second, third, late]


def test_pauses_and_queues_apply_to_marked_tasks(db: StoreHarness) -> None:  # J2
    sent = mark(db, queue="mail")
    known = groups(db)
    assert db.claim(marked=known, queues=["default"]) == []
    for kind, name in (("task", "work"), ("queue", "mail")):
        db.connection.execute(
            db.plain(
                "insert into {schema}.pauses (kind, name, paused_at, paused_by) values (%s, %s, now(), 'me')"
            ),
            [kind, name],
        )
        assert db.claim(marked=known) == []
        db.connection.execute(db.plain("delete from {schema}.pauses"))
    assert [one.id for one in db.claim(marked=known, queues=["mail"])] == [sent]


def test_claims_and_next_due_skip_a_group_without_tasks_of_their_names(db: StoreHarness) -> None:  # J2
    mark(db, name="other", queue="mail")
    (group,) = groups(db)
    assert (
        db.run(tasks.next_due(names=["work"], queues=None, marked=[group], margin_ms=60_000)).due_in_ms
        is None
    )
    head = mark(db, b'{"x": 1}', serial="line", name="other")
    known = groups(db)
    assert db.claim(marked=known) == []
    assert db.claim(marked=known, names=["other"])[-1].id == head


def test_a_marked_task_past_its_good_until_is_not_claimed(db: StoreHarness) -> None:  # J2
    sent = mark(db, good_until=datetime.now(UTC) + timedelta(minutes=1))
    db.connection.execute(db.plain("update {schema}.tasks set good_until = now() - interval '1 second'"))
    assert db.claim(marked=groups(db)) == []
    db.run(expiry.expire(channel="c", limit=10))
    assert db.row(sent, "state") == "EXPIRED"


def test_a_marked_head_keeps_its_serial_line_in_order(db: StoreHarness) -> None:  # J2
    head = mark(db, serial="line")
    behind = db.send(serial="line", args=b"{}")
    assert db.claim() == []
    (group,) = groups(db)
    assert (group.queue, group.priority) == (None, None)
    (claimed,) = db.claim(marked=[group], starts=10)
    assert claimed.id == head
    assert db.claim(marked=[group]) == []
    db.settle(claimed, result=b"1")
    assert [one.id for one in db.claim()] == [behind]


def test_a_marked_suspect_is_left_to_workers_that_understand_it(db: StoreHarness) -> None:  # J2
    sent = mark(db)
    db.connection.execute(db.plain("update {schema}.tasks set suspect = true"))
    known = groups(db)
    for other in ((), known):
        waits = db.run(suspects_wait(names=["work"], queues=None, marked=other))
        due = db.run(tasks.next_due(names=["work"], queues=None, marked=other)).suspects
        assert [waits, due] == [bool(other)] * 2
    assert db.claim(marked=known, suspects=False) == []
    assert db.claim(suspects=True) == []
    assert [one.id for one in db.claim(marked=known, suspects=True)] == [sent]


def test_next_due_counts_marked_tasks_only_for_workers_that_understand_them(db: StoreHarness) -> None:  # J2
    sent = mark(db)
    line = mark(db, b'{"x": 1}', serial="line")
    known = groups(db)

    def due_in_ms(other: list[MarkedGroup], **more: Any) -> float | None:
        return db.run(tasks.next_due(names=["work"], queues=more.get("queues"), marked=other)).due_in_ms

    later = "update {schema}.tasks set enqueued_at = now() + case when id = %s then %s end"
    minutes = [timedelta(minutes=1), timedelta(minutes=2)]
    for one, delay in zip((sent, line), minutes, strict=True):
        db.connection.execute(db.plain(later + " where id = %s"), [one, delay, one])
    db.run(lines.apply_changes(readers=[str(each.needs_id) for each in known], queues=None, channel=None))
    assert due_in_ms([]) is None
    assert 50_000 < (due_in_ms(known) or 0) <= 60_000
    assert 110_000 < (due_in_ms([each for each in known if each.queue is None]) or 0) <= 120_000
    assert due_in_ms([each for each in known if each.queue == "default"], queues=["mail"]) is None


def test_most_bytes_limits_a_claim_of_marked_tasks(db: StoreHarness) -> None:  # J2
    large = json.dumps({"a": "x" * 1_000}).encode()
    for _ in range(3):
        mark(db, large)
    call = claims.claim(
        worker_id="w1", claim_call=uuid4(), names=["work"], limit=10, queues=None, queue_priorities={},
        marked=groups(db), most_bytes=2_100,
    )  # fmt: skip
    assert [one.is_cut for one in db.run(call)] == [True, True]


def test_a_repeated_claim_of_marked_tasks_returns_the_same(db: StoreHarness) -> None:  # J2
    mark(db)
    known, call = groups(db), uuid4()
    first = db.claim(marked=known, call=call)
    assert len(first) == 1
    assert db.claim(call=call) == first


def test_a_task_whose_argument_names_do_not_fit_a_mark_stays_with_its_holder(db: StoreHarness) -> None:  # J2
    long = begun(db, json.dumps({"x" * 5_000: 1}).encode())
    many = begun(db, json.dumps({f"name_{n}": n for n in range(500)}).encode())
    twice = begun(db, b'{"a": 1, "a": 2}')
    fits = begun(db, json.dumps({f"name_{n}": n for n in range(250)}).encode())
    assert declined(db, long, many, twice, fits) == ["unmarkable"] * 3 + ["PENDING"]
    assert [db.row(one.id, "state") for one in (long, many, twice)] == ["RUNNING"] * 3


def test_a_task_is_not_declined_twice_for_the_same_names(db: StoreHarness) -> None:  # J2
    sent = mark(db)
    (claimed,) = db.claim(marked=groups(db), starts=1)
    assert claimed.id == sent
    assert declined(db, claimed) == ["unmarkable"]


def test_a_decline_fails_for_argument_names_that_postgresql_cannot_read(db: StoreHarness) -> None:  # J2
    claimed = begun(db, b'{"\\u0000": 1}')
    with pytest.raises(psycopg.DataError):
        db.connection.execute(
            db.text("task/decline_tasks"),
            {"ids": [claimed.id], "claim_ids": [claimed.claim_id], "channel": "c"},
        )
    assert db.row(claimed.id, "state") == "RUNNING"


def test_a_mark_without_its_id_and_an_id_without_its_mark_are_rejected(db: StoreHarness) -> None:  # J2
    db.send()
    for column, value in (("needs", "'{}'"), ("needs_id", "gen_random_uuid()")):
        with pytest.raises(psycopg.errors.CheckViolation):
            db.connection.execute(f'update "{db.target.schema}".tasks set {column} = {value}'.encode())


def test_a_decline_notifies_workers_of_the_marked_task(db: StoreHarness) -> None:  # J2
    claimed, cancelled = begun(db), begun(db)
    db.cancel(cancelled.id)
    with db.target.connect("everbeat test") as listener:
        listener.execute(f'listen "{db.target.channel}"'.encode())
        declined(db, claimed, cancelled)
        found = {note.payload for note in listener.notifies(timeout=10, stop_after=2)}
    assert found >= {"m", f"d:{cancelled.id}"}
