"""Half of the trees disappear at once: killed on hosts that nobody can look into, or cut off while they live."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest

from tests.stories.stage import Stage, Tree
from tests.stories.wire import Wire, wire

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

TREES = 6
ONE_EACH = {"async_concurrency": 1, "thread_concurrency": 1, "process_concurrency": 1, "prefetch": 0}


@pytest.fixture
def line(stage: Stage) -> Iterator[Wire]:
    with wire(stage.target) as made:
        yield made


def running_trees(
    stage: Stage, deeds: ModuleType, *, recovery: Mapping[str, Any], away: str | None = None
) -> tuple[list[Tree], list[Any]]:
    """Six trees with one running task each; the first three are on other hosts, and reach the server by `away` if given."""
    half = TREES // 2
    trees = [
        stage.start_tree(recovery=recovery, worker=ONE_EACH, url=away if number < half else None)
        for number in range(TREES)
    ]
    stage.until(lambda: all(stage.workers(tree) for tree in trees), within=90, what="six trees claim")
    tasks = [deeds.wait_for_on_crash.send("go") for _ in range(TREES)]
    stage.until(lambda: len(stage.effects("start")) == TREES, within=60, what="each tree runs one")
    # As if they ran on other machines: no process, no file and no boot of them can be seen here.
    for number, tree in enumerate(trees[:half]):
        stage.query(
            "update {schema}.supervisors set boot_id = %s, machine_id = %s, lock_file = null where pid = %s returning id",
            f"boot {number}",
            f"machine {number}",
            tree.pid,
        )
    return trees, tasks


def finish(stage: Stage, tasks: list[Any], *, starts: int) -> None:
    """Let all tasks end; `starts`: how often their code began in all."""
    stage.open_gate("go")
    for task in tasks:
        assert task.result(timeout=60) == "done"
    assert len(stage.effects("start")) == starts


@pytest.mark.parametrize(
    ("recovery", "within_s"),
    [
        pytest.param({}, 60.0, marks=pytest.mark.long, id="default settings"),
        pytest.param({"mass_session_grace_ms": 2_000}, 15.0, id="a short wait"),
    ],
)
def test_half_of_the_trees_killed_elsewhere_are_settled_after_the_wait(
    stage: Stage, deeds: ModuleType, recovery: Mapping[str, Any], within_s: float
) -> None:  # E14
    trees, tasks = running_trees(stage, deeds, recovery=recovery)
    victims = [tree.pid for tree in trees[:3]]
    doomed = [process for tree in trees[:3] for process in tree.processes()]
    for process in doomed:  # at one moment: trees that are lost one after the other are judged one by one
        process.kill()
    took = stage.until(lambda: len(stage.recoveries()) == 3, within=within_s, what="all three are settled")
    print(f"settled after {took:.1f} s")
    recoveries = stage.recoveries()
    assert {row["noticed_by"] for row in recoveries} == {"session"}
    assert sorted(
        row["pid"] for row in stage.query("select pid from {schema}.supervisors where ended_how = 'session'")
    ) == sorted(victims)
    logs = "\n".join(tree.output() for tree in trees[3:])
    assert "mass_session_loss" in logs, "no alarm"
    assert "everbeat sweep --threshold" in logs, "the alarm names no command"
    for row in recoveries:
        assert stage.task(row["task_id"])["state"] in ("PENDING", "CLAIMED", "RUNNING")
    for tree in trees[:3]:
        tree.kill()
        stage.start_tree(recovery=recovery, worker=ONE_EACH)
    finish(stage, tasks, starts=TREES + 3)


def test_half_of_the_trees_whose_connections_were_closed_keep_their_work(
    stage: Stage, deeds: ModuleType, line: Wire
) -> None:  # E14
    """The line comes back before the wait is over. To the server this looks like three deaths until then."""
    trees, tasks = running_trees(stage, deeds, recovery={"mass_session_grace_ms": 8_000}, away=line.url)
    line.cut()
    stage.until(
        lambda: all("mass_session_loss" in tree.output() for tree in trees[3:]), within=15, what="an alarm"
    )
    line.mend()
    stage.until(lambda: held_sessions(stage) == TREES, within=15, what="all are back")
    time.sleep(9)  # the wait would be over by now
    assert stage.recoveries() == []
    finish(stage, tasks, starts=TREES)


def test_half_of_the_trees_behind_a_silent_line_keep_their_work(
    stage: Stage, deeds: ModuleType, line: Wire
) -> None:  # E14
    """No connection was closed, so the server keeps the session of each, and the wait for closed ones does not apply."""
    _, tasks = running_trees(stage, deeds, recovery={"mass_session_grace_ms": 1_000}, away=line.url)
    stage.until(lambda: held_sessions(stage) == TREES, within=15, what="each tree has its session lock")
    line.stall()
    time.sleep(8)  # several times the wait and the grace
    assert held_sessions(stage) == TREES
    line.mend()
    stage.until(lambda: held_sessions(stage) == TREES, within=15, what="all are back")
    assert stage.recoveries() == []
    finish(stage, tasks, starts=TREES)


def held_sessions(stage: Stage) -> int:
    """How many session locks the server shows for supervisors that were not ended."""
    target = stage.target
    names = stage.query("select id from {schema}.supervisors where ended_at is null")
    keys = {target.lock_key(row["id"]) % 2**64 for row in names}
    locks = stage.query(
        "select (classid::bigint << 32) | objid::bigint as key from pg_locks where locktype = 'advisory' and granted"
    )
    return len({row["key"] % 2**64 for row in locks} & keys)
