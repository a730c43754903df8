"""The caretaker moves ended tasks to `history` while its tree is killed. No task is lost, and users find all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from everbeat import Handle
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.errors import TaskFailed
from everbeat.runtime.clock import SystemClock
from tests.cli.conftest import Command, forks
from tests.cli.forks import Forks
from tests.stories.scenario import FAST, Scenario
from tests.stories.test_workflow_kills import GATE, is_blocked
from tests.stories.test_workflows import Starter, diamond, flows

__all__ = ["flows", "forks"]

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

OFTEN = {**FAST, "retention_interval_ms": 1_000}
MANY = 1_200
"""More tasks than one step of the caretaker examines, so a pass needs two steps."""
YOUNG, OLD = "2 hours", "4 days"


class LateClock(SystemClock):
    """The clock of a sender that sent its tasks days ago. Ids contain this time, and the caretaker skips ids of the last hour."""

    def wall(self) -> datetime:
        return super().wall() - timedelta(days=5)


@dataclass(frozen=True)
class Sent:
    """Tasks that completed, a task that failed, and a workflow that completed."""

    done: list[Handle[Any]]
    failed: Handle[Any]
    workflow: WorkflowHandle[Any]


def send(scenario: Scenario, flows: ModuleType) -> Sent:
    """Send tasks and a workflow, and wait until all have ended. The failed task has the newest id."""
    done = flows.app.send_many([flows.work.call(f"n{number}", value=number) for number in range(MANY)])
    workflow = Starter(flows).start(diamond())
    flows.app.outcomes(done, timeout=60)
    assert workflow.result(timeout=60) == "bottom"
    failed = flows.picky.send("repaired")
    with pytest.raises(TaskFailed):
        failed.result(timeout=60)
    return Sent(done, failed, workflow)


def date_back(scenario: Scenario, ids: list[UUID], age: str) -> None:
    scenario.query(
        f"""with ended as (
                update {{schema}}.tasks set completed_at = completed_at - interval '{age}', failed_at = failed_at - interval '{age}'
                where id = any(%s) returning 1
            ) select count(*) from ended""",
        ids,
    )


def ids_in(scenario: Scenario, table: str) -> set[UUID]:
    return {row["id"] for row in scenario.query(f"select id from {{schema}}.{table}")}


@contextmanager
def blocked_move(scenario: Scenario, task_id: UUID) -> Iterator[None]:
    """Block the statement that moves this task. At the end, wait until the server has ended the session of the killed caretaker."""
    scenario.query("select pg_advisory_lock(%s)", GATE)
    scenario.connection.execute(
        f"""create function {scenario.schema}.wait_at_the_gate() returns trigger language plpgsql as $$
            begin perform pg_advisory_xact_lock_shared({GATE}); return old; end $$"""
    )
    scenario.connection.execute(
        f"create trigger gate before delete on {scenario.schema}.tasks for each row when (old.id = '{task_id}')"
        f" execute function {scenario.schema}.wait_at_the_gate()"
    )
    try:
        yield
        scenario.until(lambda: not is_blocked(scenario), within=30, what="the server ends the session")
    finally:
        scenario.query("select pg_advisory_unlock(%s)", GATE)
        scenario.connection.execute(f"drop function {scenario.schema}.wait_at_the_gate() cascade")


@pytest.fixture
def everbeat(scenario: Scenario, forks: Forks) -> Callable[..., Any]:
    """Return a function that runs `everbeat ... --json` and returns its document."""
    given = {"EVERBEAT_DATABASE_URL": scenario.url, "EVERBEAT_SCHEMA": scenario.schema}
    command = Command(scenario.folder, dict(os.environ) | given, forks)
    return lambda *words: command(*words, "--json").assert_code(0).document


def assert_users_find(everbeat: Callable[..., Any], flows: ModuleType, sent: Sent) -> None:
    """Check what handles and commands say about tasks that have moved. Handles keep results that they have read, so new ones are used."""
    handles = [flows.app.handle(handle.id) for handle in sent.done]
    assert flows.app.results(handles, timeout=30) == list(range(MANY))
    assert {handle.info().state for handle in handles[:3]} == {"COMPLETED"}
    assert sent.failed.info().state == "FAILED"
    with pytest.raises(TaskFailed, match="CLOSED"):
        flows.app.handle(sent.failed.id).result(timeout=30)
    assert "CLOSED" in flows.app.explain(sent.failed.id).reasons[0].text
    assert flows.app.workflow_handle(sent.workflow.id).result(timeout=30) == "bottom"
    assert [node.state for node in sent.workflow.nodes()] == ["COMPLETED"] * 4

    failed = str(sent.failed.id)
    shown = json.dumps(everbeat("tasks", "show", failed))
    assert "CLOSED" in shown
    assert '"outcome": "FAILED"' in shown
    listed = everbeat("tasks", "list", "--state", "FAILED")["tasks"]
    assert [task["id"] for task in listed] == [failed]
    listed = everbeat("tasks", "list", "--workflow", str(sent.workflow.id))["tasks"]
    assert len(listed) == 4
    assert "CLOSED" in json.dumps(everbeat("explain", failed))
    (workflow,) = everbeat("workflows", "list")["workflows"]
    assert (workflow["id"], workflow["state"]) == (str(sent.workflow.id), "COMPLETED")
    assert str(sent.workflow.id) in json.dumps(everbeat("workflows", "show", str(sent.workflow.id)))


def test_each_task_is_in_one_table_after_the_tree_was_killed_while_it_moved_them(
    scenario: Scenario, flows: ModuleType, everbeat: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # H1
    monkeypatch.setattr(flows.app._sender.ids, "_clock", LateClock())
    tree = scenario.ready_tree(program="flows", recovery=OFTEN)
    sent = send(scenario, flows)
    everything = ids_in(scenario, "tasks")
    assert len(everything) == MANY + 4 + 1
    old = [handle.id for handle in sent.done[:300]]

    with blocked_move(scenario, sent.failed.id):
        date_back(scenario, old, OLD)
        date_back(scenario, list(everything - {*old}), YOUNG)
        scenario.until(
            lambda: is_blocked(scenario), within=20, what="the caretaker moves the last tasks", tree=tree
        )
        tree.kill()
    moved = ids_in(scenario, "history")
    assert MANY > len(moved) > 0, "one step was committed, and the next one was interrupted"
    assert ids_in(scenario, "tasks") == everything - moved

    late = flows.work.send("late", value="late")
    tree = scenario.ready_tree(program="flows", recovery=OFTEN)
    assert late.result(timeout=30) == "late"
    scenario.until(lambda: ids_in(scenario, "tasks") == {late.id}, within=20, what="all moved", tree=tree)
    assert ids_in(scenario, "history") == everything
    assert len(scenario.query("select 1 from {schema}.history")) == len(everything)
    assert scenario.query("select 1 from {schema}.attempts where task_id <> %s", late.id) == []
    assert_users_find(everbeat, flows, sent)

    scenario.open_gate("repaired")
    everbeat("tasks", "retry", str(sent.failed.id))
    assert flows.app.handle(sent.failed.id).result(timeout=30) == "repaired"
    assert ids_in(scenario, "tasks") == {late.id, sent.failed.id}
    assert ids_in(scenario, "history") == everything - {sent.failed.id}
    assert [row["outcome"] for row in scenario.attempts(sent.failed.id)] == ["FAILED", "COMPLETED"]

    assert tree.stop() == 0
    tree = scenario.ready_tree(program="flows", recovery={**OFTEN, "terminal_record_retention_hours": 48})
    kept = everything - {*old, sent.failed.id}
    scenario.until(
        lambda: ids_in(scenario, "history") == kept, within=20, what="a partition is dropped", tree=tree
    )
    assert flows.app.handle(sent.done[-1].id).result(timeout=30) == MANY - 1
