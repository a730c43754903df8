"""A deploy breaks the program or migrates the schema under a running supervisor: operators see why it starts no worker process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from everbeat import App
from everbeat.domain.doctor.findings import Check, CheckVerdict
from everbeat.domain.explain.reasons import Reason
from everbeat.examination import Examination
from everbeat.inspection import SupervisorInfo
from tests.stories.scenario import SLACK, Scenario, Tree

pytestmark = pytest.mark.story

SOUND = "from sample_tasks import app\n"
BROKEN = "raise RuntimeError('no answer from redis://shop:hunter2@cache/0 \\x1b[31m today')\n"
SAID = "Importing 'program' failed with RuntimeError: no answer from redis://***@cache/0 "
NEWER = 9_999
VISIBLE_WITHIN_S = 15 * SLACK
LONGEST_PAUSE_S = 30.0


@pytest.fixture
def app(scenario: Scenario) -> Iterator[App]:
    """An operator's app, opened before the deploy."""
    opened = App(scenario.url, schema=scenario.schema, auto_migrate=False)
    yield opened
    opened.close()


def supervisor_of(app: App) -> SupervisorInfo:
    (found,) = app.list_supervisors(ended=False)
    return found


def examine(app: App) -> dict[str, Check]:
    return {check.code: check for check in Examination(app, long_transaction_s=300).checks()}


def shown(scenario: Scenario) -> tuple[str, list[dict[str, Any]]]:
    """Return the output of `everbeat workers`: its tables, and the supervisors of its JSON."""
    command = [
        sys.executable,
        "-m",
        "everbeat",
        "workers",
        "--url",
        scenario.url,
        "--schema",
        scenario.schema,
    ]
    looks = [
        subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        for options in ((), ("--json",))
    ]
    table, document = (look.communicate(timeout=60)[0] for look in looks)
    return table, json.loads(document)["supervisors"]


def a_tree_of_the_program(scenario: Scenario) -> Tree:
    (scenario.folder / "program.py").write_text(SOUND)
    return scenario.ready_tree(program="program")


def kill_the_worker(scenario: Scenario, tree: Tree) -> None:
    (row,) = scenario.workers(tree)
    os.kill(row["pid"], signal.SIGKILL)


def wait_for_the_reason(scenario: Scenario, app: App, tree: Tree) -> SupervisorInfo:
    scenario.until(
        lambda: supervisor_of(app).start_problem is not None,
        within=VISIBLE_WITHIN_S,
        what="the reason is stored",
        tree=tree,
    )
    scenario.until(lambda: supervisor_of(app).workers == 0, within=10, what="the dead worker is buried")
    return supervisor_of(app)


def wait_for_a_worker(scenario: Scenario, app: App, tree: Tree) -> None:
    scenario.until(
        lambda: (supervisor_of(app).workers, supervisor_of(app).start_problem) == (1, None),
        within=LONGEST_PAUSE_S * SLACK,
        what="a worker process, and no reason any more",
        tree=tree,
    )


@pytest.mark.long
def test_a_program_broken_by_a_deploy_is_reported_until_it_is_repaired(  # J8
    scenario: Scenario, sample_tasks: ModuleType, app: App
) -> None:
    tree = a_tree_of_the_program(scenario)
    scenario.until(
        lambda: supervisor_of(app).processes == 1, within=10, what="the number of processes is stored"
    )
    assert examine(app)["STARTS"].verdict is CheckVerdict.OK
    (scenario.folder / "program.py").write_text(BROKEN)
    kill_the_worker(scenario, tree)
    broken = wait_for_the_reason(scenario, app, tree)
    task = sample_tasks.quick.send()
    reasons: dict[str, Reason] = {reason.code: reason for reason in app.explain(task.id).reasons}
    check = examine(app)["STARTS"]
    table, document = shown(scenario)
    (scenario.folder / "program.py").write_text(SOUND)

    assert broken.start_problem is not None
    assert broken.start_problem.startswith(SAID)
    assert "hunter2" not in broken.start_problem + table + check.text
    assert (broken.pid, broken.workers, broken.processes) == (tree.pid, 0, 1)
    assert list(reasons) == ["NO_WORKER", "WORKER_NOT_STARTED"]
    text = reasons["WORKER_NOT_STARTED"].text
    assert text.startswith(f"supervisor {broken.supervisor_id} (pid {tree.pid}) on {broken.hostname} cannot")
    assert SAID in text
    assert reasons["WORKER_NOT_STARTED"].since == broken.start_problem_at
    assert check.verdict is CheckVerdict.FAIL
    assert (
        f"{broken.supervisor_id} (pid {tree.pid} on {broken.hostname}, with 0 of 1 worker): {SAID}"
        in check.text
    )
    assert "0 of 1" in table
    assert f"Supervisor {broken.supervisor_id} cannot start a worker process since " in table
    assert "\x1b" not in table
    assert [each["start_problem"] for each in document] == [broken.start_problem]

    wait_for_a_worker(scenario, app, tree)
    scenario.until(scenario.state_is(task.id, "COMPLETED"), within=20, what="the task has run", tree=tree)
    assert examine(app)["STARTS"].verdict is CheckVerdict.OK
    assert tree.stop() == 0


def test_a_schema_that_is_too_new_for_the_code_is_reported_as_the_reason(  # J8
    scenario: Scenario, sample_tasks: ModuleType, app: App
) -> None:
    tree = a_tree_of_the_program(scenario)
    task = sample_tasks.wait_for.send("never")
    scenario.until(scenario.started(task.id), within=20, what="it runs", tree=tree)
    supervisor = supervisor_of(app)
    scenario.query(
        "insert into {schema}.schema_versions (version, name, oldest_code) values (%s, 'of a later release', %s) returning version",
        NEWER,
        NEWER,
    )
    kill_the_worker(scenario, tree)
    refused = wait_for_the_reason(scenario, app, tree)
    assert refused.supervisor_id == supervisor.supervisor_id, "the supervisor continues"
    assert f"is at version {NEWER}; this everbeat knows up to" in (refused.start_problem or "")
    assert f"the schema works with {NEWER} or newer" in (refused.start_problem or "")
    waiting = sample_tasks.quick.send()
    assert (
        f"is at version {NEWER}"
        in {each.code: each.text for each in app.explain(waiting.id).reasons}["WORKER_NOT_STARTED"]
    )
    scenario.query("delete from {schema}.schema_versions where version = %s returning version", NEWER)
    wait_for_a_worker(scenario, app, tree)
    scenario.until(scenario.state_is(waiting.id, "COMPLETED"), within=20, what="the task has run", tree=tree)
