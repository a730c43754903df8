"""`everbeat explain`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.text import Text

from everbeat.app import App
from everbeat.cli.output import amount, data_console, moment, say, show_heading, show_json, show_pairs, state
from everbeat.cli.selection import AppOption, JsonOption, SchemaOption, UrlOption, selected_app
from everbeat.domain.explanation import Explanation, Reason, WorkflowExplanation
from everbeat.errors import TaskNotFound, WorkflowNotFound
from everbeat.errors.visible import on_one_line

commands = typer.Typer(rich_markup_mode=None, add_completion=False)


@commands.command()
def explain(
    task_id: Annotated[
        str, typer.Argument(metavar="ID", help="The id of a task or of a workflow.", show_default=False)
    ],
    *,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a task is not running, or why it was run again; or why a workflow has not ended.

    Each reason with its code, since when, until when, and the command that helps. With --app the thresholds are those of
    the app's RecoveryConfig.
    """
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        found = _explained(chosen, task_id)
    if as_json:
        show_json({"explanation": found})
    elif isinstance(found, Explanation):
        _show(found)
    else:
        _show_workflow(found)


def _explained(app: App, given: str) -> Explanation | WorkflowExplanation:
    """The explanation of whatever has this id; raises TaskNotFound if that is neither a task nor a workflow."""
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
            ("seen at", moment(found.at)),
        ]
    )
    show_reasons(found.reasons)
    if found.second_runs:
        show_heading("Taken up again, because")
        show_reasons(found.second_runs)


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
            ("seen at", moment(found.at)),
        ]
    )
    show_reasons(found.reasons)
    if found.left_out:
        say(
            f"{amount(found.left_out, 'more node')} have not ended either: everbeat workflows show {found.workflow_id}"
        )


def show_reasons(reasons: Sequence[Reason]) -> None:
    """Reasons for people, one paragraph each."""
    console = data_console()
    for reason in reasons:
        console.print(Text.assemble("\n", (reason.code.value, "bold"), f"  {on_one_line(reason.text)}"))
        times = [
            f"{word} {moment(value)}"
            for word, value in (("since", reason.since), ("until", reason.until))
            if value is not None
        ]
        if times:
            console.print(f"  {', '.join(times)}")
        if reason.command is not None:
            console.print(Text.assemble("  try: ", (on_one_line(reason.command), "cyan")))
