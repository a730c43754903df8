"""Workflow types that cannot be imported from `everbeat` itself: definitions, node maps and inspection results."""

from everbeat.client.workflow.definition import WorkflowDefinition as WorkflowDefinition
from everbeat.client.workflow.node import Nodes as Nodes
from everbeat.client.workflow.node import first as first
from everbeat.client.workflow.node import outcomes as outcomes
from everbeat.client.workflow.node import results as results
from everbeat.client.workflow.sender import WorkflowCall as WorkflowCall
from everbeat.domain.filters import WorkflowFilters as WorkflowFilters
from everbeat.domain.workflow.states import NodeInfo as NodeInfo
from everbeat.domain.workflow.states import NodeState as NodeState
from everbeat.domain.workflow.states import StuckWorkflow as StuckWorkflow
from everbeat.domain.workflow.states import WorkflowInfo as WorkflowInfo
from everbeat.domain.workflow.states import WorkflowRetry as WorkflowRetry
from everbeat.domain.workflow.states import WorkflowState as WorkflowState
