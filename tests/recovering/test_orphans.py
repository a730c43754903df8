"""Test leases whose worker is not registered: they are recovered when they are old enough by the database clock."""

from __future__ import annotations

from psycopg import sql

from tests.recovering.conftest import ManualObserver, StoreHarness, sweep

FAST = {
    "claimer_heartbeat_interval_ms": 1_000, "runner_heartbeat_interval_ms": 1_000, "claimed_stale_threshold_ms": 2_000,
    "running_stale_threshold_ms": 4_000, "check_interval_ms": 1_000,
}  # fmt: skip


def orphan(db: StoreHarness, *, seconds: float) -> None:
    """Delete the row of worker w1 and date its leases back by this many seconds."""
    schema = sql.Identifier(db.target.schema)
    db.connection.execute(sql.SQL("delete from {}.workers where id = 'w1'").format(schema))
    db.connection.execute(
        sql.SQL(
            "update {}.tasks set sent_at = now() - interval '1 day', claimed_at = now() - %(ago)s::interval,"
            " started_at = case when started_at is not null then now() - %(ago)s::interval end"
            " where claimed_by_worker_id = 'w1'"
        ).format(schema),
        {"ago": f"{seconds} seconds"},
    )


async def test_an_orphaned_lease_is_recovered_when_it_is_older_than_its_threshold(
    observer: ManualObserver, db: StoreHarness
) -> None:  # F4
    running, resilient = db.running(), db.running(flags=b'{"infrastructure_resilient": true}')
    db.send()
    (claimed,) = db.claim(limit=1)
    neighbour = db.running("w2")

    async def states_after(seconds: float) -> list[str]:
        orphan(db, seconds=seconds)
        await observer.reaper(**FAST).tick()
        return [db.row(task.id, "state") for task in (claimed, running, resilient)]

    assert await states_after(1.0) == ["CLAIMED", "RUNNING", "RUNNING"]
    assert await states_after(2.5) == ["PENDING", "RUNNING", "RUNNING"]
    assert await states_after(4.5) == ["PENDING", "FAILED", "RUNNING"]
    assert await states_after(11.0) == ["PENDING", "FAILED", "RUNNING"]
    assert await states_after(12.5) == ["PENDING", "FAILED", "FAILED"]
    assert db.row(neighbour.id, "state") == "RUNNING"
    error = db.row(running.id, "error")
    assert "its worker is not registered" in error["message"]
    assert (error["data"]["worker_id"], error["data"]["hostname"], error["data"]["pid"]) == ("w1", None, None)
    rows = db.table("recoveries", "worker_id, supervisor_id, cause, noticed_by, charge")
    assert (("w1", None, "its worker is not registered", "sweep", "loss")) in rows
    db.settle(neighbour)


async def test_a_sweep_recovers_orphaned_leases(observer: ManualObserver, db: StoreHarness) -> None:  # F4
    running = db.running()

    async def swept(**options: object) -> tuple[str, ...]:
        result = await sweep(observer.recoverer(), **options)  # type: ignore[arg-type]
        return result.worker_ids

    orphan(db, seconds=50)
    assert await swept(threshold_ms=60_000) == ()
    orphan(db, seconds=70)
    assert await swept(threshold_ms=60_000, dry_run=True) == ("w1",)
    assert db.row(running.id, "state") == "RUNNING"
    assert await swept(threshold_ms=60_000) == ("w1",)
    assert db.row(running.id, "state") == "FAILED"


async def test_orphaned_leases_are_not_recovered_with_automatic_recovery_off(
    observer: ManualObserver, db: StoreHarness
) -> None:  # A7
    running = db.running()
    orphan(db, seconds=100)
    await observer.reaper(**FAST | {"auto_fail_stale_running": False}).tick()
    assert db.row(running.id, "state") == "RUNNING"
    await observer.reaper(**FAST).tick()
    assert db.row(running.id, "state") == "FAILED"
