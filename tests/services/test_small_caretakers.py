"""Start-up reconciliation, expiry and snapshots."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from everbeat.config import RecoveryConfig
from everbeat.services.expirer import Expirer
from everbeat.services.snapshots import Snapshots
from everbeat.store.workers import WorkerState
from tests.services.conftest import Hands, Onlooker


async def test_late_tasks_expire_within_one_check_interval(onlooker: Onlooker, hands: Hands) -> None:  # C1
    late = datetime.now(UTC) - timedelta(seconds=1)
    expired = [hands.send(good_until=late) for _ in range(450)]
    sound = hands.send(good_until=datetime.now(UTC) + timedelta(hours=1))
    config = RecoveryConfig(check_interval_ms=20_000)
    expirer = Expirer(onlooker.session, config, channel=hands.target.channel, observer=onlooker)
    assert expirer.interval_s == 10.0, "a turn of half the interval, and half to wait for the next"
    await expirer.tick()
    assert {hands.row(task, "state") for task in expired} == {"EXPIRED"}
    assert hands.row(sound, "state") == "PENDING"
    assert hands.table("attempts") == []


async def test_one_supervisor_in_each_interval_expires(onlooker: Onlooker, hands: Hands) -> None:
    config = RecoveryConfig()
    first = Expirer(onlooker.session, config, channel=hands.target.channel, observer=onlooker)
    await first.tick()
    other = Onlooker(hands, onlooker.session, supervisor_id="other")
    late = hands.send(good_until=datetime.now(UTC) - timedelta(seconds=1))
    await Expirer(onlooker.session, config, channel=hands.target.channel, observer=other).tick()
    assert hands.row(late, "state") == "PENDING"
    await first.tick()
    assert hands.row(late, "state") == "EXPIRED"


async def test_snapshots_are_stored(onlooker: Onlooker, hands: Hands) -> None:  # D6
    states: list[WorkerState] = []
    snapshots = Snapshots(onlooker.session, RecoveryConfig(), states=lambda: states)
    assert snapshots.interval_s == 30.0
    assert await snapshots.tick() == 1.0, "asked again soon: the first is not to wait for half a minute"
    states.append(
        WorkerState(
            worker_id="w1",
            running=1,
            claimed=2,
            slots=8,
            rss_bytes=10**10,
            cpu_percent=99.5,
            loop_lag_ms=0.25,
        )
    )
    assert await snapshots.tick() is None
    rows = hands.table(
        "worker_states", "worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms"
    )
    assert rows == [("w1", 1, 2, 8, 10**10, 99.5, 0.25)]
