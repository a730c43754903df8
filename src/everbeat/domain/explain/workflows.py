"""The reasons why a workflow has not finished, or how it finished."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.domain.doctor.work import no_worker
from everbeat.domain.drawing.picture import blockers, depths, elapsed_s, status_of
from everbeat.domain.explain.reasons import (
    Explanation,
    Reason,
    ReasonCode,
    RestartingSupervisor,
    WorkflowExplanation,
    advice_on,
    counted,
    unknown_liveness,
)
from everbeat.domain.task.states import TaskState
from everbeat.domain.workflow.states import (
    STUCK,
    NodeInfo,
    NodeState,
    StuckWorkflow,
    WorkflowInfo,
    WorkflowState,
)
from everbeat.errors.wording import amount, some

MOST_REASONS: Final = 40
MOST_TASKS: Final = 16
"""The tasks of up to this many open nodes are explained individually."""
MOST_FAILED: Final = 12
_SOON_S: Final = 10.0
_FAILED: Final = frozenset({NodeState.FAILED, NodeState.EXPIRED})
_URGENCY: Final = {NodeState.READY: 0, NodeState.ENQUEUED: 1, NodeState.RUNNING: 2, NodeState.PENDING: 3}


class Movement(Struct, frozen=True):
    """Whether a workflow is advancing. `unmoved` counts unprocessed outbox entries, up to 1,001; `alive` counts live workers.

    `unmoved_since` is the time of the oldest unprocessed entry. `last_seen_at` is the last heartbeat of any worker.
    `restarting` supervisors are about to start workers. These supervisors are read from the database only if no worker is
    alive.
    """

    at: datetime
    unmoved: int
    unmoved_since: datetime | None
    alive: int
    last_seen_at: datetime | None
    is_standby: bool = False
    restarting: tuple[RestartingSupervisor, ...] = ()


class NodeGroup(Struct, frozen=True):
    """Open nodes with the same task, state and dependencies. `node` represents the group."""

    node: NodeInfo
    count: int

    @property
    def subject(self) -> str:
        """Return the subject of the sentence that states a reason."""
        if self.count == 1:
            return f"node {self.node.name}"
        if self.node.member_of is not None:
            return f"{self.node.name} and {amount(self.count - 1, 'more member')} of {self.node.member_of}"
        return f"node {self.node.name} and {self.count - 1:,} like it"

    @property
    def is_(self) -> str:
        """Return the subject followed by "is" or "are"."""
        return f"{self.subject} {self.verb('is', 'are')}"

    def verb(self, one: str, many: str) -> str:
        """Return the verb form for the number of nodes."""
        return one if self.count == 1 else many


def open_kinds(nodes: Sequence[NodeInfo]) -> list[NodeGroup]:
    """Return the open nodes in groups. Dependencies come first, because they are the root causes."""
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
            continue  # its members represent the map
        waits = frozenset(by_name[name].member_of or name for name in node.needs if name in open_nodes)
        own = (node.waits_for, node.wake_at is None) if node.kind == "task" else _own(node)
        chosen = first.setdefault((node.member_of, node.task, node.state, waits, own), node)
        counts[chosen.name] = counts.get(chosen.name, 0) + 1
    found = [NodeGroup(node, counts[node.name]) for node in first.values()]
    return sorted(found, key=lambda each: (_URGENCY[each.node.state], depth[each.node.name]))


def _own(node: NodeInfo) -> tuple[object, ...]:
    """Return a key that distinguishes a map or child workflow from others. Members that have not started share a key."""
    is_alike = node.member_of is not None and node.state in (NodeState.PENDING, NodeState.READY)
    return () if is_alike else (node.name,)


def why_not_ended(
    info: WorkflowInfo,
    nodes: Sequence[NodeInfo],
    movement: Movement,
    *,
    stuck: Sequence[StuckWorkflow] = (),
    tasks: Mapping[str, Explanation] | None = None,
    children: Mapping[str, WorkflowExplanation] | None = None,
) -> WorkflowExplanation:
    """Return the explanation of a workflow. `tasks` and `children` are explanations of nodes by node name."""
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
                of_task = (tasks or {}).get(kind.node.name)
                reasons.append(_node(kind, of_task, by_name, info=info, at=movement.at))
        if info.state is not WorkflowState.PAUSED:
            reasons += _failures(nodes)
    return WorkflowExplanation(
        workflow_id=info.id,
        name=info.name,
        state=info.state,
        at=movement.at,
        reasons=tuple(reasons) or (_about_to_end(),),
        left_out=left_out,
        labels=info.labels,
    )


def _end(info: WorkflowInfo) -> Iterator[Reason]:
    code = ReasonCode(info.state.value)
    text = f"it ended {info.state}" if info.error is None else f"it ended {info.state}: {info.error}"
    again = (
        None
        if info.state is WorkflowState.COMPLETED or info.parent_id is not None
        else _command("retry", info)
    )
    advice = advice_on(None if info.error is None else info.error.code)
    if again is not None and advice.same_again:
        text, again = f"{text.removesuffix('.')}. {advice.text.format(again=again)}", None
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
        yield Reason(code=ReasonCode.FAILED, text=f"{amount(more, 'more node')} ended FAILED or EXPIRED")


def _whole(
    info: WorkflowInfo, nodes: Sequence[NodeInfo], movement: Movement, *, stuck: Sequence[StuckWorkflow]
) -> Iterator[Reason]:
    if info.state is WorkflowState.PAUSED:
        failed = any(node.state in _FAILED for node in nodes)
        failed = failed and info.on_error == "pause"
        why = (
            ", because a node failed: a retry reruns that node, a resume continues without it"
            if failed
            else ""
        )
        yield Reason(
            code=ReasonCode.WORKFLOW_PAUSED,
            text=f"it is paused and starts no node until it is resumed{why}",
            since=info.paused_at,
            command=_command("retry" if failed else "resume", info),
        )
    if info.state is WorkflowState.CANCELLING:
        running = sum(
            node.state in (NodeState.ENQUEUED, NodeState.RUNNING) and node.kind != "map" for node in nodes
        )
        yield Reason(
            code=ReasonCode.WORKFLOW_CANCELLING,
            text=f"it is being cancelled: {counted(running, 'running node')} asked to stop",
            since=info.cancel_requested_at,
        )
    if movement.alive == 0 and movement.is_standby:
        yield unknown_liveness("whether a live worker advances it", last_beat_at=_seen_at(info, movement))
    elif movement.alive == 0:
        yield no_worker(
            "no live worker advances it or runs its tasks",
            since=_seen_at(info, movement),
            restarting=movement.restarting,
        )
    late = (
        movement.unmoved_since is not None
        and (movement.at - movement.unmoved_since).total_seconds() >= _SOON_S
    )
    if movement.unmoved and (late or movement.alive == 0):
        yield Reason(
            code=ReasonCode.NOT_ADVANCED,
            text=f"no worker has processed its outbox ({counted(movement.unmoved, 'entry', plural='entries')})",
            since=movement.unmoved_since,
            command="everbeat workflows reconcile" if late else None,
        )
    yield from _stuck(stuck)


def _seen_at(info: WorkflowInfo, movement: Movement) -> datetime:
    """Return when a worker was last seen, or when the workflow was sent, whichever is later."""
    return info.sent_at if movement.last_seen_at is None else max(info.sent_at, movement.last_seen_at)


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
            text=f"{subject} is stuck{more}: {STUCK.get(what, what)}, but no worker has processed that",
            blocked_by=None if alike[0].task_id is None else str(alike[0].task_id),
            command="everbeat workflows reconcile",
        )


def _node(
    kind: NodeGroup,
    of_task: Explanation | None,
    by_name: Mapping[str, NodeInfo],
    *,
    info: WorkflowInfo,
    at: datetime,
) -> Reason:
    node = kind.node
    match node.state:
        case NodeState.PENDING:
            waits = blockers(node, by_name, at=at)
            text = f"{kind.is_} PENDING and {kind.verb('waits', 'wait')} for {some(waits, limit=8)}"
            if node.quorum is not None:
                text += f"; {node.quorum} of its dependencies must complete"
            if not waits:
                text = f"{kind.is_} PENDING, but all its dependencies have ended: it starts next"
            return Reason(code=ReasonCode.WAITS_FOR_NODES, text=text, node=node.name)
        case NodeState.READY:
            when = "is resumed" if info.state is WorkflowState.PAUSED else "advances"
            text = f"{kind.is_} READY, to be enqueued when the workflow {when}"
            return Reason(code=ReasonCode.NOT_ADVANCED, text=text, node=node.name)
        case _:
            pass
    doing = f"{kind.is_} {status_of(node.state, elapsed_s(node, at=at), node.attempt)}"
    if of_task is not None and of_task.reasons:
        return _of_task(kind, of_task, doing=doing)
    active = {"workflow": "its workflow is", "map": "its members are", "task": "its task is"}[node.kind]
    return Reason(
        code=ReasonCode.RUNNING if node.state is NodeState.RUNNING else ReasonCode.WAITS_FOR_NODES,
        text=f"{doing}: {active} in progress",
        since=node.started_at or node.enqueued_at,
        node=node.name,
    )


def _of_task(kind: NodeGroup, task: Explanation, *, doing: str) -> Reason:
    main = task.reasons[0]
    texts = "; ".join(reason.text for reason in task.reasons[:2])
    subject = "its task" if kind.count == 1 else f"the task of {kind.node.name}"
    code = main.code
    if task.state.is_terminal:
        code, text = ReasonCode.NOT_ADVANCED, f"{subject} has ended {task.state}, but the node has not yet"
    elif task.state is TaskState.PENDING:
        text = (
            f"{subject} {texts[3:]}"
            if texts.startswith(("it waits ", "it sleeps "))
            else f"{subject} waits because {texts}"
        )
    else:
        text = texts if kind.count == 1 else f"for {subject}, {texts}"
    return Reason(
        code=code,
        text=f"{doing}: {text}",
        since=main.since,
        until=main.until,
        blocked_by=str(task.task_id) if main.blocked_by is None else main.blocked_by,
        command=main.command if task.state is TaskState.PENDING else f"everbeat explain {task.task_id}",
        node=kind.node.name,
    )


def _child(kind: NodeGroup, child: WorkflowExplanation) -> Reason:
    main = child.reasons[0]
    return Reason(
        code=main.code,
        text=f"{kind.is_} workflow {child.workflow_id} ({child.name}), {child.state}; there {main.text}",
        since=main.since,
        until=main.until,
        blocked_by=str(child.workflow_id),
        command=f"everbeat explain {child.workflow_id}",
        node=kind.node.name,
    )


def _about_to_end() -> Reason:
    return Reason(code=ReasonCode.NOT_ADVANCED, text="all of its nodes have ended: it is about to end")


def _command(name: str, info: WorkflowInfo) -> str:
    return f"everbeat workflows {name} {info.id}"
