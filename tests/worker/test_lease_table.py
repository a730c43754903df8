"""What a supervisor is told of the leases in memory: differences, once each."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID, uuid4

from everbeat.domain.policy import StoredPolicy
from everbeat.store.leases import Claimed
from everbeat.worker.attempt import Attempt, Stage
from everbeat.worker.leases import LeaseTable
from tests.worker.deeds import DEFINITIONS


def attempt(task_id: UUID | None = None) -> Attempt:
    claimed = Claimed(
        id=task_id or uuid4(), claim_id=uuid4(), fence=1, name="double", queue="default", priority=0, args="{}", attempt=0,
        retry_count=0, crash_count=0, loss_count=0, policy=None, enqueued_at=datetime.now(UTC), good_until=None,
    )  # fmt: skip
    return Attempt(
        task=claimed,
        lane="async",
        definition=DEFINITIONS["double"],
        policy=StoredPolicy(),
        on_progress=lambda _: None,
    )


def test_changes_are_told_once() -> None:
    table, one, two = LeaseTable(), attempt(), attempt()
    table.add(one)
    table.add(two)
    assert table.changes() == ([one.lease, two.lease], [])
    assert table.changes() == ([], [])
    assert table.remove(one)
    assert not table.remove(one)
    assert table.changes() == ([], [one.claim_id])
    assert one.stage is Stage.GONE
    assert list(table) == [two]


def test_a_lease_that_came_and_went_between_two_reports_is_in_neither() -> None:
    table, one = LeaseTable(), attempt()
    table.add(one)
    table.remove(one)
    assert table.changes() == ([], [])


def test_a_second_attempt_of_a_task_outlives_the_removal_of_the_first() -> None:
    table, first = LeaseTable(), attempt()
    second = attempt(first.id)
    table.add(first)
    table.add(second)
    table.remove(first)
    assert table.by_task(first.id) is second
    assert table.by_claim(first.claim_id) is None


def test_leases_that_nobody_holds_are_unknown() -> None:
    table, one, ghost = LeaseTable(), attempt(), (uuid4(), uuid4())
    table.add(one)
    assert table.unknown([one.lease, ghost]) == [ghost]


def test_after_an_adoption_the_reports_begin_from_nothing() -> None:
    table, one = LeaseTable(), attempt()
    table.add(one)
    assert table.clear() == [one]
    assert table.changes() == ([], [])
    assert len(table) == 0
