"""Processes and sessions die faster than the tree recovers; each effect happens once, or its row states the reason."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from uuid import UUID

import psutil
import psycopg
import pytest
from psycopg import sql

from tests.invariants import check_invariants
from tests.stories.scenario import FAST, Scenario
from tests.stories.test_reload import is_gone

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]


@contextmanager
def repeated(fault: object, *, pause_s: float) -> Iterator[list[int]]:
    """Repeat the fault during the block; count the repetitions."""
    over = threading.Event()
    counter = [0]

    def repeat() -> None:
        while not over.wait(pause_s):
            fault()  # type: ignore[operator]
            counter[0] += 1

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield counter
    finally:
        over.set()
        thread.join(10)


def settled(scenario: Scenario) -> bool:
    return not set(scenario.states()) & {"PENDING", "CLAIMED", "RUNNING"}


def test_constantly_terminated_sessions_duplicate_no_task(
    scenario: Scenario, mischief: ModuleType
) -> None:  # E7, I10
    scenario.ready_tree(program="mischief", worker={"processes": 2})
    scenario.ready_tree(program="mischief")
    dice = random.Random(7)

    def terminate() -> None:
        with psycopg.connect(scenario.url, autocommit=True) as connection:
            pids = [
                row[0]
                for row in connection.execute(
                    "select pid from pg_stat_activity where application_name ~ '^everbeat-[0-9a-f]{16} '"
                ).fetchall()
            ]
            for pid in dice.sample(pids, k=min(2, len(pids))):
                connection.execute("select pg_terminate_backend(%s)", [pid])

    with repeated(terminate, pause_s=0.05) as counter:
        sent = mischief.app.send_many([mischief.quickly.call(n) for n in range(500)])
        for _ in range(9):
            time.sleep(0.5)  # so that terminations meet claims, starts, code and settles
            sent += mischief.app.send_many([mischief.sleepy.call(0.05) for n in range(100)])
        scenario.until(lambda: settled(scenario), within=120, what="1,400 tasks under fire")
    print(f"{counter[0]} faults")
    assert scenario.states() == {"COMPLETED": 1_400}
    counted = Counter(effect["task"] for effect in scenario.effects("start"))
    assert set(counted.values()) == {1}, counted.most_common(3)
    assert scenario.recoveries() == []
    check_invariants(scenario.url, scenario.schema, sent={one.id for one in sent})


@pytest.mark.long
def test_constantly_killed_worker_processes_lose_no_task_and_record_every_attempt(
    scenario: Scenario, mischief: ModuleType
) -> None:  # E4, E9, promises 1 and 3
    trees = [scenario.ready_tree(program="mischief", worker={"processes": 2}) for _ in range(2)]
    dice = random.Random(11)

    connection = scenario.target.connect("everbeat story killer")

    def kill() -> None:
        # Kill only ready workers: the supervisor pauses for half a minute after repeated kills during the start.
        ready = connection.execute(
            sql.SQL(
                "select pid from {}.workers where ended_at is null and started_at < now() - interval '0.5 s'"
            ).format(sql.Identifier(scenario.schema))
        ).fetchall()
        with suppress(psutil.NoSuchProcess):
            if ready:
                worker = psutil.Process(dice.choice(ready)[0])
                dice.choice([worker, *worker.children()]).send_signal(signal.SIGKILL)

    with repeated(kill, pause_s=0.4) as counter:
        for _ in range(20):
            mischief.app.send_many([mischief.quickly.call(n) for n in range(50)])
            mischief.app.send_many([mischief.sleepy.call(0.2) for n in range(30)])
            mischief.app.send_many([mischief.sleepy_process.call(0.2) for n in range(4)])
            time.sleep(0.5)  # so that kills meet claims, starts, code and settles
    scenario.until(lambda: settled(scenario), within=90, what=f"all ended after {counter[0]} kills")
    started = Counter(effect["task"] for effect in scenario.effects("start"))
    attempts = Counter(str(row["task_id"]) for row in scenario.query("select task_id from {schema}.attempts"))
    assert all(attempts[task] >= times for task, times in started.items())  # I10
    failed = scenario.query(
        "select error ->> 'code' as code, count(*) from {schema}.tasks where state = 'FAILED' group by 1"
    )
    connection.close()
    print(scenario.states(), failed, f"{counter[0]} kills, {len(scenario.recoveries())} recoveries")
    assert {row["code"] for row in failed} <= {"WORKER_CRASHED"}
    recovered = {row["task_id"] for row in scenario.recoveries() if row["action"] == "fail"}
    assert {
        row["id"] for row in scenario.query("select id from {schema}.tasks where state = 'FAILED'")
    } == recovered
    for tree in trees:
        assert tree.stop() == 0


@pytest.mark.long
def test_the_tasks_of_repeatedly_killed_trees_are_recovered_by_other_trees(
    scenario: Scenario, mischief: ModuleType
) -> None:  # E5, E10
    sent: set[UUID] = set()
    scenario.ready_tree(program="mischief", recovery=FAST)  # the one that stays
    for turn in range(5):
        tree = scenario.ready_tree(program="mischief", recovery=FAST)
        sent |= {
            one.id for one in mischief.app.send_many([mischief.crash_proof.call(0.3) for n in range(40)])
        }
        time.sleep(0.15 * turn)  # at a different moment each time
        if turn % 2:
            tree.process.kill()  # only the supervisor: its processes follow
            tree.process.wait(10)
        else:
            tree.kill()
    scenario.until(lambda: settled(scenario), within=60, what="all ended")
    assert scenario.states() == {"COMPLETED": 200}
    for task_id in sent:
        assert len(scenario.effects("start", task_id)) <= len(scenario.attempts(task_id))
    check_invariants(scenario.url, scenario.schema, sent=sent)


@pytest.mark.long
def test_a_tree_that_is_killed_while_it_drains_loses_no_task(
    scenario: Scenario, mischief: ModuleType
) -> None:  # B12, promise 1
    scenario.ready_tree(program="mischief")
    leaving = scenario.ready_tree(program="mischief", worker={"grace": "30s"})
    tasks = [mischief.crash_proof.send(1.5) for _ in range(20)]
    scenario.until(lambda: len(scenario.effects("start")) == 20, within=20, what="all run")
    leaving.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)  # it drains
    leaving.kill()
    for task in tasks:
        assert task.result(timeout=30) == "done"


@pytest.mark.long
def test_a_signal_at_any_moment_of_the_start_ends_the_tree_in_order(
    scenario: Scenario, mischief: ModuleType
) -> None:  # B12
    for tenths in range(12):
        tree = scenario.start_tree(program="mischief")
        time.sleep(0.2 + tenths / 10)  # at some moment of the start
        pids = [each.pid for each in tree.processes()]
        began = time.monotonic()
        code = tree.stop()
        print(
            f"SIGTERM after {0.2 + tenths / 10:.1f} s: exit code {code} after {time.monotonic() - began:.2f} s"
        )
        # Python's default handler ends the supervisor until it installs its own, before its first log line. Its first worker process can exist.
        assert code == 0 or (code == -signal.SIGTERM and not tree.output()), tree.output()
        scenario.until(lambda pids=pids: all(map(is_gone, pids)), within=20, what="no process is left")
    assert scenario.query("select id from {schema}.supervisors where ended_at is null") == []
    assert scenario.query("select id from {schema}.workers where ended_at is null") == []
