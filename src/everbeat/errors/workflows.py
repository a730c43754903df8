"""Errors about workflows: unknown ones, refused retries, and placeholders that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from everbeat.errors.tree import EverbeatError
from everbeat.errors.wording import nearest


class WorkflowNotFound(EverbeatError):
    """No workflow with this id exists: it was never committed in this schema, or its record was pruned."""

    code = "WORKFLOW_NOT_FOUND"

    def __init__(self, workflow_id: UUID | str) -> None:
        super().__init__(
            f"Workflow {workflow_id} does not exist: it was never committed in this schema, or was pruned since.",
            fix="check the id, the database and the schema, and terminal_record_retention_hours.",
        )
        self.workflow_id = workflow_id


class WorkflowNotRetryable(EverbeatError):
    """This workflow cannot be retried.

    FAILED, CANCELLED and PAUSED workflows can be retried, and COMPLETED workflows can be retried from a given node onward. A
    workflow that is a node of another workflow can be retried only if it paused itself. A workflow with a key cannot be retried
    while another live workflow has the same name and key.
    """

    code = "WORKFLOW_NOT_RETRYABLE"

    def __init__(
        self, workflow_id: UUID | str, *, state: str, is_child: bool, other: UUID | None = None
    ) -> None:
        if other is not None:
            reason, fix = (
                f"has the key of the live workflow {other}; only one live workflow can have a key",
                "wait until that workflow ends, or cancel it first.",
            )
        elif is_child:
            reason, fix = (
                "is a node of another workflow",
                "retry that workflow: the failed nodes of this one are retried with it.",
            )
        else:
            reason = f"is {state}; only FAILED, CANCELLED and PAUSED workflows can be retried"
            fix = "wait until it ends, or cancel it first."
            if state == "COMPLETED":
                fix = "start a new one, or name the node to begin from: retry(from_node=...)."
        super().__init__(f"Workflow {workflow_id} {reason}.", fix=fix)
        self.workflow_id = workflow_id
        self.state = state


class NodeNotEnded(EverbeatError):
    """The result of a workflow node was requested before the node had finished."""

    code = "NODE_NOT_ENDED"

    def __init__(self, workflow_id: UUID | str, node: str, *, state: str) -> None:
        super().__init__(
            f"Node {node!r} of workflow {workflow_id} is {state}: it has no result yet.",
            fix="wait for the workflow, or see the state of its nodes: handle.nodes().",
        )
        self.workflow_id = workflow_id
        self.node = node
        self.state = state


class PlaceholderUsed(EverbeatError, TypeError):
    """Code that builds a workflow used the result of a node as a value. No node has run yet, so its result can only be passed to
    other nodes.
    """

    code = "PLACEHOLDER_USED"

    def __init__(self, placeholder: str, use: str, *, fix: str) -> None:
        super().__init__(
            f"{placeholder} cannot be {use} while the workflow is built: no node has run yet.", fix=f"{fix}."
        )


class NoSuchPart(EverbeatError, AttributeError, LookupError):
    """The result of a workflow node, as annotated, has no such attribute, key or index."""

    code = "NO_SUCH_PART"

    def __init__(
        self, placeholder: str, part: str, reason: str, *, choices: Iterable[str] = (), fix: str | None = None
    ) -> None:
        known = list(choices)
        guess = nearest(part, known)
        if guess is not None:
            fix = f"did you mean {guess}?"
        elif fix is None:
            fix = f"use one of {', '.join(known)}." if known else "pass it as a whole."
        super().__init__(f"{placeholder} has no {part}: {reason}.", fix=fix)
