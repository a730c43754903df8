"""Stores workflows in a separate transaction, in the user's transaction, or on behalf of a running task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import msgspec
from msgspec import structs

from everbeat.client.handle import TaskOperations
from everbeat.client.options import StartSettings
from everbeat.client.sender import CallSender
from everbeat.client.task import Task
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.domain.labels import decode_labels, encode_labels
from everbeat.domain.settings.checks import public
from everbeat.domain.settings.settings import refused
from everbeat.domain.task.argument_digest import digest_of_values
from everbeat.domain.task.context_backend import NewWorkflow
from everbeat.domain.tracing.model import TracedWorkflow
from everbeat.domain.workflow.graph import Graph, TaskSpec, crowded_node, encode
from everbeat.errors import PayloadError, SendError
from everbeat.errors.wording import amount
from everbeat.store.plan import Plan, ask
from everbeat.store.tasks import KEY_TRIES
from everbeat.store.workflows import insert

MOST_NODES_OF_TASK: Final = 10_000
"""The maximum number of nodes in a workflow that a task starts.

The task's row is locked while the nodes are stored, and a cancellation must wait for that lock.
"""


class WorkflowSender:
    """Stores workflows and returns the specifications of the tasks that their nodes send."""

    def __init__(
        self, operations: TaskOperations, *, sender: CallSender, knows: Callable[[str], bool]
    ) -> None:
        self._operations = operations
        self._knows = knows
        self._sender = sender

    def spec(self, task: Task[..., Any], /) -> TaskSpec:
        """Return the specification of the task that a node sends. Raises ConfigurationError in the same cases as a send."""
        return self._sender.spec(task)

    def start(
        self, graph: Graph, options: StartSettings, *, decode: Callable[[str], Any]
    ) -> WorkflowHandle[Any]:
        """Start a workflow, or find the live workflow with this name and key, and return its handle.

        `decode` decodes the workflow's result. Raises BlockingCallInLoop on an event loop, and DatabaseError if the database fails.
        """
        plan = self._stored(labelled(graph, options.labels), options)
        started = self._sender.run(
            plan, options.connection, calls=None, name="start", twin="astart", patience_s=options.patience_s
        )
        return WorkflowHandle(started, operations=self._operations, decode=decode)

    async def astart(
        self, graph: Graph, options: StartSettings, *, decode: Callable[[str], Any]
    ) -> WorkflowHandle[Any]:
        """Async version of `start` that does not block the running event loop."""
        plan = self._stored(labelled(graph, options.labels), options)
        started = await self._sender.arun(
            plan, options.connection, calls=None, twin="start", patience_s=options.patience_s
        )
        return WorkflowHandle(started, operations=self._operations, decode=decode)

    def new_workflow(
        self,
        graph: Graph,
        options: StartSettings,
        *,
        digest: str,
        task_name: str,
        inherited: Mapping[str, str],
    ) -> NewWorkflow:
        """Return a workflow in the form in which a running task starts it.

        The workflow inherits the labels of the task. Raises PayloadError if the workflow has a connection, belongs to another app, is too
        large, or would have too many labels.
        """
        graph = labelled(graph, options.labels)
        text = encode(graph).decode()
        problem = self._problem(graph, len(text), options, task_name) or _crowd(graph, inherited)
        if problem is not None:
            rule, fix = problem
            raise PayloadError(
                f"Workflow {graph.name!r} cannot be started by task {task_name!r}: {rule}.",
                parameter="workflow",
                fix=f"{fix}.",
            )
        largest = self._sender.payload_limit
        return NewWorkflow(name=graph.name, graph=text, key=options.key, largest=largest, digest=digest)

    def _problem(
        self, graph: Graph, size: int, options: StartSettings, task_name: str
    ) -> tuple[str, str] | None:
        smaller = (
            "let nodes be workflows, or map over the result of a node: its members are made when it runs"
        )
        if options.connection is not None:
            rule = "it belongs to the transaction of a connection, and the worker starts it"
            return rule, "leave connection= out, or start it without the task: definition.start(...)"
        if not self._knows(task_name):
            rule = "it belongs to another App, which does not have this task"
            return rule, "use the App of the task, or start it without the task: definition.start(...)"
        if len(graph.nodes) > MOST_NODES_OF_TASK:
            rule = f"it has {amount(len(graph.nodes), 'node')}, and a task can start at most {MOST_NODES_OF_TASK:,} in one workflow"
            return rule, smaller
        if size > self._sender.payload_limit:
            rule = f"it takes {size:,} characters of JSON, and App.payload_limit allows {self._sender.payload_limit:,}"
            return (
                rule,
                "keep large data elsewhere and pass a reference to it, or raise App(payload_limit=...)",
            )
        return None

    def handle(self, workflow_id: UUID, *, decode: Callable[[str], Any]) -> WorkflowHandle[Any]:
        """Return a handle for a started workflow. `decode` decodes the workflow's result."""
        return WorkflowHandle(workflow_id, operations=self._operations, decode=decode)

    def _stored(self, graph: Graph, options: StartSettings) -> Plan[UUID]:
        workflow_id, tracing = self._sender.ids.next(), self._sender.tracing
        if tracing is None:
            return (yield from self._inserted(workflow_id, graph, options, None))
        whole = TracedWorkflow(
            name=graph.name, workflow_id=workflow_id, nodes=len(graph.nodes), key=options.key
        )
        with tracing.starting(whole) as context:
            return (yield from self._inserted(workflow_id, graph, options, context))

    def _inserted(
        self, workflow_id: UUID, graph: Graph, options: StartSettings, context: str | None
    ) -> Plan[UUID]:
        key = options.key
        statement = insert(
            workflow_id,
            graph,
            channel=self._operations.database.channel,
            key=key,
            largest=self._sender.payload_limit,
            joined=options.connection is not None,
            context=context,
        )
        for _ in range(KEY_TRIES):
            started = yield from ask(statement)
            if started is not None:
                return started.id
        raise SendError(
            f"The key {key!r} of workflow {graph.name!r} was taken and released again during each of {KEY_TRIES} tries to start.",
            task_id=workflow_id,
            fix="start again; nothing was stored for it.",
        )


R_co = TypeVar("R_co", covariant=True)


@public
class WorkflowCall(Generic[R_co]):
    """A workflow to pass to `Context.start`. Returned by `definition.call(...)` and `wf.call(...)`.

    handle = ctx.start(order.call(17))
    """

    __slots__ = ("_backend", "_decode", "_digest", "_graph", "_options")

    def __init__(
        self,
        graph: Graph,
        *,
        options: StartSettings,
        decode: Callable[[str], Any],
        digest: str,
        backend: WorkflowSender,
    ) -> None:
        self._graph = graph
        self._options = options
        self._decode = decode
        self._digest = digest
        self._backend = backend

    def __repr__(self) -> str:
        return f"<WorkflowCall {self._graph.name!r}, {amount(len(self._graph.nodes), 'node')}>"

    def _as_started_by(self, task_name: str, labels: Mapping[str, str], /) -> NewWorkflow:
        return self._backend.new_workflow(
            self._graph, self._options, digest=self._digest, task_name=task_name, inherited=labels
        )

    def _handle_of(self, workflow_id: UUID, /) -> WorkflowHandle[R_co]:
        return self._backend.handle(workflow_id, decode=self._decode)


def labelled(graph: Graph, labels: Mapping[str, str]) -> Graph:
    """Return the graph with more labels. Raises ConfigurationError if the workflow or one of its nodes would have too many."""
    if not labels:
        return graph
    chosen = structs.replace(graph, labels=encode_labels({**decode_labels(graph.labels), **labels}))
    if (crowd := crowded_node(chosen)) is not None:
        subject, rule = f"labels of workflow {graph.name!r}", f"are too many: {crowd}"
        raise refused(sorted(labels), subject=subject, code="TOO_MANY_LABELS", rule=rule, fix=_FEWER_LABELS)
    return chosen


def _crowd(graph: Graph, inherited: Mapping[str, str]) -> tuple[str, str] | None:
    crowd = crowded_node(graph, inherited=inherited) if inherited else None
    return None if crowd is None else (crowd, _FEWER_LABELS)


_FEWER_LABELS: Final = "leave some labels out"


def digest_of_graph(graph: Graph) -> str:
    """Return the digest of a workflow that has no definition, computed from its nodes, arguments and edges."""
    return digest_of_values((graph.name, _facts(graph)), {})


def _facts(graph: Graph) -> Any:
    return [
        graph.on_error,
        graph.output,
        graph.success,
        msgspec.to_builtins(graph.edges),
        [
            [
                node.name,
                node.kind,
                node.members,
                node.quorum,
                None if node.task is None else node.task.name,
                None if node.args is None else msgspec.json.decode(node.args),
                msgspec.to_builtins(node.template),
                msgspec.to_builtins(node.items),
                None if node.graph is None else _facts(node.graph),
            ]
            for node in graph.nodes
        ],
    ]
