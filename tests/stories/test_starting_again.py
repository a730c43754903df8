"""A worker is started again where another one died: it knows at once what is provably dead, and leaves the living alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.stories.stage import SLACK, Stage, Tree

pytestmark = pytest.mark.story


def lock_files(stage: Stage) -> set[str]:
    """The lock files of the living."""
    return {
        row["lock_file"]
        for row in stage.query("select lock_file from {schema}.supervisors where ended_at is null")
    }


def supervisor(stage: Stage, tree: Tree) -> dict[str, Any]:
    (row,) = stage.query("select * from {schema}.supervisors where pid = %s", tree.pid)
    return row


class TestOnTheSameMachine:
    def test_the_successor_recovers_it_within_three_seconds_with_nobody_else_alive(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E10
        doomed = stage.ready_tree()
        task = deeds.wait_for_on_crash.send("a")
        in_process = deeds.wait_in_process_on_crash.send("a")
        for each in (task, in_process):
            stage.until(stage.started(each.id), within=20, what="it runs")
        (file,) = lock_files(stage)
        assert Path(file).exists()
        doomed.kill()
        began = time.monotonic()
        successor = stage.ready_tree()
        for each in (task, in_process):
            stage.until(lambda each=each: stage.recoveries(each.id), within=3 * SLACK, what="recovered")
        print(f"recovered after the restart: {time.monotonic() - began:.2f} s")
        registered = supervisor(stage, successor)["started_at"]
        for each in (task, in_process):
            (recovery,) = stage.recoveries(each.id)
            assert (recovery["noticed_by"], recovery["action"]) == ("startup", "retry")
            assert "lock file is free" in recovery["cause"]
            took = (recovery["noticed_at"] - registered).total_seconds()
            print(f"after the successor had registered: {took:.2f} s")
            assert took < 2.0 * SLACK, "the rest of the three seconds is for Python to start"
        stage.open_gate("a")
        assert [each.result(timeout=20) for each in (task, in_process)] == ["done", "done"]
        stage.until(lambda: not Path(file).exists(), within=5, what="the file of the dead is removed")

    def test_a_living_tree_beside_it_keeps_its_work(self, stage: Stage, deeds: ModuleType) -> None:  # E10
        living = stage.ready_tree()
        task = deeds.wait_for_on_crash.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        before = supervisor(stage, living)
        for _ in range(2):
            other = stage.ready_tree()
            stage.until(
                lambda other=other: supervisor(stage, other)["beat_seq"] > 0,
                within=10,
                what="it has looked round",
            )
            time.sleep(1)  # what must not happen tells nobody
            other.kill()
        stage.ready_tree()
        assert supervisor(stage, living)["id"] == before["id"]
        assert supervisor(stage, living)["ended_at"] is None
        stage.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert len(stage.effects("start", task.id)) == 1
        assert stage.recoveries(task.id) == []

    def test_a_tree_that_leaves_takes_its_lock_file_along(self, stage: Stage, deeds: ModuleType) -> None:
        tree = stage.ready_tree()
        (file,) = lock_files(stage)
        assert tree.stop() == 0
        assert not Path(file).exists()
        assert deeds.app.list_active_workers() == []

    def test_a_frozen_tree_is_not_dead(self, stage: Stage, deeds: ModuleType) -> None:
        frozen = stage.ready_tree()
        task = deeds.wait_for_on_crash.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        frozen.freeze()
        stage.ready_tree()
        time.sleep(4)  # longer than a start looks for proofs
        assert stage.recoveries() == []
        frozen.thaw()
        stage.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert len(stage.effects("start", task.id)) == 1


def can_rename_the_machine() -> bool:
    """Whether a process here may have a host name of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_rename_the_machine(), reason="no UTS namespaces here")
class TestHostNames:
    @pytest.mark.parametrize(
        ("restarted", "beside"),
        [("web", "web-2"), pytest.param("my_host", "my9host", marks=pytest.mark.long), ("web", "web")],
    )
    def test_they_prove_nothing(
        self, stage: Stage, deeds: ModuleType, restarted: str, beside: str
    ) -> None:  # E10
        living = self.tree_named(stage, beside)
        task = deeds.wait_for_on_crash.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        doomed = self.tree_named(stage, restarted)
        doomed.kill()
        self.tree_named(stage, restarted)
        stage.until(
            lambda: supervisor(stage, doomed)["ended_how"] in ("startup", "session"),
            within=3 * SLACK,
            what="its own is ended",
        )
        assert supervisor(stage, living)["ended_at"] is None
        stage.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert stage.recoveries(task.id) == []

    def tree_named(self, stage: Stage, name: str) -> Tree:
        rename = (
            "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
        )
        tree = stage.ready_tree(prefix=("unshare", "--uts", sys.executable, "-c", rename, name))
        assert supervisor(stage, tree)["hostname"] == name
        return tree


class TestSlots:
    def test_the_next_bearer_of_a_slot_ends_the_dead_one_without_other_proof(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E10
        doomed = stage.ready_tree(options=("--slot", "web-0"))
        stage.until(lambda: supervisor(stage, doomed)["slot"] == "web-0", within=5, what="it has its slot")
        task = deeds.wait_for_on_crash.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        # As if it had run on another machine: no process, no file and no boot of it can be seen here.
        stage.query(
            "update {schema}.supervisors set boot_id = 'x', machine_id = 'x', lock_file = null returning id"
        )
        self.wait_for_a_calm_server(stage)
        doomed.kill()
        stage.ready_tree(options=("--slot", "web-0"))
        stage.until(
            lambda: stage.recoveries(task.id), within=3 * SLACK, what="recovered by the slot's next bearer"
        )
        (recovery,) = stage.recoveries(task.id)
        assert recovery["noticed_by"] == "startup"
        assert "'web-0'" in recovery["cause"]
        stage.open_gate("a")
        assert task.result(timeout=20) == "done"

    def test_a_living_bearer_is_not_robbed(self, stage: Stage, deeds: ModuleType) -> None:  # E10
        older = stage.ready_tree(options=("--slot", "web-0"))
        stage.until(lambda: supervisor(stage, older)["slot"] == "web-0", within=5, what="it has its slot")
        task = deeds.wait_for_on_crash.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        newer = stage.ready_tree(options=("--slot", "web-0"))
        stage.until(lambda: "slot_taken" in newer.output(), within=10, what="the newer says so")
        assert supervisor(stage, newer)["slot"] is None
        assert supervisor(stage, older)["ended_at"] is None
        stage.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert stage.recoveries() == []

    def wait_for_a_calm_server(self, stage: Stage) -> None:
        """A slot proves nothing just after a start of the server: everybody is on the way back then."""
        stage.until(
            lambda: stage.query("select 1 where now() - pg_postmaster_start_time() > interval '10 s'"),
            within=15,
            what="the server is no longer new",
        )
