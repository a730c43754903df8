"""A standby is promoted, or a tree dies for good: an observer that has just started tells a hanging tree from a dead one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from psycopg.rows import dict_row

from tests.conftest import NewPair
from tests.replication import Pair
from tests.stories.stage import SLACK, Stage, Tree, program_of, staged

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@contextmanager
def staged_on(url: str, folder: Path) -> Iterator[tuple[Stage, ModuleType]]:
    with staged(url, "story", folder, check=False) as stage, program_of(stage) as deeds:
        yield stage, deeds


def supervisor(stage: Stage, tree: Tree) -> dict[str, Any]:
    """The latest row of a tree's supervisor."""
    (row,) = stage.query(
        "select * from {schema}.supervisors where pid = %s order by started_at desc limit 1", tree.pid
    )
    return row


def elsewhere(stage: Stage, tree: Tree) -> None:
    """Another machine runs this tree, as far as everbeat can tell: there is no local proof of its death."""
    stage.query(
        """update {schema}.supervisors set boot_id = 'elsewhere', machine_id = 'elsewhere', lock_file = null
           where pid = %s returning id""",
        tree.pid,
    )


def now_on(stage: Stage, pair: Pair) -> None:
    """Look at the promoted server from now on."""
    stage.connection.close()
    pair.promote()
    stage.connection = stage.target.connect("everbeat story")
    stage.connection.row_factory = dict_row  # type: ignore[assignment]


def test_a_tree_that_waits_for_the_former_primary_is_not_declared_dead(
    new_pair: NewPair, tmp_path: Path
) -> None:  # J16
    pair = new_pair()
    with staged_on(pair.url, tmp_path) as (stage, deeds):
        old = stage.ready_tree()
        task = deeds.wait_for_on_crash.send("go")
        stage.until(stage.started(task.id), within=20, what="it runs")
        elsewhere(stage, old)
        stage.until(lambda: supervisor(stage, old)["session_held"], within=20, what="its lock is held")
        deeds.app.close()
        pair.wait_replayed()
        pair.freeze_primary()
        now_on(stage, pair)
        new = stage.ready_tree(url=pair.standby.tcp_url)
        time.sleep(
            4
        )  # the grace and two looks of the new tree; it used to declare the old one dead 1.5 s after its start
        assert supervisor(stage, old)["ended_at"] is None
        pair.kill_primary()  # the connections of the old tree end, and it comes back
        incarnation = supervisor(stage, new)["session_server"]
        stage.until(
            lambda: supervisor(stage, old)["session_server"] == incarnation,
            within=30,
            what="the lock is back",
        )
        stage.open_gate("go")
        assert task.result(timeout=60) == "done"
        assert len(stage.effects("start", task.id)) == 1
        assert stage.recoveries() == []
        again = deeds.wait_for_on_crash.send("never")
        stage.until(stage.started(again.id), within=20, what="another one runs")
        holder = next(tree for tree in (old, new) if stage.effects("start", again.id)[0]["pid"] in pids(tree))
        holder.kill()
        took = stage.until(
            lambda: stage.recoveries(again.id), within=3 * SLACK, what="noticed on the new primary"
        )
        print(f"noticed by session after a promotion: {took:.2f} s")
        assert [row["noticed_by"] for row in stage.recoveries(again.id)] == ["session"]


def pids(tree: Tree) -> set[int]:
    return {process.pid for process in tree.processes()}


def test_a_sole_tree_that_was_killed_is_recovered_by_its_replacement_on_another_host(
    stage: Stage, deeds: ModuleType
) -> None:  # J16
    sole = stage.ready_tree()
    task = deeds.wait_for_on_crash.send("go")
    stage.until(stage.started(task.id), within=20, what="it runs")
    elsewhere(stage, sole)
    stage.until(lambda: supervisor(stage, sole)["session_held"], within=20, what="its lock is held")
    sole.kill()
    time.sleep(1)  # the replacement starts a second later
    replacement = stage.start_tree()
    stage.until(lambda: stage.recoveries(task.id), within=5 * SLACK, what="recovered", tree=replacement)
    (recovery,) = stage.recoveries(task.id)
    assert recovery["noticed_by"] == "session"
    stage.open_gate("go")
    assert task.result(timeout=20) == "done"
