"""Test the sweep of an operator, which uses the operator's thresholds and the database clock."""

from __future__ import annotations

import asyncio
import re
from random import Random
from typing import Any, TypeVar

import psycopg
import pytest
from psycopg import sql

from everbeat.assembly.operations import sweep_plan
from everbeat.config import RecoveryConfig
from everbeat.domain.inspection import SweepResult
from everbeat.domain.recovery.hooks import HookSet
from everbeat.recovering.sweep import TURN
from everbeat.runtime.events import TaskRecovered
from everbeat.store import workers
from everbeat.store.database import Database
from everbeat.store.plan import run_plan
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.recovering.conftest import ManualObserver, StoreHarness, sweep

T = TypeVar("T")
TABLES = (
    "tasks", "supervisors", "workers", "attempts", "recoveries", "beats", "worker_states", "turns", "pauses", "installation",
)  # fmt: skip
ENOUGH = {"threshold_ms": 60_000}


def silence(db: StoreHarness, supervisor: str, minutes: float) -> None:
    """Move every sign of life of a supervisor and its tasks into the past."""
    schema = sql.Identifier(db.target.schema)
    for text in (
        "update {}.supervisors set last_beat_at = now() - %(ago)s::interval where id = %(id)s",
        "update {}.tasks set claimed_at = now() - %(ago)s::interval, started_at = case when started_at is not null"
        " then now() - %(ago)s::interval end, sent_at = now() - interval '1 day', enqueued_at = now() - interval '1 day'"
        " where state in ('CLAIMED', 'RUNNING')",
    ):
        db.connection.execute(sql.SQL(text).format(schema), {"ago": f"{minutes} minutes", "id": supervisor})  # type: ignore[arg-type]


async def swept(
    observer: ManualObserver, config: RecoveryConfig | None = None, **options: Any
) -> SweepResult:
    """Run a sweep of an operator; `options` other than the threshold are settings."""
    settings = {} if config is None else config.values()
    given = {name: options.pop(name) for name in ("threshold_ms", "dry_run") if name in options}
    return await sweep(observer.recoverer(**settings | options), **given)


def everything(db: StoreHarness) -> dict[str, list[Any]]:
    return {name: sorted(db.table(name), key=str) for name in TABLES}


async def test_a_sweep_uses_the_configured_thresholds_or_those_of_the_operator(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    db.send()
    (claimed,) = db.claim("w2", limit=1)
    silence(db, "s1", 3)
    result = await swept(observer)
    assert (result.recovered_count, result.worker_ids) == (1, ("w2",)), "CLAIMED is stale after 2 minutes"
    assert db.row(claimed.id, "state") == "PENDING"
    result = await swept(observer, **ENOUGH)
    assert [(task.id, task.was, task.action) for task in result.tasks] == [(running.id, "RUNNING", "fail")]
    assert db.row(running.id, "error")["data"]["noticed_by"] == "sweep"
    assert await swept(observer, **ENOUGH) == SweepResult(
        worker_ids=(), recovered_count=0, tasks=(), skipped=False, missed=0, dry_run=False
    )


async def test_a_dry_run_of_a_sweep_names_stale_workers_and_changes_nothing(
    observer: ManualObserver, db: StoreHarness
) -> None:  # F2
    running = db.running()
    db.supervisor("s2", "idle")
    db.supervisor("s3", "fresh")
    silence(db, "s1", 6)
    silence(db, "s2", 6)
    before = everything(db)
    result = await swept(observer, dry_run=True)
    assert (result.dry_run, result.recovered_count, result.skipped) == (True, 0, False)
    assert result.worker_ids == ("idle", "w1", "w2"), "a worker without leases is dead too"
    assert [(task.id, task.action) for task in result.tasks] == [(running.id, "fail")]
    assert result.tasks[0].silent_ms >= 360_000
    assert everything(db) == before
    done = await swept(observer)
    assert (done.worker_ids, done.recovered_count) == (result.worker_ids, 1), (
        "the sweep must recover what the dry run named"
    )


async def test_a_sweep_works_with_automatic_recovery_off(
    observer: ManualObserver, db: StoreHarness
) -> None:  # F2
    running = db.running()
    silence(db, "s1", 6)
    off = RecoveryConfig(auto_requeue_stale_claimed=False, auto_fail_stale_running=False)
    assert (await swept(observer, off)).recovered_count == 1
    assert db.row(running.id, "state") == "FAILED"


async def test_each_resilient_task_has_a_longer_threshold_in_a_sweep(
    observer: ManualObserver, db: StoreHarness
) -> None:  # F6
    resilient = db.running(flags=b'{"infrastructure_resilient": true, "slow": true}')
    plain = db.running("w2", flags=b'{"infrastructure_resilient": false}')
    silence(db, "s1", 6)
    rehearsal = await swept(observer, dry_run=True)
    result = await swept(observer)
    assert [task.id for task in result.tasks] == [plain.id]
    assert rehearsal.worker_ids == result.worker_ids == ("w2",), "the other worker keeps its task"
    assert observer.living() == {"me", "s1"}, "it still has a lease that is not stale"
    assert (await swept(observer, resilient_task_flags=["other"], dry_run=True)).tasks[0].id == resilient.id
    assert (await swept(observer, resilient_task_flags=["slow"], dry_run=True)).tasks == ()
    assert (await swept(observer, resilient_sweep_threshold_multiplier=1)).recovered_count == 1
    assert db.row(resilient.id, "state") == "FAILED"


@pytest.mark.parametrize("delay_ms", [750])
async def test_the_recovery_delay_of_a_sweep_is_the_minimum_until_the_next_start(
    delay_ms: int, observer: ManualObserver, db: StoreHarness
) -> None:  # F5
    task_id = db.send()
    db.claim(limit=1)
    silence(db, "s1", 6)
    assert (await swept(observer, recovery_delay_ms=delay_ms)).recovered_count == 1
    ((due_in,),) = db.table("tasks", "extract(epoch from enqueued_at - clock_timestamp()) * 1000")
    ((waits,),) = db.table("recoveries", "extract(epoch from next_retry_at - noticed_at) * 1000")
    assert delay_ms <= waits <= 1.2 * delay_ms
    assert 0 < due_in <= 1.2 * delay_ms
    assert db.claim(limit=1) == []
    assert re.fullmatch(
        r"Worker w1 \(pid \d+ on host\) had claimed this task when it died: .+\. It was noticed by sweep \d[\w. ]* after its last sign of life\."
        r" Its code had not started, so the task was put back into its queue\.",
        db.row(task_id, "error ->> 'message'"),
    )


async def test_a_sweep_keeps_a_later_run_time(observer: ManualObserver, db: StoreHarness) -> None:  # F5
    task_id = db.send()
    db.claim(limit=1)
    silence(db, "s1", 6)
    db.connection.execute(
        sql.SQL("update {}.tasks set enqueued_at = '2099-01-01Z'").format(sql.Identifier(db.target.schema))
    )
    await swept(observer, recovery_delay_ms=750)
    assert db.row(task_id, "state, enqueued_at = '2099-01-01Z'") == ("PENDING", True)


async def test_a_sweep_recovers_many_batches_in_one_call(
    observer: ManualObserver, db: StoreHarness
) -> None:  # F9
    for _ in range(250):
        db.send()
    assert len(db.claim(limit=250)) == 250
    silence(db, "s1", 6)
    assert (await swept(observer)).recovered_count == 250
    batches = db.table("recoveries", "noticed_at, count(*) over (partition by noticed_at)")
    assert sorted({row[1] for row in batches}) == [50, 100]


async def test_a_sweep_recovers_leases_of_an_ended_worker_without_a_threshold(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """`explain` recommends a sweep for leases of ended workers, so it recovers them at any age."""
    running = db.running()
    db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed"))
    assert (await swept(observer, dry_run=True)).worker_ids == ("w1",)
    result = await swept(observer)
    assert (result.recovered_count, db.row(running.id, "state")) == (1, "FAILED")


async def test_a_sweep_measures_the_delay_from_the_last_heartbeat(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed by SIGKILL"))
    silence(db, "s1", 6)
    await swept(observer)
    data = db.row(running.id, "error")["data"]
    assert data["noticed_by"] == "sweep"
    assert data["noticed_after_ms"] >= 6 * 60_000


async def test_a_sweep_deregisters_the_workers_that_it_recovers(
    observer: ManualObserver, db: StoreHarness
) -> None:  # F9
    db.running()
    db.supervisor("s2", "idle")
    silence(db, "s1", 6)
    silence(db, "s2", 6)
    assert (await swept(observer)).worker_ids == ("idle", "w1", "w2")
    assert observer.living() == {"me"}
    assert set(db.table("workers", "id, ended_how")) == {(name, "sweep") for name in ("w1", "w2", "idle")}
    assert db.run(workers.beat("s1", [], draining=False)).seq is None, (
        "a supervisor that is still alive must learn that it was ended"
    )


async def test_a_worker_with_its_own_heartbeats_keeps_its_supervisor_registered_in_a_sweep(
    observer: ManualObserver, db: StoreHarness
) -> None:  # F9
    silence(db, "s1", 6)
    db.run(workers.beat_worker("w1"))
    assert (await swept(observer)).worker_ids == ()
    assert observer.living() == {"me", "s1"}


async def test_a_sweep_recovers_leases_of_an_ended_worker_under_a_live_supervisor(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed by SIGKILL", signal=9))
    db.connection.execute(
        sql.SQL(
            "update {}.workers set ended_at = now() - interval '6 minutes' where ended_at is not null"
        ).format(sql.Identifier(db.target.schema))
    )
    session = observer.session
    observer.session = Interrupted(session, "task/recover_leases", lambda: observer.beat("s1"))  # type: ignore[assignment]
    assert (await swept(observer)).worker_ids == ("w1",), (
        "heartbeats of the supervisor do not count for an ended worker"
    )
    observer.session = session
    assert db.row(running.id, "error -> 'data' ->> 'cause'") == "killed by SIGKILL"


async def test_only_one_sweep_runs_at_a_time_and_the_others_report_it(
    observer: ManualObserver, db: StoreHarness
) -> None:  # F3
    ids = {db.send() for _ in range(50)}
    db.start(*db.claim(limit=40))
    db.claim(limit=10)
    silence(db, "s1", 6)
    sessions = [Session(db.target, "everbeat test sweeper", random=Random(one)) for one in range(8)]
    sweepers = [ManualObserver(db, session, supervisor_id=f"o{one}") for one, session in enumerate(sessions)]
    config = RecoveryConfig(sweep_batch_size=7)
    for session in sessions:
        await session.run(workers.watch_beats())  # connects all sessions, so that the sweeps begin together
    results = await asyncio.gather(*(swept(each, config) for each in sweepers))
    assert sum(result.recovered_count for result in results) == 50
    assert [result.recovered_count for result in results if not result.skipped] == [50]
    assert {result.missed for result in results} == {0}
    told = [event.task_id for each in sweepers for event in each.told(TaskRecovered)]  # type: ignore[attr-defined]
    assert len(told) == 50
    assert set(told) == ids
    for session in sessions:
        await session.drop()


async def test_a_sweep_whose_process_died_blocks_others_only_until_its_turn_expires(
    observer: ManualObserver, db: StoreHarness
) -> None:
    db.running()
    silence(db, "s1", 6)
    db.run(workers.take_turn(TURN, interval_ms=10_000, taken_by="somebody"))
    result = await swept(observer)
    assert (result.skipped, result.recovered_count, result.worker_ids) == (True, 0, ())
    assert (await swept(observer, dry_run=True)).skipped is False, "a dry run needs no turn"
    db.connection.execute(
        sql.SQL("update {}.turns set taken_until = now()").format(sql.Identifier(db.target.schema))
    )
    assert (await swept(observer)).recovered_count == 1


async def test_a_worker_that_beats_during_a_sweep_keeps_its_task(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    silence(db, "s1", 6)
    statements = Interrupted(observer.session, "task/recover_leases", lambda: observer.beat("s1"))
    config = RecoveryConfig()
    observer.session = statements  # type: ignore[assignment]
    result = await swept(observer, config)
    assert (result.recovered_count, result.missed, result.worker_ids) == (0, 1, ())
    assert db.row(running.id, "state") == "RUNNING"
    assert "s1" in observer.living()
    db.settle(running)


async def test_a_failed_sweep_releases_its_turn(observer: ManualObserver, db: StoreHarness) -> None:  # F10
    db.running()
    silence(db, "s1", 6)

    def fail() -> None:
        raise ArithmeticError

    session = observer.session
    observer.session = Interrupted(session, "task/recover_leases", fail)  # type: ignore[assignment]
    with pytest.raises(ArithmeticError):
        await swept(observer)
    observer.session = session
    assert (await swept(observer)).recovered_count == 1


async def test_a_sweep_reports_that_it_could_not_end_sessions_of_dead_trees(
    observer: ManualObserver, db: StoreHarness
) -> None:
    db.running()
    silence(db, "s1", 6)
    db.connection.execute(db.plain("alter table {schema}.supervisors rename column session_name to renamed"))
    result = await swept(observer)
    assert result.recovered_count == 1
    assert result.sessions_problem is not None
    assert "session_name" in result.sessions_problem
    db.connection.execute(db.plain("alter table {schema}.supervisors rename column renamed to session_name"))
    assert (await swept(observer)).sessions_problem is None


async def test_a_sweep_waits_only_briefly_to_end_sessions_of_dead_trees(
    db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everbeat.recovering.sweep.AFTERWARDS_S", 0.5)
    db.running()
    silence(db, "s1", 6)
    with psycopg.connect(db.target.url) as other:
        plan = sweep_plan(
            RecoveryConfig(), channel=db.target.channel, hooks=HookSet(), dry_run=False, sweep_threshold=None,
            recovery_delay=None, resilient_task_flags=None, resilient_sweep_threshold_multiplier=None,
        )  # fmt: skip
        result = run_plan(LockedOut(db.target, other), plan)
    assert result.recovered_count == 1
    assert result.sessions_problem is not None


class LockedOut(Database):
    """A client that waits for a lock before it ends the sessions of dead trees."""

    def __init__(self, target: Target, other: psycopg.Connection[Any]) -> None:
        super().__init__(target)
        self.other = other

    def run(self, statement: Statement[T], **options: Any) -> T:
        if statement.name == "worker/list_remaining_sessions":
            self.other.execute(compose_lock(self.target))
        return super().run(statement, **options)


def compose_lock(target: Target) -> sql.Composed:
    return sql.SQL("lock table {}").format(sql.Identifier(target.schema, "supervisors"))


class Interrupted:
    """A session that calls `act` once, before a statement of this name."""

    def __init__(self, session: Session, name: str, act: Any) -> None:
        self.session, self.name, self.act = session, name, act
        self.done = False

    async def run(self, statement: Any, *, patience_s: float | None = None) -> Any:
        if statement.name == self.name and not self.done:
            self.done = True
            self.act()
        return await self.session.run(statement, patience_s=patience_s)

    async def drop(self) -> None:
        await self.session.drop()
