"""The waterfall of a workflow: waits and runs on one axis, what open nodes wait for, and the way to answer a question."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from uuid import UUID, uuid4

from everbeat import App
from everbeat.domain.task.steps import ANSWER_PREFIX
from everbeat.domain.workflow.graph import Edge
from everbeat.domain.workflow.states import NodeInfo, NodeState
from everbeat.store import steps
from everbeat.web.waterfall import NodeLane, waterfall_of
from tests.store.flows import task
from tests.web.conftest import NewVisitor, Workers
from tests.workflows.sent import sent

AT = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def node(name: str, state: str, **given: Any) -> NodeInfo:
    values: dict[str, Any] = {
        "kind": "task", "task": "work", "task_id": uuid4(), "needs": (), "member_of": None, "quorum": None, "attempt": None,
        "enqueued_at": None, "started_at": None, "ended_at": None, "error": None,
    }  # fmt: skip
    return NodeInfo(name=name, state=NodeState(state), **(values | given))


def lanes_of(*nodes: NodeInfo) -> dict[str, NodeLane]:
    found = waterfall_of(nodes, since=AT, now=at(100), ended_at=None)
    assert [each.left for each in found.ticks] == [4.0, 50.0, 96.0]
    return {each.name: each for each in found.lanes}


def test_a_lane_separates_the_wait_of_a_node_from_its_run() -> None:
    ran = node("ran", "COMPLETED", enqueued_at=at(0), started_at=at(25), ended_at=at(50))
    waits = node("waits", "ENQUEUED", enqueued_at=at(50))
    lanes = lanes_of(waits, ran)
    assert [*lanes] == ["ran", "waits"], "in the order of their beginning"
    one = lanes["ran"]
    assert (one.wait_left, one.wait_width, one.left, one.width) == (4.0, 23.0, 27.0, 23.0)
    assert (one.mark, one.tone, one.told) == ("COMPLETED", "live", "25 s")
    assert (lanes["waits"].wait_width, lanes["waits"].left, lanes["waits"].mark) == (46.0, None, "ENQUEUED")


def test_an_open_node_says_what_it_waits_for_and_comes_last() -> None:
    begun = {"enqueued_at": at(1), "started_at": at(2)}
    lanes = lanes_of(
        node("z", "PENDING", needs=("done", "runs", "asked", "c", "d")),
        node("done", "COMPLETED", ended_at=at(3), **begun),
        node("runs", "ENQUEUED", **begun),
        node("asked", "ENQUEUED", waits_for=f"{ANSWER_PREFIX}refund", **begun),
        node("event", "ENQUEUED", waits_for="paid", **begun),
        node("sleeps", "ENQUEUED", wake_at=at(200), **begun),
        node("child", "ENQUEUED", kind="workflow", enqueued_at=at(2)),
        node("member", "ENQUEUED", member_of="map"),
    )
    assert [*lanes][-1] == "z"
    assert "member" not in lanes
    assert {name: (lane.mark, lane.told) for name, lane in lanes.items()} == {
        "done": ("COMPLETED", "1.0 s"),
        "runs": ("RUNNING", "1 m 38 s"),
        "asked": ("waits", "for an answer"),
        "event": ("waits", "for event 'paid'"),
        "sleeps": ("suspended", "1 m 38 s"),
        "child": ("RUNNING", "1 m 38 s"),
        "z": ("pending", "for runs, asked, c and 1 more"),
    }


async def test_the_page_of_a_workflow_leads_to_the_question_that_it_waits_for(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    _, flow = await asyncio.to_thread(sent, app, workers.db, [task("ask"), task("told")], [Edge(0, 1)])
    for _ in range(3):
        workers.ask("Earlier?")
    (claimed,) = flow.claim()
    event, asked = (
        f"{ANSWER_PREFIX}refund",
        json.dumps({"question": "Refund?", "type": {"kind": "bool"}, "note": None}),
    )
    workers.db.start(claimed)
    waiting = steps.wait_for_signal(
        claimed.id, claimed.claim_id, name=event, event=event, timeout_ms=None, question=asked
    )
    workers.db.run(waiting)
    assert workers.db.settle(claimed, "SUSPENDED") == "PENDING"
    visitor = new_visitor("operate")
    path = f"/workflows/{flow.id}"
    page = unescape((await visitor.get(path)).text)
    (address,) = re.findall(r'<a class="btn main" href="([^"]*)">.*?Answer ask</a>', page)
    assert address.endswith(f"#{claimed.id}")
    after = re.search(r"after=([0-9a-f-]+)", address)
    assert after is not None
    inbox = await visitor.json("/inbox", after=after[1])
    assert UUID(inbox["questions"][0]["task_id"]) == claimed.id, "the question is the first of its page"
    assert 'aria-label="ask: waits for an answer"' in page
    assert 'aria-label="told: pending for ask"' in page
    assert f'see node <a href="/tasks/{claimed.id}">ask</a>' in page, "the first reason leads to its task"
    assert "Answer ask" not in (await new_visitor("read").get(path)).text
