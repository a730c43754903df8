"""What a workflow costs beside plain tasks, as wide and as long as it may be.

What lives here: these figures. What may not: how workflows move on (`store.advance`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from everbeat import WorkflowHandle
from everbeat.cli.bench.crew import Program, workers
from everbeat.cli.bench.figures import Sample, Target
from everbeat.cli.bench.watch import Plain, timed
from everbeat.store.statement import compose

WIDTHS: Final = (10, 100, 1_000, 10_000)
LENGTH: Final = 100
_AT_ONCE: Final = 1_000
_ANSWER_S: Final = 300.0


def workflow_figures(program: Program, connection: Plain, *, most: int) -> Iterator[Sample]:
    """Maps of nodes that do nothing, each with a node that waits for them all, and as many plain tasks, from the first start to the last
    answer; then a chain. Narrow ones are many at once. `most`: nothing wider."""
    connection.execute(compose("bench/forget", program.app.schema))
    with workers(program.app):
        _plain(program, 10, 1)
        _wide(program, 10, 1)
        for width in WIDTHS:
            if width <= most:
                yield from _beside(program, width)
        yield _chain(program)


def _beside(program: Program, width: int) -> Iterator[Sample]:
    times = max(1, _AT_ONCE // width)
    nodes = times * (width + 1)
    plain = f"{nodes:,} plain tasks, {width + 1:,} at a time"
    yield Sample(name=plain, value=nodes / timed(lambda: _plain(program, width, times)), unit="tasks/s")
    yield Sample(
        name=f"{times:,} workflows of {width:,} nodes and a join" if times > 1 else f"a workflow of {width:,} nodes and a join",
        value=nodes / timed(lambda: _wide(program, width, times)),
        unit="nodes/s",
        beside=plain,
        target=Target(at_least=0.5),
    )  # fmt: skip


def _plain(program: Program, width: int, times: int) -> None:
    app = program.app
    sent = [app.send_many(program.nothing.call(number) for number in range(width + 1)) for _ in range(times)]
    app.results([handle for handles in sent for handle in handles], timeout=_ANSWER_S)


def _wide(program: Program, width: int, times: int) -> None:
    started: list[WorkflowHandle[int]] = []
    for _ in range(times):
        workflow = program.app.workflow("bench-wide")
        members = workflow.map(program.nothing, range(width))
        started.append(workflow.start(output=workflow.add(program.nothing, -1).after(members)))
    for handle in started:
        handle.result(timeout=_ANSWER_S)


def _chain(program: Program) -> Sample:
    """The results of all are handed on."""
    workflow = program.app.workflow("bench-long")
    node = workflow.add(program.nothing, 1)
    for _ in range(LENGTH - 1):
        node = workflow.add(program.nothing, node.result)
    took_s = timed(lambda: workflow.start(output=node).result(timeout=_ANSWER_S))
    name = f"chain of {LENGTH} nodes: from one to the next"
    return Sample(name=name, value=1_000 * took_s / LENGTH, unit="ms", target=Target(at_most=10))
