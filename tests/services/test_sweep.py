"""An operator's sweep: by the operator's word and the database's clock."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql

from everbeat.config import RecoveryConfig
from everbeat.services.sweep import SweepResult, sweep
from tests.services.conftest import Hands, Onlooker


def silence(hands: Hands, supervisor: str, minutes: float) -> None:
    """Moves every sign of life of a supervisor and its tasks into the past."""
    schema = sql.Identifier(hands.target.schema)
    for text in (
        "update {}.supervisors set last_beat_at = now() - %(ago)s::interval where id = %(id)s",
        "update {}.tasks set claimed_at = now() - %(ago)s::interval, started_at = case when started_at is not null"
        " then now() - %(ago)s::interval end, sent_at = now() - interval '1 day', enqueued_at = now() - interval '1 day'"
        " where state in ('CLAIMED', 'RUNNING')",
    ):
        hands.connection.execute(
            sql.SQL(text).format(schema), {"ago": f"{minutes} minutes", "id": supervisor}
        )  # type: ignore[arg-type]


async def swept(onlooker: Onlooker, config: RecoveryConfig | None = None, **options: Any) -> SweepResult:
    config = config or RecoveryConfig()
    return await sweep(onlooker.session, config, recoverer=onlooker.recoverer(**config.values()), **options)


async def test_a_sweep_takes_the_configurations_thresholds_or_the_operators(
    onlooker: Onlooker, hands: Hands
) -> None:
    running = hands.running()
    hands.send()
    (claimed,) = hands.claim("w2", limit=1)
    silence(hands, "s1", 3)
    result = await swept(onlooker)
    assert (result.recovered_count, result.worker_ids) == (1, ("w2",)), "CLAIMED is stale after 2 minutes"
    assert hands.row(claimed.id, "state") == "PENDING"
    result = await swept(onlooker, threshold_ms=60_000)
    assert [(task.id, task.was, task.action) for task in result.tasks] == [(running.id, "RUNNING", "fail")]
    assert hands.row(running.id, "error")["data"]["noticed_by"] == "sweep"
    assert await swept(onlooker, threshold_ms=0) == SweepResult(
        worker_ids=(), recovered_count=0, tasks=(), skipped=0, dry_run=False
    )


async def test_a_dry_run_names_the_dead_and_changes_nothing(onlooker: Onlooker, hands: Hands) -> None:  # F2
    running = hands.running()
    silence(hands, "s1", 6)
    before = hands.table("tasks"), hands.table("supervisors"), hands.table("workers")
    result = await swept(onlooker, dry_run=True)
    assert (result.dry_run, result.recovered_count, result.worker_ids) == (True, 0, ("w1",))
    assert [(task.id, task.action) for task in result.tasks] == [(running.id, "fail")]
    assert result.tasks[0].silent_ms >= 360_000
    assert (hands.table("tasks"), hands.table("supervisors"), hands.table("workers")) == before


async def test_a_sweep_works_with_automatic_recovery_off(onlooker: Onlooker, hands: Hands) -> None:
    running = hands.running()
    silence(hands, "s1", 6)
    off = RecoveryConfig(auto_requeue_stale_claimed=False, auto_fail_stale_running=False)
    assert (await swept(onlooker, off)).recovered_count == 1
    assert hands.row(running.id, "state") == "FAILED"


async def test_resilient_tasks_are_given_longer(onlooker: Onlooker, hands: Hands) -> None:  # F6
    resilient = hands.running(flags=b'{"infrastructure_resilient": true, "slow": true}')
    silence(hands, "s1", 6)
    assert (await swept(onlooker)).tasks == ()
    assert (await swept(onlooker, resilient_flags=["other"], dry_run=True)).tasks[0].id == resilient.id
    assert (await swept(onlooker, multiplier=1, dry_run=True)).tasks[0].id == resilient.id
    assert (await swept(onlooker, threshold_ms=100_000)).recovered_count == 1


@pytest.mark.parametrize("delay_ms", [750])
async def test_the_delay_is_the_least_time_until_the_next_start(
    delay_ms: int, onlooker: Onlooker, hands: Hands
) -> None:  # F5
    hands.send()
    hands.claim(limit=1)
    silence(hands, "s1", 6)
    assert (await swept(onlooker, recovery_delay_ms=delay_ms)).recovered_count == 1
    ((due_in,),) = hands.table("tasks", "extract(epoch from enqueued_at - clock_timestamp()) * 1000")
    assert 0 < due_in <= delay_ms
    assert hands.claim(limit=1) == []


async def test_many_pages_are_swept_to_the_end(onlooker: Onlooker, hands: Hands) -> None:  # F9
    for _ in range(2_100):
        hands.send()
    assert len(hands.claim(limit=2_100)) == 2_100
    silence(hands, "s1", 6)
    assert (await swept(onlooker)).recovered_count == 2_100
