"""Test the lease table of a worker, which reports each change to the supervisor once."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID, uuid4

from everbeat.domain.task.policy import StoredPolicy
from everbeat.store.claims import Claimed
from everbeat.worker.attempt import Attempt
from everbeat.worker.leases import LeaseTable
from tests.worker.environments import NO_REQUESTS
from tests.worker.sample_tasks import DEFINITIONS


def attempt(task_id: UUID | None = None) -> Attempt:
    claimed = Claimed(
        id=task_id or uuid4(), claim_id=uuid4(), fence=1, name="double", queue="default", priority=0, args="{}", attempt=0,
        retry_count=0, crash_count=0, loss_count=0, policy=None, enqueued_at=datetime.now(UTC), good_until=None,
    )  # fmt: skip
    return Attempt(
        task=claimed,
        executor_name="async",
        definition=DEFINITIONS["double"],
        policy=StoredPolicy(),
        requests=NO_REQUESTS,
    )


def test_the_lease_table_reports_each_change_once() -> None:
    table, one, two = LeaseTable(), attempt(), attempt()
    table.add(one)
    table.add(two)
    assert table.changes() == ([one.lease, two.lease], [])
    assert table.changes() == ([], [])
    assert table.remove(one)
    assert not table.remove(one)
    assert table.changes() == ([], [one.claim_id])
    assert list(table) == [two]


def test_the_lease_table_omits_a_lease_added_and_removed_between_two_reports() -> None:
    table, one = LeaseTable(), attempt()
    table.add(one)
    table.remove(one)
    assert table.changes() == ([], [])


def test_the_lease_table_keeps_a_second_attempt_when_the_first_is_removed() -> None:
    table, first = LeaseTable(), attempt()
    second = attempt(first.id)
    table.add(first)
    table.add(second)
    table.remove(first)
    assert table.by_task(first.id) is second
    assert table.by_claim(first.claim_id) is None


def test_the_lease_table_names_the_leases_that_it_does_not_hold() -> None:
    table, one, ghost = LeaseTable(), attempt(), (uuid4(), uuid4())
    table.add(one)
    assert table.unknown([one.lease, ghost]) == [ghost]


def test_a_cleared_lease_table_reports_from_nothing_again() -> None:
    table, one = LeaseTable(), attempt()
    table.add(one)
    assert table.clear() == [one]
    assert table.changes() == ([], [])
    assert len(table) == 0
