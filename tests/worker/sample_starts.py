"""Task functions that start workflows, in all four execution modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from everbeat.domain.task.context import Context
from everbeat.domain.task.context_backend import NewWorkflow
from everbeat.domain.workflow.graph import Graph, GraphNode, TaskSpec, encode
from everbeat.errors import TaskStopped
from tests.worker.sample_steps import AGAIN, in_all_modes
from tests.worker.sample_tasks import gate, task


class Flow:
    """A stand-in for the result of `definition.call(...)` without an app: a number of nodes of one task."""

    def __init__(self, name: str, *, nodes: int = 1, digest: str | None = None) -> None:
        spec = TaskSpec(name="echo", queue="default")
        members = tuple(GraphNode(name=f"n{n}", task=spec, args=f'{{"text":"{n}"}}') for n in range(nodes))
        graph = encode(Graph(name=name, nodes=members)).decode()
        self._workflow = NewWorkflow(name=name, graph=graph, digest=digest)

    def _as_started_by(self, task_name: str, labels: Mapping[str, str], /) -> NewWorkflow:
        del task_name, labels
        return self._workflow

    def _handle_of(self, workflow_id: UUID, /) -> str:
        return str(workflow_id)


def found(ctx: Context) -> list[str]:
    started = [ctx.start(Flow("flow")), ctx.start(Flow("flow")), ctx.named("own").start(Flow("flow"))]
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return started


async def afound(ctx: Context) -> list[str]:
    started = [await ctx.astart(Flow("flow")), await ctx.astart(Flow("flow"))]
    started.append(await ctx.named("own").astart(Flow("flow")))
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return started


in_all_modes("found", found, afound, retry=AGAIN)


@task(retry=AGAIN)
def found_another(ctx: Context) -> str:
    return (
        ctx.named("own").start(Flow("flow", digest=f"attempt {ctx.attempt}"))
        if ctx.attempt > 1
        else again(ctx)
    )


def again(ctx: Context) -> str:
    ctx.named("own").start(Flow("flow", digest="attempt 1"))
    raise RuntimeError("once")


@task()
def found_late(ctx: Context) -> str:
    gate.journal.append("begun")
    gate.opened.wait(30)
    try:
        return ctx.start(Flow("flow"))
    except TaskStopped as stop:
        gate.journal.append(stop.reason)
        raise


@task()
def found_many(ctx: Context, nodes: int) -> str:
    return ctx.start(Flow("flow", nodes=nodes))


@task()
def found_wrongly(ctx: Context, what: Any) -> str:
    return ctx.start(what)
