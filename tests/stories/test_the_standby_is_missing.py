"""The synchronous standby is missing: commits wait on the server, and no process opens session after session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from everbeat.store import migrating, workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from tests.conftest import NewPair
from tests.replication import Pair
from tests.stories.conftest import sample_tasks
from tests.stories.scenario import FAST, Scenario

__all__ = ["sample_tasks"]

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

# docs/internals.md, "Processes and connections": a tree with one worker process has six sessions; while the server does not
# reply, five of them have a second one.
MOST_SESSIONS = 11
OUTAGE_S = 15.0


@pytest.fixture
def pair(new_pair: NewPair) -> Pair:
    return new_pair(synchronous=True)


@pytest.fixture
def scenario(pair: Pair, tmp_path: Path) -> Iterator[Scenario]:
    made = Scenario(pair.primary.url, "story", tmp_path)
    yield made
    pair.require_standby("")  # the remaining steps must not wait for a standby
    made.close()


@pytest.mark.long
def test_sessions_stay_few_and_no_task_is_lost_while_the_standby_is_missing(
    pair: Pair, scenario: Scenario, sample_tasks: ModuleType
) -> None:
    patient = FAST | {"claimed_stale_threshold_ms": 60_000, "running_stale_threshold_ms": 60_000}
    tree = scenario.ready_tree(recovery=patient)
    handles = [sample_tasks.wait_for.send("go") for _ in range(20)]
    scenario.until(lambda: len(scenario.effects("start")) == 20, within=20, what="all run", tree=tree)
    pair.stop_standby()
    scenario.open_gate("go")
    until, most, waiting = time.monotonic() + OUTAGE_S, 0, 0
    while time.monotonic() < until:
        (found,) = scenario.query(
            """select count(*) as sessions, count(*) filter (where wait_event = 'SyncRep') as waiting
               from pg_stat_activity where application_name ~ '^everbeat-[0-9a-f]+ '"""
        )
        most, waiting = max(most, found["sessions"]), max(waiting, found["waiting"])
        time.sleep(0.1)  # polls from outside while the standby is missing
    print(f"at most {most} sessions, {waiting} of them waiting for the standby")
    assert waiting, "commits did not wait for the standby"
    assert most <= MOST_SESSIONS
    pair.start_standby()
    assert [handle.result(timeout=60) for handle in handles] == ["done"] * 20
    assert len(scenario.effects("start")) == 20, "a task ran twice"
    assert scenario.recoveries() == []


@pytest.mark.long
async def test_a_session_waits_for_its_own_backend_that_waits_for_the_standby(pair: Pair) -> None:
    target = Target.parse(pair.primary.url)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        session = Session(target, "everbeat counted", reply_timeout_s=0.5)
        await session.run(workers.take_turn("mine", interval_ms=0, taken_by="me"))
        pair.stop_standby()
        asking = asyncio.ensure_future(session.run(workers.take_turn("mine", interval_ms=0, taken_by="me")))
        most = 0
        for _ in range(50):
            await asyncio.sleep(0.1)  # the standby stays away
            row = connection.execute(
                "select count(*) from pg_stat_activity where application_name like 'everbeat counted %'"
            ).fetchone()
            assert row is not None
            most = max(most, row[0])
        assert not asking.done()
        assert most == 2
        pair.start_standby()
        async with asyncio.timeout(30):
            assert await asking is True
        await session.drop()
