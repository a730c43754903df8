"""The `App` methods that build and define workflows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from everbeat.client.workflow.definition import (
    Workflow,
    WorkflowDecorator,
    WorkflowDefinition,
    definition_decorator,
)
from everbeat.client.workflow.sender import WorkflowSender
from everbeat.domain.labels import NO_LABELS, Labels
from everbeat.domain.workflow.graph import OnError


class WorkflowMethods:
    """The `App` methods that build and define workflows. Nothing is stored until a workflow starts."""

    _workflow_sender: WorkflowSender
    _workflows: dict[str, WorkflowDefinition[..., Any]]

    @property
    def workflows(self) -> Mapping[str, WorkflowDefinition[..., Any]]:
        """Return a mapping from the names of the defined workflows to their definitions."""
        return MappingProxyType(self._workflows)

    def workflow(self, name: str, *, on_error: OnError = "fail", labels: Labels = NO_LABELS) -> Workflow:
        """Return an empty workflow to which you can add nodes. Raises ConfigurationError if an argument is invalid.

        `on_error` determines how the workflow reacts to a failed node. With "fail", the nodes that do not depend on the failed node still
        run, and then the workflow fails. With "pause", no further node starts. With "continue", the workflow ignores failures.
        The tasks of the nodes inherit the `labels`.

        wf = app.workflow("order")
        wf.add(pack, wf.add(charge, order).result)
        """
        return Workflow(name, on_error=on_error, labels=labels, backend=self._workflow_sender)

    def define_workflow(
        self, name: str, *, on_error: OnError = "fail", labels: Labels = NO_LABELS
    ) -> WorkflowDecorator:
        """Register a function that adds the nodes of a workflow. Use this method as a decorator.

        Raises RegistrationError if the function is unsuitable or the name is taken, and ConfigurationError if an argument is invalid.

        @app.define_workflow("order")
        def order(wf: Workflow, order_id: int) -> Node[str]:
            return wf.add(pack, wf.add(charge, order_id).result)
        """
        return definition_decorator(
            name, on_error=on_error, labels=labels, backend=self._workflow_sender, known=self._workflows
        )
