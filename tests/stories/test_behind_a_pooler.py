"""Life behind PgBouncer in transaction mode: no LISTEN, no session lock; everything holds, by polls and by the age of beats."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from everbeat import App, SweepResult
from everbeat.store import migrating, workers
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.store.conftest import Hands
from tests.store.test_remaining_sessions import is_open, session_of
from tests.stories.pooler import pooled
from tests.stories.stage import FAST, SLACK, Stage

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def pool(new_server: NewServer) -> Iterator[tuple[str, str]]:
    """The URLs of a server and of the pooler before it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = new_server(tcp_port=port)
    with pooled(server.tcp_url) as url:
        yield server.tcp_url, url


@pytest.fixture
def stage(pool: tuple[str, str], tmp_path: Path) -> Iterator[Stage]:
    made = Stage(pool[0], "story", tmp_path)
    made.url = pool[1]
    yield made
    made.url = pool[0]
    made.close()


def test_a_dead_tree_is_recovered_by_age_and_says_that_sessions_prove_nothing(
    stage: Stage, deeds: ModuleType
) -> None:
    first = stage.ready_tree(recovery=FAST)
    handles = [deeds.wait_for_on_crash.send("go") for _ in range(5)]
    stage.until(lambda: len(stage.effects("start")) == 5, within=20, what="all run")
    second = stage.ready_tree(recovery=FAST)
    time.sleep(2 * FAST["running_stale_threshold_ms"] / 1_000)  # nobody alive may be declared dead meanwhile
    assert stage.recoveries() == []
    assert "session_lock_off" in first.output()
    first.kill()
    took = stage.until(lambda: len(stage.recoveries()) == 5, within=4 * SLACK, what="recovered by age")
    assert {row["noticed_by"] for row in stage.recoveries()} == {"age"}
    print(f"noticed after {took:.2f} s")
    stage.open_gate("go")
    assert [handle.result(timeout=30) for handle in handles] == ["done"] * 5
    assert second.stop() == 0


def test_a_killed_worker_process_is_noticed_at_once_and_a_cancel_arrives_by_poll(
    stage: Stage, deeds: ModuleType
) -> None:
    tree = stage.ready_tree(recovery=FAST, worker={"processes": 2})
    poisoned = deeds.poison.send("exit")
    stage.until(stage.state_is(poisoned.id, "FAILED"), within=30, what="the poison is stopped")
    assert {row["noticed_by"] for row in stage.recoveries(poisoned.id)} == {"child_exit"}
    asked = deeds.nap.send(60)
    stage.until(stage.started(asked.id), within=20, what="it runs")
    asked.cancel()
    stage.until(stage.state_is(asked.id, "CANCELLED"), within=2 * SLACK, what="cancelled")
    later = [deeds.quick.send(n) for n in range(50)]
    assert [handle.result(timeout=30) for handle in later] == list(range(50))
    assert tree.stop() == 0


def test_a_sweep_through_the_pooler_ends_no_sessions_of_the_dead(pool: tuple[str, str]) -> None:  # J14
    target, pooled_target = (Target.parse(url) for url in pool)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        hands = Hands(target, connection)
        hands.supervisor("s1")
        hands.run(workers.end_supervisor("s1", how="age"))
        with session_of(target, "s1") as session:
            for url, is_left in ((pooled_target.url, True), (target.url, False)):
                app = App(url)
                assert app.sweep_stale_workers().sessions_problem is None
                assert asyncio.run(swept_on_a_loop(app)).sessions_problem is None
                app.close()
                assert is_open(session) is is_left
        hands.database.close()


async def swept_on_a_loop(app: App) -> SweepResult:
    result = await app.asweep_stale_workers()
    await app.aclose()
    return result
