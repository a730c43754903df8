"""`everbeat explain`: shows why a task is not running, a workflow has not ended, or a schedule sends no tasks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Final

import typer
from rich.text import Text

from everbeat.app import App
from everbeat.cli.output import (
    moment,
    optional_moment,
    say,
    show_heading,
    show_json,
    show_pairs,
    shown_labels,
    state,
    stdout_console,
)
from everbeat.cli.selection import full_target_id, with_app
from everbeat.domain.explain.reasons import Explanation, Reason, WorkflowExplanation
from everbeat.domain.explain.schedules import ScheduleExplanation
from everbeat.errors import TaskNotFound, WorkflowNotFound
from everbeat.errors.wording import amount, on_one_line

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_SCHEDULE: Final = "schedule:"
_LIMIT: Final = "limit:"


@commands.command()
@with_app
def explain(
    app: App,
    task_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The id of a task or of a workflow, or schedule:NAME.", show_default=False
        ),
    ],
    *,
    as_json: bool,
) -> None:
    """Explain why a task is not running or ran again, why a workflow has not ended, or why a schedule sends no tasks.

    Each reason has a code, a start, an end if known, and a command that helps. With --app the thresholds come from the
    app's RecoveryConfig.
    """
    found = _explained(app, task_id)
    if as_json:
        show_json({"explanation": found})
    elif isinstance(found, Explanation):
        _show(found)
    elif isinstance(found, ScheduleExplanation):
        _show_schedule(found)
    else:
        _show_workflow(found)


def _explained(app: App, given: str) -> Explanation | WorkflowExplanation | ScheduleExplanation:
    """Return the explanation of the task or workflow with this id, or of the schedule with this name after `schedule:`.

    Raises TaskNotFound or UnknownName if it does not exist.
    """
    if given.startswith(_SCHEDULE):
        return app.explain_schedule(given.removeprefix(_SCHEDULE))
    if given.startswith(_LIMIT):
        name = shlex.quote(given.removeprefix(_LIMIT))
        raise typer.BadParameter(f"to see why a limit keeps tasks waiting, run everbeat limits show {name}.")
    given = full_target_id(app, given)
    try:
        return app.explain(given)
    except TaskNotFound:
        with suppress(WorkflowNotFound):
            return app.workflow_handle(given).explain()
        raise


def _show(found: Explanation) -> None:
    show_pairs(
        [
            ("task", str(found.task_id)),
            ("name", found.name),
            ("queue", found.queue),
            ("state", state(found.state)),
            ("workflow", _workflow(found)),
            ("node", found.node),
            ("labels", shown_labels(found.labels)),
            ("seen at", moment(found.at)),
        ]
    )
    _show_reasons(found.reasons)
    if found.second_runs:
        show_heading("Earlier attempts")
        _show_reasons(found.second_runs)


def _workflow(found: Explanation) -> str | None:
    if found.workflow_id is None:
        return None
    return f"{found.workflow_id}" if found.workflow is None else f"{found.workflow_id} ({found.workflow})"


def _show_workflow(found: WorkflowExplanation) -> None:
    show_pairs(
        [
            ("workflow", str(found.workflow_id)),
            ("name", found.name),
            ("state", state(found.state)),
            ("labels", shown_labels(found.labels)),
            ("seen at", moment(found.at)),
        ]
    )
    _show_reasons(found.reasons)
    if found.left_out:
        more = amount(found.left_out, "more node has", plural="more nodes have")
        say(f"{more} not ended: everbeat workflows show {found.workflow_id}")


def _show_schedule(found: ScheduleExplanation) -> None:
    show_pairs(
        [
            ("schedule", found.schedule),
            ("state", found.state),
            ("task", found.task),
            ("next at", optional_moment(found.next_at)),
            ("seen at", moment(found.at)),
        ]
    )
    _show_reasons(found.reasons)


def _show_reasons(reasons: Sequence[Reason]) -> None:
    """Write each reason to stdout as a paragraph."""
    console = stdout_console()
    for reason in reasons:
        console.print(Text.assemble("\n", (reason.code.value, "bold"), f"  {on_one_line(reason.text)}"))
        times = [
            f"{label} {moment(value)}"
            for label, value in (("since", reason.since), ("until", reason.until))
            if value is not None
        ]
        if times:
            console.print(f"  {', '.join(times)}")
        if reason.command is not None:
            console.print(Text.assemble("  try: ", (on_one_line(reason.command), "cyan")))
