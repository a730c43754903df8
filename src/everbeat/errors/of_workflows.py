"""Errors of whoever asks about workflows."""

from __future__ import annotations

from uuid import UUID

from everbeat.errors.base import EverbeatError


class WorkflowNotFound(EverbeatError):
    """No workflow has this id: it was never committed in this schema, or its record was pruned."""

    code = "WORKFLOW_NOT_FOUND"

    def __init__(self, workflow_id: UUID | str) -> None:
        super().__init__(
            f"Workflow {workflow_id} does not exist: it was never committed in this schema, or was pruned since.",
            fix="check the id, the database and the schema, and terminal_record_retention_hours.",
        )
        self.workflow_id = workflow_id


class WorkflowNotRetryable(EverbeatError):
    """Only a workflow that FAILED, was CANCELLED or is PAUSED can be retried; one that COMPLETED, from a node on. One that is a
    node of another only where it paused by itself; one with a key only while no other lives with it."""

    code = "WORKFLOW_NOT_RETRYABLE"

    def __init__(
        self, workflow_id: UUID | str, *, state: str, is_child: bool, other: UUID | None = None
    ) -> None:
        if other is not None:
            reason, fix = (
                f"has a key with which workflow {other} lives now",
                "wait until that one ends, or cancel it.",
            )
        elif is_child:
            reason, fix = (
                "is a node of another workflow",
                "retry that one: what failed in this one is retried with it.",
            )
        else:
            reason = f"is {state}; only FAILED, CANCELLED and PAUSED workflows can be retried"
            fix = "wait until it ends, or cancel it first."
            if state == "COMPLETED":
                fix = "start it anew, or name the node to begin from: retry(from_node=...)."
        super().__init__(f"Workflow {workflow_id} {reason}.", fix=fix)
        self.workflow_id = workflow_id
        self.state = state


class NodeNotEnded(EverbeatError):
    """A node's result was asked for, and it has not ended, or was never begun."""

    code = "NODE_NOT_ENDED"

    def __init__(self, workflow_id: UUID | str, node: str, *, state: str) -> None:
        super().__init__(
            f"Node {node!r} of workflow {workflow_id} is {state}: there is no result yet.",
            fix="wait for the workflow, or ask handle.nodes() where it stands.",
        )
        self.workflow_id = workflow_id
        self.node = node
        self.state = state
