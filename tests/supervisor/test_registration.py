"""Test a supervisor in the database: its row, its lock, its heartbeats and its return after it was declared dead."""

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
from everbeat.protocol import Adopt, Beaten, CancelAttempts, DropLeases, FromSupervisor, Held, Phantoms, Tick
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import DatabaseBack, Event, EventBus
from everbeat.runtime.events import DatabaseUnreachable as Unreachable
from everbeat.store import migrating, retention, workers
from everbeat.store.target import Target
from everbeat.supervisor.registration import Supervision
from everbeat.supervisor.workers import SupervisedWorker
from tests.conftest import NewPair, NewServer
from tests.store.conftest import StoreHarness, db
from tests.supervisor.supervising import FAST, supervision

__all__ = ["db"]


class MessageLog:
    """Records the messages that a worker gets from its supervisor."""

    def __init__(self) -> None:
        self.received: list[FromSupervisor] = []
        self.news = asyncio.Event()

    def __call__(self, message: FromSupervisor) -> None:
        self.received.append(message)
        self.news.set()

    async def next(self, kind: type[Any]) -> Any:
        """Return the next message of a kind."""
        async with asyncio.timeout(20):
            while True:
                for number, message in enumerate(self.received):
                    if isinstance(message, kind):
                        del self.received[: number + 1]
                        return message
                self.news.clear()
                await self.news.wait()


class RegisteredSupervisor:
    """An open supervision with one worker and its events."""

    def __init__(self, supervision: Supervision, events: list[Event]) -> None:
        self.supervision = supervision
        self.events = events
        self.messages = MessageLog()
        self.worker: SupervisedWorker = SupervisedWorker(
            pid=os.getpid(),
            queues=["a", "b"],
            metadata={"tasks": ["work"]},
            send=self.messages,
            clock=SystemClock(),
        )

    async def open(self) -> None:
        await self.supervision.open()
        welcome = await self.supervision.register(self.worker)
        assert welcome == self.supervision.welcome(self.worker)


@pytest.fixture
async def registered(db: StoreHarness) -> AsyncIterator[RegisteredSupervisor]:
    db.run(workers.end_supervisor("s1", how="left"))
    found = make(db.target)
    await found.open()
    yield found
    await found.supervision.close()


def make(target: Target, **settings: Any) -> RegisteredSupervisor:
    events: list[Event] = []
    bus = EventBus()
    bus.subscribe(events.append)
    return RegisteredSupervisor(supervision(target, RecoveryConfig(**FAST | settings), events=bus), events)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)  # only the database shows the awaited change


def row(db: StoreHarness, registered: RegisteredSupervisor, columns: str) -> Any:
    rows = dict(db.table("supervisors", f"id, ({columns})"))
    return rows[registered.supervision.supervisor_id]


def session_pid(db: StoreHarness, registered: RegisteredSupervisor) -> int:
    """Return the pid of the backend that holds the lock, or 0."""
    key = db.target.lock_key(registered.supervision.supervisor_id)
    found = db.connection.execute(
        "select pid from pg_locks where locktype = 'advisory' and (classid::bigint << 32) | objid::bigint = %s",
        [key],
    ).fetchone()
    return 0 if found is None else int(found[0])


def waits_for_a_lock(db: StoreHarness, registered: RegisteredSupervisor) -> bool:
    """Return whether a statement of the supervisor waits for a lock."""
    found = db.connection.execute(
        "select from pg_stat_activity where application_name like %s || ' %%' and wait_event_type = 'Lock'",
        [f"{registered.supervision.session_name} supervisor"],
    )
    return found.fetchone() is not None


async def test_a_supervisor_registers_itself_and_its_worker_and_holds_its_session_lock(
    registered: RegisteredSupervisor, db: StoreHarness
) -> None:
    await until(lambda: row(db, registered, "session_held"))
    assert session_pid(db, registered)
    found = db.table("workers", "supervisor_id, pid, queues, metadata->'tasks'")
    mine = [one for one in found if one[0] == registered.supervision.supervisor_id]
    assert mine == [(registered.supervision.supervisor_id, os.getpid(), ["a", "b"], ["work"])]
    names = db.connection.execute(
        "select count(*) from pg_stat_activity where application_name like %s || ' %%'",
        [f"{registered.supervision.session_name} supervisor"],
    ).fetchone()
    assert names == (3,), "the sessions of the lock, the heartbeats and the maintenance"


async def test_a_heartbeat_returns_lost_cancelled_and_unknown_leases(
    registered: RegisteredSupervisor, db: StoreHarness
) -> None:
    worker = registered.worker.worker_id
    kept, lost, cancelled, phantom = (db.running(worker) for _ in range(4))
    leases = {name: (task.id, task.claim_id) for name, task in
              {"kept": kept, "lost": lost, "cancelled": cancelled, "phantom": phantom}.items()}  # fmt: skip
    registered.worker.receive(Held([leases["kept"], leases["lost"], leases["cancelled"]], []))
    lease = next(one for one in db.leases(registered.supervision.supervisor_id) if one.id == lost.id)
    db.recover(lease, "retry")
    db.cancel(cancelled.id)
    assert (await registered.messages.next(DropLeases)).leases == [leases["lost"]]
    assert lost.claim_id not in registered.worker.held
    assert (await registered.messages.next(CancelAttempts)).leases == [leases["cancelled"]]
    assert (await registered.messages.next(Phantoms)).leases == [leases["phantom"]]
    first, second = await registered.messages.next(Beaten), await registered.messages.next(Beaten)
    assert second.seq == first.seq + 1
    registered.worker.receive(Held([], [kept.claim_id]))
    phantoms = (await registered.messages.next(Phantoms)).leases
    assert leases["kept"] in phantoms, (
        "a heartbeat must not renew a lease that the worker reported as released"
    )


@pytest.fixture
async def patient(db: StoreHarness) -> AsyncIterator[RegisteredSupervisor]:
    """A supervisor with rare heartbeats and long statement timeouts."""
    found = RegisteredSupervisor(supervision(db.target, RecoveryConfig()), [])
    await found.open()
    yield found
    await found.supervision.close()


async def test_a_heartbeat_does_not_wait_for_maintenance_statements(
    patient: RegisteredSupervisor, db: StoreHarness
) -> None:  # D1
    await until(lambda: row(db, patient, "beat_seq") >= 1)
    with db.target.connect("somebody else") as other:
        other.autocommit = False
        other.execute(sql.SQL("lock table {}.turns").format(sql.Identifier(db.target.schema)))
        turn = workers.take_turn("pruner", interval_ms=1_000, taken_by="s1")
        caretaker = asyncio.create_task(patient.supervision.session.run(turn, patience_s=0))
        await until(lambda: waits_for_a_lock(db, patient))
        before = row(db, patient, "beat_seq")
        patient.supervision.drain()  # written by the next heartbeat, which is now
        await until(lambda: row(db, patient, "beat_seq") > before)
        assert row(db, patient, "draining")
        assert not caretaker.done(), "the statement keeps the session busy meanwhile"
        assert waits_for_a_lock(db, patient)
        other.rollback()
    assert await caretaker


async def test_a_lost_session_lock_is_taken_again_at_once(
    registered: RegisteredSupervisor, db: StoreHarness
) -> None:
    await until(lambda: row(db, registered, "session_held"))
    before, pid = row(db, registered, "session_at"), session_pid(db, registered)
    db.connection.execute("select pg_terminate_backend(%s)", [pid])
    began = time.monotonic()
    await until(lambda: session_pid(db, registered) not in (0, pid))
    print(f"taken again after {time.monotonic() - began:.3f} s")
    await until(lambda: row(db, registered, "session_at") > before)  # stored after the lock is taken
    assert registered.supervision.disturbances == 1
    assert registered.supervision.reconnected_at is not None


@pytest.mark.long
async def test_the_session_lock_follows_the_heartbeats_to_a_promoted_standby(
    new_pair: NewPair,
) -> None:  # J16
    """The former primary is frozen, and its kernel keeps the idle connection of the lock open."""
    pair = new_pair()
    target = Target.parse(f"{pair.url}?connect_timeout=2")
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
    times = {f"{role}_heartbeat_interval_ms": 3_000 for role in ("claimer", "runner")}
    found = make(target, **times, claimed_stale_threshold_ms=6_000, running_stale_threshold_ms=6_000)
    await found.open()
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
                await asyncio.sleep(0.1)  # only the database shows the awaited change
    await found.supervision.close()


async def test_a_supervisor_declared_dead_returns_under_a_new_id_with_its_workers(
    registered: RegisteredSupervisor, db: StoreHarness
) -> None:
    old_supervisor, old_worker = registered.supervision.supervisor_id, registered.worker.worker_id
    task = db.running(old_worker)
    registered.worker.receive(Held([(task.id, task.claim_id)], []))
    assert db.run(workers.end_supervisor(old_supervisor, how="age"))
    welcome = (await registered.messages.next(Adopt)).welcome
    assert welcome.supervisor_id == registered.supervision.supervisor_id != old_supervisor
    assert welcome.worker_id == registered.worker.worker_id != old_worker
    assert registered.worker.held == {}
    await until(lambda: row(db, registered, "session_held"))
    assert db.run(workers.beat(welcome.supervisor_id, [], draining=False)).seq is not None
    # Its own sweep recovers the leases of its old id, like those of any dead supervisor.
    await until(lambda: db.row(task.id, "state") == "FAILED")


async def test_a_drained_supervisor_deregisters_and_closes_its_sessions(db: StoreHarness) -> None:
    registered = make(db.target)
    await registered.open()
    registered.supervision.drain()
    await until(lambda: row(db, registered, "draining"))
    registered.supervision.dismiss(registered.worker)
    await registered.supervision.burial.in_order(registered.worker)
    await registered.supervision.close()
    assert row(db, registered, "ended_how") == "left"
    await until(lambda: session_pid(db, registered) == 0)  # its backend ends a moment after the connection
    assert dict(db.table("workers", "id, ended_how"))[registered.worker.worker_id] == "left"


async def test_a_supervisor_that_cannot_reach_the_database_fails_to_start(tmp_path: Any) -> None:
    registered = make(Target.parse(f"postgresql:///postgres?host={tmp_path}"))
    with pytest.raises(DatabaseUnreachable):
        await registered.supervision.open(patience_s=0.2)
    await registered.supervision.close()


async def test_an_outage_and_its_end_are_reported_once_each(new_server: NewServer) -> None:
    server = new_server(settings={"synchronous_commit": "on"})
    target = Target.parse(server.url)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
    registered = make(target)
    await registered.open()
    await registered.messages.next(Beaten)
    server.stop("immediate")
    await until(lambda: [one for one in registered.events if isinstance(one, Unreachable)])
    server.restart("immediate")
    await until(lambda: [one for one in registered.events if isinstance(one, DatabaseBack)])
    assert registered.supervision.disturbances >= 2
    assert len([one for one in registered.events if isinstance(one, Unreachable)]) == 1
    await registered.supervision.close()


async def test_a_heartbeat_refused_for_any_reason_counts_as_a_disturbance(
    registered: RegisteredSupervisor, db: StoreHarness
) -> None:  # J12
    """The table is renamed for a while: the cause that refuses this heartbeat might refuse those of other supervisors."""
    schema = sql.Identifier(db.target.schema)
    await until(lambda: row(db, registered, "beat_seq") >= 1)
    before = registered.supervision.disturbances
    db.connection.execute(sql.SQL("alter table {}.beats rename to beats_away").format(schema))
    await until(lambda: registered.supervision.disturbances > before)
    db.connection.execute(sql.SQL("alter table {}.beats_away rename to beats").format(schema))
    seen = row(db, registered, "beat_seq")
    await until(lambda: row(db, registered, "beat_seq") > seen)
    assert registered.supervision.disturbances > before


async def test_an_idle_supervisor_sends_at_most_two_statements_a_second(new_server: NewServer) -> None:  # D3
    """With default settings and all maintenance services."""
    server = new_server(settings={"log_statement": "all", "log_line_prefix": "%a|"})
    target = Target.parse(server.url)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
    registered = RegisteredSupervisor(supervision(target, RecoveryConfig()), [])
    await registered.open()
    registered.worker.receive(Tick(0, 0, 1, 0.0, 0.0, []))
    log = server.folder / "server.log"

    def questions() -> int:
        lines = re.findall(
            rf"^{registered.supervision.session_name} supervisor (?:beats )?[0-9.]+\|LOG:.*(?:statement|execute)",
            log.read_text(),
            re.MULTILINE,
        )
        return len(lines)

    await asyncio.sleep(1.0)  # the start sends more statements
    before, began = questions(), time.monotonic()
    for _ in range(10):
        registered.worker.receive(
            Tick(0, 0, 1, 0.0, 0.0, [])
        )  # as every worker does; the supervisor checks a silent one
        await asyncio.sleep(0.5)  # the measured period
    rate = (questions() - before) / (time.monotonic() - began)
    print(f"{rate:.2f} statements a second")
    assert 0.5 < rate <= 2.0
    await registered.supervision.close()


async def test_a_worker_whose_row_is_lost_continues_under_a_new_id(
    registered: RegisteredSupervisor, db: StoreHarness
) -> None:
    """A server that comes back without its last commits knows the supervisor, but not the worker: it would claim nothing for ever."""
    lost = registered.worker.worker_id
    db.connection.execute(db.plain("delete from {schema}.workers"))
    welcome = (await registered.messages.next(Adopt)).welcome
    assert welcome.worker_id == registered.worker.worker_id != lost
    assert [each for (each,) in db.table("workers", "id")] == [welcome.worker_id]
    task = db.send()
    assert [each.id for each in db.claim(welcome.worker_id)] == [task]


async def test_a_released_live_worker_continues_under_a_new_id(
    registered: RegisteredSupervisor, db: StoreHarness
) -> None:
    old = registered.worker.worker_id
    task = db.running(old)
    registered.worker.receive(Held([(task.id, task.claim_id)], []))
    assert db.run(retention.release_workers([old], cause="released")) == [old]
    welcome = (await registered.messages.next(Adopt)).welcome
    assert welcome.worker_id == registered.worker.worker_id != old
    assert welcome.supervisor_id == registered.supervision.supervisor_id
    assert registered.worker.held == {}
    db.send()
    (claimed,) = db.claim(welcome.worker_id)
    registered.supervision.dismiss(registered.worker)
    await until(lambda: db.row(task.id, "state") == "FAILED")
    assert dict(db.table("workers", "id, ended_how"))[old] == "operator"
    assert claimed.attempt == 0, "the worker can claim under its new id"
    db.cancel(claimed.id)
