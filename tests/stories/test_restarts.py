"""A worker starts where another one died: it detects provable deaths at once and leaves live trees alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.stories.scenario import SLACK, Scenario, Tree

pytestmark = pytest.mark.story


def lock_files(scenario: Scenario) -> set[str]:
    """Return the lock files of the live supervisors."""
    return {
        row["lock_file"]
        for row in scenario.query("select lock_file from {schema}.supervisors where ended_at is null")
    }


def supervisor(scenario: Scenario, tree: Tree) -> dict[str, Any]:
    (row,) = scenario.query("select * from {schema}.supervisors where pid = %s", tree.pid)
    return row


class TestOnTheSameMachine:
    def test_a_successor_on_the_same_machine_recovers_a_dead_tree_within_three_seconds(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E10
        doomed = scenario.ready_tree()
        task = sample_tasks.wait_for_on_crash.send("a")
        in_process = sample_tasks.wait_in_process_on_crash.send("a")
        for each in (task, in_process):
            scenario.until(scenario.started(each.id), within=20, what="it runs")
        (file,) = lock_files(scenario)
        assert Path(file).exists()
        doomed.kill()
        began = time.monotonic()
        successor = scenario.ready_tree()
        for each in (task, in_process):
            scenario.until(lambda each=each: scenario.recoveries(each.id), within=3 * SLACK, what="recovered")
        print(f"recovered after the restart: {time.monotonic() - began:.2f} s")
        registered = supervisor(scenario, successor)["started_at"]
        for each in (task, in_process):
            (recovery,) = scenario.recoveries(each.id)
            assert (recovery["noticed_by"], recovery["action"]) == ("startup", "retry")
            assert "lock file is free" in recovery["cause"]
            took = (recovery["noticed_at"] - registered).total_seconds()
            print(f"after the successor had registered: {took:.2f} s")
            assert took < 2.0 * SLACK, "the rest of the three seconds is for Python to start"
        scenario.open_gate("a")
        assert [each.result(timeout=20) for each in (task, in_process)] == ["done", "done"]
        scenario.until(lambda: not Path(file).exists(), within=5, what="the file of the dead is removed")

    @pytest.mark.long
    def test_a_start_on_the_same_machine_does_not_affect_a_live_tree(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E10
        living = scenario.ready_tree()
        task = sample_tasks.wait_for_on_crash.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        before = supervisor(scenario, living)
        for _ in range(2):
            other = scenario.ready_tree()
            scenario.until(
                lambda other=other: supervisor(scenario, other)["beat_seq"] > 0,
                within=10,
                what="it has looked round",
            )
            time.sleep(1)  # a wrong recovery would happen now
            other.kill()
        scenario.ready_tree()
        assert supervisor(scenario, living)["id"] == before["id"]
        assert supervisor(scenario, living)["ended_at"] is None
        scenario.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert len(scenario.effects("start", task.id)) == 1
        assert scenario.recoveries(task.id) == []

    def test_a_stopped_tree_removes_its_lock_file(self, scenario: Scenario, sample_tasks: ModuleType) -> None:
        tree = scenario.ready_tree()
        (file,) = lock_files(scenario)
        assert tree.stop() == 0
        assert not Path(file).exists()
        assert sample_tasks.app.list_active_workers() == []

    @pytest.mark.long
    def test_a_frozen_tree_is_not_declared_dead_by_a_start(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:
        frozen = scenario.ready_tree()
        task = sample_tasks.wait_for_on_crash.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        frozen.freeze()
        scenario.ready_tree()
        time.sleep(4)  # longer than a start searches for proofs
        assert scenario.recoveries() == []
        frozen.thaw()
        scenario.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert len(scenario.effects("start", task.id)) == 1


def can_rename_the_machine() -> bool:
    """Whether a process here can have a separate host name."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_rename_the_machine(), reason="no UTS namespaces here")
class TestHostNames:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("restarted", "beside"),
        [
            pytest.param("web", "web-2", marks=pytest.mark.long),
            pytest.param("my_host", "my9host", marks=pytest.mark.long),
            ("web", "web"),
        ],
    )
    def test_host_names_do_not_prove_a_death(
        self, scenario: Scenario, sample_tasks: ModuleType, restarted: str, beside: str
    ) -> None:  # E10
        living = self.tree_named(scenario, beside)
        task = sample_tasks.wait_for_on_crash.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        doomed = self.tree_named(scenario, restarted)
        doomed.kill()
        self.tree_named(scenario, restarted)
        scenario.until(
            lambda: supervisor(scenario, doomed)["ended_how"] in ("startup", "session"),
            within=3 * SLACK,
            what="its own is ended",
        )
        assert supervisor(scenario, living)["ended_at"] is None
        scenario.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert scenario.recoveries(task.id) == []

    def tree_named(self, scenario: Scenario, name: str) -> Tree:
        rename = (
            "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
        )
        tree = scenario.ready_tree(prefix=("unshare", "--uts", sys.executable, "-c", rename, name))
        assert supervisor(scenario, tree)["hostname"] == name
        return tree


class TestSlots:
    def test_the_next_holder_of_a_slot_ends_the_dead_one_without_other_proof(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E10
        doomed = scenario.ready_tree(options=("--slot", "web-0"))
        scenario.until(
            lambda: supervisor(scenario, doomed)["slot"] == "web-0", within=5, what="it has its slot"
        )
        task = sample_tasks.wait_for_on_crash.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        # Pretend that it ran on another machine: none of its processes, files or boots are visible here.
        scenario.query(
            "update {schema}.supervisors set boot_id = 'x', machine_id = 'x', lock_file = null returning id"
        )
        self.wait_for_a_calm_server(scenario)
        doomed.kill()
        scenario.ready_tree(options=("--slot", "web-0"))
        scenario.until(
            lambda: scenario.recoveries(task.id), within=3 * SLACK, what="recovered by the slot's next bearer"
        )
        (recovery,) = scenario.recoveries(task.id)
        assert recovery["noticed_by"] == "startup"
        assert "'web-0'" in recovery["cause"]
        scenario.open_gate("a")
        assert task.result(timeout=20) == "done"

    @pytest.mark.long
    def test_a_live_holder_keeps_its_slot(self, scenario: Scenario, sample_tasks: ModuleType) -> None:  # E10
        older = scenario.ready_tree(options=("--slot", "web-0"))
        scenario.until(
            lambda: supervisor(scenario, older)["slot"] == "web-0", within=5, what="it has its slot"
        )
        task = sample_tasks.wait_for_on_crash.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        newer = scenario.ready_tree(options=("--slot", "web-0"))
        scenario.until_logged(newer, "slot_taken", within=10)
        assert supervisor(scenario, newer)["slot"] is None
        assert supervisor(scenario, older)["ended_at"] is None
        scenario.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert scenario.recoveries() == []

    def wait_for_a_calm_server(self, scenario: Scenario) -> None:
        """Wait until the server has been up for 10 s: before that, supervisors may be reconnecting and a slot proves nothing."""
        scenario.until(
            lambda: scenario.query("select 1 where now() - pg_postmaster_start_time() > interval '10 s'"),
            within=15,
            what="the server is no longer new",
        )
