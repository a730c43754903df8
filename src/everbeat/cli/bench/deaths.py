"""How soon the work of the dead is begun again, with the default settings, and how soon a worker begins at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from everbeat import App, Handle
from everbeat.cli.bench.crew import Program, started, workers
from everbeat.cli.bench.figures import Sample, Target
from everbeat.cli.bench.watch import Plain, timed, until
from everbeat.store.statement import compose

_PATIENCE_S: Final = 120.0


def death_figures(program: Program, connection: Plain) -> Iterator[Sample]:
    """kill -9 of one worker process, then of a whole tree beside another one; from the signal to the next start of the task."""
    app = program.app
    connection.execute(compose("bench/forget", app.schema))
    with workers(app):
        nap, pid = _sleeping(program)
        took_s = timed(lambda: _killed(app, [pid]))
        nap.cancel()  # nobody need wait for it
        yield Sample(
            name="kill -9 of a worker process, to the next start",
            value=took_s,
            unit="s",
            target=Target(at_most=1),
        )
    connection.execute(compose("bench/forget", app.schema))
    with started() as tree:
        until(app.list_active_workers, within_s=_PATIENCE_S, what="a worker that is ready")
        nap, victim = _sleeping(program)
        with workers(app):
            took_s = timed(lambda: _killed(app, [tree.pid, victim]))
            nap.cancel()
            yield Sample(
                name="kill -9 of a whole tree, to the next start",
                value=took_s,
                unit="s",
                target=Target(at_most=3),
            )
    connection.execute(compose("bench/forget", app.schema))
    program.begun.send()
    yield _start(program)


def _start(program: Program) -> Sample:
    def begin() -> None:
        tree.enter_context(started())
        until(
            lambda: program.app.list_tasks(state=["COMPLETED"], limit=1),
            within_s=_PATIENCE_S,
            what="the first task",
        )

    with ExitStack() as tree:
        name = "start of everbeat worker to its first task's end"
        return Sample(name=name, value=timed(begin), unit="s", target=Target(at_most=1.5))


def _sleeping(program: Program) -> tuple[Handle[None], int]:
    """A long task, and in which process it runs."""
    nap = program.nap.send(600.0)
    until(lambda: nap.info().state == "RUNNING", within_s=_PATIENCE_S, what="a task that runs")
    worker_id = nap.info().claimed_by_worker_id
    return nap, next(
        worker.pid for worker in program.app.list_active_workers() if worker.worker_id == worker_id
    )


def _killed(app: App, pids: list[int]) -> None:
    before = {task.claimed_by_worker_id for task in app.list_tasks(state=["RUNNING"])}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(
        lambda: {task.claimed_by_worker_id for task in app.list_tasks(state=["RUNNING"])} - before,
        within_s=_PATIENCE_S,
        what="the task running again",
    )
