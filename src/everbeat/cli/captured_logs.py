"""The command `everbeat logs`."""

from __future__ import annotations

from collections.abc import Iterator
from time import sleep
from typing import Annotated, Final
from uuid import UUID

import typer
from msgspec import structs

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.output import compact_json, moment, say, show_heading, show_json
from everbeat.cli.selection import TaskIdArgument, database_answer, full_task_id, with_app
from everbeat.client.captured_logs import LogReading
from everbeat.client.database_access import database_of
from everbeat.client.handle import to_task_id
from everbeat.domain.task.captured_log import CapturedLog
from everbeat.domain.task.states import TASK_TERMINAL_STATES
from everbeat.errors.wording import amount, on_one_line, visible
from everbeat.store import history

_POLL_S: Final = 1.0
_LAST_POLLS: Final = 2
"""How often to look for further lines after the task has ended. Its worker writes the last lines up to a second later."""

_INDENT: Final = "  "

commands = typer.Typer(rich_markup_mode=None, add_completion=False)


@commands.command()
@with_app
def logs(
    app: App,
    task_id: TaskIdArgument,
    *,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", min=1, help="Only this attempt.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new lines until the task has ended.")
    ] = False,
    as_json: bool,
) -> None:
    """Show what the code of a task has logged, for each of its newest 20 attempts, oldest first.

    Logs are captured if the task, or its worker, has `capture_logs`. With --follow and --json, each line is one log line as JSON.
    """
    full_id = to_task_id(full_task_id(app, task_id))
    with named_as_options({"logs.attempt": "--attempt"}):
        reading = LogReading(full_id, attempt=attempt)
    if follow:
        _follow(app, full_id, reading, as_json=as_json)
        return
    found = _next(app, reading)
    if as_json:
        show_json({"id": full_id, "logs": [structs.asdict(log) for log in found]})
        return
    for log in found:
        _show(log)
    if not found:
        of = "The task" if attempt is None else f"Attempt {attempt}"
        say(
            f"{of} has no captured log. Capture logs with capture_logs=True of the task, or with --capture-logs of the worker."
        )


def _next(app: App, reading: LogReading) -> list[CapturedLog]:
    return database_of(app).run(reading.next_lines(), name="everbeat", twin="arun")


def _follow(app: App, task_id: UUID, reading: LogReading, *, as_json: bool) -> None:
    shown: UUID | None = None
    polls_left = _LAST_POLLS
    while True:
        task = database_answer(app, history.outcomes([task_id])).get(task_id)
        has_ended = task is None or task.state in TASK_TERMINAL_STATES
        for log in _next(app, reading):
            if as_json:
                for line in log.lines:
                    print(compact_json({"attempt": log.attempt, **structs.asdict(line)}), flush=True)
            else:
                _show(log, has_heading=log.claim_id != shown)
                shown = log.claim_id
        polls_left = polls_left - 1 if has_ended else _LAST_POLLS
        if polls_left < 0:
            return
        sleep(_POLL_S)


def _show(log: CapturedLog, *, has_heading: bool = True) -> None:
    if has_heading:
        show_heading(f"Attempt {log.attempt}")
    for text in _texts(log):
        print(visible(text), flush=True)


def _texts(log: CapturedLog) -> Iterator[str]:
    """Yield the lines of a log, and a note in each place where lines were not kept.

    Further lines of a message and its traceback are indented, so that a message cannot forge a record or a heading.
    """
    for line, missing in log.with_gaps():
        if missing:
            yield f"… {amount(missing, 'line')} not kept …"
        if line is not None:
            level, logger = on_one_line(line.level), on_one_line(line.logger)
            more = "" if line.exception is None else f"\n{line.exception}"
            text = f"{line.message}{more}".replace("\n", f"\n{_INDENT}")
            yield f"{moment(line.at)} {level:<7} {logger}: {text}"
