"""Test noticing deaths by session: PostgreSQL has freed the lock of a tree and none of its sessions is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import Connection, conninfo

from everbeat.recovering.notice.session import MassSessionLoss, MassSessionLossRecovered, SessionWatch
from everbeat.recovering.observer import CALM_S
from everbeat.runtime.events import TaskRecovered
from everbeat.store import workers
from tests.recovering.conftest import ManualObserver, StoreHarness


@contextmanager
def session_of(db: StoreHarness, supervisor: str) -> Iterator[Connection[Any]]:
    """Yield a session of the supervisor's tree that holds its lock until the block ends or a test closes it."""
    connection = db.target.connect(f"everbeat-{supervisor} supervisor")
    lock_key = db.target.lock_key(supervisor)
    row = connection.execute(
        db.text("worker/lock_session"), {"id": supervisor, "lock_key": lock_key}
    ).fetchone()
    assert row == (True,)
    try:
        yield connection
    finally:
        connection.close()


def end(connection: Connection[Any], db: StoreHarness) -> None:
    """Close the session and wait until the server has noticed."""
    pid = connection.info.backend_pid
    connection.close()
    db.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])


async def look(observer: ManualObserver, watch: SessionWatch, *, after_s: float = 0.7) -> float | None:
    await observer.clock.advance(after_s)
    return await watch.tick()


async def test_a_tree_whose_session_ended_is_recovered_after_its_grace_period(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    watch = observer.session_watch()
    with session_of(db, "s1") as session:
        assert await look(observer, watch) is None
        assert await look(observer, watch, after_s=60.0) is None
        end(session, db)
        assert await look(observer, watch) is None
        assert await look(observer, watch, after_s=1.4) == pytest.approx(0.1), (
            "it ticks exactly at the end of the grace period"
        )
        assert db.row(running.id, "state") == "RUNNING"
        await look(observer, watch, after_s=0.11)
    assert db.row(running.id, "state") == "FAILED"
    data = db.row(running.id, "error")["data"]
    assert data["noticed_by"] == "session"
    # Since the last check that saw it alive: 0.7 + 1.4 + 0.11 s.
    assert data["noticed_after_ms"] == pytest.approx(2_210, abs=2)
    assert observer.living() == {"me"}
    assert set(db.table("workers", "ended_how")) == {("session",)}
    assert len(observer.told(TaskRecovered)) == 1


async def test_the_session_watch_interval_is_shorter_than_every_stale_threshold(
    observer: ManualObserver,
) -> None:
    assert observer.session_watch().interval_s == 1.0
    short = {"running_stale_threshold_ms": 2_000, "runner_heartbeat_interval_ms": 1_000}
    assert observer.session_watch(**short).interval_s == pytest.approx(0.4)
    assert observer.session_watch(**short, auto_fail_stale_running=False).interval_s == 1.0


async def test_a_tree_that_takes_its_lock_again_within_the_grace_period_is_alive(
    observer: ManualObserver, db: StoreHarness
) -> None:
    watch = observer.session_watch()
    for _ in range(4):
        with session_of(db, "s1") as session:
            await look(observer, watch)
            end(session, db)
        await look(observer, watch)
        await look(observer, watch, after_s=1.4)
    assert observer.living() == {"me", "s1"}


async def test_another_session_of_the_tree_keeps_it_alive(observer: ManualObserver, db: StoreHarness) -> None:
    watch = observer.session_watch()
    worker = db.target.connect("everbeat-s1 worker")
    with session_of(db, "s1") as session:
        await look(observer, watch)
        end(session, db)
    for _ in range(5):
        await look(observer, watch)
    assert observer.living() == {"me", "s1"}
    end(worker, db)
    for _ in range(4):
        await look(observer, watch)
    assert observer.living() == {"me"}


async def test_a_tree_that_never_held_a_session_lock_is_not_judged(observer: ManualObserver) -> None:
    """Behind a transaction pooler no tree holds a session lock."""
    watch = observer.session_watch()
    for _ in range(5):
        await look(observer, watch)
    assert observer.living() == {"me", "s1"}


async def test_an_observer_behind_a_pooler_judges_no_sessions(
    observer: ManualObserver, db: StoreHarness
) -> None:
    with session_of(db, "s1") as session:
        end(session, db)
    observer.is_pooled = True
    watch = observer.session_watch()
    for _ in range(5):
        assert await look(observer, watch) is None
    assert observer.living() == {"me", "s1"}


async def test_an_observer_that_just_reconnected_waits_before_it_judges_sessions(
    observer: ManualObserver, db: StoreHarness
) -> None:
    with session_of(db, "s1") as session:
        end(session, db)
    watch = observer.session_watch()
    observer.reconnected_at = observer.clock.monotonic()
    for _ in range(13):
        await look(observer, watch)
    assert observer.clock.monotonic() < CALM_S
    assert observer.living() == {"me", "s1"}
    for _ in range(5):
        await look(observer, watch)
    assert observer.living() == {"me"}


async def test_a_lost_observer_session_discards_its_observations(
    observer: ManualObserver, db: StoreHarness
) -> None:
    watch = observer.session_watch()
    with session_of(db, "s1") as session:
        await look(observer, watch)
        observer.disturbances += 1
        observer.reconnected_at = observer.clock.monotonic()
        end(session, db)
    for _ in range(13):
        await look(observer, watch)
    assert observer.living() == {"me", "s1"}
    for _ in range(5):
        await look(observer, watch)
    assert observer.living() == {"me"}


async def test_a_tree_that_held_its_lock_on_a_former_primary_is_left_to_age(
    observer: ManualObserver, db: StoreHarness
) -> None:  # J16
    """A new observer has no observations, and the tree might still wait for an answer of the former primary."""
    with session_of(db, "s1") as session:
        end(session, db)
    db.connection.execute(
        db.plain("update {schema}.supervisors set session_server = '1795391252.744875/00000001'")
    )
    watch = observer.session_watch()
    for _ in range(30):
        await look(observer, watch)
    assert observer.living() == {"me", "s1"}
    with session_of(db, "s1") as session:  # the tree has found the new primary
        end(session, db)
    for _ in range(4):
        await look(observer, watch)
    assert observer.living() == {"me"}


async def test_a_missing_session_is_not_judged_while_no_connection_is_free(
    observer: ManualObserver, db: StoreHarness
) -> None:  # J12
    watch = observer.session_watch()
    with session_of(db, "s1") as session:
        await look(observer, watch)
        end(session, db)
    observer.is_served = False
    for _ in range(20):
        await look(observer, watch)
    observer.is_served = True
    for _ in range(2):
        await look(observer, watch)
    assert observer.living() == {"me", "s1"}, "the tree has a whole grace period to come back"
    for _ in range(2):
        await look(observer, watch)
    assert observer.living() == {"me"}


async def test_a_connection_of_another_role_does_not_keep_a_dead_tree_alive(
    observer: ManualObserver, db: StoreHarness
) -> None:
    role = f"stranger_{db.target.schema}"
    db.connection.execute(db.plain(f"create role {role} login"))
    url = conninfo.make_conninfo(db.target.url, user=role, application_name="everbeat-s1 supervisor")
    watch = observer.session_watch()
    try:
        with psycopg.connect(url, autocommit=True) as stranger:
            with session_of(db, "s1") as session:
                await look(observer, watch)
                end(session, db)
            stranger.execute("select pg_advisory_lock(%s)", [db.target.lock_key("s1")])
            for _ in range(4):
                await look(observer, watch)
            assert observer.living() == {"me"}
    finally:
        db.connection.execute(db.plain(f"drop role {role}"))


async def test_a_heartbeat_after_the_query_cancels_the_judgement(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """The statement that ends a supervisor compares its heartbeat, so that a later heartbeat wins."""
    with session_of(db, "s1") as session:
        end(session, db)
    watched = next(one for one in db.run(workers.watch_sessions()) if one.supervisor_id == "s1")
    observer.beat("s1")
    given_up = workers.end_supervisor(
        "s1", how="session", beat_seq=watched.beat_seq, session_at=watched.session_at
    )
    assert db.run(given_up) is False


async def test_trees_that_lose_their_sessions_together_are_left_to_age(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """Two of four trees lost their sessions within five seconds: the server is the more likely cause."""
    db.supervisor("s2")
    db.supervisor("other")
    watch = observer.session_watch()
    with session_of(db, "s1") as first, session_of(db, "s2") as second, session_of(db, "other"):
        await look(observer, watch)
        end(first, db)
        await look(observer, watch, after_s=0.7)
        end(second, db)
        for _ in range(20):
            await look(observer, watch)
        assert observer.living() == {"me", "other", "s1", "s2"}
        (event,) = observer.told(MassSessionLoss)
        assert (event.gone, event.known) == (2, 4)  # type: ignore[attr-defined]


async def test_the_last_tree_of_a_mass_loss_is_left_to_age(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E14
    """When the other trees of a mass loss return, the few still away are as unlikely to be dead as before."""
    db.supervisor("s2")
    db.supervisor("other")
    watch = observer.session_watch()
    with session_of(db, "s1") as first, session_of(db, "s2") as second:
        await look(observer, watch)
        end(first, db)
        end(second, db)
        for _ in range(4):
            await look(observer, watch)
        with session_of(db, "s2"):
            for _ in range(20):
                await look(observer, watch)
            assert observer.living() == {"me", "other", "s1", "s2"}
            # The tree returns in the end; later losses are judged as usual.
            with session_of(db, "s1") as again:
                await look(observer, watch)
                end(again, db)
                for _ in range(4):
                    await look(observer, watch)
            assert observer.living() == {"me", "other", "s2"}


async def test_a_tree_cut_off_again_in_a_mass_loss_is_not_recovered_alone(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E14
    """Its network is as bad as that of the trees still away, even if it was cut off again much later."""
    for name in ("s2", "s3", "other"):
        db.supervisor(name)
    running = db.running()
    watch = observer.session_watch()
    with ExitStack() as sessions:
        lost = [sessions.enter_context(session_of(db, name)) for name in ("s1", "s2", "s3")]
        await look(observer, watch)
        for session in lost:
            end(session, db)
    for _ in range(10):
        await look(observer, watch)
    assert len(observer.told(MassSessionLoss)) == 1
    with session_of(db, "s1") as back:
        await look(observer, watch)
        end(back, db)
    for _ in range(10):
        await look(observer, watch)
    assert observer.living() == {"me", "other", "s1", "s2", "s3"}
    assert db.row(running.id, "state") == "RUNNING"
    with session_of(db, "s1"):
        for _ in range(50):
            await look(observer, watch)
        assert observer.living() == {"me", "other", "s1"}, "the others stayed away for the whole wait"
    assert db.row(running.id, "state") == "RUNNING"


async def lose_two_of_four(
    observer: ManualObserver, db: StoreHarness, watch: SessionWatch, *, silent_for: str = "0"
) -> None:
    """Close the sessions of s1 and s2 together, with last heartbeats of this age."""
    db.supervisor("s2")
    db.supervisor("other")
    with session_of(db, "s1") as first, session_of(db, "s2") as second:
        await look(observer, watch)
        end(first, db)
        end(second, db)
        db.connection.execute(
            db.plain("update {schema}.supervisors set last_beat_at = now() - %s::interval"), [silent_for]
        )
    for _ in range(4):
        await look(observer, watch)
    assert observer.living() == {"me", "other", "s1", "s2"}


async def test_trees_of_a_mass_loss_that_stay_away_for_the_whole_wait_are_recovered(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E14
    running = db.running()
    watch = observer.session_watch()
    await lose_two_of_four(observer, db, watch)
    for _ in range(39):
        await look(observer, watch)
    assert observer.living() == {"me", "other", "s1", "s2"}, "29.4 s after the loss"
    for _ in range(3):
        await look(observer, watch)
    assert observer.living() == {"me", "other"}
    assert db.row(running.id, "state") == "FAILED"
    assert "did not come back within 3" in db.row(running.id, "error")["data"]["cause"]
    assert len(observer.told(MassSessionLossRecovered)) == 2
    (event,) = observer.told(MassSessionLoss)
    assert (event.wait_s, event.fix) == (30.0, "everbeat sweep")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "silent_for"),
    [({"mass_session_grace_ms": None}, "0"), ({}, "5 hours")],
    ids=["no wait", "silent for so long that the server may have given the line up"],
)
async def test_trees_of_a_mass_loss_without_conclusive_sessions_are_left_to_age(
    settings: dict[str, Any], silent_for: str, observer: ManualObserver, db: StoreHarness
) -> None:  # E14
    watch = observer.session_watch(**settings)
    await lose_two_of_four(observer, db, watch, silent_for=silent_for)
    for _ in range(100):
        await look(observer, watch)
    assert observer.living() == {"me", "other", "s1", "s2"}


async def test_an_observer_that_lost_the_database_restarts_the_wait_of_a_mass_loss(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E14
    watch = observer.session_watch()
    await lose_two_of_four(observer, db, watch)
    for _ in range(35):
        await look(observer, watch)
    observer.disturbances += 1
    observer.reconnected_at = observer.clock.monotonic()
    for _ in range(56):
        await look(observer, watch)
    assert observer.living() == {"me", "other", "s1", "s2"}, "39.2 s later: calm, then the wait"
    for _ in range(4):
        await look(observer, watch)
    assert observer.living() == {"me", "other"}


async def test_trees_that_might_be_returning_count_towards_a_mass_loss(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E14
    """The observer has just reconnected and has seen only one of the three hold its session since then."""
    for name in ("s2", "s3", "other"):
        db.supervisor(name)
    observer.reconnected_at = observer.clock.monotonic()
    watch = observer.session_watch()
    for name in ("s2", "s3"):
        with session_of(db, name) as session:
            end(session, db)
    with session_of(db, "s1") as first:
        await look(observer, watch)
        end(first, db)
    for _ in range(4):
        await look(observer, watch)
    assert observer.living() == {"me", "other", "s1", "s2", "s3"}
    (event,) = observer.told(MassSessionLoss)
    assert (event.gone, event.known) == (3, 5)  # type: ignore[attr-defined]


async def test_two_lost_trees_of_five_are_declared_dead(observer: ManualObserver, db: StoreHarness) -> None:
    for name in ("s2", "other", "another"):
        db.supervisor(name)
    watch = observer.session_watch()
    with session_of(db, "s1") as first, session_of(db, "s2") as second:
        await look(observer, watch)
        end(first, db)
        end(second, db)
        for _ in range(4):
            await look(observer, watch)
    assert observer.living() == {"me", "other", "another"}
