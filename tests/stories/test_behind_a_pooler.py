"""Workers behind PgBouncer in transaction mode: no LISTEN, no session lock; polls and the age of beats replace them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from everbeat import App
from everbeat.inspection import SweepResult
from everbeat.store import migrating, workers
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.store.conftest import StoreHarness
from tests.store.test_remaining_sessions import is_open, session_of
from tests.stories.pooler import pooled
from tests.stories.scenario import FAST, SLACK, Scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def pool(new_server: NewServer) -> Iterator[tuple[str, str]]:
    """The URLs of a server and of the pooler in front of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = new_server(tcp_port=port)
    with pooled(server.tcp_url) as url:
        yield server.tcp_url, url


@pytest.fixture
def scenario(pool: tuple[str, str], tmp_path: Path) -> Iterator[Scenario]:
    made = Scenario(pool[0], "story", tmp_path)
    made.url = pool[1]
    yield made
    made.url = pool[0]
    made.close()


@pytest.mark.long
def test_a_dead_tree_behind_a_transaction_pooler_is_recovered_by_age(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    first = scenario.ready_tree(recovery=FAST)
    handles = [sample_tasks.wait_for_on_crash.send("go") for _ in range(5)]
    scenario.until(lambda: len(scenario.effects("start")) == 5, within=20, what="all run")
    second = scenario.ready_tree(recovery=FAST)
    time.sleep(2 * FAST["running_stale_threshold_ms"] / 1_000)  # no live tree may be declared dead meanwhile
    assert scenario.recoveries() == []
    scenario.until_logged(first, "session_lock_off")
    first.kill()
    took = scenario.until(lambda: len(scenario.recoveries()) == 5, within=4 * SLACK, what="recovered by age")
    assert {row["noticed_by"] for row in scenario.recoveries()} == {"age"}
    print(f"noticed after {took:.2f} s")
    scenario.open_gate("go")
    assert [handle.result(timeout=30) for handle in handles] == ["done"] * 5
    assert second.stop() == 0


def test_a_killed_process_behind_a_pooler_is_noticed_at_once_and_a_cancel_arrives_by_poll(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = scenario.ready_tree(recovery=FAST, worker={"processes": 2})
    poisoned = sample_tasks.poison.send("exit")
    scenario.until(scenario.state_is(poisoned.id, "FAILED"), within=30, what="the poison is stopped")
    assert {row["noticed_by"] for row in scenario.recoveries(poisoned.id)} == {"child_exit"}
    asked = sample_tasks.nap.send(60)
    scenario.until(scenario.started(asked.id), within=20, what="it runs")
    asked.cancel()
    scenario.until(scenario.state_is(asked.id, "CANCELLED"), within=2 * SLACK, what="cancelled")
    later = [sample_tasks.quick.send(n) for n in range(50)]
    assert [handle.result(timeout=30) for handle in later] == list(range(50))
    assert tree.stop() == 0


@pytest.mark.long
def test_a_sweep_through_a_pooler_ends_no_sessions_of_dead_trees(pool: tuple[str, str]) -> None:  # J14
    target, pooled_target = (Target.parse(url) for url in pool)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        db = StoreHarness(target, connection)
        db.supervisor("s1")
        db.run(workers.end_supervisor("s1", how="age"))
        with session_of(target, "s1") as session:
            for url, is_left in ((pooled_target.url, True), (target.url, False)):
                app = App(url)
                assert app.sweep_stale_workers().sessions_problem is None
                assert asyncio.run(swept_on_a_loop(app)).sessions_problem is None
                app.close()
                assert is_open(session) is is_left
        db.database.close()


async def swept_on_a_loop(app: App) -> SweepResult:
    result = await app.asweep_stale_workers()
    await app.aclose()
    return result
