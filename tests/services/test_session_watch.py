"""Noticing by session: a tree whose lock PostgreSQL has freed, and of which no session is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import Connection, conninfo

from everbeat.runtime.events import TaskRecovered
from everbeat.services.observer import CALM_S
from everbeat.services.session_watch import (
    MassSessionLoss,
    MassSessionLossRecovered,
    SessionWatch,
)
from everbeat.store import workers
from tests.services.conftest import Hands, Onlooker


@contextmanager
def session_of(hands: Hands, supervisor: str) -> Iterator[Connection[Any]]:
    """A session of the supervisor's tree that holds its lock, until the block ends or it is closed."""
    connection = hands.target.connect(f"everbeat-{supervisor} supervisor")
    lock_key = hands.target.lock_key(supervisor)
    row = connection.execute(
        hands.text("worker/hold_session"), {"id": supervisor, "lock_key": lock_key}
    ).fetchone()
    assert row == (True,)
    try:
        yield connection
    finally:
        connection.close()


def end(connection: Connection[Any], hands: Hands) -> None:
    """Closes the session and waits until the server has noticed."""
    pid = connection.info.backend_pid
    connection.close()
    hands.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])


async def look(onlooker: Onlooker, watch: SessionWatch, *, after_s: float = 0.7) -> float | None:
    await onlooker.clock.advance(after_s)
    return await watch.tick()


async def test_a_tree_whose_session_ended_is_settled_when_its_grace_is_over(
    onlooker: Onlooker, hands: Hands
) -> None:
    running = hands.running()
    watch = onlooker.session_watch()
    with session_of(hands, "s1") as session:
        assert await look(onlooker, watch) is None
        assert await look(onlooker, watch, after_s=60.0) is None
        end(session, hands)
        assert await look(onlooker, watch) is None
        assert await look(onlooker, watch, after_s=1.4) == pytest.approx(0.1), "the very moment"
        assert hands.row(running.id, "state") == "RUNNING"
        await look(onlooker, watch, after_s=0.11)
    assert hands.row(running.id, "state") == "FAILED"
    data = hands.row(running.id, "error")["data"]
    assert data["noticed_by"] == "session"
    # From the last look that saw it alive: 0.7 + 1.4 + 0.11 s.
    assert data["noticed_after_ms"] == pytest.approx(2_210, abs=2)
    assert onlooker.living() == {"me"}
    assert set(hands.table("workers", "ended_how")) == {("session",)}
    assert len(onlooker.told(TaskRecovered)) == 1


async def test_sessions_are_looked_at_so_often_that_no_age_is_faster(onlooker: Onlooker) -> None:
    assert onlooker.session_watch().interval_s == 1.0
    short = {"running_stale_threshold_ms": 2_000, "runner_heartbeat_interval_ms": 1_000}
    assert onlooker.session_watch(**short).interval_s == pytest.approx(0.4)
    assert onlooker.session_watch(**short, auto_fail_stale_running=False).interval_s == 1.0


async def test_who_takes_the_lock_again_within_the_grace_is_alive(onlooker: Onlooker, hands: Hands) -> None:
    watch = onlooker.session_watch()
    for _ in range(4):
        with session_of(hands, "s1") as session:
            await look(onlooker, watch)
            end(session, hands)
        await look(onlooker, watch)
        await look(onlooker, watch, after_s=1.4)
    assert onlooker.living() == {"me", "s1"}


async def test_another_session_of_the_tree_keeps_it_alive(onlooker: Onlooker, hands: Hands) -> None:
    watch = onlooker.session_watch()
    worker = hands.target.connect("everbeat-s1 worker")
    with session_of(hands, "s1") as session:
        await look(onlooker, watch)
        end(session, hands)
    for _ in range(5):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "s1"}
    end(worker, hands)
    for _ in range(4):
        await look(onlooker, watch)
    assert onlooker.living() == {"me"}


async def test_who_never_held_a_lock_is_not_judged(onlooker: Onlooker) -> None:
    """Behind a transaction pooler nobody holds one."""
    watch = onlooker.session_watch()
    for _ in range(5):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "s1"}


async def test_an_observer_behind_a_pooler_watches_nothing(onlooker: Onlooker, hands: Hands) -> None:
    with session_of(hands, "s1") as session:
        end(session, hands)
    onlooker.is_pooled = True
    watch = onlooker.session_watch()
    for _ in range(5):
        assert await look(onlooker, watch) is None
    assert onlooker.living() == {"me", "s1"}


async def test_an_observer_that_just_reconnected_waits(onlooker: Onlooker, hands: Hands) -> None:
    with session_of(hands, "s1") as session:
        end(session, hands)
    watch = onlooker.session_watch()
    onlooker.reconnected_at = onlooker.clock.monotonic()
    for _ in range(13):
        await look(onlooker, watch)
    assert onlooker.clock.monotonic() < CALM_S
    assert onlooker.living() == {"me", "s1"}
    for _ in range(5):
        await look(onlooker, watch)
    assert onlooker.living() == {"me"}


async def test_a_loss_of_its_own_session_makes_the_observer_forget_what_it_saw(
    onlooker: Onlooker, hands: Hands
) -> None:
    watch = onlooker.session_watch()
    with session_of(hands, "s1") as session:
        await look(onlooker, watch)
        onlooker.disturbances += 1
        onlooker.reconnected_at = onlooker.clock.monotonic()
        end(session, hands)
    for _ in range(13):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "s1"}
    for _ in range(5):
        await look(onlooker, watch)
    assert onlooker.living() == {"me"}


async def test_a_tree_that_held_its_lock_on_a_former_primary_is_left_to_age(
    onlooker: Onlooker, hands: Hands
) -> None:  # J16
    """An observer that has just started has seen nothing: the tree may still wait for an answer of the former primary."""
    with session_of(hands, "s1") as session:
        end(session, hands)
    hands.connection.execute(
        hands.plain("update {schema}.supervisors set session_server = '1795391252.744875/00000001'")
    )
    watch = onlooker.session_watch()
    for _ in range(30):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "s1"}
    with session_of(hands, "s1") as session:  # it has found the new primary
        end(session, hands)
    for _ in range(4):
        await look(onlooker, watch)
    assert onlooker.living() == {"me"}


async def test_while_no_connection_is_free_a_missing_session_proves_nothing(
    onlooker: Onlooker, hands: Hands
) -> None:  # J12
    watch = onlooker.session_watch()
    with session_of(hands, "s1") as session:
        await look(onlooker, watch)
        end(session, hands)
    onlooker.is_served = False
    for _ in range(20):
        await look(onlooker, watch)
    onlooker.is_served = True
    for _ in range(2):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "s1"}, "it has a whole grace to come back"
    for _ in range(2):
        await look(onlooker, watch)
    assert onlooker.living() == {"me"}


async def test_a_connection_of_another_role_keeps_no_dead_tree_alive(
    onlooker: Onlooker, hands: Hands
) -> None:
    role = f"stranger_{hands.target.schema}"
    hands.connection.execute(hands.plain(f"create role {role} login"))
    url = conninfo.make_conninfo(hands.target.url, user=role, application_name="everbeat-s1 supervisor")
    watch = onlooker.session_watch()
    try:
        with psycopg.connect(url, autocommit=True) as stranger:
            with session_of(hands, "s1") as session:
                await look(onlooker, watch)
                end(session, hands)
            stranger.execute("select pg_advisory_lock(%s)", [hands.target.lock_key("s1")])
            for _ in range(4):
                await look(onlooker, watch)
            assert onlooker.living() == {"me"}
    finally:
        hands.connection.execute(hands.plain(f"drop role {role}"))


async def test_a_beat_between_undoes_the_judgement(onlooker: Onlooker, hands: Hands) -> None:
    """A supervisor that lost its lock and yet beats is given up by swap on a beat: a later one wins."""
    with session_of(hands, "s1") as session:
        end(session, hands)
    watched = next(one for one in hands.run(workers.watch_sessions()) if one.supervisor_id == "s1")
    onlooker.beat("s1")
    given_up = workers.end_supervisor(
        "s1", how="session", beat_seq=watched.beat_seq, session_at=watched.session_at
    )
    assert hands.run(given_up) is False


async def test_many_that_lose_their_sessions_together_are_left_to_age(
    onlooker: Onlooker, hands: Hands
) -> None:
    """Two of four within five seconds: rather the server than they."""
    hands.supervisor("s2")
    hands.supervisor("other")
    watch = onlooker.session_watch()
    with session_of(hands, "s1") as first, session_of(hands, "s2") as second, session_of(hands, "other"):
        await look(onlooker, watch)
        end(first, hands)
        await look(onlooker, watch, after_s=0.7)
        end(second, hands)
        for _ in range(20):
            await look(onlooker, watch)
        assert onlooker.living() == {"me", "other", "s1", "s2"}
        (event,) = onlooker.told(MassSessionLoss)
        assert (event.gone, event.known) == (2, 4)  # type: ignore[attr-defined]


async def test_the_last_to_come_back_is_left_to_age_too(onlooker: Onlooker, hands: Hands) -> None:  # E14
    """As the others of a mass loss come back, those still away become few: they are no more dead than before."""
    hands.supervisor("s2")
    hands.supervisor("other")
    watch = onlooker.session_watch()
    with session_of(hands, "s1") as first, session_of(hands, "s2") as second:
        await look(onlooker, watch)
        end(first, hands)
        end(second, hands)
        for _ in range(4):
            await look(onlooker, watch)
        with session_of(hands, "s2"):
            for _ in range(20):
                await look(onlooker, watch)
            assert onlooker.living() == {"me", "other", "s1", "s2"}
            # It comes back in the end; what happens to it from then on is judged as ever.
            with session_of(hands, "s1") as again:
                await look(onlooker, watch)
                end(again, hands)
                for _ in range(4):
                    await look(onlooker, watch)
            assert onlooker.living() == {"me", "other", "s2"}


async def test_one_that_came_back_into_a_mass_loss_and_is_cut_again_is_not_recovered_alone(
    onlooker: Onlooker, hands: Hands
) -> None:  # E14
    """Its line is as bad as those of the others that are still away, however long after them it was cut again."""
    for name in ("s2", "s3", "other"):
        hands.supervisor(name)
    running = hands.running()
    watch = onlooker.session_watch()
    with ExitStack() as sessions:
        lost = [sessions.enter_context(session_of(hands, name)) for name in ("s1", "s2", "s3")]
        await look(onlooker, watch)
        for session in lost:
            end(session, hands)
    for _ in range(10):
        await look(onlooker, watch)
    assert len(onlooker.told(MassSessionLoss)) == 1
    with session_of(hands, "s1") as back:
        await look(onlooker, watch)
        end(back, hands)
    for _ in range(10):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "other", "s1", "s2", "s3"}
    assert hands.row(running.id, "state") == "RUNNING"
    with session_of(hands, "s1"):
        for _ in range(50):
            await look(onlooker, watch)
        assert onlooker.living() == {"me", "other", "s1"}, "the others stayed away for the whole wait"
    assert hands.row(running.id, "state") == "RUNNING"


async def lose_two_of_four(
    onlooker: Onlooker, hands: Hands, watch: SessionWatch, *, silent_for: str = "0"
) -> None:
    """The sessions of s1 and s2 are closed together; their last beats are as old as said."""
    hands.supervisor("s2")
    hands.supervisor("other")
    with session_of(hands, "s1") as first, session_of(hands, "s2") as second:
        await look(onlooker, watch)
        end(first, hands)
        end(second, hands)
        hands.connection.execute(
            hands.plain("update {schema}.supervisors set last_beat_at = now() - %s::interval"), [silent_for]
        )
    for _ in range(4):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "other", "s1", "s2"}


async def test_many_that_stay_away_for_the_whole_wait_are_recovered_together(
    onlooker: Onlooker, hands: Hands
) -> None:  # E14
    running = hands.running()
    watch = onlooker.session_watch()
    await lose_two_of_four(onlooker, hands, watch)
    for _ in range(39):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "other", "s1", "s2"}, "29.4 s after the loss"
    for _ in range(3):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "other"}
    assert hands.row(running.id, "state") == "FAILED"
    assert "did not come back within 3" in hands.row(running.id, "error")["data"]["cause"]
    assert len(onlooker.told(MassSessionLossRecovered)) == 2
    (event,) = onlooker.told(MassSessionLoss)
    assert (event.wait_s, event.fix) == (30.0, "everbeat sweep")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "silent_for"),
    [({"mass_session_grace_ms": None}, "0"), ({}, "5 hours")],
    ids=["no wait", "silent for so long that the server may have given the line up"],
)
async def test_many_are_left_to_age_where_their_sessions_prove_nothing(
    settings: dict[str, Any], silent_for: str, onlooker: Onlooker, hands: Hands
) -> None:  # E14
    watch = onlooker.session_watch(**settings)
    await lose_two_of_four(onlooker, hands, watch, silent_for=silent_for)
    for _ in range(100):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "other", "s1", "s2"}


async def test_an_observer_that_lost_the_database_waits_anew(onlooker: Onlooker, hands: Hands) -> None:  # E14
    watch = onlooker.session_watch()
    await lose_two_of_four(onlooker, hands, watch)
    for _ in range(35):
        await look(onlooker, watch)
    onlooker.disturbances += 1
    onlooker.reconnected_at = onlooker.clock.monotonic()
    for _ in range(56):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "other", "s1", "s2"}, "39.2 s later: calm, then the wait"
    for _ in range(4):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "other"}


async def test_those_that_may_be_on_their_way_back_count_as_lost_together(
    onlooker: Onlooker, hands: Hands
) -> None:  # E14
    """This observer has just reconnected, and has seen only one of the three hold its session since then."""
    for name in ("s2", "s3", "other"):
        hands.supervisor(name)
    onlooker.reconnected_at = onlooker.clock.monotonic()
    watch = onlooker.session_watch()
    for name in ("s2", "s3"):
        with session_of(hands, name) as session:
            end(session, hands)
    with session_of(hands, "s1") as first:
        await look(onlooker, watch)
        end(first, hands)
    for _ in range(4):
        await look(onlooker, watch)
    assert onlooker.living() == {"me", "other", "s1", "s2", "s3"}
    (event,) = onlooker.told(MassSessionLoss)
    assert (event.gone, event.known) == (3, 5)  # type: ignore[attr-defined]


async def test_two_of_five_are_given_up(onlooker: Onlooker, hands: Hands) -> None:
    for name in ("s2", "other", "another"):
        hands.supervisor(name)
    watch = onlooker.session_watch()
    with session_of(hands, "s1") as first, session_of(hands, "s2") as second:
        await look(onlooker, watch)
        end(first, hands)
        end(second, hands)
        for _ in range(4):
            await look(onlooker, watch)
    assert onlooker.living() == {"me", "other", "another"}
