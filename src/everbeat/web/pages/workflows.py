"""Workflows: the list, and one workflow with its graph, its waterfall, and what blocks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from markupsafe import Markup
from msgspec import Struct, structs

from everbeat.client.database_access import database_of
from everbeat.client.inspection import workflow_page
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.domain.documents import listed_workflow_document, workflow_document
from everbeat.domain.drawing.diagrams import svg
from everbeat.domain.drawing.picture import picture, tally
from everbeat.domain.explain.reasons import WorkflowExplanation
from everbeat.domain.workflow.states import NodeInfo, WorkflowInfo, WorkflowState
from everbeat.errors.wording import amount
from everbeat.web.filters import MOST_EXAMINED, ListFilters, page_size, to_uuid
from everbeat.web.hiding import blanked, concealed
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.reasons import lead_of, shown_reasons
from everbeat.web.refusals import RequestRefused

_MOST_LANES: Final = 60
_MOST_BOXES: Final = 120
_TABS: Final = ("", *WorkflowState)
_TONES: Final = {
    "COMPLETED": "live",
    "RUNNING": "run",
    "ENQUEUED": "wait",
    "FAILED": "dead",
    "EXPIRED": "late",
}


async def show(visit: Visit) -> PageResult:
    """Return the latest workflows that match the parameters of the address."""
    limit, state = page_size(visit.query), visit.query.get("state")
    if state is not None and state not in set(WorkflowState):
        fix = f"use one of {', '.join(WorkflowState)}."
        raise RequestRefused(400, "UNKNOWN_CHOICE", "There is no such state of a workflow.", fix=fix)
    given = ListFilters.read(visit.query).task_filters()
    filters: Any = {
        name: given.get(name)
        for name in ("name", "key", "parent", "since", "until", "labels")
        if given.get(name)
    }
    plan = workflow_page(limit=limit, most=MOST_EXAMINED, state=state, **filters)
    listing = database_of(visit.app).arun(plan)
    found = await visit.part("The workflows", listing, None)
    shown = [_shown(each, hides=visit.hiding.has_rules) for each in found or ()]
    data = {"workflows": None if found is None else [listed_workflow_document(each) for each in shown]}
    more = {
        "rows": [(each, tally(each.counts)) for each in shown],
        "tabs": _TABS,
        "chosen_state": state or "",
        "given": {name: visit.query.get(name) for name in ("name", "key", "label", "since")},
        "is_full": len(shown) == limit,
        "limit": limit,
        "examined": MOST_EXAMINED if (filters or state) and len(shown) < limit else None,
    }
    says = _sentence(found, filtered=bool(filters or state), limit=limit)
    return Page(
        template="workflows.html",
        title="Workflows",
        says=says,
        data=data,
        more=more,
        command="everbeat workflows",
    )


def _shown(info: WorkflowInfo, *, hides: bool) -> WorkflowInfo:
    """Return a workflow, without its error and result if they are hidden. Both come from a node, whose task can have a rule."""
    return structs.replace(info, error=concealed(info.error), result=blanked(info.result)) if hides else info


def _sentence(found: Sequence[WorkflowInfo] | None, *, filtered: bool, limit: int) -> str:
    if found is None:
        return "The workflows could not be read"
    if not found:
        return "No workflows match" if filtered else "No workflows"
    counts = Counter(each.state for each in found)
    latest = f"the {limit} latest workflows" if len(found) == limit else amount(len(found), "workflow")
    if failed := counts[WorkflowState.FAILED]:
        return f"{failed:,} of {latest} failed"
    if going := sum(count for state, count in counts.items() if not state.is_final):
        return f"{going:,} of {latest} {'is' if going == 1 else 'are'} going on, and none failed"
    return f"None of {latest} failed" if len(found) > 1 else "The only workflow has ended well"


class NodeLane(Struct, frozen=True, kw_only=True):
    """A node on the common time axis, in percent."""

    name: str
    task_id: str | None
    kind: str
    state: str
    tone: str
    left: float
    width: float
    seconds: float


async def show_one(visit: Visit) -> PageResult:
    """Return the page of a workflow. Raises WorkflowNotFound."""
    workflow_id = to_uuid(visit.path_values["id"], what="workflow")
    handle: WorkflowHandle[Any] = visit.app.workflow_handle(workflow_id)
    found = await visit.parts(
        info=("The workflow", handle.ainfo(), None),
        nodes=("The nodes", handle.anodes(), None),
        explanation=("The reasons", handle.aexplain(), None),
    )
    info: WorkflowInfo | None = found["info"]
    if info is None:
        return Page(
            template="workflow.html",
            title="Workflow",
            says="The workflow could not be read",
            data={"workflow": None},
            status=503,
        )
    nodes: list[NodeInfo] | None = found["nodes"]
    explanation: WorkflowExplanation | None = found["explanation"]
    hides = visit.hiding.everything or any(visit.hiding.touches(each.task or "") for each in nodes or ())
    hides = hides or (nodes is None and visit.hiding.has_rules)
    shown = _shown(info, hides=hides)
    shown_nodes = [
        structs.replace(each, error=visit.hiding.error(each.task or "", each.error)) for each in nodes or ()
    ]
    reasons = () if explanation is None else shown_reasons(explanation.reasons, hides=hides)
    data = {
        "workflow": workflow_document(shown),
        "nodes": None if nodes is None else shown_nodes,
        "explanation": None if explanation is None else structs.replace(explanation, reasons=reasons),
    }
    lanes = lanes_of(shown_nodes, since=info.sent_at, now=visit.now, ended_at=info.ended_at)
    more = {
        "info": shown,
        "reasons": reasons,
        "graph": _graph(visit, shown, shown_nodes),
        "lanes": lanes[:_MOST_LANES],
        "left_out": max(len(lanes) - _MOST_LANES, 0),
        "tally": tally(info.counts),
        "is_over": info.state.is_final,
        "can_retry": info.state in (WorkflowState.FAILED, WorkflowState.CANCELLED),
    }
    return Page(
        template="workflow.html",
        title=info.name,
        says=lead_of(reasons, otherwise=f"It is {info.state.value.lower()}: {tally(info.counts)}"),
        data=data,
        more=more,
        command=f"everbeat workflows show {workflow_id} --graph",
        targets=[
            str(workflow_id),
            "everything",
            *(str(each.task_id) for each in shown_nodes if each.task_id),
        ],
    )


def _graph(visit: Visit, info: WorkflowInfo, nodes: Sequence[NodeInfo]) -> Markup | None:
    """Return the drawing. It escapes all texts itself."""
    if not nodes:
        return None
    drawn = picture(nodes, at=visit.now, limit=_MOST_BOXES)
    links = {
        box.key: visit.link(f"/{'workflows' if box.kind == 'workflow' else 'tasks'}/{box.task_id}")
        for box in drawn.boxes
        if box.task_id is not None
    }
    title = f"workflow {info.name}: {info.state}, {amount(len(drawn.boxes), 'box', plural='boxes')}"
    return Markup(svg(drawn, title=title, links=links, is_styled=False))


def lanes_of(
    nodes: Sequence[NodeInfo], *, since: datetime, now: datetime, ended_at: datetime | None
) -> list[NodeLane]:
    """Return the nodes that have begun on one time axis, in the order of their beginning. Members of maps are left out."""
    last = ended_at or now
    whole = max((last - since).total_seconds(), 0.001)
    begun = [(node.started_at or node.enqueued_at, node) for node in nodes if node.member_of is None]

    def place(moment: datetime) -> float:
        return round(min(max((moment - since).total_seconds() / whole, 0.0), 1.0) * 96 + 2, 2)

    lanes = []
    for began, node in sorted(
        [(began, node) for began, node in begun if began is not None],
        key=lambda each: (each[0], each[1].name),
    ):
        over = node.ended_at or last
        lanes.append(
            NodeLane(
                name=node.name, task_id=None if node.task_id is None else str(node.task_id), kind=node.kind,
                state=node.state.value, tone=_TONES.get(node.state.value, "wait"), left=place(began),
                width=round(max(place(over) - place(began), 0.5), 2), seconds=(over - began).total_seconds(),
            )
        )  # fmt: skip
    return lanes


async def pause(visit: Visit) -> PageResult:
    """Start no more nodes of a workflow. Raises WorkflowNotFound."""
    return _done(visit, await _handle(visit).apause(), "No more nodes start. Running nodes finish.")


async def resume(visit: Visit) -> PageResult:
    """Let a paused workflow continue. Raises WorkflowNotFound."""
    return _done(visit, await _handle(visit).aresume(), "The workflow continues.")


async def cancel(visit: Visit) -> PageResult:
    """Cancel a workflow: skip nodes that have not started, and ask running ones to stop. Raises WorkflowNotFound."""
    return _done(visit, await _handle(visit).acancel(), "The workflow is being cancelled.")


async def retry(visit: Visit) -> PageResult:
    """Rerun the failed nodes and those after them. Raises WorkflowNotFound or WorkflowNotRetryable."""
    keeps = visit.form.get("completed") == "keep"
    result = await _handle(visit).aretry(completed="keep" if keeps else "rerun")
    return ActionDone(goto=_place(visit), says="The failed nodes run again.", data={"retry": result})


def _handle(visit: Visit) -> WorkflowHandle[Any]:
    return visit.app.workflow_handle(to_uuid(visit.path_values["id"], what="workflow"))


def _place(visit: Visit) -> str:
    return visit.link(f"/workflows/{to_uuid(visit.path_values['id'], what='workflow')}")


def _done(visit: Visit, state: WorkflowState, says: str) -> ActionDone:
    return ActionDone(goto=_place(visit), says=says, data={"id": visit.path_values["id"], "state": state})
