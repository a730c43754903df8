"""Why a workflow has not ended, or how it ended: reasons about it as a whole, then about its open nodes, the deepest causes first.

What lives here: the reasons. What may not: why a task waits or who runs it (`waiting`, `holding`), and how facts are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.domain.drawing import blockers, elapsed_s, named, status_of
from everbeat.domain.drawing_layers import depths
from everbeat.domain.explanation import (
    Explanation,
    Reason,
    ReasonCode,
    WorkflowExplanation,
    counted,
    unknown_liveness,
)
from everbeat.domain.states import TaskState
from everbeat.domain.workflow_info import NodeInfo, NodeState, StuckWorkflow, WorkflowInfo, WorkflowState

MOST_REASONS: Final = 40
MOST_TASKS: Final = 16
"""Of so many open nodes the tasks are explained, too."""
MOST_FAILED: Final = 12
_SOON_S: Final = 10.0
_FAILED: Final = frozenset({NodeState.FAILED, NodeState.EXPIRED})
_URGENCY: Final = {NodeState.READY: 0, NodeState.ENQUEUED: 1, NodeState.RUNNING: 2, NodeState.PENDING: 3}
_STUCK: Final = {
    "TASK_ENDED": "its task has ended or is gone",
    "CHILD_ENDED": "its workflow has ended or is gone",
    "MEMBERS_ENDED": "all of its members have ended",
    "NOT_RESOLVED": "all it waits for has ended",
    "NOT_ENQUEUED": "it is ready, and was not enqueued",
    "CHILD_HELD": "its workflow is still paused",
    "NOT_CANCELLED": "the cancel of the workflow has not reached it",
    "NODE_GONE": "other nodes wait for it, and its row was deleted",
    "NOTHING_MOVES": "its open nodes wait for each other",
    "NOT_FINISHED": "all nodes have ended, and it was not finished",
}


class Movement(Struct, frozen=True):
    """Whether a workflow is moved on: what happened to it that nobody acted on (counted to 1,001), since when, and how many workers live."""

    at: datetime
    unmoved: int
    unmoved_since: datetime | None
    alive: int
    last_beat_at: datetime | None
    is_standby: bool = False


class Kind(Struct, frozen=True):
    """Open nodes of one kind: alike in task, state and what they wait for. One stands for all."""

    node: NodeInfo
    count: int

    @property
    def subject(self) -> str:
        """Of whom a reason speaks."""
        if self.count == 1:
            return f"node {self.node.name}"
        if self.node.member_of is not None:
            return f"{self.node.name} and {self.count - 1:,} more members of {self.node.member_of}"
        return f"node {self.node.name} and {self.count - 1:,} like it"

    @property
    def is_(self) -> str:
        """The subject and its verb."""
        return f"{self.subject} {self.verb('is', 'are')}"

    def verb(self, one: str, many: str) -> str:
        """The form that fits their number."""
        return one if self.count == 1 else many


def open_kinds(nodes: Sequence[NodeInfo]) -> list[Kind]:
    """The kinds of open nodes, those that others wait for before those that wait: the deepest causes first."""
    by_name = {node.name: node for node in nodes}
    open_nodes = {node.name: node for node in nodes if not node.state.is_final}
    depth = depths(
        {name: [each for each in node.needs if each in open_nodes] for name, node in open_nodes.items()}
    )
    busy = {node.member_of for node in open_nodes.values()}
    first: dict[tuple[object, ...], NodeInfo] = {}
    counts: dict[str, int] = {}
    for node in open_nodes.values():
        if node.kind == "map" and node.name in busy:
            continue  # its members say all of it
        waits = frozenset(by_name[name].member_of or name for name in node.needs if name in open_nodes)
        own = (node.name,) if node.kind != "task" else (node.waits_for, node.wake_at is None)
        chosen = first.setdefault((node.member_of, node.task, node.state, waits, own), node)
        counts[chosen.name] = counts.get(chosen.name, 0) + 1
    found = [Kind(node, counts[node.name]) for node in first.values()]
    return sorted(found, key=lambda each: (_URGENCY[each.node.state], depth[each.node.name]))


def why_not_ended(
    info: WorkflowInfo,
    nodes: Sequence[NodeInfo],
    movement: Movement,
    *,
    stuck: Sequence[StuckWorkflow] = (),
    tasks: Mapping[str, Explanation] | None = None,
    children: Mapping[str, WorkflowExplanation] | None = None,
) -> WorkflowExplanation:
    """The explanation of a workflow; `tasks` and `children` are those of nodes, by their names."""
    left_out = 0
    if info.state.is_final:
        reasons = [*_end(info), *_failures(nodes)]
    else:
        reasons = [*_whole(info, nodes, movement, stuck=stuck)]
        if info.state is WorkflowState.PAUSED:
            reasons += _failures(nodes)
        by_name = {node.name: node for node in nodes}
        kinds = open_kinds(nodes)
        room = max(1, MOST_REASONS - len(reasons))
        left_out = sum(kind.count for kind in kinds[room:])
        for kind in kinds[:room]:
            child = (children or {}).get(kind.node.name)
            if child is not None:
                reasons.append(_child(kind, child))
            else:
                told = (tasks or {}).get(kind.node.name)
                reasons.append(_node(kind, told, by_name, info=info, at=movement.at))
        if info.state is not WorkflowState.PAUSED:
            reasons += _failures(nodes)
    return WorkflowExplanation(
        workflow_id=info.id,
        name=info.name,
        state=info.state,
        at=movement.at,
        reasons=tuple(reasons) or (_about_to_end(),),
        left_out=left_out,
    )


def _end(info: WorkflowInfo) -> Iterator[Reason]:
    code = ReasonCode(info.state.value)
    text = f"it ended {info.state}" if info.error is None else f"it ended {info.state}: {info.error}"
    again = (
        None
        if info.state is WorkflowState.COMPLETED or info.parent_id is not None
        else _command("retry", info)
    )
    yield Reason(code=code, text=text, since=info.ended_at, command=again)


def _failures(nodes: Sequence[NodeInfo]) -> Iterator[Reason]:
    failed = [node for node in nodes if node.state in _FAILED and node.kind != "map"]
    for node in failed[:MOST_FAILED]:
        error = "" if node.error is None else f": {node.error}"
        yield Reason(
            code=ReasonCode(node.state.value),
            text=f"node {node.name} ended {node.state}{error}",
            since=node.ended_at,
            blocked_by=None if node.task_id is None else str(node.task_id),
            command=None if node.task_id is None else f"everbeat explain {node.task_id}",
            node=node.name,
        )
    if len(failed) > MOST_FAILED:
        more = len(failed) - MOST_FAILED
        yield Reason(code=ReasonCode.FAILED, text=f"{more:,} more nodes ended FAILED or EXPIRED")


def _whole(
    info: WorkflowInfo, nodes: Sequence[NodeInfo], movement: Movement, *, stuck: Sequence[StuckWorkflow]
) -> Iterator[Reason]:
    if info.state is WorkflowState.PAUSED:
        failed = any(node.state in _FAILED for node in nodes)
        failed = failed and info.on_error == "pause"
        why = ", as a node failed: a retry begins it again, a resume goes on without it" if failed else ""
        yield Reason(
            code=ReasonCode.WORKFLOW_PAUSED,
            text=f"it is paused and begins nothing until it is resumed{why}",
            since=info.paused_at,
            command=_command("retry" if failed else "resume", info),
        )
    if info.state is WorkflowState.CANCELLING:
        running = sum(
            node.state in (NodeState.ENQUEUED, NodeState.RUNNING) and node.kind != "map" for node in nodes
        )
        yield Reason(
            code=ReasonCode.WORKFLOW_CANCELLING,
            text=f"it is being cancelled: {counted(running, 'node')} under way, asked to end",
            since=info.cancel_requested_at,
        )
    if movement.alive == 0 and movement.is_standby:
        yield unknown_liveness("whether a live worker moves it on", last_beat_at=movement.last_beat_at)
    elif movement.alive == 0:
        yield Reason(
            code=ReasonCode.NO_WORKER,
            text="no live worker: nobody moves it on, and nobody runs its tasks",
            since=movement.last_beat_at,
            command="everbeat worker MODULE:APP",
        )
    late = (
        movement.unmoved_since is not None
        and (movement.at - movement.unmoved_since).total_seconds() >= _SOON_S
    )
    if movement.unmoved and (late or movement.alive == 0):
        yield Reason(
            code=ReasonCode.NOT_ADVANCED,
            text=f"nobody has acted on what happened to it ({counted(movement.unmoved, 'entry', plural='entries')} in the outbox)",
            since=movement.unmoved_since,
            command="everbeat workflows reconcile" if late else None,
        )
    yield from _stuck(stuck)


def _stuck(found: Sequence[StuckWorkflow]) -> Iterator[Reason]:
    by_kind: dict[str, list[StuckWorkflow]] = {}
    for each in found:
        by_kind.setdefault(each.what, []).append(each)
    for what, alike in by_kind.items():
        node = alike[0].node
        subject = "it" if node is None else f"node {node}"
        more = "" if len(alike) == 1 else f" (and {len(alike) - 1:,} more)"
        yield Reason(
            code=ReasonCode.STUCK,
            text=f"{subject} is stuck{more}: {_STUCK.get(what, what)}, and that was not acted on",
            blocked_by=None if alike[0].task_id is None else str(alike[0].task_id),
            command="everbeat workflows reconcile",
        )


def _node(
    kind: Kind, told: Explanation | None, by_name: Mapping[str, NodeInfo], *, info: WorkflowInfo, at: datetime
) -> Reason:
    node = kind.node
    match node.state:
        case NodeState.PENDING:
            waits = blockers(node, by_name, at=at)
            text = f"{kind.is_} PENDING and {kind.verb('waits', 'wait')} for {named(waits, most=8)}"
            if node.quorum is not None:
                text += f"; {node.quorum} of those it joins must complete"
            if not waits:
                text = f"{kind.is_} PENDING, and all it waits for has ended: its turn is next"
            return Reason(code=ReasonCode.WAITS_FOR_NODES, text=text, node=node.name)
        case NodeState.READY:
            when = "resumed" if info.state is WorkflowState.PAUSED else "moved on"
            text = f"{kind.is_} READY, to be enqueued when the workflow is {when}"
            return Reason(code=ReasonCode.NOT_ADVANCED, text=text, node=node.name)
        case _:
            pass
    doing = f"{kind.is_} {status_of(node.state, elapsed_s(node, at=at), node.attempt)}"
    if told is not None and told.reasons:
        return _of_task(kind, told, doing=doing)
    under_way = {"workflow": "its workflow is", "map": "its members are", "task": "its task is"}[node.kind]
    return Reason(
        code=ReasonCode.RUNNING if node.state is NodeState.RUNNING else ReasonCode.WAITS_FOR_NODES,
        text=f"{doing}: {under_way} under way",
        since=node.started_at or node.enqueued_at,
        node=node.name,
    )


def _of_task(kind: Kind, told: Explanation, *, doing: str) -> Reason:
    hardest = told.reasons[0]
    said = "; ".join(reason.text for reason in told.reasons[:2])
    whose = "its task" if kind.count == 1 else f"the task of {kind.node.name}"
    code = hardest.code
    if told.state.is_terminal:
        code, text = ReasonCode.NOT_ADVANCED, f"{whose} has ended {told.state}, and the node has not yet"
    elif told.state is TaskState.PENDING:
        text = (
            f"{whose} {said[3:]}"
            if said.startswith(("it waits ", "it sleeps "))
            else f"{whose} waits because {said}"
        )
    else:
        text = said if kind.count == 1 else f"of {whose}, {said}"
    return Reason(
        code=code,
        text=f"{doing}: {text}",
        since=hardest.since,
        until=hardest.until,
        blocked_by=str(told.task_id) if hardest.blocked_by is None else hardest.blocked_by,
        command=hardest.command if told.state is TaskState.PENDING else f"everbeat explain {told.task_id}",
        node=kind.node.name,
    )


def _child(kind: Kind, child: WorkflowExplanation) -> Reason:
    hardest = child.reasons[0]
    return Reason(
        code=hardest.code,
        text=f"{kind.is_} workflow {child.workflow_id} ({child.name}), {child.state}; there {hardest.text}",
        since=hardest.since,
        until=hardest.until,
        blocked_by=str(child.workflow_id),
        command=f"everbeat explain {child.workflow_id}",
        node=kind.node.name,
    )


def _about_to_end() -> Reason:
    return Reason(code=ReasonCode.NOT_ADVANCED, text="all of its nodes have ended: it is about to end, too")


def _command(word: str, info: WorkflowInfo) -> str:
    return f"everbeat workflows {word} {info.id}"
