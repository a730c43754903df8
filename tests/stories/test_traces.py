"""A trace from an HTTP request through the send and a killed attempt to the run that settles, as real processes export it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from datetime import datetime
from itertools import product
from types import ModuleType
from typing import Any
from uuid import UUID

import httpx
import pytest

from everbeat import Schedule
from tests.stories.scenario import Scenario, Tree, program_of
from tests.variants import long_except

pytestmark = pytest.mark.story

SIGKILLED = "the task process was stopped: killed by SIGKILL"
WORKER = {"processes": 2, "process_concurrency": 1, "grace": 5}


def spans(program: ModuleType) -> list[dict[str, Any]]:
    if not program.SPANS.exists():
        return []
    return [json.loads(line) for line in program.SPANS.read_text().splitlines()]


def named(program: ModuleType, name: str) -> list[dict[str, Any]]:
    return [span for span in spans(program) if span["name"] == name]


def one(program: ModuleType, name: str) -> dict[str, Any]:
    (found,) = named(program, name)
    return found


def place(span: dict[str, Any]) -> tuple[str, str]:
    return span["context"]["trace_id"], span["context"]["span_id"]


def links(span: dict[str, Any]) -> set[tuple[str, str]]:
    return {(link["context"]["trace_id"], link["context"]["span_id"]) for link in span["links"]}


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "link"))


@pytest.fixture
def program(scenario: Scenario, mode: str) -> Iterator[ModuleType]:
    if mode == "parent":
        scenario.open_gate("parent")
    with program_of(scenario, "traced") as imported:
        yield imported


async def post(program: ModuleType, path: str) -> UUID:
    transport = httpx.ASGITransport(program.shop)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        task_id = UUID((await client.post(path)).json()["task"])
    await program.app.aclose()
    return task_id


def order(scenario: Scenario, program: ModuleType, kind: str, *, tree: Tree) -> UUID:
    """Order over HTTP, and kill the process that runs the order's first attempt."""
    task_id = asyncio.run(post(program, f"/orders/{kind}"))
    scenario.until(lambda: scenario.effects("packed", task_id), within=30, what="it runs", tree=tree)
    os.kill(scenario.effects("packed", task_id)[0]["pid"], signal.SIGKILL)
    scenario.until(scenario.state_is(task_id, "COMPLETED"), within=40, what="a second run", tree=tree)
    scenario.until(
        lambda: named(program, "everbeat.recover"), within=20, what="the recovery's span", tree=tree
    )
    return task_id


@pytest.mark.parametrize(
    ("mode", "kind"),
    long_except(product(("link", "parent"), ("thread", "process")), ("link", "thread")),
    indirect=["mode"],
)
def test_a_request_a_killed_attempt_and_its_second_run_are_one_readable_trace(
    scenario: Scenario, program: ModuleType, mode: str, kind: str
) -> None:  # O6
    tree = scenario.ready_tree(program="traced", worker=WORKER)
    task_id = order(scenario, program, kind, tree=tree)
    assert tree.stop() == 0

    request, sent = one(program, f"POST /orders/{kind}"), one(program, "send default")
    assert sent["parent_id"] == request["context"]["span_id"]
    runs = sorted(named(program, "process default"), key=lambda span: span["start_time"])
    dead, settled = runs
    recovery = one(program, "everbeat.recover")
    if mode == "parent":
        assert {span["context"]["trace_id"] for span in spans(program)} == {place(request)[0]}, "one trace"
        assert {span["parent_id"] for span in (dead, settled, recovery)} == {place(sent)[1]}
    else:
        assert links(dead) == links(settled) == {place(sent)}
        assert place(sent) in links(recovery)
    assert place(dead) in links(recovery)

    facts = dead["attributes"]
    assert dead["status"]["status_code"] == "ERROR"
    assert facts["everbeat.synthesized"] is True
    assert facts["error.type"] == "WORKER_CRASHED"
    assert facts["everbeat.attempt"] == 1
    assert facts["everbeat.certificate.noticed_by"] == "child_exit"
    assert facts["everbeat.certificate.signal"] == 9
    (lost,) = scenario.effects("packed", task_id)[:1]
    assert dead["resource"]["attributes"]["process.pid"] != lost["pid"], "the dead process cannot export it"
    assert dead["start_time"] <= dead["end_time"] <= recovery["end_time"]
    assert recovery["end_time"] <= settled["start_time"]
    assert recovery["attributes"]["everbeat.recovery.action"] == "retry"

    assert settled["status"]["status_code"] == "UNSET"
    assert settled["attributes"]["everbeat.attempt"] == 2
    assert settled["attributes"]["everbeat.outcome"] == "completed"
    assert settled["resource"]["attributes"]["process.pid"] == scenario.effects("packed", task_id)[1]["pid"]
    assert [event["name"] for event in settled["events"]] == ["everbeat.step_recorded"]
    assert one(program, "everbeat.step pack")["parent_id"] is not None

    (line,) = [each for each in tree.output().splitlines() if "packing the order" in each]
    trace_id, span_id = (number.removeprefix("0x") for number in place(one(program, "everbeat.step pack")))
    assert f"trace_id={trace_id} span_id={span_id}" in line


def test_processes_export_their_last_spans_when_they_exit(scenario: Scenario, program: ModuleType) -> None:
    scenario.open_gate("batched")
    scenario.open_gate("calm")
    tree = scenario.ready_tree(program="traced", worker=WORKER)
    for task in (program.in_thread, program.in_process):
        task_id = task.send().id
        scenario.until(scenario.state_is(task_id, "COMPLETED"), within=40, what="it ran", tree=tree)
    assert named(program, "process default") == []
    assert tree.stop() == 0
    assert len(named(program, "process default")) == 2


def test_a_killed_task_process_leaves_a_span_and_log_lines_about_attempts_have_its_ids(
    scenario: Scenario, program: ModuleType
) -> None:
    tree = scenario.ready_tree(program="traced", worker=WORKER, options=("--log-format", "json"))
    deaf, failing = program.deaf.send().id, program.failing.send().id
    for task_id in (deaf, failing):
        scenario.until(scenario.state_is(task_id, "FAILED"), within=40, what="it failed", tree=tree)
    assert tree.stop() == 0
    of_task: dict[str, list[dict[str, Any]]] = {str(deaf): [], str(failing): []}
    for span in named(program, "process default"):
        of_task[span["attributes"]["messaging.message.id"]].append(span)

    (killed,) = of_task[str(deaf)]
    assert killed["status"] == {"status_code": "ERROR", "description": "TASK_TIMEOUT: " + SIGKILLED}
    assert killed["attributes"]["error.type"] == "TASK_TIMEOUT"
    assert killed["attributes"]["everbeat.outcome"] == "failed"
    assert killed["attributes"]["everbeat.synthesized"] is True
    ran_in = scenario.effects("deaf", deaf)[0]["pid"]
    assert killed["resource"]["attributes"]["process.pid"] != ran_in, "the dead process cannot export it"
    began_at, ended_at = (datetime.fromisoformat(killed[name]) for name in ("start_time", "end_time"))
    assert 1 <= (ended_at - began_at).total_seconds() < 15
    assert links(killed) <= {place(span) for span in named(program, "send default")}

    lines = [json.loads(line) for line in tree.output().splitlines() if line.startswith("{")]
    logged = [line for line in lines if line.get("event") in ("task_retry", "task_failure")]
    logged = [line["fields"] for line in logged if line["fields"]["task_id"] == str(failing)]
    runs = sorted(of_task[str(failing)], key=lambda span: span["start_time"])
    assert [(f"0x{fields['trace_id']}", f"0x{fields['span_id']}") for fields in logged] == [
        place(span) for span in runs
    ]
    assert len(logged) == 2


@pytest.mark.long
def test_a_tick_has_a_span_that_is_the_parent_of_its_send(scenario: Scenario, program: ModuleType) -> None:
    program.app.put_schedule(Schedule("pulse", program.tick.call(), every="1s"))
    tree = scenario.ready_tree(program="traced", worker=WORKER)
    names = ("everbeat.tick pulse", "send default", "process default")
    # The supervisor writes the first two, and can do so after the worker has written the third.
    scenario.until(lambda: all(named(program, name) for name in names), within=30, what="a tick", tree=tree)
    program.app.delete_schedule("pulse")
    tick, sent, ran = (named(program, name)[0] for name in names)
    assert sent["parent_id"] == tick["context"]["span_id"]
    assert links(ran) == {place(sent)}
    assert ran["attributes"]["everbeat.schedule"] == "pulse"
    assert tick["attributes"]["everbeat.synthesized"] is True
