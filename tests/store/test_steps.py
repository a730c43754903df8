"""Steps, sleeps and children as the database keeps them: recorded once, under the fence, whatever is repeated or comes late."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.domain.recorded import NewChild, Recorded
from everbeat.store import leases, retention, steps, tasks
from everbeat.store.leases import Claimed
from tests.store.conftest import Hands

FAR = "2100-01-01"


def record(hands: Hands, held: Claimed, name: str = "charge", result: bytes = b"1") -> bool:
    return hands.run(steps.record_step(held.id, held.claim_id, name=name, result=result))


def loaded(hands: Hands, held: Claimed) -> tuple[Recorded, ...] | None:
    page = hands.run(steps.load_steps(held.id, held.claim_id))
    return None if page is None else page.records


def sleep(hands: Hands, held: Claimed, ms: int = 3_600_000, name: str = "sleep") -> float | None:
    return hands.run(steps.begin_sleep(held.id, held.claim_id, name=name, duration_ms=ms))


def again(hands: Hands, worker: str = "w2") -> Claimed:
    (held,) = hands.claim(worker, limit=1)
    assert hands.start(held) == ["started"]
    return held


def make_due(hands: Hands, task_id: UUID) -> None:
    update = sql.SQL("update {}.tasks set enqueued_at = statement_timestamp() where id = %s")
    hands.connection.execute(update.format(sql.Identifier(hands.target.schema)), [task_id])


def send_child(
    hands: Hands, held: Claimed, step: str = "work", *, name: str = "work", key: str | None = None
) -> steps.ChildVerdict | None:
    child = NewChild(name=name, queue="default", priority=0, args="{}", key=key)
    return hands.run(
        steps.send_child(held.id, held.claim_id, step=step, child=child, channel=hands.target.channel)
    )


class TestRecord:
    def test_a_repeated_record_changes_nothing_and_is_answered_like_the_first(self, hands: Hands) -> None:
        held = hands.running()
        assert record(hands, held, result=b'{"a": 1}')
        assert record(hands, held, result=b'{"a": 2}')
        assert hands.table("steps", "kind, name, state, result, attempt") == [
            ("step", "charge", "DONE", {"a": 1}, 1)
        ]
        assert hands.row(held.id, "progress_at") is not None, "a step is a sign of life"

    def test_a_zombie_records_and_reads_nothing(self, hands: Hands) -> None:  # I2
        old = hands.running()
        assert record(hands, old, "before")
        hands.settle(old, "RELEASED")
        new = again(hands)
        assert not record(hands, old)
        assert loaded(hands, old) is None
        assert sleep(hands, old) is None
        assert (
            hands.run(steps.wait_for_signal(old.id, old.claim_id, name="e", event="e", timeout_ms=None))
            is None
        )
        assert send_child(hands, old) is None
        assert [one.name for one in loaded(hands, new) or ()] == ["before"]
        assert hands.settle(new) == "COMPLETED"
        assert not record(hands, new), "what has ended records nothing more"
        assert hands.table("tasks", "count(*)") == [(1,)]

    def test_what_is_claimed_and_has_not_started_records_nothing(self, hands: Hands) -> None:
        hands.send()
        (held,) = hands.claim()
        assert not record(hands, held)
        assert hands.table("steps") == []

    def test_all_that_is_recorded_is_read_a_page_at_a_time(
        self, hands: Hands, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = hands.running()
        names = [f"step#{number:02}" for number in range(1, 8)]
        for name in names:
            assert record(hands, held, name, b'"' + b"x" * 90 + b'"')
        for rows, size in ((3, 10_000), (100, 200), (7, 10_000), (100, 10)):
            monkeypatch.setattr(steps, "PAGE_ROWS", rows)
            monkeypatch.setattr(steps, "PAGE_BYTES", size)
            found, after = list[str](), steps.FIRST
            while after is not None:
                page = hands.run(steps.load_steps(held.id, held.claim_id, after=after))
                assert page is not None
                found += [one.name for one in page.records]
                after = page.next_after  # type: ignore[assignment]
            assert found == names


class TestSleep:
    def test_its_moment_is_set_once(self, hands: Hands) -> None:
        held = hands.running()
        first = sleep(hands, held, 60_000)
        later = sleep(hands, held, 999_000)
        assert first == 60_000
        assert later is not None
        assert 0 < later < 60_000

    def test_a_suspended_task_is_due_then_at_no_cost_and_begun_tasks_do_not_expire(
        self, hands: Hands
    ) -> None:
        held = hands.running(
            good_until=hands.connection.execute("select now() + interval '1 s'").fetchone()[0]
        )  # type: ignore[index]
        assert sleep(hands, held) == 3_600_000
        assert hands.settle(held, "SUSPENDED") == "PENDING"
        assert hands.settle(held, "SUSPENDED") == "already"
        due, wake, good_until, *counts = hands.row(
            held.id, "enqueued_at, wake_at, good_until, retry_count, crash_count, loss_count"
        )
        assert due == wake == hands.table("steps", "due_at")[0][0]
        assert (good_until, counts) == (None, [0, 0, 0])
        assert hands.table("attempts", "outcome, will_retry") == [("SUSPENDED", True)]
        assert hands.claim() == []
        due_in_ms = hands.run(leases.next_due(names=["work"], queues=None)).due_in_ms
        assert due_in_ms is not None
        assert 3_500_000 < due_in_ms <= 3_600_000
        make_due(hands, held.id)
        woken = again(hands)
        assert woken.attempt == 1
        (slept,) = loaded(hands, woken) or ()
        assert slept.left_ms is not None
        assert slept.left_ms > 3_500_000

    def test_a_retry_and_a_death_forget_what_the_task_waited_for(self, hands: Hands) -> None:
        held = hands.running()
        sleep(hands, held)
        assert hands.settle(held, "FAILED", error=b'{"code": "X"}', retry_in_ms=0) == "PENDING"
        assert hands.row(held.id, "waits_for, wake_at") == (None, None)
        held = again(hands)
        sleep(hands, held)
        (lease,) = hands.leases()
        hands.recover(lease, "retry")
        assert hands.row(held.id, "waits_for, wake_at") == (None, None)
        assert [one.kind for one in loaded(hands, again(hands)) or ()] == ["sleep"]

    def test_a_cancel_comes_before_a_suspension(self, hands: Hands) -> None:
        held = hands.running()
        sleep(hands, held)
        assert hands.cancel(held.id) == "REQUESTED"
        assert hands.settle(held, "SUSPENDED") == "CANCELLED"
        assert hands.settle(held, "SUSPENDED") == "already"

    def test_a_suspended_head_keeps_its_place_in_a_serial_line(self, hands: Hands) -> None:
        held = hands.running(serial="key:a")
        second = hands.send(serial="key:a")
        plain = hands.send()
        sleep(hands, held)
        assert hands.settle(held, "SUSPENDED") == "PENDING"
        assert [one.id for one in hands.claim()] == [plain], "nothing of its line runs meanwhile"
        make_due(hands, held.id)
        woken = again(hands)
        assert woken.id == held.id
        hands.settle(woken)
        assert again(hands).id == second


class TestRetention:
    def test_steps_and_signals_go_with_their_task(self, hands: Hands) -> None:
        held, other = hands.running(), hands.running()
        for one in (held, other):
            record(hands, one)
            hands.connection.execute(
                sql.SQL("insert into {}.signals (id, target, name, value) values (%s, %s, 'e', '1')").format(
                    sql.Identifier(hands.target.schema)
                ),
                [uuid4(), one.id],
            )
        hands.settle(held)
        age = sql.SQL("update {}.tasks set completed_at = now() - interval '2 h' where id = %s")
        hands.connection.execute(age.format(sql.Identifier(hands.target.schema)), [held.id])
        statement = retention.prune_tasks(hours=1, limit=100, after=UUID(int=0), until=UUID(int=2**128 - 1))
        gone = hands.run(statement).deleted
        assert gone == {"tasks": 1, "attempts": 1, "recoveries": 0, "steps": 1, "signals": 1}
        assert hands.table("steps", "task_id") == hands.table("signals", "target") == [(other.id,)]

    def test_what_is_left_without_a_task_goes_by_its_age(self, hands: Hands) -> None:
        schema = sql.Identifier(hands.target.schema)
        held = hands.running()
        record(hands, held)
        strays = [uuid4() for _ in range(3)]
        for number, stray in enumerate(strays):
            hands.connection.execute(
                sql.SQL(
                    "insert into {}.steps (task_id, kind, name, attempt, recorded_at) values (%s, 'step', 'a', 1, now() - %s * interval '2 h')"
                ).format(schema),
                [stray, number],
            )
            hands.connection.execute(
                sql.SQL(
                    "insert into {}.signals (id, target, name, value, sent_at) values (%s, %s, 'e', '1', now() - %s * interval '2 h')"
                ).format(schema),
                [uuid4(), stray, number],
            )
        between = {"hours": 1, "limit": 100, "after": UUID(int=0), "until": UUID(int=2**128 - 1)}
        assert hands.run(retention.prune_stray_steps(**between)).deleted == {"steps": 2}  # type: ignore[arg-type]
        assert hands.run(retention.prune_stray_signals(**between)).deleted == {"signals": 2}  # type: ignore[arg-type]
        assert {row[0] for row in hands.table("steps", "task_id")} == {held.id, strays[0]}
        assert hands.table("signals", "target") == [(strays[0],)]


class TestChildren:
    def test_a_child_is_sent_once_in_all_attempts(self, hands: Hands) -> None:
        held = hands.running()
        first = send_child(hands, held)
        assert first is not None
        assert first == send_child(hands, held)
        assert first.id is not None
        other = send_child(hands, held, "work#2")
        assert other is not None
        assert other.id != first.id
        hands.settle(held, "RELEASED")
        held = next(one for one in hands.claim("w2") if one.id == held.id)
        hands.start(held)
        assert send_child(hands, held) == first
        child = first.id
        assert hands.row(child, "state, parent_id, name") == ("CLAIMED", held.id, "work")
        assert child.version == 7
        assert child.bytes[:6] == held.id.bytes[:6], "retention walks by the time in an id"
        assert hands.table("tasks", "count(*)") == [(3,)]

    def test_a_child_that_was_pruned_is_not_sent_again(self, hands: Hands) -> None:
        held = hands.running()
        sent = send_child(hands, held)
        assert sent is not None
        assert sent.id is not None
        hands.connection.execute(
            sql.SQL("delete from {}.tasks where id = %s").format(sql.Identifier(hands.target.schema)),
            [sent.id],
        )
        assert send_child(hands, held) == sent
        assert hands.table("tasks", "id") == [(held.id,)]

    def test_a_live_task_with_the_same_key_is_answered(self, hands: Hands) -> None:
        held = hands.running()
        known = hands.send(name="keyed", key="k")
        sent = send_child(hands, held, name="keyed", key="k")
        assert sent is not None
        assert sent.id is not None
        assert sent.id == known
        assert hands.row(known, "parent_id") is None

    def test_who_is_asked_to_end_sends_no_more_children(self, hands: Hands) -> None:
        held = hands.running()
        first = send_child(hands, held)
        hands.cancel(held.id)
        refused = send_child(hands, held, "work#2")
        assert refused is not None
        assert (refused.verdict, refused.id) == ("cancelled", None)
        assert send_child(hands, held) == first
        assert hands.table("tasks", "count(*)") == [(2,)]

    def test_a_cancel_reaches_children_and_their_children(self, hands: Hands) -> None:
        parent = hands.running()
        send_child(hands, parent)
        send_child(hands, parent, "work#2")
        middle, waiting = hands.claim("w2")
        hands.start(middle)
        grandchild = send_child(hands, middle)
        stranger = hands.send()
        channel = hands.target.channel
        assert hands.cancel(parent.id) == "REQUESTED"
        assert hands.run(tasks.cancel_children(parent.id, channel=channel)) == 3
        assert hands.run(tasks.cancel_children(parent.id, channel=channel)) == 0
        assert hands.row(middle.id, "state, cancel_requested_at is not null") == ("RUNNING", True)
        assert hands.row(waiting.id, "state, claim_id") == ("CANCELLED", None)
        assert grandchild is not None
        assert grandchild.id is not None
        assert hands.row(grandchild.id, "state") == "CANCELLED"
        assert hands.row(stranger, "state") == "PENDING"
        error = hands.row(waiting.id, "error")
        assert str(parent.id) in error["message"]
