"""Failure handlers: each final failure sends exactly one handler task, even while workers are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any
from uuid import UUID

import psutil
import pytest

from everbeat.runtime.clock import SystemClock
from tests.stories.scenario import FAST, Scenario, program_of

pytestmark = pytest.mark.story


@pytest.fixture
def failing(scenario: Scenario) -> Iterator[ModuleType]:
    """Yield the program with failing tasks, imported as by a sender."""
    with program_of(scenario, "failing") as program:
        yield program


def handlers(scenario: Scenario, task_id: UUID) -> list[dict[str, Any]]:
    """Return the tasks that were sent for the failures of a task, oldest first."""
    text = "select * from {schema}.tasks t where t.args #>> array['failure', 'task_id'] = %s order by t.id"
    return scenario.query(text, str(task_id))


def told(scenario: Scenario, task_id: UUID, step: str = "told") -> list[dict[str, Any]]:
    """Return what the handlers of a task recorded."""
    return [line for line in scenario.effects(step) if line["of"] == str(task_id)]


def handled(scenario: Scenario, task_id: UUID, times: int = 1) -> Callable[[], bool]:
    return lambda: [row["state"] for row in handlers(scenario, task_id)] == ["COMPLETED"] * times


def test_each_way_to_fail_sends_exactly_one_handler_task(
    scenario: Scenario, failing: ModuleType
) -> None:  # K12
    soon = SystemClock().wall() + timedelta(milliseconds=50)
    workflow = failing.app.workflow("w", on_error="continue")
    workflow.add(failing.broken, 4).named("bad")
    run = workflow.start()
    sent = {
        "expired": failing.broken.with_options(good_until=soon).send(0),
        "raised": failing.broken.with_options(key="one").send(1),
        "large": failing.broken.send(2, "x" * 100_000),
        "retried": failing.stubborn.send(),
        "late": failing.slow.send(),
        "killed": failing.fragile.send(),
        "poison": failing.deadly.send(),
        "by name": failing.app.send_by_name("broken", {"number": 3}),
    }
    others = [failing.plain.send(), failing.works.send(), failing.cancelled.send()]
    scenario.open_gate("careful")
    scenario.ready_tree(program="failing", recovery=FAST)
    scenario.until(scenario.started(sent["killed"].id), within=30, what="the fragile task runs")
    psutil.Process(scenario.effects("start", sent["killed"].id)[0]["pid"]).kill()
    ids = {what: handle.id for what, handle in sent.items()}
    scenario.until(lambda: run.nodes()[0].state == "FAILED", within=30, what="the node fails")
    ids["node"] = UUID(str(run.nodes()[0].task_id))
    for what, task_id in ids.items():
        scenario.until(handled(scenario, task_id), within=30, what=f"the handler of {what}")
    for handle in others:
        scenario.until(
            scenario.state_is(handle.id, "FAILED", "COMPLETED", "CANCELLED"), within=30, what="the others"
        )
        assert handlers(scenario, handle.id) == []
    facts = {what: [(line["state"], line["code"]) for line in told(scenario, ids[what])] for what in ids}
    assert facts == {
        "expired": [("EXPIRED", "TASK_EXPIRED")],
        "raised": [("FAILED", "BROKEN")],
        "large": [("FAILED", "BROKEN")],
        "retried": [("FAILED", "BROKEN")],
        "late": [("FAILED", "TASK_TIMEOUT")],
        "killed": [("FAILED", "WORKER_CRASHED")],
        "poison": [("FAILED", "WORKER_CRASHED")],
        "by name": [("FAILED", "BROKEN")],
        "node": [("FAILED", "BROKEN")],
    }
    (raised,), (large,) = told(scenario, ids["raised"]), told(scenario, ids["large"])
    assert (raised["arguments"], raised["omitted"], raised["key"]) == ({"number": 1}, False, "one")
    assert (large["arguments"], large["omitted"]) == ({}, True)
    (node,), (retried,) = told(scenario, ids["node"]), told(scenario, ids["retried"])
    assert (node["node"], node["workflow"]) == ("bad", str(run.id))
    assert (retried["attempt"], len(scenario.effects("start", ids["retried"]))) == (3, 3)
    (row,), (urgent,) = handlers(scenario, ids["raised"]), handlers(scenario, ids["killed"])
    assert (row["name"], row["queue"], row["priority"]) == ("alert", "alerts", -5)
    assert (urgent["queue"], urgent["policy"]) == ("urgent", {})


def test_a_task_expires_without_a_worker_and_its_handler_waits_for_one(
    scenario: Scenario, failing: ModuleType
) -> None:  # K12
    soon = SystemClock().wall() + timedelta(milliseconds=50)
    late = failing.broken.with_options(good_until=soon).send(0)
    scenario.ready_tree(program="failing", recovery=FAST, worker={"queues": ["unused"]})
    scenario.until(scenario.state_is(late.id, "EXPIRED"), within=30, what="expired")
    (handler,) = handlers(scenario, late.id)
    assert (handler["state"], handler["attempt"]) == ("PENDING", 0)
    scenario.ready_tree(program="failing", recovery=FAST)
    scenario.until(handled(scenario, late.id), within=30, what="the handler of the expired task")


def test_kills_of_the_handlers_worker_repeat_its_code_but_send_no_second_task(
    scenario: Scenario, failing: ModuleType
) -> None:  # K12
    task = failing.watched.send()
    tree = scenario.ready_tree(program="failing", recovery=FAST)
    for times in (1, 2):
        scenario.until(
            lambda times=times: len(told(scenario, task.id, "begins")) == times,
            within=30,
            what=f"the handler begins ({times})",
        )
        psutil.Process(told(scenario, task.id, "begins")[-1]["pid"]).kill()
    scenario.until(lambda: len(told(scenario, task.id, "begins")) == 3, within=30, what="it begins again")
    tree.kill()
    scenario.ready_tree(program="failing", recovery=FAST)
    scenario.open_gate("careful")
    scenario.until(handled(scenario, task.id), within=60, what="the handler completes")
    assert len(told(scenario, task.id, "begins")) == 4
    assert len(told(scenario, task.id)) == 1


def test_a_retried_task_that_fails_again_sends_a_second_handler_task(
    scenario: Scenario, failing: ModuleType
) -> None:  # K12
    task = failing.broken.send(1)
    scenario.ready_tree(program="failing", recovery=FAST)
    scenario.until(handled(scenario, task.id), within=30, what="the first handler")
    failing.app.retry(task.id)
    scenario.until(handled(scenario, task.id, 2), within=30, what="the second handler")
    assert [line["fence"] for line in told(scenario, task.id)] == [1, 2]
    assert len({row["id"] for row in handlers(scenario, task.id)}) == 2
