"""Test expiry: every late task, once in each interval of the cluster."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from everbeat.maintenance.cleanup import Expirer
from tests.recovering.conftest import ManualObserver, StoreHarness


async def test_tasks_past_their_good_until_expire_within_one_check_interval(
    observer: ManualObserver, db: StoreHarness
) -> None:  # C1
    late = datetime.now(UTC) - timedelta(seconds=1)
    expired = [db.send(good_until=late) for _ in range(450)]
    sound = db.send(good_until=datetime.now(UTC) + timedelta(hours=1))
    expirer = Expirer(observer.environment(check_interval_ms=20_000))
    assert expirer.interval_s == 10.0, (
        "the turn lasts half the interval, and the wait for the next one the other half"
    )
    await expirer.tick()
    assert {db.row(task, "state") for task in expired} == {"EXPIRED"}
    assert db.row(sound, "state") == "PENDING"
    assert db.table("attempts") == []


async def test_only_one_supervisor_expires_tasks_in_each_interval(
    observer: ManualObserver, db: StoreHarness
) -> None:
    first = Expirer(observer.environment())
    await first.tick()
    other = ManualObserver(db, observer.session, supervisor_id="other")
    late = db.send(good_until=datetime.now(UTC) - timedelta(seconds=1))
    await Expirer(other.environment()).tick()
    assert db.row(late, "state") == "PENDING"
    await first.tick()
    assert db.row(late, "state") == "EXPIRED"
