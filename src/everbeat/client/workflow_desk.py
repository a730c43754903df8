"""The workflows' half of an app: handles by id, lists, and putting right what got stuck.

What lives here: `WorkflowDesk`. What may not: building workflows, which needs none.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from everbeat.client import workflow_control
from everbeat.client.control import Control
from everbeat.client.pausing import Pausing
from everbeat.client.twins import awaiting, blocking
from everbeat.client.workflow_handle import WorkflowHandle
from everbeat.domain.checks import one_of, whole
from everbeat.domain.settings import refused
from everbeat.domain.workflow_info import StuckWorkflow, WorkflowInfo, WorkflowState
from everbeat.store.plan import Plan

MOST_LISTED = 10_000


def to_workflow_id(value: object) -> UUID:
    """A workflow's id, given as UUID or as text; raises ConfigurationError for anything else."""
    if isinstance(value, UUID):
        return value
    if isinstance(value, str):
        try:
            return UUID(value)
        except ValueError:
            pass
    rule, fix = "must be a UUID, or its text", "pass handle.id, as start() gave it"
    raise refused(value, subject="workflow_id", code="WRONG_TYPE", rule=rule, fix=fix)


class WorkflowDesk(Pausing):
    """What is asked of workflows by their ids."""

    _control: Control

    def workflow_handle(self, workflow_id: UUID | str, /) -> WorkflowHandle[Any]:
        """The handle of a workflow that was started elsewhere or earlier; its result is plain JSON."""
        return WorkflowHandle(to_workflow_id(workflow_id), control=self._control)

    def _list_workflows(
        self,
        *,
        name: str | None = None,
        state: WorkflowState | str | None = None,
        key: str | None = None,
        children: bool = False,
        limit: int = 100,
    ) -> Plan[list[WorkflowInfo]]:
        """The latest workflows, the latest first, without their results; `children`: also those that are nodes of others.

        app.list_workflows(name="order", state="FAILED")
        """
        whole(1, MOST_LISTED)(limit, subject="list_workflows.limit")
        wanted = (
            None
            if state is None
            else WorkflowState(one_of(*WorkflowState)(state, subject="list_workflows.state"))
        )
        return workflow_control.listing(name=name, state=wanted, key=key, children=children, limit=limit)

    def _recover_stuck_workflows(self, *, dry_run: bool = False) -> Plan[list[StuckWorkflow]]:
        """Finds what should have happened in workflows more than 10 s ago and has not, does it, and says what it was.

        Every supervisor does so by itself; this is for whoever has none running, or wants to know. `dry_run`: only says.
        """
        return workflow_control.recover_stuck(channel=self.door.channel, dry_run=dry_run)

    list_workflows = blocking(_list_workflows)
    alist_workflows = awaiting(_list_workflows)
    recover_stuck_workflows = blocking(_recover_stuck_workflows)
    arecover_stuck_workflows = awaiting(_recover_stuck_workflows)
