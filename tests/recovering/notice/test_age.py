"""Test noticing deaths by age: each lease is judged on the observer's clock while the database is reachable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql

from everbeat.domain.task.policy import StoredPolicy
from everbeat.errors import DatabaseError
from everbeat.recovering.notice.age import Reaper, SilenceExcused
from everbeat.recovering.observer import OwnBeats
from everbeat.runtime.events import JudgementDelayed, MassSilence, TaskRecovered
from everbeat.runtime.identity import ProcessIdentity
from everbeat.store import migrating, workers
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.recovering.conftest import ManualObserver, StoreHarness

AGAIN = StoredPolicy(on_crash="retry").to_json()
FAST = {
    "runner_heartbeat_interval_ms": 1_000,
    "claimer_heartbeat_interval_ms": 1_000,
    "running_stale_threshold_ms": 2_000,
    "claimed_stale_threshold_ms": 2_000,
    "check_interval_ms": 1_000,
}


@dataclass
class Refusing:
    """A session whose server refuses every statement of this name."""

    session: Session
    name: str

    async def run(self, statement: Statement[Any], *, patience_s: float | None = None) -> Any:
        if statement.name == self.name:
            raise DatabaseError("refused", fix="ask again")
        return await self.session.run(statement, patience_s=patience_s)


@dataclass
class Noting:
    """A session that calls `act` before each statement of this name."""

    session: Session
    name: str
    act: Callable[[], object]

    async def run(self, statement: Statement[Any], *, patience_s: float | None = None) -> Any:
        if statement.name == self.name:
            self.act()
        return await self.session.run(statement, patience_s=patience_s)


async def look(
    observer: ManualObserver, reaper: Reaper, *, after_s: float = 1.0, beating: tuple[str, ...] = ()
) -> None:
    await observer.clock.advance(after_s)
    observer.beat("me", *beating)
    await reaper.tick()


def had_its_lock(db: StoreHarness, supervisor: str) -> None:
    """Record that the tree held its session lock and lost the session."""
    with db.target.connect(f"everbeat-{supervisor} supervisor") as session:
        parameters = {"id": supervisor, "lock_key": db.target.lock_key(supervisor)}
        session.execute(db.text("worker/lock_session"), parameters)
        pid = session.info.backend_pid
    db.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])


async def test_a_silent_tree_without_connections_is_not_judged_while_none_is_free(
    observer: ManualObserver, db: StoreHarness
) -> None:  # J12
    had_its_lock(db, "s1")
    running = db.running()
    reaper = observer.reaper(**FAST)
    await look(observer, reaper)
    observer.is_served = False
    for _ in range(20):
        await look(observer, reaper)
    observer.is_served = True
    for _ in range(2):
        await look(observer, reaper)
    await look(observer, reaper, after_s=0.98)
    assert db.row(running.id, "state") == "RUNNING", "its worker has a whole threshold to come back"
    await look(observer, reaper, after_s=0.1)
    assert db.row(running.id, "state") == "FAILED"
    (told,) = observer.told(SilenceExcused)
    assert isinstance(told, SilenceExcused)
    assert (told.supervisor_ids, told.at_most_s) == (("s1",), None)


async def test_a_silent_tree_with_a_heartbeat_connection_is_judged_while_none_is_free(
    observer: ManualObserver, db: StoreHarness
) -> None:  # J12
    """A frozen tree keeps its connections and might be the reason why no other is free."""
    had_its_lock(db, "s1")
    running = db.running()
    reaper = observer.reaper(**FAST)
    observer.is_served = False
    with db.target.connect("everbeat-s1 supervisor beats 7.1"):
        for after_s in (1.0, 1.0, 0.9):
            await look(observer, reaper, after_s=after_s)
        assert db.row(running.id, "state") == "RUNNING"
        await look(observer, reaper, after_s=0.2)
        assert db.row(running.id, "state") == "FAILED"
    assert observer.told(SilenceExcused) == []


@pytest.mark.parametrize("why", ["another session of it is left", "its lock was never taken", "a pooler"])
async def test_a_silent_tree_with_unknown_connections_is_excused_for_two_thresholds(
    why: str, observer: ManualObserver, db: StoreHarness
) -> None:  # J12
    if why != "its lock was never taken":
        had_its_lock(db, "s1")
    running = db.running()
    reaper = observer.reaper(**FAST)
    observer.is_served = False
    observer.is_pooled = why == "a pooler"
    with db.target.connect("everbeat-s1 worker 7.1" if why.startswith("another") else "a stranger"):
        for _ in range(
            8
        ):  # it is excused from the third to the sixth check and has a threshold from the seventh
            await look(observer, reaper)
        assert db.row(running.id, "state") == "RUNNING"
        await look(observer, reaper, after_s=1.1)
        assert db.row(running.id, "state") == "FAILED"
    (told,) = observer.told(SilenceExcused)
    assert isinstance(told, SilenceExcused)
    assert (told.supervisor_ids, told.at_most_s) == (("s1",), 4.0)


async def test_refused_connections_of_other_services_do_not_excuse_a_silent_tree(
    observer: ManualObserver, db: StoreHarness
) -> None:  # J12
    """A session watch that waits for a free connection tries once a second."""
    running = db.running()
    reaper, watch = observer.reaper(**FAST), observer.session_watch(**FAST)
    db.supervisor("s2")
    had_its_lock(db, "s2")
    with db.target.connect("everbeat-s1 supervisor beats 7.1"):
        observer.is_served = False
        for _ in range(3):
            await look(observer, reaper)
            await watch.tick()
        await look(observer, reaper, after_s=0.1)
    assert db.row(running.id, "state") == "FAILED"


async def test_a_silent_worker_loses_its_leases_after_the_threshold_and_not_before(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running, again = db.running(), db.running("w2", policy=AGAIN)
    db.send()
    (claimed,) = db.claim(limit=1)
    reaper = observer.reaper(**FAST)
    await look(observer, reaper)
    await look(observer, reaper, after_s=1.0)
    await look(observer, reaper, after_s=0.99)
    assert db.row(running.id, "state") == "RUNNING"
    await look(observer, reaper, after_s=0.02)

    assert db.row(claimed.id, "state, claim_id, retry_count, loss_count, attempt") == (
        "PENDING",
        None,
        0,
        0,
        0,
    )  # E1
    assert db.row(again.id, "state, retry_count, loss_count") == ("PENDING", 1, 1)  # E3
    error = db.row(running.id, "error")
    assert db.row(running.id, "state") == "FAILED"  # E2
    assert error["code"] == "WORKER_CRASHED"
    data = error["data"]
    assert (data["worker_id"], data["hostname"], data["pid"], data["supervisor_id"]) == (
        "w1",
        "host",
        2,
        "s1",
    )
    assert (data["noticed_by"], data["poison"], data["loss_count"], data["crash_count"]) == (
        "age",
        False,
        1,
        0,
    )
    assert data["started_at"] <= data["last_beat"] <= data["detected_at"]
    assert sorted(db.table("attempts", "outcome, will_retry")) == [("LOST", False), ("LOST", True)]
    told = {event.task_id for event in observer.told(TaskRecovered)}  # type: ignore[attr-defined]
    assert told == {running.id, again.id, claimed.id}
    rows = db.table("recoveries", "worker_id, was, action, noticed_by, recovered_by")
    assert {row[3:] for row in rows} == {("age", "me")}


async def test_the_reaper_ticks_again_when_a_silence_reaches_its_threshold(observer: ManualObserver) -> None:
    reaper = observer.reaper(**FAST)
    assert await reaper.tick() is None
    await observer.clock.advance(0.9)
    assert await reaper.tick() is None, "not due within the interval"
    await observer.clock.advance(0.9)
    assert await reaper.tick() == pytest.approx(0.2)


async def test_a_tree_that_sends_heartbeats_keeps_its_long_task(
    observer: ManualObserver, db: StoreHarness
) -> None:  # D1
    running = db.running()
    reaper = observer.reaper(**FAST)
    for _ in range(12):
        await look(observer, reaper, beating=("s1",))
    assert db.row(running.id, "state") == "RUNNING"
    assert observer.living() == {"me", "s1"}


async def test_a_worker_with_its_own_heartbeats_keeps_its_leases_and_its_silent_sibling_does_not(
    observer: ManualObserver, db: StoreHarness
) -> None:
    mine, siblings = db.running("w1"), db.running("w2")
    reaper = observer.reaper(**FAST)
    for _ in range(6):
        db.run(workers.beat_worker("w1"))
        await look(observer, reaper)
    assert db.row(mine.id, "state") == "RUNNING"
    assert db.row(siblings.id, "state") == "FAILED"
    assert "s1" in observer.living()


async def test_each_lease_has_its_own_stale_threshold(
    observer: ManualObserver, db: StoreHarness
) -> None:  # F6
    plain = db.running()
    resilient = db.running(flags=b'{"infrastructure_resilient": true}')
    db.send(flags=b'{"infrastructure_resilient": false}')
    (claimed,) = db.claim(limit=1)
    reaper = observer.reaper(**FAST | {"claimed_stale_threshold_ms": 4_000})

    async def states() -> list[str]:
        return [db.row(task.id, "state") for task in (plain, resilient, claimed)]

    for _ in range(4):
        await look(observer, reaper, after_s=1.01)
    assert await states() == ["FAILED", "RUNNING", "CLAIMED"]
    for _ in range(2):
        await look(observer, reaper, after_s=1.01)
    assert await states() == ["FAILED", "RUNNING", "PENDING"]
    assert "s1" in observer.living(), "it stays registered until its longest threshold has passed"
    for _ in range(2):
        await look(observer, reaper, after_s=1.01)
    assert await states() == ["FAILED", "FAILED", "PENDING"]
    assert observer.living() == {"me"}


async def test_an_ended_supervisor_learns_it_by_its_heartbeat_and_its_workers_cannot_claim(
    observer: ManualObserver, db: StoreHarness
) -> None:
    db.send()
    reaper = observer.reaper(**FAST)
    for _ in range(4):
        await look(observer, reaper, after_s=1.01)
    assert db.run(workers.beat("s1", [], draining=False)).seq is None
    assert db.claim() == []
    assert set(db.table("workers", "id, ended_how")) == {("w1", "age"), ("w2", "age")}


async def test_a_reaper_never_judges_its_own_supervisor(observer: ManualObserver, db: StoreHarness) -> None:
    observer.supervisor_id = "s1"
    running = db.running()
    reaper = observer.reaper(**FAST)
    for _ in range(6):
        await observer.clock.advance(1.0)
        await reaper.tick()
    assert db.row(running.id, "state") == "RUNNING"


@pytest.mark.parametrize("trouble", ["a gap", "a disturbance"])
async def test_silence_windows_restart_after_trouble_of_the_observer(
    trouble: str, observer: ManualObserver, db: StoreHarness
) -> None:  # I14
    running = db.running()
    reaper = observer.reaper(**FAST)
    await look(observer, reaper)
    await look(observer, reaper, after_s=1.9)
    if trouble == "a gap":
        await look(observer, reaper, after_s=60.0)
    else:
        observer.disturbances += 1
        await look(observer, reaper, after_s=1.0)
    assert db.row(running.id, "state") == "RUNNING"
    await look(observer, reaper, after_s=1.9)
    assert db.row(running.id, "state") == "RUNNING", "the tree gets a whole new window"
    await look(observer, reaper, after_s=0.2)
    assert db.row(running.id, "state") == "FAILED"


@pytest.mark.parametrize("every_looks", [1, 2])
async def test_recurring_trouble_of_the_observer_does_not_postpone_a_judgement_for_ever(
    every_looks: int, observer: ManualObserver, db: StoreHarness
) -> None:  # I14, E4
    """The observer's heartbeats succeed, so the silent tree had the same chance; two such thresholds are enough."""
    running = db.running()
    reaper = observer.reaper(**FAST)
    await look(observer, reaper)
    for number in range(3):
        observer.disturbances += number % every_looks == 0
        await look(observer, reaper)
    assert db.row(running.id, "state") == "RUNNING", (
        "three heartbeats within a threshold of two, each with trouble"
    )
    observer.disturbances += 1
    await look(observer, reaper)
    assert db.row(running.id, "state") == "FAILED"


async def test_recurring_trouble_of_the_observer_costs_no_live_tree_its_tasks(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """The tree writes one heartbeat in one and a half thresholds."""
    running = db.running()
    reaper = observer.reaper(**FAST)
    for number in range(16):
        observer.disturbances += 1
        await look(observer, reaper, beating=("s1",) if number % 3 == 0 else ())
    assert db.row(running.id, "state") == "RUNNING"
    assert observer.told(JudgementDelayed) == []


@pytest.mark.parametrize("trouble", ["no write", "no connection", "away"])
async def test_time_in_which_no_heartbeat_could_be_written_does_not_count_as_silence(
    trouble: str, observer: ManualObserver, db: StoreHarness
) -> None:  # J12
    assert await state_after(trouble, observer, db) == "RUNNING"
    assert observer.living() == {"me", "s1"}


async def state_after(trouble: str, observer: ManualObserver, db: StoreHarness, *, times: int = 12) -> str:
    """Repeat the same trouble with one heartbeat between, then without an end, and return the state of the task."""
    had_its_lock(db, "s1")
    running = db.running()
    reaper = observer.reaper(**FAST)
    for _ in range(times):
        await look(observer, reaper)
        observer.disturbances += 1
        observer.is_served = trouble != "no connection"
        for _ in range(3):
            await observer.clock.advance(2.1 if trouble == "away" else 0.9)
            if trouble != "no write":
                observer.beat("me")
            await reaper.tick()
        observer.is_served = True
        observer.disturbances += 1
        await look(observer, reaper, beating=("s1",))
    for _ in range(8):
        observer.disturbances += 1
        observer.is_served = trouble != "no connection"
        await observer.clock.advance(2.1 if trouble == "away" else 0.9)
        if trouble != "no write":
            observer.beat("me")
        await reaper.tick()
    return str(db.row(running.id, "state"))


async def test_silence_measured_without_own_heartbeats_would_declare_live_trees_dead(
    observer: ManualObserver, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the rule: each check counts as served, although no heartbeat was accepted."""
    monkeypatch.setattr(OwnBeats, "landed", lambda *_, **__: 1)
    assert await state_after("no write", observer, db, times=0) == "FAILED"


async def test_a_judgement_delayed_by_trouble_is_reported_once(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    reaper = observer.reaper(**FAST)
    for _ in range(12):
        observer.disturbances += 1
        await observer.clock.advance(0.9)
        await reaper.tick()
    (event,) = observer.told(JudgementDelayed)
    assert (event.silent, event.troubles) == (1, 6)  # type: ignore[attr-defined]
    assert event.for_s == pytest.approx(4.5)  # type: ignore[attr-defined]
    assert db.row(running.id, "state") == "RUNNING"
    observer.beat("me", "s1")
    await reaper.tick()
    for _ in range(6):
        observer.disturbances += 1
        await observer.clock.advance(0.9)
        await reaper.tick()
    assert len(observer.told(JudgementDelayed)) == 2, "this is a new delay"


async def test_the_reaper_recovers_nothing_with_both_automatic_recoveries_off(
    observer: ManualObserver, db: StoreHarness
) -> None:  # A7
    running = db.running()
    db.send()
    (claimed,) = db.claim(limit=1)
    off = FAST | {"auto_requeue_stale_claimed": False, "auto_fail_stale_running": False}
    reaper = observer.reaper(**off)
    for _ in range(7):
        await look(observer, reaper)
    assert [db.row(task.id, "state") for task in (running, claimed)] == ["RUNNING", "CLAIMED"]
    assert observer.living() == {"me", "s1"}


async def test_the_reaper_recovers_only_claimed_tasks_with_auto_fail_off(
    observer: ManualObserver, db: StoreHarness
) -> None:  # A7
    running = db.running()
    db.send()
    (claimed,) = db.claim(limit=1)
    reaper = observer.reaper(**FAST | {"auto_fail_stale_running": False})
    for _ in range(7):
        await look(observer, reaper)
    assert [db.row(task.id, "state") for task in (running, claimed)] == ["RUNNING", "PENDING"]
    assert observer.living() == {"me", "s1"}, "a supervisor that still has a lease stays registered"


async def test_a_mass_silence_delays_and_limits_recoveries(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E14
    """Four of five trees are cut off for five thresholds: each gets one window more, then one is recovered per two windows."""
    tasks: dict[str, UUID] = {"s1": db.running().id}
    for name in ("s2", "s3", "s4"):
        db.supervisor(name, f"{name}-w")
        tasks[name] = db.running(f"{name}-w").id
    db.supervisor("other")
    first, second = observer.reaper(**FAST), observer.reaper(**FAST)
    for _ in range(10):
        await observer.clock.advance(1.0)
        observer.beat("me", "other")
        await first.tick()
        await second.tick()
    assert len(observer.told(MassSilence)) == 2, "there must be one event for each observer"
    given_up = [name for name, task in tasks.items() if db.row(task, "state") != "RUNNING"]
    # The clock of the database limits the rate, and it advanced far less than two windows.
    assert len(given_up) == 1
    survivors = tuple(name for name in tasks if name not in given_up)
    for _ in range(4):
        await observer.clock.advance(1.0)
        observer.beat("me", "other", *survivors)
        await first.tick()
        await second.tick()
    assert [db.row(tasks[name], "state") for name in survivors] == ["RUNNING"] * 3


async def test_trees_cut_off_together_are_judged_as_a_mass_silence_at_different_heartbeat_times(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E14
    """Their last heartbeats differ, so they reach the threshold at different times and still form a mass silence."""
    tasks: dict[str, UUID] = {"s1": db.running().id}
    for name in ("s2", "s3", "s4"):
        db.supervisor(name, f"{name}-w")
        tasks[name] = db.running(f"{name}-w").id
    db.supervisor("other")
    reaper = observer.reaper(**FAST)
    await look(observer, reaper, after_s=0.1, beating=("s1", "s2", "other"))
    await look(observer, reaper, after_s=0.9, beating=("s3", "s4"))  # the last heartbeats of all four
    for _ in range(12):
        await look(observer, reaper, after_s=0.25, beating=("other",))
        assert [db.row(task, "state") for task in tasks.values()] == ["RUNNING"] * 4
        if observer.told(MassSilence):
            break
    (event,) = observer.told(MassSilence)
    assert event.silent >= 3  # type: ignore[attr-defined]


async def test_a_return_from_a_mass_silence_gives_the_others_one_more_window(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E14
    tasks: dict[str, UUID] = {"s1": db.running().id}
    for name in ("s2", "s3"):
        db.supervisor(name, f"{name}-w")
        tasks[name] = db.running(f"{name}-w").id
    reaper = observer.reaper(**FAST)
    while not observer.told(MassSilence):
        await look(observer, reaper, after_s=0.5)
    await look(observer, reaper, after_s=1.9)  # the extra window of all trees is almost over
    await look(observer, reaper, after_s=0.05, beating=("s3",))
    await look(observer, reaper, after_s=1.0, beating=("s3",))
    assert [db.row(task, "state") for task in tasks.values()] == ["RUNNING"] * 3
    await look(observer, reaper, after_s=0.9, beating=("s2", "s3"))
    await look(observer, reaper, after_s=1.0, beating=("s2", "s3"))
    assert [db.row(task, "state") for task in tasks.values()] == ["RUNNING"] * 3, (
        "the reaper waits for the last tree too"
    )
    for _ in range(4):
        await look(observer, reaper, after_s=0.9, beating=("s2", "s3"))
    assert db.row(tasks["s1"], "state") == "FAILED", "the wait must end"


async def test_a_locked_orphan_row_does_not_block_other_judgements(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """An open transaction has a share lock on one row; all other trees are judged as usual."""
    db.supervisor("old", "old-w")
    db.run(workers.end_supervisor("old", how="age"))
    running = db.running()
    reaper = observer.reaper(**FAST)
    row = sql.SQL("select from {}.workers where id = 'old-w' for key share").format(
        sql.Identifier(db.target.schema)
    )
    with db.target.connect("everbeat test stranger") as stranger, stranger.transaction():
        stranger.execute(row)
        async with asyncio.timeout(5):
            for _ in range(4):
                await look(observer, reaper)
    assert db.row(running.id, "state") == "FAILED"
    ended = "select id from {}.workers where ended_at is not null order by id"
    schema = sql.Identifier(db.target.schema)
    assert db.connection.execute(sql.SQL(ended).format(schema)).fetchall() == [("w1",), ("w2",)]
    await look(observer, reaper)
    assert db.connection.execute(sql.SQL(ended).format(schema)).fetchall() == [
        ("old-w",),
        ("w1",),
        ("w2",),
    ]


@pytest.mark.parametrize(
    "part", ["worker/bury_orphans", "task/list_leases_of_ended_workers", "task/list_orphaned_leases"]
)
async def test_a_failing_part_of_the_reaper_does_not_block_judgements(
    part: str, observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    observer.session = Refusing(observer.session, part)  # type: ignore[assignment]
    reaper = observer.reaper(**FAST)
    for _ in range(4):
        with pytest.raises(DatabaseError, match="refused"):
            await look(observer, reaper)
    assert db.row(running.id, "state") == "FAILED"


@pytest.mark.parametrize("part", ["worker/list_predecessors", "worker/end_supervisor"])
async def test_a_failing_proof_of_death_does_not_block_judgements(
    part: str, observer: ManualObserver, db: StoreHarness, caplog: pytest.LogCaptureFixture
) -> None:  # E14
    """In a mass silence the reaper first asks this machine for proofs. The server refuses that query or the later burial."""
    tasks = [db.running()]
    for name in ("s2", "s3"):
        db.supervisor(name, f"{name}-w")
        tasks.append(db.running(f"{name}-w"))
    me = ProcessIdentity.current()
    gone = "update {schema}.supervisors set boot_id = %s, pid_namespace = %s, pid = 1, process_started = 1 where id <> 'me'"
    db.connection.execute(db.plain(gone), [me.boot_id, str(me.pid_namespace)])
    refusing = Refusing(observer.session, part)
    reaper = observer.reaper(witness=refusing, **FAST)
    while not observer.told(MassSilence):
        await look(observer, reaper, after_s=0.5)
    for _ in range(6):
        await look(observer, reaper)
    assert [db.row(task.id, "state") for task in tasks].count("FAILED") == 1, (
        "the mass-silence guard admits one recovery"
    )
    assert "refused" in caplog.text


async def test_a_judgement_is_dropped_if_the_database_was_away_since_its_query(
    observer: ManualObserver, db: StoreHarness
) -> None:  # I14
    """Another service noticed it: their shared session is open again, so the next statement would succeed."""
    running = db.running()

    def disturb() -> None:
        observer.disturbances += 1

    session = observer.session
    observer.session = Noting(session, "task/list_leases_of_supervisor", disturb)  # type: ignore[assignment]
    reaper = observer.reaper(**FAST)
    for _ in range(3):
        await look(observer, reaper)
    await look(observer, reaper, after_s=0.1)
    assert db.row(running.id, "state") == "RUNNING"
    observer.session = session


async def test_two_silent_trees_of_five_are_not_a_mass_silence(
    observer: ManualObserver, db: StoreHarness
) -> None:
    for name in ("s2", "s3", "s4"):
        db.supervisor(name)
    reaper = observer.reaper(**FAST)
    for _ in range(4):
        await look(observer, reaper, after_s=1.01, beating=("s3", "s4"))
    assert observer.living() == {"me", "s3", "s4"}
    assert observer.told(MassSilence) == []


async def test_a_server_restart_restarts_the_silence_windows(new_server: NewServer) -> None:  # I14
    """Unchanged heartbeats after a server restart are not proof: the trees might still be reconnecting."""
    server = new_server(settings={"synchronous_commit": "on"})
    target = Target.parse(server.url, schema="everbeat")
    with target.connect("everbeat test") as connection:
        from_store = StoreHarness(target, connection)
        observer = ManualObserver(from_store, Session(target, "everbeat test caretakers"))
        migrating.migrate(connection, target)
        from_store.supervisor("s1", "w1")
        from_store.supervisor("me")
        running = from_store.running()
    reaper = observer.reaper(**FAST)
    await reaper.tick()
    await observer.clock.advance(1.9)
    await reaper.tick()
    server.restart("immediate")
    with target.connect("everbeat test") as connection:
        from_store.connection = connection
        await observer.session.run(workers.beat("me", [], draining=False))
        await observer.clock.advance(1.0)
        await reaper.tick()
        assert from_store.row(running.id, "state") == "RUNNING"
        await observer.clock.advance(1.9)
        await reaper.tick()
        assert from_store.row(running.id, "state") == "RUNNING"
        await observer.clock.advance(0.2)
        await reaper.tick()
        assert from_store.row(running.id, "state") == "FAILED"
    await observer.session.drop()
    from_store.database.close()
