"""Blow upon blow: processes and sessions die faster than the tree recovers; each effect is there once, or its row says why not."""

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
from tests.stories.stage import FAST, Stage

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]


@contextmanager
def again_and_again(blow: object, *, pause_s: float) -> Iterator[list[int]]:
    """Strikes beside the story until the block ends; counts the blows."""
    over = threading.Event()
    blows = [0]

    def strike() -> None:
        while not over.wait(pause_s):
            blow()  # type: ignore[operator]
            blows[0] += 1

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    try:
        yield blows
    finally:
        over.set()
        thread.join(10)


def settled(stage: Stage) -> bool:
    return not set(stage.states()) & {"PENDING", "CLAIMED", "RUNNING"}


def test_sessions_that_are_terminated_all_the_time_double_nothing(
    stage: Stage, mischief: ModuleType
) -> None:  # E7, I10
    stage.ready_tree(program="mischief", worker={"processes": 2})
    stage.ready_tree(program="mischief")
    dice = random.Random(7)

    def terminate() -> None:
        with psycopg.connect(stage.url, autocommit=True) as connection:
            pids = [
                row[0]
                for row in connection.execute(
                    "select pid from pg_stat_activity where application_name ~ '^everbeat-[0-9a-f]{16} '"
                ).fetchall()
            ]
            for pid in dice.sample(pids, k=min(2, len(pids))):
                connection.execute("select pg_terminate_backend(%s)", [pid])

    with again_and_again(terminate, pause_s=0.05) as blows:
        sent = mischief.app.send_many([mischief.quickly.call(n) for n in range(500)])
        for _ in range(9):
            time.sleep(0.5)  # so that blows meet claims, starts, code and settles
            sent += mischief.app.send_many([mischief.sleepy.call(0.05) for n in range(100)])
        stage.until(lambda: settled(stage), within=120, what="1,400 tasks under fire")
    print(f"{blows[0]} blows")
    assert stage.states() == {"COMPLETED": 1_400}
    counted = Counter(effect["task"] for effect in stage.effects("start"))
    assert set(counted.values()) == {1}, counted.most_common(3)
    assert stage.recoveries() == []
    check_invariants(stage.url, stage.schema, sent={one.id for one in sent})


@pytest.mark.long
def test_worker_processes_killed_all_the_time_lose_and_double_nothing_unrecorded(
    stage: Stage, mischief: ModuleType
) -> None:  # E4, E9, promises 1 and 3
    trees = [stage.ready_tree(program="mischief", worker={"processes": 2}) for _ in range(2)]
    dice = random.Random(11)

    connection = stage.target.connect("everbeat story killer")

    def kill() -> None:
        # Those that work: killed before that, again and again, a post is given a rest of half a minute.
        ready = connection.execute(
            sql.SQL(
                "select pid from {}.workers where ended_at is null and started_at < now() - interval '0.5 s'"
            ).format(sql.Identifier(stage.schema))
        ).fetchall()
        with suppress(psutil.NoSuchProcess):
            if ready:
                worker = psutil.Process(dice.choice(ready)[0])
                dice.choice([worker, *worker.children()]).send_signal(signal.SIGKILL)

    with again_and_again(kill, pause_s=0.4) as blows:
        for _ in range(20):
            mischief.app.send_many([mischief.quickly.call(n) for n in range(50)])
            mischief.app.send_many([mischief.sleepy.call(0.2) for n in range(30)])
            mischief.app.send_many([mischief.sleepy_process.call(0.2) for n in range(4)])
            time.sleep(0.5)  # so that kills meet claims, starts, code and settles
    stage.until(lambda: settled(stage), within=90, what=f"all ended after {blows[0]} kills")
    started = Counter(effect["task"] for effect in stage.effects("start"))
    attempts = Counter(str(row["task_id"]) for row in stage.query("select task_id from {schema}.attempts"))
    assert all(attempts[task] >= times for task, times in started.items())  # I10
    failed = stage.query(
        "select error ->> 'code' as code, count(*) from {schema}.tasks where state = 'FAILED' group by 1"
    )
    connection.close()
    print(stage.states(), failed, f"{blows[0]} kills, {len(stage.recoveries())} recoveries")
    assert {row["code"] for row in failed} <= {"WORKER_CRASHED"}
    recovered = {row["task_id"] for row in stage.recoveries() if row["action"] == "fail"}
    assert {
        row["id"] for row in stage.query("select id from {schema}.tasks where state = 'FAILED'")
    } == recovered
    for tree in trees:
        assert tree.stop() == 0


def test_trees_killed_all_the_time_are_cleaned_up_by_their_successors(
    stage: Stage, mischief: ModuleType
) -> None:  # E5, E10
    sent: set[UUID] = set()
    stage.ready_tree(program="mischief", recovery=FAST)  # the one that stays
    for turn in range(5):
        tree = stage.ready_tree(program="mischief", recovery=FAST)
        sent |= {
            one.id for one in mischief.app.send_many([mischief.crash_proof.call(0.3) for n in range(40)])
        }
        time.sleep(0.15 * turn)  # at another moment each time
        if turn % 2:
            tree.process.kill()  # the supervisor alone: the others follow
            tree.process.wait(10)
        else:
            tree.kill()
    stage.until(lambda: settled(stage), within=60, what="all ended")
    assert stage.states() == {"COMPLETED": 200}
    for task_id in sent:
        assert len(stage.effects("start", task_id)) <= len(stage.attempts(task_id))
    check_invariants(stage.url, stage.schema, sent=sent)


def test_a_tree_killed_while_it_drains_loses_nothing(
    stage: Stage, mischief: ModuleType
) -> None:  # B12, promise 1
    stage.ready_tree(program="mischief")
    leaving = stage.ready_tree(program="mischief", worker={"grace": "30s"})
    tasks = [mischief.crash_proof.send(1.5) for _ in range(20)]
    stage.until(lambda: len(stage.effects("start")) == 20, within=20, what="all run")
    leaving.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)  # it drains
    leaving.kill()
    for task in tasks:
        assert task.result(timeout=30) == "done"


def test_a_signal_at_any_moment_of_the_start_ends_in_good_order(
    stage: Stage, mischief: ModuleType
) -> None:  # B12
    for tenths in range(12):
        tree = stage.start_tree(program="mischief")
        time.sleep(0.2 + tenths / 10)  # somewhere in the start
        is_begun = len(tree.processes()) > 1
        began = time.monotonic()
        code = tree.stop()
        print(
            f"SIGTERM after {0.2 + tenths / 10:.1f} s: exit code {code} after {time.monotonic() - began:.2f} s"
        )
        # Python itself ends by the signal until the program has taken it over, before the first process is started.
        assert code == 0 or (code == -signal.SIGTERM and not is_begun), tree.output()
    assert stage.query("select id from {schema}.supervisors where ended_at is null") == []
    assert stage.query("select id from {schema}.workers where ended_at is null") == []
