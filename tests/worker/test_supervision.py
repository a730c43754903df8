"""What a supervisor is to the database: its row, its lock, its beats, what it hands out, and its way back from the dead."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseUnreachable
from everbeat.runtime.events import DatabaseBack, Event, EventBus
from everbeat.runtime.events import DatabaseUnreachable as Unreachable
from everbeat.store import migrating, sweeping, workers
from everbeat.store.target import Target
from everbeat.worker.protocol import Adopt, Beaten, Cancel, FromSupervisor, Held, Lost, Phantoms, Tick
from everbeat.worker.seat import Seat
from everbeat.worker.supervision import Supervision
from tests.conftest import NewPair, NewServer
from tests.store.conftest import Hands, hands
from tests.worker.supervising import FAST, supervision

__all__ = ["hands"]


class Ears:
    """A worker that hears what its supervision tells it."""

    def __init__(self) -> None:
        self.heard: list[FromSupervisor] = []
        self.news = asyncio.Event()

    def __call__(self, message: FromSupervisor) -> None:
        self.heard.append(message)
        self.news.set()

    async def next(self, kind: type[Any]) -> Any:
        """The next message of a kind."""
        async with asyncio.timeout(20):
            while True:
                for number, message in enumerate(self.heard):
                    if isinstance(message, kind):
                        del self.heard[: number + 1]
                        return message
                self.news.clear()
                await self.news.wait()


class Household:
    """A supervision with one worker, and the events it tells."""

    def __init__(self, supervision: Supervision, events: list[Event]) -> None:
        self.supervision = supervision
        self.events = events
        self.ears = Ears()
        self.seat: Seat = supervision.new_seat(
            pid=os.getpid(), queues=["a", "b"], metadata={"tasks": ["work"]}, tell=self.ears
        )

    async def move_in(self) -> None:
        await self.supervision.open()
        welcome = await self.supervision.register(self.seat)
        assert welcome == self.supervision.welcome(self.seat)


@pytest.fixture
async def household(hands: Hands) -> AsyncIterator[Household]:
    hands.run(workers.end_supervisor("s1", how="left"))
    found = make(hands.target)
    await found.move_in()
    yield found
    await found.supervision.close()


def make(target: Target, **settings: Any) -> Household:
    events: list[Event] = []
    bus = EventBus()
    bus.subscribe(events.append)
    return Household(supervision(target, RecoveryConfig(**FAST | settings), events=bus), events)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)  # the database is looked at from outside


def row(hands: Hands, household: Household, columns: str) -> Any:
    rows = dict(hands.table("supervisors", f"id, ({columns})"))
    return rows[household.supervision.supervisor_id]


def session_pid(hands: Hands, household: Household) -> int:
    """The backend that holds the lock."""
    key = hands.target.lock_key(household.supervision.supervisor_id)
    found = hands.connection.execute(
        "select pid from pg_locks where locktype = 'advisory' and (classid::bigint << 32) | objid::bigint = %s",
        [key],
    ).fetchone()
    return 0 if found is None else int(found[0])


def waits_for_a_lock(hands: Hands, household: Household) -> bool:
    """Whether a statement of the supervisor does."""
    found = hands.connection.execute(
        "select from pg_stat_activity where application_name like %s || ' %%' and wait_event_type = 'Lock'",
        [f"{household.supervision.session_name} supervisor"],
    )
    return found.fetchone() is not None


async def test_it_registers_itself_and_its_worker_and_holds_its_lock(
    household: Household, hands: Hands
) -> None:
    await until(lambda: row(hands, household, "session_held"))
    assert session_pid(hands, household)
    found = hands.table("workers", "supervisor_id, pid, queues, metadata->'tasks'")
    mine = [one for one in found if one[0] == household.supervision.supervisor_id]
    assert mine == [(household.supervision.supervisor_id, os.getpid(), ["a", "b"], ["work"])]
    names = hands.connection.execute(
        "select count(*) from pg_stat_activity where application_name like %s || ' %%'",
        [f"{household.supervision.session_name} supervisor"],
    ).fetchone()
    assert names == (3,), "the lock, the beats and everything else, whatever there is to do"


async def test_a_beat_answers_what_was_lost_what_is_to_be_cancelled_and_what_nobody_holds(
    household: Household, hands: Hands
) -> None:
    worker = household.seat.worker_id
    kept, lost, cancelled, phantom = (hands.running(worker) for _ in range(4))
    leases = {name: (task.id, task.claim_id) for name, task in
              {"kept": kept, "lost": lost, "cancelled": cancelled, "phantom": phantom}.items()}  # fmt: skip
    household.seat.hear(Held([leases["kept"], leases["lost"], leases["cancelled"]], []))
    lease = next(one for one in hands.leases(household.supervision.supervisor_id) if one.id == lost.id)
    hands.recover(lease, "retry")
    hands.cancel(cancelled.id)
    assert (await household.ears.next(Lost)).leases == [leases["lost"]]
    assert lost.claim_id not in household.seat.held
    assert (await household.ears.next(Cancel)).leases == [leases["cancelled"]]
    assert (await household.ears.next(Phantoms)).leases == [leases["phantom"]]
    first, second = await household.ears.next(Beaten), await household.ears.next(Beaten)
    assert second.seq == first.seq + 1
    household.seat.hear(Held([], [kept.claim_id]))
    phantoms = (await household.ears.next(Phantoms)).leases
    assert leases["kept"] in phantoms, "what is said to be held no more is not vouched for"


@pytest.fixture
async def patient(hands: Hands) -> AsyncIterator[Household]:
    """Beats are far apart, and a statement may take long."""
    found = Household(supervision(hands.target, RecoveryConfig()), [])
    await found.move_in()
    yield found
    await found.supervision.close()


async def test_a_beat_waits_for_no_caretaker(patient: Household, hands: Hands) -> None:  # D1
    await until(lambda: row(hands, patient, "beat_seq") >= 1)
    with hands.target.connect("somebody else") as other:
        other.autocommit = False
        other.execute(sql.SQL("lock table {}.turns").format(sql.Identifier(hands.target.schema)))
        turn = workers.take_turn("pruner", interval_ms=1_000, taken_by="s1")
        caretaker = asyncio.create_task(patient.supervision.session.run(turn, patience_s=0))
        await until(lambda: waits_for_a_lock(hands, patient))
        before = row(hands, patient, "beat_seq")
        patient.supervision.drain()  # said by the next beat, which is now
        await until(lambda: row(hands, patient, "beat_seq") > before)
        assert row(hands, patient, "draining")
        assert not caretaker.done(), "it keeps its session busy all the while"
        assert waits_for_a_lock(hands, patient)
        other.rollback()
    assert await caretaker


async def test_a_lock_that_is_lost_is_taken_again_at_once(household: Household, hands: Hands) -> None:
    await until(lambda: row(hands, household, "session_held"))
    before, pid = row(hands, household, "session_at"), session_pid(hands, household)
    hands.connection.execute("select pg_terminate_backend(%s)", [pid])
    began = time.monotonic()
    await until(lambda: session_pid(hands, household) not in (0, pid))
    print(f"taken again after {time.monotonic() - began:.3f} s")
    assert row(hands, household, "session_at") > before
    assert household.supervision.disturbances == 1
    assert household.supervision.reconnected_at is not None


async def test_the_lock_follows_the_beats_to_a_promoted_standby(new_pair: NewPair) -> None:  # J16
    """The former primary is frozen, and its kernel keeps the idle connection of the lock open."""
    pair = new_pair()
    target = Target.parse(f"{pair.url}?connect_timeout=2")
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
    times = {f"{role}_heartbeat_interval_ms": 3_000 for role in ("claimer", "runner")}
    found = make(target, **times, claimed_stale_threshold_ms=6_000, running_stale_threshold_ms=6_000)
    await found.move_in()
    held = "select count(*) from everbeat.supervisors where session_held and session_server = everbeat.server_incarnation()"
    with psycopg.connect(pair.primary.url, autocommit=True) as primary:
        await until(lambda: primary.execute(held).fetchone() == (1,))
    pair.wait_replayed()
    pair.freeze_primary()
    pair.promote()
    with psycopg.connect(pair.standby.url, autocommit=True) as standby:
        assert standby.execute(held).fetchone() == (0,)
        async with asyncio.timeout(60):
            while standby.execute(held).fetchone() != (1,):
                await asyncio.sleep(0.1)  # the database is looked at from outside
    await found.supervision.close()


async def test_declared_dead_it_comes_back_under_a_new_id_with_its_workers(
    household: Household, hands: Hands
) -> None:
    old_supervisor, old_worker = household.supervision.supervisor_id, household.seat.worker_id
    task = hands.running(old_worker)
    household.seat.hear(Held([(task.id, task.claim_id)], []))
    assert hands.run(workers.end_supervisor(old_supervisor, how="age"))
    welcome = (await household.ears.next(Adopt)).welcome
    assert welcome.supervisor_id == household.supervision.supervisor_id != old_supervisor
    assert welcome.worker_id == household.seat.worker_id != old_worker
    assert household.seat.held == {}
    await until(lambda: row(hands, household, "session_held"))
    assert hands.run(workers.beat(welcome.supervisor_id, [], draining=False)).seq is not None
    # By its own sweep: what its old self held is like anybody's.
    await until(lambda: hands.row(task.id, "state") == "FAILED")


async def test_it_leaves_in_good_order(hands: Hands) -> None:
    household = make(hands.target)
    await household.move_in()
    household.supervision.drain()
    await until(lambda: row(hands, household, "draining"))
    household.supervision.dismiss(household.seat)
    await household.supervision.burials.in_order(household.seat)
    await household.supervision.close()
    assert row(hands, household, "ended_how") == "left"
    await until(lambda: session_pid(hands, household) == 0)  # its backend ends a moment after the connection
    assert dict(hands.table("workers", "id, ended_how"))[household.seat.worker_id] == "left"


async def test_an_unreachable_database_is_told_at_once(tmp_path: Any) -> None:
    household = make(Target.parse(f"postgresql:///postgres?host={tmp_path}"))
    with pytest.raises(DatabaseUnreachable):
        await household.supervision.open(patience_s=0.2)
    await household.supervision.close()


async def test_an_outage_is_told_once_and_its_end_too(new_server: NewServer) -> None:
    server = new_server(settings={"synchronous_commit": "on"})
    target = Target.parse(server.url)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
    household = make(target)
    await household.move_in()
    await household.ears.next(Beaten)
    server.stop("immediate")
    await until(lambda: [one for one in household.events if isinstance(one, Unreachable)])
    server.restart("immediate")
    await until(lambda: [one for one in household.events if isinstance(one, DatabaseBack)])
    assert household.supervision.disturbances >= 2
    assert len([one for one in household.events if isinstance(one, Unreachable)]) == 1
    await household.supervision.close()


async def test_a_beat_that_is_refused_for_any_reason_is_a_disturbance(
    household: Household, hands: Hands
) -> None:  # J12
    """Here the table has another name for a while: what refuses this beat may refuse the beats of others."""
    schema = sql.Identifier(hands.target.schema)
    await until(lambda: row(hands, household, "beat_seq") >= 1)
    before = household.supervision.disturbances
    hands.connection.execute(sql.SQL("alter table {}.beats rename to beats_away").format(schema))
    await until(lambda: household.supervision.disturbances > before)
    hands.connection.execute(sql.SQL("alter table {}.beats_away rename to beats").format(schema))
    seen = row(hands, household, "beat_seq")
    await until(lambda: row(hands, household, "beat_seq") > seen)
    assert household.supervision.disturbances > before


async def test_an_idle_supervisor_asks_at_most_two_questions_a_second(new_server: NewServer) -> None:  # D3
    """At default settings, with all its caretakers."""
    server = new_server(settings={"log_statement": "all", "log_line_prefix": "%a|"})
    target = Target.parse(server.url)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
    household = Household(supervision(target, RecoveryConfig()), [])
    await household.move_in()
    household.seat.hear(Tick(0, 0, 1, 0.0, 0.0, []))
    log = server.folder / "server.log"

    def questions() -> int:
        lines = re.findall(
            rf"^{household.supervision.session_name} supervisor (?:beats )?[0-9.]+\|LOG:.*(?:statement|execute)",
            log.read_text(),
            re.MULTILINE,
        )
        return len(lines)

    await asyncio.sleep(1.0)  # the start asks more
    before, began = questions(), time.monotonic()
    for _ in range(10):
        household.seat.hear(
            Tick(0, 0, 1, 0.0, 0.0, [])
        )  # as every worker does; one that falls silent is looked at
        await asyncio.sleep(0.5)  # what is measured
    rate = (questions() - before) / (time.monotonic() - began)
    print(f"{rate:.2f} statements a second")
    assert 0.5 < rate <= 2.0
    await household.supervision.close()


async def test_a_worker_that_lives_and_was_released_goes_on_under_a_new_id(
    household: Household, hands: Hands
) -> None:
    old = household.seat.worker_id
    task = hands.running(old)
    household.seat.hear(Held([(task.id, task.claim_id)], []))
    assert hands.run(sweeping.release_workers([old], cause="released")) == [old]
    welcome = (await household.ears.next(Adopt)).welcome
    assert welcome.worker_id == household.seat.worker_id != old
    assert welcome.supervisor_id == household.supervision.supervisor_id
    assert household.seat.held == {}
    hands.send()
    (claimed,) = hands.claim(welcome.worker_id)
    household.supervision.dismiss(household.seat)
    await until(lambda: hands.row(task.id, "state") == "FAILED")
    assert dict(hands.table("workers", "id, ended_how"))[old] == "operator"
    assert claimed.attempt == 0, "it is not deaf for ever"
    hands.cancel(claimed.id)
