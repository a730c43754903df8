"""The states and records of workflows and nodes, the final state of a workflow, and the effect of a retry."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.labels import NO_LABELS
from everbeat.errors import TaskError


class WorkflowState(StrEnum):
    """The state of a workflow. The last three states are final."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    """No node starts until the workflow is resumed. Nodes that are already running may finish."""
    CANCELLING = "CANCELLING"
    """No more nodes start, and running nodes have been asked to stop. Once they have stopped, the workflow becomes CANCELLED."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        """Return whether the workflow has reached a final state."""
        return self in _FINAL


_FINAL: Final = frozenset({WorkflowState.COMPLETED, WorkflowState.FAILED, WorkflowState.CANCELLED})


class NodeState(StrEnum):
    """The state of a node. COMPLETED and all following states are final."""

    PENDING = "PENDING"
    """The node is waiting for other nodes."""
    READY = "READY"
    """The node can start. Either its workflow is paused, or the node is about to be enqueued."""
    ENQUEUED = "ENQUEUED"
    """The node's task is waiting for a worker. A map or child workflow in this state is in progress."""
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"
    SKIPPED = "SKIPPED"
    """The node never started: a dependency did not complete, or its condition did not hold."""

    @property
    def is_final(self) -> bool:
        """Return whether the node has reached a final state."""
        return self not in _OPEN


_OPEN: Final = frozenset({NodeState.PENDING, NodeState.READY, NodeState.ENQUEUED, NodeState.RUNNING})


class NodeInfo(Struct, frozen=True, kw_only=True):
    """The current state of a node.

    `needs` lists the names of the node's dependencies. `conditions` describes its other conditions, such as `if paid.is_large`
    or `2 of left, right, up`. For a node of `kind` "workflow", `task_id` is the id of the child workflow. A suspended task is
    waiting for the event `waits_for`, if any, and becomes due at `wake_at` at the latest.
    """

    name: str
    kind: str
    state: NodeState
    task: str | None
    task_id: UUID | None
    needs: Sequence[str]
    member_of: str | None
    quorum: int | None
    conditions: Sequence[str] = ()
    attempt: int | None
    enqueued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    error: TaskError | None
    waits_for: str | None = None
    wake_at: datetime | None = None

    @property
    def duration_s(self) -> float | None:
        """Return the seconds from the node's start to its end, or None if the node has not finished or never started."""
        begun = self.started_at or (None if self.kind == "task" else self.enqueued_at)
        return None if begun is None or self.ended_at is None else (self.ended_at - begun).total_seconds()


class WorkflowInfo(Struct, frozen=True, kw_only=True):
    """The current state of a workflow.

    `counts` has the number of nodes in each state; RUNNING nodes count as ENQUEUED. `result` is the output's value as plain
    JSON once the workflow is COMPLETED. `parent_id` is the id of the workflow that contains this workflow as a node.
    `parent_task_id` is the id of the task that started this workflow. `labels` includes the labels that the workflow has inherited.
    """

    id: UUID
    name: str
    key: str | None
    state: WorkflowState
    on_error: str
    counts: Mapping[NodeState, int]
    output: str | None
    parent_id: UUID | None
    parent_task_id: UUID | None
    sent_at: datetime
    paused_at: datetime | None
    cancel_requested_at: datetime | None
    ended_at: datetime | None
    result: Any
    error: TaskError | None
    labels: Mapping[str, str] = NO_LABELS

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return sum(self.counts.values())


class WorkflowPage(list[WorkflowInfo]):
    """A list of workflows. If it is shorter than the limit because the search stopped early, `continue_before` is not None.

    `examined` is then the number of the newest workflows that the search examined. To search the older ones, pass `continue_before`
    as `before`.
    """

    def __init__(
        self,
        workflows: Iterable[WorkflowInfo] = (),
        *,
        examined: int | None = None,
        continue_before: UUID | None = None,
    ) -> None:
        super().__init__(workflows)
        self.examined = examined
        self.continue_before = continue_before


class StuckWorkflow(Struct, frozen=True, kw_only=True):
    """An overdue step of a workflow that reconciliation found and, except in a dry run, carried out.

    `what` is one of:

    - `TASK_ENDED`, `CHILD_ENDED`, `MEMBERS_ENDED`: the node's task, child workflow or members have finished.
    - `NOT_RESOLVED`: all dependencies of the node have finished.
    - `NOT_ENQUEUED`: the node is ready.
    - `CHILD_HELD`: the node's child workflow is still paused.
    - `NOT_CANCELLED`: the cancellation of the workflow has not reached the node.
    - `NODE_GONE`: the row of a node that other nodes are waiting for was deleted, so the node is FAILED.
    - `NOT_FINISHED`: all nodes have finished; `node` is None.
    - `NOTHING_MOVES`: the open nodes are waiting for each other; `node` is None.

    `problem` is why the step could not be carried out, or None.
    """

    workflow_id: UUID
    workflow: str
    node: str | None
    task_id: UUID | None
    what: str
    problem: str | None = None


class WorkflowRetry(Struct, frozen=True, kw_only=True):
    """The result of a workflow retry. Nodes are identified by name; a node of a child workflow is named `child/node`.

    `again` lists the finished nodes that will run again, and `completed` lists those of them that were COMPLETED. `kept` lists
    the downstream nodes that will not run again, because they are COMPLETED (with `completed="keep"`) or in progress. `state`
    is the workflow's current state.
    """

    state: WorkflowState
    again: Sequence[str]
    completed: Sequence[str]
    kept: Sequence[str]
    dry_run: bool = False


class WorkflowCode(StrEnum):
    """The codes of workflow errors that were not raised by a task. The statements in `sql/workflow` write all of them except the last."""

    UPSTREAM_SKIPPED = "UPSTREAM_SKIPPED"
    """The node was SKIPPED: a dependency did not complete, a condition did not hold, or its quorum could not be met."""
    SUBWORKFLOW_FAILED = "SUBWORKFLOW_FAILED"
    """The node's child workflow is FAILED."""
    SUBWORKFLOW_CANCELLED = "SUBWORKFLOW_CANCELLED"
    """The node's child workflow was cancelled."""
    MEMBERS_FAILED = "MEMBERS_FAILED"
    """A member of the map is FAILED, EXPIRED or CANCELLED, or its row was deleted."""
    MEMBERS_SKIPPED = "MEMBERS_SKIPPED"
    """A member of the map was SKIPPED, and no member failed, expired or was cancelled."""
    WORKFLOW_CANCELLED = "WORKFLOW_CANCELLED"
    """The workflow was cancelled before the node, or its task, started."""
    WORKFLOW_PAUSED = "WORKFLOW_PAUSED"
    """A pause cancelled the task before it started. The node will get another task."""
    WORKFLOW_SUCCESS_CASE_NOT_MET = "WORKFLOW_SUCCESS_CASE_NOT_MET"
    """No case of the success policy was met. No node failed, but nodes were skipped."""


STUCK: Final[Mapping[str, str]] = {
    "TASK_ENDED": "its task has ended or was deleted",
    "CHILD_ENDED": "its workflow has ended or was deleted",
    "MEMBERS_ENDED": "all of its members have ended",
    "NOT_RESOLVED": "all of its dependencies have ended",
    "NOT_ENQUEUED": "it is ready but was not enqueued",
    "CHILD_HELD": "its workflow is still paused",
    "NOT_CANCELLED": "the cancellation of the workflow has not reached it",
    "NODE_GONE": "other nodes wait for it, but its row was deleted",
    "NOTHING_MOVES": "its open nodes are waiting for each other",
    "NOT_FINISHED": "all nodes have ended but the workflow has not",
}
"""Descriptions of the findings of reconciliation, by the code in `StuckWorkflow.what`."""

FinalState: TypeAlias = Literal["COMPLETED", "FAILED", "CANCELLED"]


class EndedWorkflow(Struct, frozen=True, kw_only=True):
    """The facts about a workflow without open nodes.

    The `bad_*` fields describe the unsuccessful node with the lowest number. With a success policy, `short` lists the numbers
    of all nodes that did not complete.
    """

    workflow_id: UUID
    state: str
    on_error: str
    success: Sequence[Sequence[int]] = ()
    output: int | None = None
    output_state: str | None = None
    output_result: str | None = None
    output_is_map: bool = False
    bad_name: str | None = None
    bad_state: str | None = None
    bad_error: str | None = None
    short: Sequence[int] = ()
    output_name: str | None = None
    output_error: str | None = None


class WorkflowVerdict(Struct, frozen=True):
    """The final state of a workflow. `result` and `error` are JSON text."""

    workflow_id: UUID
    state: FinalState
    result: str | None = None
    error: str | None = None


def verdict(ended: EndedWorkflow) -> WorkflowVerdict:
    """Return the final state of a workflow.

    A cancelled workflow is CANCELLED. With a success policy, a workflow is COMPLETED if any case is met. Without a success
    policy, it is COMPLETED if no node failed, or if failures are ignored (`on_error="continue"`). If the output is missing, the
    COMPLETED workflow has an error that explains why.
    """
    if ended.state == "CANCELLING":
        return WorkflowVerdict(ended.workflow_id, "CANCELLED")
    if ended.success:
        short = frozenset(ended.short)
        is_met = any(short.isdisjoint(case) for case in ended.success)
    else:
        is_met = ended.bad_name is None or ended.on_error == "continue"
    if is_met:
        if ended.output is None or ended.output_result is not None:
            return WorkflowVerdict(ended.workflow_id, "COMPLETED", result=ended.output_result)
        error = _of_node(ended.output_name, ended.output_state, ended.output_error)
        return WorkflowVerdict(ended.workflow_id, "COMPLETED", error=_encoded(error))
    return WorkflowVerdict(ended.workflow_id, "FAILED", error=_error(ended))


def _error(ended: EndedWorkflow) -> str:
    if ended.bad_name is None:
        error: dict[str, object] = {
            "code": WorkflowCode.WORKFLOW_SUCCESS_CASE_NOT_MET,
            "message": "no case of the success policy was met",
        }
    else:
        error = _of_node(ended.bad_name, ended.bad_state, ended.bad_error)
    return _encoded(error)


def _of_node(name: str | None, state: str | None, text: str | None) -> dict[str, object]:
    of_node = _decoded(text)
    return {
        "code": of_node.get("code", "UNHANDLED_EXCEPTION"),
        "message": f"node {name} ended {state}: {of_node.get('message', '')}",
        "data": {"node": name, "error": of_node},
        "type": of_node.get("type"),
    }


def _encoded(error: dict[str, object]) -> str:
    return msgspec.json.encode(error).decode()


def _decoded(text: str | None) -> dict[str, object]:
    try:
        return {} if text is None else msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {"message": text}


_BAD: Final = frozenset({"FAILED", "CANCELLED", "EXPIRED"})


class EndedNode(Struct, frozen=True, kw_only=True):
    """The state of a node before a retry.

    `makes_members` means that the node's members are created at run time, from a list that another node returns. `follows`
    means that the node was SKIPPED because of its dependencies, not because of a cancellation.
    """

    number: int
    name: str
    kind: str
    state: str
    member_of: int | None = None
    has_members: bool = False
    makes_members: bool = False
    has_task: bool = True
    follows: bool = False
    child: UUID | None = None
    child_state: str | None = None


class WorkflowRetryPlan(Struct, frozen=True, kw_only=True):
    """The effect of a retry on one workflow. Nodes are identified by number.

    `states` maps nodes to their new states. The members of the maps in `emptied` are deleted and created again. `children` maps
    nodes to the child workflows that are retried too. `again` lists the finished nodes that run again, `completed` those of
    them that were COMPLETED, and `kept` the downstream nodes that do not run again.
    """

    states: dict[int, str]
    emptied: frozenset[int]
    children: dict[int, UUID]
    again: Sequence[int]
    completed: Sequence[int]
    kept: Sequence[int]


def plan_retry(
    nodes: Sequence[EndedNode],
    edges: Iterable[tuple[int, int]],
    *,
    keep: bool = False,
    first: Collection[int] = (),
) -> WorkflowRetryPlan:
    """Return a plan that reruns the unsuccessful nodes, the nodes in `first`, and all nodes downstream of them.

    If `keep` is set, COMPLETED nodes do not run again, except those in `first`.
    """
    return _Walk(nodes, edges, keep=keep, first=frozenset(first)).reopening()


class _Walk:
    """Follows the edges from the nodes that run again. A node runs `anew` if its input might have changed."""

    def __init__(
        self,
        nodes: Sequence[EndedNode],
        edges: Iterable[tuple[int, int]],
        *,
        keep: bool,
        first: frozenset[int],
    ) -> None:
        self._nodes = {node.number: node for node in nodes}
        self._keep = keep
        self._first = first
        self._following: dict[int, list[int]] = {}
        self._members: dict[int, list[int]] = {}
        for parent, child in edges:
            self._following.setdefault(parent, []).append(child)
        for node in nodes:
            if node.member_of is not None:
                self._members.setdefault(node.member_of, []).append(node.number)
        self._again: set[int] = set()
        self._anew: set[int] = set()
        self._kept: set[int] = set()

    def reopening(self) -> WorkflowRetryPlan:
        self._walk()
        nodes, again = self._nodes, sorted(self._again)
        emptied = frozenset(
            number for number in self._anew if nodes[number].makes_members and nodes[number].has_members
        )
        dropped = {member for number in emptied for member in self._members.get(number, ())}
        children = {
            number: node.child
            for number in again
            if number not in self._anew
            and (node := nodes[number]).child is not None
            and node.state in _BAD
            and node.child_state in ("FAILED", "CANCELLED")
        }
        states: dict[int, str] = {}
        for number in again:
            continues = nodes[number].has_members and number not in emptied
            if number not in dropped and nodes[number].state != "PENDING":
                states[number] = "ENQUEUED" if continues or number in children else "PENDING"
        ran = [
            number for number in sorted({*again, *dropped}) if nodes[number].state not in ("PENDING", "READY")
        ]
        return WorkflowRetryPlan(
            states=states,
            emptied=emptied,
            children=children,
            again=ran,
            completed=[number for number in ran if nodes[number].state == "COMPLETED"],
            kept=sorted(self._kept - {*again, *dropped}),
        )

    def _walk(self) -> None:
        waiting = [
            (number, number in self._first) for number, node in self._nodes.items() if self._begins(node)
        ]
        seen: set[tuple[int, bool]] = set()
        while waiting:
            place = waiting.pop()
            if place in seen or place[0] not in self._nodes:
                continue
            seen.add(place)
            number, is_anew = place
            if self._stays(self._nodes[number]):
                self._keep_from(number)
                continue
            self._again.add(number)
            if is_anew:
                self._anew.add(number)
            waiting += [(each, True) for each in self._next_of(number, is_anew)]
            if (whole := self._nodes[number].member_of) is not None:
                waiting.append((whole, False))

    def _begins(self, node: EndedNode) -> bool:
        if node.number in self._first:
            return True
        is_bad = node.state in _BAD or (node.state == "SKIPPED" and not node.follows)
        return is_bad and (node.kind != "task" or node.has_task)

    def _stays(self, node: EndedNode) -> bool:
        if node.state == "ENQUEUED":
            return True
        is_lost = node.kind == "task" and not node.has_task
        return is_lost or (self._keep and node.state == "COMPLETED" and node.number not in self._first)

    def _next_of(self, number: int, is_anew: bool) -> list[int]:
        following = self._following.get(number, [])
        # The members of a map over a known list have their own edges. Only an explicit --from-node reaches them through the map.
        if is_anew and number in self._first:
            return [*following, *self._members.get(number, ())]
        return following

    def _keep_from(self, number: int) -> None:
        """Record a node that does not run again, and the completed nodes downstream of it."""
        waiting = [number]
        while waiting:
            one = self._nodes.get(waiting.pop())
            if one is None or one.number in self._kept or one.state not in ("COMPLETED", "ENQUEUED"):
                continue
            # An unfinished map is only waiting for its members, which are recorded themselves.
            if one.state == "COMPLETED" or not one.has_members:
                self._kept.add(one.number)
                waiting += self._following.get(one.number, [])
