"""Noticing by age: judged per lease, on the observer's own clock, with the database reachable throughout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql

from everbeat.domain.policy import StoredPolicy
from everbeat.errors import DatabaseError
from everbeat.runtime.events import JudgementDelayed, MassSilence, TaskRecovered
from everbeat.runtime.identity import ProcessIdentity
from everbeat.services.excuses import SilenceExcused
from everbeat.services.observer import OwnBeats
from everbeat.services.reaper import Reaper
from everbeat.store import migrating, workers
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.services.conftest import Hands, Onlooker

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
    """A session of which the server refuses every statement of this name."""

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
    onlooker: Onlooker, reaper: Reaper, *, after_s: float = 1.0, beating: tuple[str, ...] = ()
) -> None:
    await onlooker.clock.advance(after_s)
    onlooker.beat("me", *beating)
    await reaper.tick()


def had_its_lock(hands: Hands, supervisor: str) -> None:
    """The tree held its session lock, and lost the session."""
    with hands.target.connect(f"everbeat-{supervisor} supervisor") as session:
        parameters = {"id": supervisor, "lock_key": hands.target.lock_key(supervisor)}
        session.execute(hands.text("worker/hold_session"), parameters)
        pid = session.info.backend_pid
    hands.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])


async def test_while_no_connection_is_free_the_silence_of_a_tree_without_one_proves_nothing(
    onlooker: Onlooker, hands: Hands
) -> None:  # J12
    had_its_lock(hands, "s1")
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    await look(onlooker, reaper)
    onlooker.is_served = False
    for _ in range(20):
        await look(onlooker, reaper)
    onlooker.is_served = True
    for _ in range(2):
        await look(onlooker, reaper)
    await look(onlooker, reaper, after_s=0.98)
    assert hands.row(running.id, "state") == "RUNNING", "its holder has a whole threshold to come back"
    await look(onlooker, reaper, after_s=0.1)
    assert hands.row(running.id, "state") == "FAILED"
    (told,) = onlooker.told(SilenceExcused)
    assert isinstance(told, SilenceExcused)
    assert (told.supervisor_ids, told.at_most_s) == (("s1",), None)


async def test_a_silent_tree_whose_beats_have_a_connection_is_judged_although_no_other_is_free(
    onlooker: Onlooker, hands: Hands
) -> None:  # J12
    """A frozen tree keeps its connections, and may be why there is no other."""
    had_its_lock(hands, "s1")
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    onlooker.is_served = False
    with hands.target.connect("everbeat-s1 supervisor beats 7.1"):
        for after_s in (1.0, 1.0, 0.9):
            await look(onlooker, reaper, after_s=after_s)
        assert hands.row(running.id, "state") == "RUNNING"
        await look(onlooker, reaper, after_s=0.2)
        assert hands.row(running.id, "state") == "FAILED"
    assert onlooker.told(SilenceExcused) == []


@pytest.mark.parametrize("why", ["another session of it is left", "its lock was never taken", "a pooler"])
async def test_a_tree_of_which_nobody_knows_whether_it_is_connected_is_excused_for_two_thresholds(
    why: str, onlooker: Onlooker, hands: Hands
) -> None:  # J12
    if why != "its lock was never taken":
        had_its_lock(hands, "s1")
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    onlooker.is_served = False
    onlooker.is_pooled = why == "a pooler"
    with hands.target.connect("everbeat-s1 worker 7.1" if why.startswith("another") else "a stranger"):
        for _ in range(
            8
        ):  # it is excused from the third look to the sixth, and has a threshold from the seventh on
            await look(onlooker, reaper)
        assert hands.row(running.id, "state") == "RUNNING"
        await look(onlooker, reaper, after_s=1.1)
        assert hands.row(running.id, "state") == "FAILED"
    (told,) = onlooker.told(SilenceExcused)
    assert isinstance(told, SilenceExcused)
    assert (told.supervisor_ids, told.at_most_s) == (("s1",), 4.0)


async def test_refusals_that_others_met_excuse_nobody(onlooker: Onlooker, hands: Hands) -> None:  # J12
    """A session watch that waits for a free connection tries one each second."""
    running = hands.running()
    reaper, watch = onlooker.reaper(**FAST), onlooker.session_watch(**FAST)
    hands.supervisor("s2")
    had_its_lock(hands, "s2")
    with hands.target.connect("everbeat-s1 supervisor beats 7.1"):
        onlooker.is_served = False
        for _ in range(3):
            await look(onlooker, reaper)
            await watch.tick()
        await look(onlooker, reaper, after_s=0.1)
    assert hands.row(running.id, "state") == "FAILED"


async def test_a_silent_holder_loses_its_leases_after_the_threshold_and_not_before(
    onlooker: Onlooker, hands: Hands
) -> None:
    running, again = hands.running(), hands.running("w2", policy=AGAIN)
    hands.send()
    (claimed,) = hands.claim(limit=1)
    reaper = onlooker.reaper(**FAST)
    await look(onlooker, reaper)
    await look(onlooker, reaper, after_s=1.0)
    await look(onlooker, reaper, after_s=0.99)
    assert hands.row(running.id, "state") == "RUNNING"
    await look(onlooker, reaper, after_s=0.02)

    assert hands.row(claimed.id, "state, claim_id, retry_count, loss_count, attempt") == (
        "PENDING",
        None,
        0,
        0,
        0,
    )  # E1
    assert hands.row(again.id, "state, retry_count, loss_count") == ("PENDING", 1, 1)  # E3
    error = hands.row(running.id, "error")
    assert hands.row(running.id, "state") == "FAILED"  # E2
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
    assert sorted(hands.table("attempts", "outcome, will_retry")) == [("LOST", False), ("LOST", True)]
    told = {event.task_id for event in onlooker.told(TaskRecovered)}  # type: ignore[attr-defined]
    assert told == {running.id, again.id, claimed.id}
    rows = hands.table("recoveries", "worker_id, was, action, noticed_by, recovered_by")
    assert {row[3:] for row in rows} == {("age", "me")}


async def test_the_next_look_is_asked_for_when_the_silence_becomes_too_long(onlooker: Onlooker) -> None:
    reaper = onlooker.reaper(**FAST)
    assert await reaper.tick() is None
    await onlooker.clock.advance(0.9)
    assert await reaper.tick() is None, "not due within the interval"
    await onlooker.clock.advance(0.9)
    assert await reaper.tick() == pytest.approx(0.2)


async def test_whoever_beats_is_left_alone_however_long_the_task(
    onlooker: Onlooker, hands: Hands
) -> None:  # D1
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    for _ in range(12):
        await look(onlooker, reaper, beating=("s1",))
    assert hands.row(running.id, "state") == "RUNNING"
    assert onlooker.living() == {"me", "s1"}


async def test_a_worker_that_beats_for_itself_keeps_its_leases_and_its_silent_sibling_does_not(
    onlooker: Onlooker, hands: Hands
) -> None:
    mine, siblings = hands.running("w1"), hands.running("w2")
    reaper = onlooker.reaper(**FAST)
    for _ in range(6):
        hands.run(workers.beat_worker("w1"))
        await look(onlooker, reaper)
    assert hands.row(mine.id, "state") == "RUNNING"
    assert hands.row(siblings.id, "state") == "FAILED"
    assert "s1" in onlooker.living()


async def test_thresholds_are_those_of_each_lease(onlooker: Onlooker, hands: Hands) -> None:  # F6
    plain = hands.running()
    resilient = hands.running(flags=b'{"infrastructure_resilient": true}')
    hands.send(flags=b'{"infrastructure_resilient": false}')
    (claimed,) = hands.claim(limit=1)
    reaper = onlooker.reaper(**FAST | {"claimed_stale_threshold_ms": 4_000})

    async def states() -> list[str]:
        return [hands.row(task.id, "state") for task in (plain, resilient, claimed)]

    for _ in range(4):
        await look(onlooker, reaper, after_s=1.01)
    assert await states() == ["FAILED", "RUNNING", "CLAIMED"]
    for _ in range(2):
        await look(onlooker, reaper, after_s=1.01)
    assert await states() == ["FAILED", "RUNNING", "PENDING"]
    assert "s1" in onlooker.living(), "it stays registered until its longest threshold has passed"
    for _ in range(2):
        await look(onlooker, reaper, after_s=1.01)
    assert await states() == ["FAILED", "FAILED", "PENDING"]
    assert onlooker.living() == {"me"}


async def test_an_ended_supervisor_is_told_so_and_its_workers_claim_nothing(
    onlooker: Onlooker, hands: Hands
) -> None:
    hands.send()
    reaper = onlooker.reaper(**FAST)
    for _ in range(4):
        await look(onlooker, reaper, after_s=1.01)
    assert hands.run(workers.beat("s1", [], draining=False)).seq is None
    assert hands.claim() == []
    assert set(hands.table("workers", "id, ended_how")) == {("w1", "age"), ("w2", "age")}


async def test_a_reaper_never_judges_its_own_supervisor(onlooker: Onlooker, hands: Hands) -> None:
    onlooker.supervisor_id = "s1"
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    for _ in range(6):
        await onlooker.clock.advance(1.0)
        await reaper.tick()
    assert hands.row(running.id, "state") == "RUNNING"


@pytest.mark.parametrize("trouble", ["a gap", "a disturbance"])
async def test_windows_restart_after_trouble_of_the_observer(
    trouble: str, onlooker: Onlooker, hands: Hands
) -> None:  # I14
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    await look(onlooker, reaper)
    await look(onlooker, reaper, after_s=1.9)
    if trouble == "a gap":
        await look(onlooker, reaper, after_s=60.0)
    else:
        onlooker.disturbances += 1
        await look(onlooker, reaper, after_s=1.0)
    assert hands.row(running.id, "state") == "RUNNING"
    await look(onlooker, reaper, after_s=1.9)
    assert hands.row(running.id, "state") == "RUNNING", "a whole window is granted anew"
    await look(onlooker, reaper, after_s=0.2)
    assert hands.row(running.id, "state") == "FAILED"


@pytest.mark.parametrize("every_looks", [1, 2])
async def test_trouble_that_recurs_faster_than_the_threshold_puts_no_judgement_off_for_ever(
    every_looks: int, onlooker: Onlooker, hands: Hands
) -> None:  # I14, E4
    """The beats of the observer land: the silent tree had the same chance. Two thresholds of that are enough."""
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    await look(onlooker, reaper)
    for number in range(3):
        onlooker.disturbances += number % every_looks == 0
        await look(onlooker, reaper)
    assert hands.row(running.id, "state") == "RUNNING", "three beats in a threshold of two, each with trouble"
    onlooker.disturbances += 1
    await look(onlooker, reaper)
    assert hands.row(running.id, "state") == "FAILED"


async def test_trouble_that_recurs_costs_no_living_tree_its_work(onlooker: Onlooker, hands: Hands) -> None:
    """It gets one beat through in a threshold and a half."""
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    for number in range(16):
        onlooker.disturbances += 1
        await look(onlooker, reaper, beating=("s1",) if number % 3 == 0 else ())
    assert hands.row(running.id, "state") == "RUNNING"
    assert onlooker.told(JudgementDelayed) == []


@pytest.mark.parametrize("trouble", ["no write", "no connection", "away"])
async def test_time_in_which_nobody_could_beat_is_never_collected(
    trouble: str, onlooker: Onlooker, hands: Hands
) -> None:  # J12
    assert await state_after(trouble, onlooker, hands) == "RUNNING"
    assert onlooker.living() == {"me", "s1"}


async def state_after(trouble: str, onlooker: Onlooker, hands: Hands, *, times: int = 12) -> str:
    """The same trouble so many times, with one beat between, and then without an end."""
    had_its_lock(hands, "s1")
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    for _ in range(times):
        await look(onlooker, reaper)
        onlooker.disturbances += 1
        onlooker.is_served = trouble != "no connection"
        for _ in range(3):
            await onlooker.clock.advance(2.1 if trouble == "away" else 0.9)
            if trouble != "no write":
                onlooker.beat("me")
            await reaper.tick()
        onlooker.is_served = True
        onlooker.disturbances += 1
        await look(onlooker, reaper, beating=("s1",))
    for _ in range(8):
        onlooker.disturbances += 1
        onlooker.is_served = trouble != "no connection"
        await onlooker.clock.advance(2.1 if trouble == "away" else 0.9)
        if trouble != "no write":
            onlooker.beat("me")
        await reaper.tick()
    return str(hands.row(running.id, "state"))


async def test_a_clock_in_the_place_of_own_beats_is_noticed(
    onlooker: Onlooker, hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake that this rule invites: each look counts as served, although nobody's beat was accepted."""
    monkeypatch.setattr(OwnBeats, "landed", lambda *_, **__: 1)
    assert await state_after("no write", onlooker, hands, times=0) == "FAILED"


async def test_a_judgement_that_trouble_puts_off_is_told_once(onlooker: Onlooker, hands: Hands) -> None:
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    for _ in range(12):
        onlooker.disturbances += 1
        await onlooker.clock.advance(0.9)
        await reaper.tick()
    (event,) = onlooker.told(JudgementDelayed)
    assert (event.silent, event.troubles) == (1, 6)  # type: ignore[attr-defined]
    assert event.for_s == pytest.approx(4.5)  # type: ignore[attr-defined]
    assert hands.row(running.id, "state") == "RUNNING"
    onlooker.beat("me", "s1")
    await reaper.tick()
    for _ in range(6):
        onlooker.disturbances += 1
        await onlooker.clock.advance(0.9)
        await reaper.tick()
    assert len(onlooker.told(JudgementDelayed)) == 2, "another episode"


async def test_both_halves_off_leave_everything_as_it_is(onlooker: Onlooker, hands: Hands) -> None:  # A7
    running = hands.running()
    hands.send()
    (claimed,) = hands.claim(limit=1)
    off = FAST | {"auto_requeue_stale_claimed": False, "auto_fail_stale_running": False}
    reaper = onlooker.reaper(**off)
    for _ in range(7):
        await look(onlooker, reaper)
    assert [hands.row(task.id, "state") for task in (running, claimed)] == ["RUNNING", "CLAIMED"]
    assert onlooker.living() == {"me", "s1"}


async def test_one_half_off_leaves_that_half(onlooker: Onlooker, hands: Hands) -> None:  # A7
    running = hands.running()
    hands.send()
    (claimed,) = hands.claim(limit=1)
    reaper = onlooker.reaper(**FAST | {"auto_fail_stale_running": False})
    for _ in range(7):
        await look(onlooker, reaper)
    assert [hands.row(task.id, "state") for task in (running, claimed)] == ["RUNNING", "PENDING"]
    assert onlooker.living() == {"me", "s1"}, "whoever still holds a lease stays registered"


async def test_a_mass_silence_puts_the_brake_on(onlooker: Onlooker, hands: Hands) -> None:  # E14
    """Four of five are cut off for five thresholds: one window more for all, then one in two windows, whoever observes."""
    tasks: dict[str, UUID] = {"s1": hands.running().id}
    for name in ("s2", "s3", "s4"):
        hands.supervisor(name, f"{name}-w")
        tasks[name] = hands.running(f"{name}-w").id
    hands.supervisor("other")
    first, second = onlooker.reaper(**FAST), onlooker.reaper(**FAST)
    for _ in range(10):
        await onlooker.clock.advance(1.0)
        onlooker.beat("me", "other")
        await first.tick()
        await second.tick()
    assert len(onlooker.told(MassSilence)) == 2, "one for each observer"
    given_up = [name for name, task in tasks.items() if hands.row(task, "state") != "RUNNING"]
    # The pace is kept by the database's clock, which ran for far less than two windows.
    assert len(given_up) == 1
    survivors = tuple(name for name in tasks if name not in given_up)
    for _ in range(4):
        await onlooker.clock.advance(1.0)
        onlooker.beat("me", "other", *survivors)
        await first.tick()
        await second.tick()
    assert [hands.row(tasks[name], "state") for name in survivors] == ["RUNNING"] * 3


async def test_those_cut_off_together_are_not_judged_one_after_the_other(
    onlooker: Onlooker, hands: Hands
) -> None:  # E14
    """Their last beats came at different moments, so they reach the threshold at different moments: still a mass."""
    tasks: dict[str, UUID] = {"s1": hands.running().id}
    for name in ("s2", "s3", "s4"):
        hands.supervisor(name, f"{name}-w")
        tasks[name] = hands.running(f"{name}-w").id
    hands.supervisor("other")
    reaper = onlooker.reaper(**FAST)
    await look(onlooker, reaper, after_s=0.1, beating=("s1", "s2", "other"))
    await look(onlooker, reaper, after_s=0.9, beating=("s3", "s4"))  # the last beats of all four
    for _ in range(12):
        await look(onlooker, reaper, after_s=0.25, beating=("other",))
        assert [hands.row(task, "state") for task in tasks.values()] == ["RUNNING"] * 4
        if onlooker.told(MassSilence):
            break
    (event,) = onlooker.told(MassSilence)
    assert event.silent >= 3  # type: ignore[attr-defined]


async def test_when_some_are_back_the_others_get_a_window_more(
    onlooker: Onlooker, hands: Hands
) -> None:  # E14
    tasks: dict[str, UUID] = {"s1": hands.running().id}
    for name in ("s2", "s3"):
        hands.supervisor(name, f"{name}-w")
        tasks[name] = hands.running(f"{name}-w").id
    reaper = onlooker.reaper(**FAST)
    while not onlooker.told(MassSilence):
        await look(onlooker, reaper, after_s=0.5)
    await look(onlooker, reaper, after_s=1.9)  # the window that everybody gets is almost over
    await look(onlooker, reaper, after_s=0.05, beating=("s3",))
    await look(onlooker, reaper, after_s=1.0, beating=("s3",))
    assert [hands.row(task, "state") for task in tasks.values()] == ["RUNNING"] * 3
    await look(onlooker, reaper, after_s=0.9, beating=("s2", "s3"))
    await look(onlooker, reaper, after_s=1.0, beating=("s2", "s3"))
    assert [hands.row(task, "state") for task in tasks.values()] == ["RUNNING"] * 3, (
        "the last one is waited for too"
    )
    for _ in range(4):
        await look(onlooker, reaper, after_s=0.9, beating=("s2", "s3"))
    assert hands.row(tasks["s1"], "state") == "FAILED", "but not for ever"


async def test_a_locked_row_of_an_orphan_halts_nobody(onlooker: Onlooker, hands: Hands) -> None:
    """Somebody's open transaction has a share of one row: everybody else is judged as ever."""
    hands.supervisor("old", "old-w")
    hands.run(workers.end_supervisor("old", how="age"))
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    row = sql.SQL("select from {}.workers where id = 'old-w' for key share").format(
        sql.Identifier(hands.target.schema)
    )
    with hands.target.connect("everbeat test stranger") as stranger, stranger.transaction():
        stranger.execute(row)
        async with asyncio.timeout(5):
            for _ in range(4):
                await look(onlooker, reaper)
    assert hands.row(running.id, "state") == "FAILED"
    ended = "select id from {}.workers where ended_at is not null order by id"
    schema = sql.Identifier(hands.target.schema)
    assert hands.connection.execute(sql.SQL(ended).format(schema)).fetchall() == [("w1",), ("w2",)]
    await look(onlooker, reaper)
    assert hands.connection.execute(sql.SQL(ended).format(schema)).fetchall() == [
        ("old-w",),
        ("w1",),
        ("w2",),
    ]


@pytest.mark.parametrize("part", ["worker/bury_orphans", "task/leases_of_ended", "task/leases_orphaned"])
async def test_a_part_that_fails_keeps_nobody_from_being_judged(
    part: str, onlooker: Onlooker, hands: Hands
) -> None:
    running = hands.running()
    onlooker.session = Refusing(onlooker.session, part)  # type: ignore[assignment]
    reaper = onlooker.reaper(**FAST)
    for _ in range(4):
        with pytest.raises(DatabaseError, match="refused"):
            await look(onlooker, reaper)
    assert hands.row(running.id, "state") == "FAILED"


@pytest.mark.parametrize("part", ["worker/predecessors", "worker/end_supervisor"])
async def test_a_proof_that_fails_keeps_nobody_from_being_judged(
    part: str, onlooker: Onlooker, hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:  # E14
    """In a mass silence this machine is asked for proofs first. The server refuses that, or the burial that follows."""
    tasks = [hands.running()]
    for name in ("s2", "s3"):
        hands.supervisor(name, f"{name}-w")
        tasks.append(hands.running(f"{name}-w"))
    me = ProcessIdentity.current()
    gone = "update {schema}.supervisors set boot_id = %s, pid_namespace = %s, pid = 1, process_started = 1 where id <> 'me'"
    hands.connection.execute(hands.plain(gone), [me.boot_id, str(me.pid_namespace)])
    refusing = Refusing(onlooker.session, part)
    reaper = onlooker.reaper(witness=refusing, **FAST)
    while not onlooker.told(MassSilence):
        await look(onlooker, reaper, after_s=0.5)
    for _ in range(6):
        await look(onlooker, reaper)
    assert [hands.row(task.id, "state") for task in tasks].count("FAILED") == 1, "the brake lets go of one"
    assert "refused" in caplog.text


async def test_a_judgement_is_dropped_if_the_database_was_away_since_the_look(
    onlooker: Onlooker, hands: Hands
) -> None:  # I14
    """Another caretaker noticed it: the session they share is open again, so that the next statement would land."""
    running = hands.running()

    def disturb() -> None:
        onlooker.disturbances += 1

    session = onlooker.session
    onlooker.session = Noting(session, "task/leases_of_supervisor", disturb)  # type: ignore[assignment]
    reaper = onlooker.reaper(**FAST)
    for _ in range(3):
        await look(onlooker, reaper)
    await look(onlooker, reaper, after_s=0.1)
    assert hands.row(running.id, "state") == "RUNNING"
    onlooker.session = session


async def test_two_of_five_are_no_mass(onlooker: Onlooker, hands: Hands) -> None:
    for name in ("s2", "s3", "s4"):
        hands.supervisor(name)
    reaper = onlooker.reaper(**FAST)
    for _ in range(4):
        await look(onlooker, reaper, after_s=1.01, beating=("s3", "s4"))
    assert onlooker.living() == {"me", "s3", "s4"}
    assert onlooker.told(MassSilence) == []


async def test_a_restart_of_the_server_restarts_the_windows(new_server: NewServer) -> None:  # I14
    """The same beats under another start of the server prove nothing: those who beat may still be on their way back."""
    server = new_server(settings={"synchronous_commit": "on"})
    target = Target.parse(server.url, schema="everbeat")
    with target.connect("everbeat test") as connection:
        from_store = Hands(target, connection)
        onlooker = Onlooker(from_store, Session(target, "everbeat test caretakers"))
        migrating.migrate(connection, target)
        from_store.supervisor("s1", "w1")
        from_store.supervisor("me")
        running = from_store.running()
    reaper = onlooker.reaper(**FAST)
    await reaper.tick()
    await onlooker.clock.advance(1.9)
    await reaper.tick()
    server.restart("immediate")
    with target.connect("everbeat test") as connection:
        from_store.connection = connection
        await onlooker.session.run(workers.beat("me", [], draining=False))
        await onlooker.clock.advance(1.0)
        await reaper.tick()
        assert from_store.row(running.id, "state") == "RUNNING"
        await onlooker.clock.advance(1.9)
        await reaper.tick()
        assert from_store.row(running.id, "state") == "RUNNING"
        await onlooker.clock.advance(0.2)
        await reaper.tick()
        assert from_store.row(running.id, "state") == "FAILED"
    await onlooker.session.drop()
    from_store.database.close()
