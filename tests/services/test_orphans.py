"""Leases whose worker is not registered: recovered when they are old enough by the database's clock, and not before."""

from __future__ import annotations

from psycopg import sql

from everbeat.config import RecoveryConfig
from everbeat.services.sweep import sweep
from tests.services.conftest import Hands, Onlooker

FAST = {
    "claimer_heartbeat_interval_ms": 1_000, "runner_heartbeat_interval_ms": 1_000, "claimed_stale_threshold_ms": 2_000,
    "running_stale_threshold_ms": 4_000, "check_interval_ms": 1_000,
}  # fmt: skip


def orphan(hands: Hands, *, seconds: float) -> None:
    """Nobody knows the worker w1 any more; what it holds is so old."""
    schema = sql.Identifier(hands.target.schema)
    hands.connection.execute(sql.SQL("delete from {}.workers where id = 'w1'").format(schema))
    hands.connection.execute(
        sql.SQL(
            "update {}.tasks set sent_at = now() - interval '1 day', claimed_at = now() - %(ago)s::interval,"
            " started_at = case when started_at is not null then now() - %(ago)s::interval end"
            " where claimed_by_worker_id = 'w1'"
        ).format(schema),
        {"ago": f"{seconds} seconds"},
    )


async def test_an_orphan_is_recovered_when_it_is_older_than_its_threshold(
    onlooker: Onlooker, hands: Hands
) -> None:  # F4
    running, resilient = hands.running(), hands.running(flags=b'{"infrastructure_resilient": true}')
    hands.send()
    (claimed,) = hands.claim(limit=1)
    neighbour = hands.running("w2")

    async def states_after(seconds: float) -> list[str]:
        orphan(hands, seconds=seconds)
        await onlooker.reaper(**FAST).tick()
        return [hands.row(task.id, "state") for task in (claimed, running, resilient)]

    assert await states_after(1.0) == ["CLAIMED", "RUNNING", "RUNNING"]
    assert await states_after(2.5) == ["PENDING", "RUNNING", "RUNNING"]
    assert await states_after(4.5) == ["PENDING", "FAILED", "RUNNING"]
    assert await states_after(11.0) == ["PENDING", "FAILED", "RUNNING"]
    assert await states_after(12.5) == ["PENDING", "FAILED", "FAILED"]
    assert hands.row(neighbour.id, "state") == "RUNNING"
    error = hands.row(running.id, "error")
    assert "its worker is not registered" in error["message"]
    assert (error["data"]["worker_id"], error["data"]["hostname"], error["data"]["pid"]) == ("w1", None, None)
    rows = hands.table("recoveries", "worker_id, supervisor_id, cause, noticed_by, charge")
    assert (("w1", None, "its worker is not registered", "sweep", "loss")) in rows
    hands.settle(neighbour)


async def test_an_orphan_is_swept_by_hand_as_well(onlooker: Onlooker, hands: Hands) -> None:  # F4
    running = hands.running()
    config = RecoveryConfig()

    async def swept(**options: object) -> tuple[str, ...]:
        result = await sweep(
            onlooker.session,
            config,
            recoverer=onlooker.recoverer(),
            **options,  # type: ignore[arg-type]
        )
        return result.worker_ids

    orphan(hands, seconds=50)
    assert await swept(threshold_ms=60_000) == ()
    orphan(hands, seconds=70)
    assert await swept(threshold_ms=60_000, dry_run=True) == ("w1",)
    assert hands.row(running.id, "state") == "RUNNING"
    assert await swept(threshold_ms=60_000) == ("w1",)
    assert hands.row(running.id, "state") == "FAILED"


async def test_orphans_are_left_alone_where_their_half_is_switched_off(
    onlooker: Onlooker, hands: Hands
) -> None:  # A7
    running = hands.running()
    orphan(hands, seconds=100)
    await onlooker.reaper(**FAST | {"auto_fail_stale_running": False}).tick()
    assert hands.row(running.id, "state") == "RUNNING"
    await onlooker.reaper(**FAST).tick()
    assert hands.row(running.id, "state") == "FAILED"
