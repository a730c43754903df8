"""Waiting for one task in a terminal: a progress bar on stderr for people, silence for programs.

What lives here: the wait of `everbeat send --wait`. What may not: what is done with the end.
"""

from __future__ import annotations

from time import monotonic
from typing import Final
from uuid import UUID

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from everbeat.app import App
from everbeat.cli.output import side_console
from everbeat.domain.duration import Duration, to_seconds
from everbeat.domain.inspection import TaskInfo
from everbeat.errors import WaitTimeout

_LOOK_EVERY_S: Final = 0.5


def wait_for(app: App, task_id: UUID, *, timeout: Duration | None) -> TaskInfo:
    """The task once it has ended. Raises WaitTimeout after `timeout`, TaskNotFound, a DatabaseError."""
    console = side_console()
    try:
        if console.is_terminal:
            _watch(app, task_id, timeout=timeout, console=console)
        else:
            app.handle(task_id).outcome(timeout=timeout)
    except WaitTimeout:
        if reason := app.info(task_id).waiting_because:
            console.print(f"It waits because: {reason}.")
        raise
    return app.info(task_id)


def _watch(app: App, task_id: UUID, *, timeout: Duration | None, console: Console) -> None:
    limit_s = None if timeout is None else to_seconds(timeout, subject="timeout")
    since = monotonic()
    handle = app.handle(task_id)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("PENDING", total=None)
        while True:
            left_s = _LOOK_EVERY_S if limit_s is None else min(_LOOK_EVERY_S, since + limit_s - monotonic())
            try:
                handle.outcome(timeout=max(0.0, left_s))
            except WaitTimeout:
                waited_s = monotonic() - since
                task = app.info(task_id)
                if limit_s is not None and waited_s >= limit_s:
                    raise WaitTimeout(task_id, waited_s, state=task.state) from None
                bars.update(bar, description=_described(task))
                if task.progress is not None and task.progress.fraction is not None:
                    bars.update(bar, total=1.0, completed=task.progress.fraction)
            else:
                return


def _described(task: TaskInfo) -> str:
    if task.waiting_because is not None:
        return f"{task.state} ({task.waiting_because})"
    return str(task.state) if task.progress is None else f"{task.state} {task.progress.stage}"
