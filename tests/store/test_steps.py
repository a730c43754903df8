"""Steps, sleeps and children in the database: recorded once, only with a valid lease, even if repeated or late."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.domain.task.context_backend import FailedTry, NewChild, Recorded
from everbeat.store import inspection, retention, steps, tasks
from everbeat.store.claims import Claimed
from tests.store.conftest import StoreHarness

FAR = "2100-01-01"


def record(
    db: StoreHarness, held: Claimed, name: str = "charge", result: bytes = b"1", digest: str | None = None
) -> bool:
    return db.run(steps.record_step(held.id, held.claim_id, name=name, result=result, digest=digest))


def loaded(db: StoreHarness, held: Claimed) -> tuple[Recorded, ...] | None:
    page = db.run(steps.load_steps(held.id, held.claim_id))
    return None if page is None else page.records


def sleep(db: StoreHarness, held: Claimed, ms: int = 3_600_000, name: str = "sleep") -> float | None:
    return db.run(steps.begin_sleep(held.id, held.claim_id, name=name, duration_ms=ms))


def again(db: StoreHarness, worker: str = "w2") -> Claimed:
    (held,) = db.claim(worker, limit=1)
    assert db.start(held) == ["started"]
    return held


def make_due(db: StoreHarness, task_id: UUID) -> None:
    update = sql.SQL("update {}.tasks set enqueued_at = statement_timestamp() where id = %s")
    db.connection.execute(update.format(sql.Identifier(db.target.schema)), [task_id])


def send_child(
    db: StoreHarness,
    held: Claimed,
    step: str = "work",
    *,
    name: str = "work",
    key: str | None = None,
    digest: str | None = None,
) -> steps.ChildVerdict | None:
    child = NewChild(name=name, queue="default", priority=0, args="{}", key=key, digest=digest)
    return db.run(steps.send_child(held.id, held.claim_id, step=step, child=child, channel=db.target.channel))


class TestRecord:
    def test_a_repeated_record_of_a_step_changes_nothing_and_returns_the_same(self, db: StoreHarness) -> None:
        held = db.running()
        assert record(db, held, result=b'{"a": 1}')
        assert record(db, held, result=b'{"a": 2}')
        assert db.table("steps", "kind, name, state, result, attempt") == [
            ("step", "charge", "DONE", {"a": 1}, 1)
        ]
        assert db.row(held.id, "progress_at") is not None, "a recorded step counts as progress"

    def test_the_digest_of_a_step_is_recorded_once_and_loaded(self, db: StoreHarness) -> None:
        held = db.running()
        assert record(db, held, digest="first")
        assert record(db, held, digest="second")
        assert record(db, held, "ship")
        assert send_child(db, held, digest="child")
        assert {(one.name, one.digest) for one in loaded(db, held) or ()} == {
            ("charge", "first"),
            ("ship", None),
            ("work", "child"),
        }

    def test_a_zombie_cannot_record_or_load_steps(self, db: StoreHarness) -> None:  # I2
        old = db.running()
        assert record(db, old, "before")
        db.settle(old, "RELEASED")
        new = again(db)
        assert not record(db, old)
        assert loaded(db, old) is None
        assert sleep(db, old) is None
        assert (
            db.run(steps.wait_for_signal(old.id, old.claim_id, name="e", event="e", timeout_ms=None)) is None
        )
        assert send_child(db, old) is None
        assert [one.name for one in loaded(db, new) or ()] == ["before"]
        assert db.settle(new) == "COMPLETED"
        assert not record(db, new), "an ended task records nothing more"
        assert db.table("tasks", "count(*)") == [(1,)]

    def test_a_claimed_task_that_has_not_started_cannot_record_steps(self, db: StoreHarness) -> None:
        db.send()
        (held,) = db.claim()
        assert not record(db, held)
        assert db.table("steps") == []

    def test_recorded_steps_are_loaded_in_pages(
        self, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = db.running()
        names = [f"step#{number:02}" for number in range(1, 8)]
        for name in names:
            assert record(db, held, name, b'"' + b"x" * 90 + b'"')
        for rows, size in ((3, 10_000), (100, 200), (7, 10_000), (100, 10)):
            monkeypatch.setattr(steps, "PAGE_ROWS", rows)
            monkeypatch.setattr(steps, "PAGE_BYTES", size)
            found, after = list[str](), steps.FIRST
            while after is not None:
                page = db.run(steps.load_steps(held.id, held.claim_id, after=after))
                assert page is not None
                found += [one.name for one in page.records]
                after = page.next_after  # type: ignore[assignment]
            assert found == names


class TestSleep:
    def test_the_end_of_a_sleep_is_set_once(self, db: StoreHarness) -> None:
        held = db.running()
        first = sleep(db, held, 60_000)
        later = sleep(db, held, 999_000)
        assert first == 60_000
        assert later is not None
        assert 0 < later < 60_000

    def test_a_failed_try_is_shown_only_during_the_wait_that_follows_it(
        self, db: StoreHarness
    ) -> None:  # J10
        failed = FailedTry("charge", 1, 3, "BUSY", "try later", "shop.Busy")

        def shown(task_id: UUID) -> list[FailedTry | None]:
            stored = db.run(inspection.task(task_id))
            assert stored is not None
            lists = [
                db.run(inspection.tasks(limit=1, latest=latest))[0].failed_try for latest in (False, True)
            ]
            return [stored.summary.failed_try, *lists]

        held = db.running()
        retry = steps.begin_sleep(
            held.id, held.claim_id, name="charge#1/retry", duration_ms=3_600_000, failed=failed
        )
        assert db.run(retry) == 3_600_000
        assert shown(held.id) == [failed] * 3, "it waits in its slot"
        db.settle(held, "SUSPENDED")
        assert shown(held.id) == [failed] * 3
        make_due(db, held.id)
        woken = again(db)
        sleep(db, woken)
        db.settle(woken, "SUSPENDED")
        assert shown(held.id) == [None] * 3, "it sleeps and no longer waits for a retry"

    def test_a_suspended_task_is_due_at_the_end_of_its_sleep_and_does_not_expire(
        self, db: StoreHarness
    ) -> None:
        held = db.running(good_until=db.connection.execute("select now() + interval '1 s'").fetchone()[0])  # type: ignore[index]
        assert sleep(db, held) == 3_600_000
        assert db.settle(held, "SUSPENDED") == "PENDING"
        assert db.settle(held, "SUSPENDED") == "already"
        due, wake, good_until, *counts = db.row(
            held.id, "enqueued_at, wake_at, good_until, retry_count, crash_count, loss_count"
        )
        assert due == wake == db.table("steps", "due_at")[0][0]
        assert (good_until, counts) == (None, [0, 0, 0])
        assert db.table("attempts", "outcome, will_retry") == [("SUSPENDED", True)]
        assert db.claim() == []
        due_in_ms = db.run(tasks.next_due(names=["work"], queues=None)).due_in_ms
        assert due_in_ms is not None
        assert 3_500_000 < due_in_ms <= 3_600_000
        make_due(db, held.id)
        woken = again(db)
        assert woken.attempt == 1
        (slept,) = loaded(db, woken) or ()
        assert slept.left_ms is not None
        assert slept.left_ms > 3_500_000

    def test_a_retry_and_a_death_clear_the_wait_of_a_task(self, db: StoreHarness) -> None:
        held = db.running()
        sleep(db, held)
        assert db.settle(held, "FAILED", error=b'{"code": "X"}', retry_in_ms=0) == "PENDING"
        assert db.row(held.id, "waits_for, wake_at") == (None, None)
        held = again(db)
        sleep(db, held)
        (lease,) = db.leases()
        db.recover(lease, "retry")
        assert db.row(held.id, "waits_for, wake_at") == (None, None)
        assert [one.kind for one in loaded(db, again(db)) or ()] == ["sleep"]

    def test_a_requested_cancel_overrides_a_suspension(self, db: StoreHarness) -> None:
        held = db.running()
        sleep(db, held)
        assert db.cancel(held.id) == "REQUESTED"
        assert db.settle(held, "SUSPENDED") == "CANCELLED"
        assert db.settle(held, "SUSPENDED") == "already"

    def test_a_suspended_head_keeps_its_place_in_a_serial_line(self, db: StoreHarness) -> None:
        held = db.running(serial="key:a")
        second = db.send(serial="key:a")
        plain = db.send()
        sleep(db, held)
        assert db.settle(held, "SUSPENDED") == "PENDING"
        assert [one.id for one in db.claim()] == [plain], "no task of its line runs meanwhile"
        make_due(db, held.id)
        woken = again(db)
        assert woken.id == held.id
        db.settle(woken)
        assert again(db).id == second


class TestRetention:
    def test_steps_and_signals_are_pruned_with_their_task(self, db: StoreHarness) -> None:
        held, other = db.running(), db.running()
        for one in (held, other):
            record(db, one)
            db.connection.execute(
                sql.SQL("insert into {}.signals (id, target, name, value) values (%s, %s, 'e', '1')").format(
                    sql.Identifier(db.target.schema)
                ),
                [uuid4(), one.id],
            )
        db.settle(held)
        age = sql.SQL("update {}.tasks set completed_at = now() - interval '2 h' where id = %s")
        db.connection.execute(age.format(sql.Identifier(db.target.schema)), [held.id])
        statement = retention.prune_tasks(hours=1, limit=100, after=UUID(int=0), until=UUID(int=2**128 - 1))
        gone = db.run(statement).deleted
        assert gone == {"tasks": 1, "attempts": 1, "recoveries": 0, "steps": 1, "signals": 1}
        assert db.table("steps", "task_id") == db.table("signals", "target") == [(other.id,)]

    def test_stray_steps_and_signals_are_pruned_by_their_age(self, db: StoreHarness) -> None:
        schema = sql.Identifier(db.target.schema)
        held = db.running()
        record(db, held)
        strays = [uuid4() for _ in range(3)]
        for number, stray in enumerate(strays):
            db.connection.execute(
                sql.SQL(
                    "insert into {}.steps (task_id, kind, name, attempt, recorded_at) values (%s, 'step', 'a', 1, now() - %s * interval '2 h')"
                ).format(schema),
                [stray, number],
            )
            db.connection.execute(
                sql.SQL(
                    "insert into {}.signals (id, target, name, value, sent_at) values (%s, %s, 'e', '1', now() - %s * interval '2 h')"
                ).format(schema),
                [uuid4(), stray, number],
            )
        between = {"hours": 1, "limit": 100, "after": UUID(int=0), "until": UUID(int=2**128 - 1)}
        assert db.run(retention.prune_stray_steps(**between)).deleted == {"steps": 2}  # type: ignore[arg-type]
        assert db.run(retention.prune_stray_signals(**between)).deleted == {"signals": 2}  # type: ignore[arg-type]
        assert {row[0] for row in db.table("steps", "task_id")} == {held.id, strays[0]}
        assert db.table("signals", "target") == [(strays[0],)]


class TestChildren:
    def test_a_step_sends_one_child_in_all_attempts(self, db: StoreHarness) -> None:
        held = db.running()
        first = send_child(db, held)
        assert first is not None
        assert first == send_child(db, held)
        assert first.id is not None
        other = send_child(db, held, "work#2")
        assert other is not None
        assert other.id != first.id
        db.settle(held, "RELEASED")
        held = next(one for one in db.claim("w2") if one.id == held.id)
        db.start(held)
        assert send_child(db, held) == first
        child = first.id
        assert db.row(child, "state, parent_id, name") == ("CLAIMED", held.id, "work")
        assert child.version == 7
        assert child.bytes[:6] == held.id.bytes[:6], "retention uses the time in an id"
        assert db.table("tasks", "count(*)") == [(3,)]

    def test_a_pruned_child_is_not_sent_again(self, db: StoreHarness) -> None:
        held = db.running()
        sent = send_child(db, held)
        assert sent is not None
        assert sent.id is not None
        db.connection.execute(
            sql.SQL("delete from {}.tasks where id = %s").format(sql.Identifier(db.target.schema)),
            [sent.id],
        )
        assert send_child(db, held) == sent
        assert db.table("tasks", "id") == [(held.id,)]

    def test_a_child_with_the_key_of_a_live_task_returns_that_task(self, db: StoreHarness) -> None:
        held = db.running()
        known = db.send(name="keyed", key="k")
        sent = send_child(db, held, name="keyed", key="k")
        assert sent is not None
        assert sent.id is not None
        assert sent.id == known
        assert db.row(known, "parent_id") is None

    def test_a_task_with_a_requested_cancel_sends_no_further_children(self, db: StoreHarness) -> None:
        held = db.running()
        first = send_child(db, held)
        db.cancel(held.id)
        refused = send_child(db, held, "work#2")
        assert refused is not None
        assert (refused.verdict, refused.id) == ("cancelled", None)
        assert send_child(db, held) == first
        assert db.table("tasks", "count(*)") == [(2,)]

    def test_the_code_of_a_task_cancels_its_children_only_under_its_lease(self, db: StoreHarness) -> None:
        old = db.running()
        sent = send_child(db, old)
        assert sent is not None
        assert sent.id is not None
        channel = db.target.channel
        db.settle(old, "RELEASED")
        assert db.run(tasks.cancel_children(old.id, channel=channel, claim_id=old.claim_id)) == 0
        new = again(db)
        assert db.run(tasks.cancel_children(old.id, channel=channel, claim_id=old.claim_id)) == 0
        assert db.row(sent.id, "state") == "PENDING"
        assert db.run(tasks.cancel_children(new.id, channel=channel, claim_id=new.claim_id)) == 1
        assert db.run(tasks.cancel_children(new.id, channel=channel, claim_id=new.claim_id)) == 0
        assert db.row(sent.id, "state") == "CANCELLED"
        assert db.row(new.id, "state, cancel_requested_at") == ("RUNNING", None)

    def test_a_cancel_reaches_children_and_grandchildren(self, db: StoreHarness) -> None:
        parent = db.running()
        send_child(db, parent)
        send_child(db, parent, "work#2")
        middle, waiting = db.claim("w2")
        db.start(middle)
        grandchild = send_child(db, middle)
        stranger = db.send()
        channel = db.target.channel
        assert db.cancel(parent.id) == "REQUESTED"
        assert db.run(tasks.cancel_children(parent.id, channel=channel)) == 3
        assert db.run(tasks.cancel_children(parent.id, channel=channel)) == 0
        assert db.row(middle.id, "state, cancel_requested_at is not null") == ("RUNNING", True)
        assert db.row(waiting.id, "state, claim_id") == ("CANCELLED", None)
        assert grandchild is not None
        assert grandchild.id is not None
        assert db.row(grandchild.id, "state") == "CANCELLED"
        assert db.row(stranger, "state") == "PENDING"
        error = db.row(waiting.id, "error")
        assert str(parent.id) in error["message"]
