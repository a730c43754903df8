"""Workflows: the list, and one workflow with its graph, its waterfall, and what blocks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from markupsafe import Markup
from msgspec import structs

from everbeat.client.database_access import database_of
from everbeat.client.inspection import workflow_page
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.domain.documents import listed_workflow_document, workflow_document
from everbeat.domain.drawing.diagrams import svg
from everbeat.domain.drawing.picture import picture, tally
from everbeat.domain.explain.reasons import WorkflowExplanation
from everbeat.domain.workflow.states import NodeInfo, WorkflowInfo, WorkflowPage, WorkflowState
from everbeat.errors.wording import amount
from everbeat.web.filters import MOST_EXAMINED, ListFilters, page_size, to_state, to_uuid
from everbeat.web.hiding import blanked, concealed
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.pages.inbox import place_of
from everbeat.web.reasons import lead_of, shown_reasons
from everbeat.web.waterfall import answers_of, waterfall_of

_MOST_LANES: Final = 60
_MOST_BOXES: Final = 120
_MOST_ANSWERS: Final = 3
_TABS: Final = ("", *WorkflowState)
_GIVEN: Final = ("name", "key", "parent", "label", "since", "until")
"""The filters that the links of the list keep."""


async def show(visit: Visit) -> PageResult:
    """Return the latest workflows that match the parameters of the address."""
    limit, state, before = page_size(visit.query), visit.query.get("state"), visit.query.get("before")
    if state is not None:
        state = to_state(state, WorkflowState)
    given = ListFilters.read(visit.query).task_filters()
    filters: Any = {
        name: given.get(name)
        for name in ("name", "key", "parent", "since", "until", "labels")
        if given.get(name)
    }
    plan = workflow_page(before=before, limit=limit, most=MOST_EXAMINED, state=state, **filters)
    listing = database_of(visit.app).arun(plan)
    found: WorkflowPage | None = await visit.part("The workflows", listing, None)
    shown = [_shown(each, hides=visit.hiding.has_rules) for each in found or ()]
    data = {
        "workflows": None if found is None else [listed_workflow_document(each) for each in shown],
        "examined": None if found is None else found.examined,
        "continue_before": None if found is None else found.continue_before,
    }
    more = {
        "rows": [(each, tally(each.counts)) for each in shown],
        "tabs": _TABS,
        "chosen_state": state or "",
        "given": {name: visit.query.all(name) for name in _GIVEN},
        "older": _older(found, limit),
        "limit": None if visit.query.get("limit") is None else limit,
        "is_first": before is None,
    }
    says = _sentence(found, filtered=bool(filters or state), limit=limit, is_first=before is None)
    return Page(
        template="workflows.html",
        title="Workflows",
        says=says,
        data=data,
        more=more,
        command="everbeat workflows",
    )


def _older(found: WorkflowPage | None, limit: int) -> str | None:
    """Return the parameter `before` of the next page, or None on the last one."""
    if found is None:
        return None
    last = found[-1].id if len(found) == limit else found.continue_before
    return None if last is None else str(last)


def _shown(info: WorkflowInfo, *, hides: bool) -> WorkflowInfo:
    """Return a workflow, without its error and result if they are hidden. Both come from a node, whose task can have a rule."""
    return structs.replace(info, error=concealed(info.error), result=blanked(info.result)) if hides else info


def _hides(visit: Visit, node: NodeInfo) -> bool:
    """Return whether the error of a node is hidden. That of a workflow comes from one of its tasks, which can have a rule."""
    return visit.hiding.has_rules if node.kind == "workflow" else visit.hiding.touches(node.task or "")


def _shown_node(visit: Visit, node: NodeInfo) -> NodeInfo:
    return structs.replace(node, error=concealed(node.error)) if _hides(visit, node) else node


def _sentence(found: WorkflowPage | None, *, filtered: bool, limit: int, is_first: bool) -> str:
    if found is None:
        return "The workflows could not be read"
    if not found:
        examined = (
            ""
            if found.examined is None
            else f" among the {found.examined:,} {'newest' if is_first else 'next'}"
        )
        return f"No {'' if is_first else 'older '}workflows{' match' if filtered else ''}{examined}"
    counts = Counter(each.state for each in found)
    if not is_first:
        latest = (
            f"these {amount(len(found), 'older workflow')}" if len(found) > 1 else "the only older workflow"
        )
    else:
        latest = f"the {limit} latest workflows" if len(found) == limit else amount(len(found), "workflow")
    if failed := counts[WorkflowState.FAILED]:
        return f"{failed:,} of {latest} failed"
    if going := sum(count for state, count in counts.items() if not state.is_final):
        return f"{going:,} of {latest} {'is' if going == 1 else 'are'} going on, and none failed"
    if len(found) > 1:
        return f"None of {latest} failed"
    return f"The only {'' if is_first else 'older '}workflow has ended well"


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
    shown_nodes = [_shown_node(visit, each) for each in nodes or ()]
    hides = visit.hiding.everything or any(_hides(visit, each) for each in nodes or ())
    hides = hides or (nodes is None and visit.hiding.has_rules)
    shown = _shown(info, hides=hides)
    reasons = () if explanation is None else shown_reasons(explanation.reasons, hides=hides)
    data = {
        "workflow": workflow_document(shown),
        "nodes": None if nodes is None else shown_nodes,
        "explanation": None if explanation is None else structs.replace(explanation, reasons=reasons),
    }
    waterfall = waterfall_of(shown_nodes, since=info.sent_at, now=visit.now, ended_at=info.ended_at)
    more = {
        "info": shown,
        "reasons": reasons,
        "graph": _graph(visit, shown, shown_nodes),
        "lanes": waterfall.lanes[:_MOST_LANES],
        "ticks": waterfall.ticks,
        "left_out": max(len(waterfall.lanes) - _MOST_LANES, 0),
        "addresses": _addresses(visit, shown_nodes),
        "answers": [
            (node.name, place_of(visit, node.task_id))
            for node in answers_of(shown_nodes)[:_MOST_ANSWERS]
            if node.task_id is not None
        ],
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


def _addresses(visit: Visit, nodes: Sequence[NodeInfo]) -> dict[str, str]:
    """Return the address of the task or the child workflow of each node that has one."""
    places = {
        node.name: f"/{'workflows' if node.kind == 'workflow' else 'tasks'}/{node.task_id}"
        for node in nodes
        if node.task_id is not None
    }
    return {name: visit.link(path) for name, path in places.items()}


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
