"""A worker freezes inside a step of a workflow: others wait a bounded time, and doctor and explain name the blocking process."""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any

import psutil
import pytest

from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.domain.doctor.findings import Check, CheckVerdict
from everbeat.examination import Examination
from everbeat.inspection import ReasonCode
from tests.stories.scenario import BY_AGE, FAST, SLACK, Scenario
from tests.stories.test_workflow_kills import GATE, POINTS, gate, is_blocked, sample_graph
from tests.stories.test_workflows import Starter, flows

__all__ = ["flows"]

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

WITHIN_S = 15.0


def locks(app: Any) -> Check:
    (found,) = [check for check in Examination(app, long_transaction_s=300).checks() if check.code == "LOCKS"]
    return found


@pytest.mark.long
def test_a_workflow_can_be_cancelled_although_its_worker_is_frozen_in_a_step(
    scenario: Scenario, flows: ModuleType
) -> None:  # J14
    tree = scenario.ready_tree(program="flows")
    handle: WorkflowHandle[Any] = Starter(flows).start(sample_graph())
    took: list[float] = []

    def cancel() -> None:
        began_at = time.monotonic()
        handle.cancel()
        took.append(time.monotonic() - began_at)

    with gate(scenario, *POINTS["a node ends"]):
        scenario.until(lambda: is_blocked(scenario), within=30, what="a step")
        tree.freeze()
        scenario.query("select pg_advisory_unlock(%s)", GATE)
        canceller = threading.Thread(target=cancel)
        canceller.start()
        scenario.until(
            lambda: locks(flows.app).verdict is CheckVerdict.WARN, within=5 * SLACK, what="the doctor's word"
        )
        check = locks(flows.app)
        (reason,) = [each for each in handle.explain().reasons if each.code is ReasonCode.LOCKED]
        canceller.join(WITHIN_S * SLACK)
    workers = [process.pid for process in psutil.Process(tree.pid).children()]
    assert any(f", process {pid} on host " in check.text for pid in workers), check.text
    assert "idle in transaction" in check.text
    assert check.fix is not None
    assert "psql -c 'select pg_terminate_backend(" in check.fix
    assert reason.text.partition(" holds locks")[0] in check.text
    assert reason.command is not None
    assert reason.command in check.fix
    print(f"cancelled after {took} s")
    assert took
    assert took[0] < WITHIN_S
    tree.thaw()
    scenario.until(lambda: handle.status() == "CANCELLED", within=30, what="cancelled", tree=tree)


def test_the_sessions_of_a_frozen_tree_are_ended_when_it_is_declared_dead(
    scenario: Scenario, flows: ModuleType
) -> None:  # J14
    frozen = scenario.ready_tree(program="flows", recovery=FAST | BY_AGE)
    observer = scenario.ready_tree(program="flows", recovery=FAST | BY_AGE)
    (row,) = scenario.query("select session_name from {schema}.supervisors where pid = %s", frozen.pid)

    def sessions() -> int:
        found = "select count(*) from pg_stat_activity where split_part(application_name, ' ', 1) = %s"
        return int(scenario.query(found, row["session_name"])[0]["count"])

    assert sessions() >= 6
    frozen.freeze()
    scenario.until(
        lambda: sessions() == 0, within=10 * SLACK, what="no session of the frozen tree", tree=observer
    )
    scenario.until_logged(observer, "sessions_ended", within=5 * SLACK)
    frozen.thaw()
    scenario.until(lambda: sessions() >= 6, within=10 * SLACK, what="it is back", tree=frozen)
    assert Starter(flows).start(sample_graph()).result(timeout=60) == [1, 2, 3]
    alive = "select count(*) from {schema}.supervisors where ended_at is null"
    scenario.until(
        lambda: scenario.query(alive)[0]["count"] == 2, within=10 * SLACK, what="two live supervisors"
    )
