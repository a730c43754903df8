"""An operator's sweep: by the operator's word and the database's clock."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, TypeVar

import psycopg
import pytest
from psycopg import sql

from everbeat.assembly.sweep import sweep_plan
from everbeat.config import RecoveryConfig
from everbeat.domain.hooks import HookSet
from everbeat.domain.inspection import SweepResult
from everbeat.runtime.events import TaskRecovered
from everbeat.services.sweep import TURN, sweep
from everbeat.store import workers
from everbeat.store.database import Database
from everbeat.store.plan import run_plan
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.services.conftest import Hands, Onlooker

T = TypeVar("T")
TABLES = (
    "tasks", "supervisors", "workers", "attempts", "recoveries", "beats", "worker_states", "turns", "pauses", "installation",
)  # fmt: skip
ENOUGH = {"threshold_ms": 60_000}


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


def everything(hands: Hands) -> dict[str, list[Any]]:
    return {name: sorted(hands.table(name), key=str) for name in TABLES}


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
    result = await swept(onlooker, **ENOUGH)
    assert [(task.id, task.was, task.action) for task in result.tasks] == [(running.id, "RUNNING", "fail")]
    assert hands.row(running.id, "error")["data"]["noticed_by"] == "sweep"
    assert await swept(onlooker, **ENOUGH) == SweepResult(
        worker_ids=(), recovered_count=0, tasks=(), skipped=False, missed=0, dry_run=False
    )


async def test_a_dry_run_names_the_dead_and_changes_no_byte(onlooker: Onlooker, hands: Hands) -> None:  # F2
    running = hands.running()
    hands.supervisor("s2", "idle")
    hands.supervisor("s3", "fresh")
    silence(hands, "s1", 6)
    silence(hands, "s2", 6)
    before = everything(hands)
    result = await swept(onlooker, dry_run=True)
    assert (result.dry_run, result.recovered_count, result.skipped) == (True, 0, False)
    assert result.worker_ids == ("idle", "w1", "w2"), "who holds nothing is dead as well"
    assert [(task.id, task.action) for task in result.tasks] == [(running.id, "fail")]
    assert result.tasks[0].silent_ms >= 360_000
    assert everything(hands) == before
    done = await swept(onlooker)
    assert (done.worker_ids, done.recovered_count) == (result.worker_ids, 1), "it did what it said"


async def test_a_sweep_works_with_automatic_recovery_off(onlooker: Onlooker, hands: Hands) -> None:  # F2
    running = hands.running()
    silence(hands, "s1", 6)
    off = RecoveryConfig(auto_requeue_stale_claimed=False, auto_fail_stale_running=False)
    assert (await swept(onlooker, off)).recovered_count == 1
    assert hands.row(running.id, "state") == "FAILED"


async def test_resilient_tasks_are_given_longer_each_for_itself(
    onlooker: Onlooker, hands: Hands
) -> None:  # F6
    resilient = hands.running(flags=b'{"infrastructure_resilient": true, "slow": true}')
    plain = hands.running(flags=b'{"infrastructure_resilient": false}')
    silence(hands, "s1", 6)
    result = await swept(onlooker)
    assert [task.id for task in result.tasks] == [plain.id]
    assert onlooker.living() == {"me", "s1"}, "it still holds what is not stale"
    assert (await swept(onlooker, resilient_flags=["other"], dry_run=True)).tasks[0].id == resilient.id
    assert (await swept(onlooker, resilient_flags=["slow"], dry_run=True)).tasks == ()
    assert (await swept(onlooker, multiplier=1)).recovered_count == 1
    assert hands.row(resilient.id, "state") == "FAILED"


@pytest.mark.parametrize("delay_ms", [750])
async def test_the_delay_is_the_least_time_until_the_next_start(
    delay_ms: int, onlooker: Onlooker, hands: Hands
) -> None:  # F5
    task_id = hands.send()
    hands.claim(limit=1)
    silence(hands, "s1", 6)
    assert (await swept(onlooker, recovery_delay_ms=delay_ms)).recovered_count == 1
    ((due_in,),) = hands.table("tasks", "extract(epoch from enqueued_at - clock_timestamp()) * 1000")
    ((waits,),) = hands.table("recoveries", "extract(epoch from next_retry_at - noticed_at) * 1000")
    assert delay_ms <= waits <= 1.2 * delay_ms
    assert 0 < due_in <= 1.2 * delay_ms
    assert hands.claim(limit=1) == []
    assert hands.row(task_id, "error ->> 'message'") == "Job recovered after worker interruption"


async def test_a_later_run_time_is_kept(onlooker: Onlooker, hands: Hands) -> None:  # F5
    task_id = hands.send()
    hands.claim(limit=1)
    silence(hands, "s1", 6)
    hands.connection.execute(
        sql.SQL("update {}.tasks set enqueued_at = '2099-01-01Z'").format(sql.Identifier(hands.target.schema))
    )
    await swept(onlooker, recovery_delay_ms=750)
    assert hands.row(task_id, "state, enqueued_at = '2099-01-01Z'") == ("PENDING", True)


async def test_many_batches_are_swept_to_the_end_the_oldest_first(
    onlooker: Onlooker, hands: Hands
) -> None:  # F9
    for _ in range(250):
        hands.send()
    assert len(hands.claim(limit=250)) == 250
    silence(hands, "s1", 6)
    assert (await swept(onlooker)).recovered_count == 250
    batches = hands.table("recoveries", "noticed_at, count(*) over (partition by noticed_at)")
    assert sorted({row[1] for row in batches}) == [50, 100]


async def test_an_ended_holder_needs_no_threshold(onlooker: Onlooker, hands: Hands) -> None:
    """`explain` sends operators here: what the ended hold is swept however young the lease is."""
    running = hands.running()
    hands.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed"))
    assert (await swept(onlooker, dry_run=True)).worker_ids == ("w1",)
    result = await swept(onlooker)
    assert (result.recovered_count, hands.row(running.id, "state")) == (1, "FAILED")


async def test_a_sweep_counts_from_the_last_beat_to_its_own_look(onlooker: Onlooker, hands: Hands) -> None:
    running = hands.running()
    hands.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed by SIGKILL"))
    silence(hands, "s1", 6)
    await swept(onlooker)
    data = hands.row(running.id, "error")["data"]
    assert data["noticed_by"] == "sweep"
    assert data["noticed_after_ms"] >= 6 * 60_000


async def test_the_swept_are_deregistered(onlooker: Onlooker, hands: Hands) -> None:  # F9
    hands.running()
    hands.supervisor("s2", "idle")
    silence(hands, "s1", 6)
    silence(hands, "s2", 6)
    assert (await swept(onlooker)).worker_ids == ("idle", "w1", "w2")
    assert onlooker.living() == {"me"}
    assert set(hands.table("workers", "id, ended_how")) == {(name, "sweep") for name in ("w1", "w2", "idle")}
    assert hands.run(workers.beat("s1", [], draining=False)).seq is None, "whoever lives after all is told"


async def test_a_worker_that_beats_for_itself_keeps_its_supervisor_registered(
    onlooker: Onlooker, hands: Hands
) -> None:  # F9
    silence(hands, "s1", 6)
    hands.run(workers.beat_worker("w1"))
    assert (await swept(onlooker)).worker_ids == ()
    assert onlooker.living() == {"me", "s1"}


async def test_what_an_ended_worker_holds_is_swept_though_its_supervisor_lives(
    onlooker: Onlooker, hands: Hands
) -> None:
    running = hands.running()
    hands.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed by SIGKILL", signal=9))
    hands.connection.execute(
        sql.SQL(
            "update {}.workers set ended_at = now() - interval '6 minutes' where ended_at is not null"
        ).format(sql.Identifier(hands.target.schema))
    )
    session = onlooker.session
    onlooker.session = Interrupted(session, "task/recover", lambda: onlooker.beat("s1"))  # type: ignore[assignment]
    assert (await swept(onlooker)).worker_ids == ("w1",), "beats of its supervisor do not speak for it"
    onlooker.session = session
    assert hands.row(running.id, "error -> 'data' ->> 'cause'") == "killed by SIGKILL"


async def test_one_sweep_at_a_time_and_the_others_say_so(onlooker: Onlooker, hands: Hands) -> None:  # F3
    ids = {hands.send() for _ in range(50)}
    hands.start(*hands.claim(limit=40))
    hands.claim(limit=10)
    silence(hands, "s1", 6)
    sessions = [Session(hands.target, "everbeat test sweeper", random=Random(one)) for one in range(8)]
    sweepers = [Onlooker(hands, session, supervisor_id=f"o{one}") for one, session in enumerate(sessions)]
    config = RecoveryConfig(sweep_batch_size=7)
    for session in sessions:
        await session.run(workers.watch_beats())  # connected, so that they begin together
    results = await asyncio.gather(*(swept(each, config, sweeper_id=each.supervisor_id) for each in sweepers))
    assert sum(result.recovered_count for result in results) == 50
    assert [result.recovered_count for result in results if not result.skipped] == [50]
    assert {result.missed for result in results} == {0}
    told = [event.task_id for each in sweepers for event in each.told(TaskRecovered)]  # type: ignore[attr-defined]
    assert len(told) == 50
    assert set(told) == ids
    for session in sessions:
        await session.drop()


async def test_a_sweeper_that_died_does_not_keep_the_turn(onlooker: Onlooker, hands: Hands) -> None:
    hands.running()
    silence(hands, "s1", 6)
    hands.run(workers.take_turn(TURN, interval_ms=10_000, taken_by="somebody"))
    result = await swept(onlooker)
    assert (result.skipped, result.recovered_count, result.worker_ids) == (True, 0, ())
    assert (await swept(onlooker, dry_run=True)).skipped is False, "who only looks needs no turn"
    hands.connection.execute(
        sql.SQL("update {}.turns set taken_until = now()").format(sql.Identifier(hands.target.schema))
    )
    assert (await swept(onlooker)).recovered_count == 1


async def test_a_holder_that_came_back_is_missed_and_keeps_its_task(onlooker: Onlooker, hands: Hands) -> None:
    running = hands.running()
    silence(hands, "s1", 6)
    statements = Interrupted(onlooker.session, "task/recover", lambda: onlooker.beat("s1"))
    config = RecoveryConfig()
    onlooker.session = statements  # type: ignore[assignment]
    result = await swept(onlooker, config)
    assert (result.recovered_count, result.missed, result.worker_ids) == (0, 1, ())
    assert hands.row(running.id, "state") == "RUNNING"
    assert "s1" in onlooker.living()
    hands.settle(running)


async def test_a_sweep_that_fails_gives_its_turn_back(onlooker: Onlooker, hands: Hands) -> None:  # F10
    hands.running()
    silence(hands, "s1", 6)

    def fail() -> None:
        raise ArithmeticError

    session = onlooker.session
    onlooker.session = Interrupted(session, "task/recover", fail)  # type: ignore[assignment]
    with pytest.raises(ArithmeticError):
        await swept(onlooker)
    onlooker.session = session
    assert (await swept(onlooker)).recovered_count == 1


async def test_a_sweep_that_cannot_end_the_sessions_of_the_dead_reports_it_and_what_it_recovered(
    onlooker: Onlooker, hands: Hands
) -> None:
    hands.running()
    silence(hands, "s1", 6)
    hands.connection.execute(
        hands.plain("alter table {schema}.supervisors rename column session_name to renamed")
    )
    result = await swept(onlooker)
    assert result.recovered_count == 1
    assert result.sessions_problem is not None
    assert "session_name" in result.sessions_problem
    hands.connection.execute(
        hands.plain("alter table {schema}.supervisors rename column renamed to session_name")
    )
    assert (await swept(onlooker)).sessions_problem is None


async def test_a_sweep_does_not_wait_long_for_the_sessions_of_the_dead(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everbeat.services.sweep.AFTERWARDS_S", 0.5)
    hands.running()
    silence(hands, "s1", 6)
    with psycopg.connect(hands.target.url) as other:
        plan = sweep_plan(
            RecoveryConfig(), channel=hands.target.channel, hooks=HookSet(), dry_run=False, sweep_threshold=None,
            recovery_delay=None, resilient_task_flags=None, resilient_sweep_threshold_multiplier=None,
        )  # fmt: skip
        result = run_plan(LockedOut(hands.target, other), plan)
    assert result.recovered_count == 1
    assert result.sessions_problem is not None


class LockedOut(Database):
    """A client that waits for a lock when it comes to the sessions of the dead."""

    def __init__(self, target: Target, other: psycopg.Connection[Any]) -> None:
        super().__init__(target)
        self.other = other

    def run(self, statement: Statement[T], **options: Any) -> T:
        if statement.name == "worker/remaining_sessions":
            self.other.execute(compose_lock(self.target))
        return super().run(statement, **options)


def compose_lock(target: Target) -> sql.Composed:
    return sql.SQL("lock table {}").format(sql.Identifier(target.schema, "supervisors"))


class Interrupted:
    """A session between whose statements something happens once, before one of this name."""

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
