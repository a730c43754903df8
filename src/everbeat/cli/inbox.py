"""The commands of `everbeat inbox`. The default command is `list`."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer
from msgspec import structs

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.output import Column, brief_moment, compact_json, say, show_json, show_rows, shown_labels
from everbeat.cli.selection import (
    TaskIdArgument,
    acting_as,
    database_answer,
    full_task_id,
    short_ids,
    with_app,
)
from everbeat.client.acting import user_at_host
from everbeat.client.handle import to_task_id
from everbeat.errors.wording import on_one_line
from everbeat.store.questions import read_question

commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="List the questions that tasks ask people (`list`, the default), and answer them.",
)


@commands.command("list")
@with_app
def list_questions(
    app: App,
    *,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=10_000, help="List the questions of at most this many tasks.")
    ] = 100,
    after: Annotated[
        str | None, typer.Option("--after", metavar="ID", help="The page after this task in the list.")
    ] = None,
    as_json: bool,
) -> None:
    """List the questions of tasks that wait for an answer. The task that was sent first is at the beginning."""
    with named_as_options({"inbox.limit": "--limit", "inbox.after": "--after"}):
        found = app.inbox(limit=limit, after=full_task_id(app, after))
    if as_json:
        show_json({"questions": [structs.asdict(each) | {"answer": str(each.type)} for each in found]})
        return
    ids = short_ids(app, uuids=[each.task_id for each in found])
    has_labels = any(each.labels for each in found)
    rows = [
        (
            Column("ID", ids.uuid(each.task_id)),
            Column("TASK", each.name, drop=3),
            Column("SINCE", brief_moment(each.since), drop=2),
            Column("UNTIL", brief_moment(each.until), drop=4),
            *([Column("LABELS", shown_labels(each.labels) or "", drop=5)] if has_labels else []),
            Column("ANSWER", on_one_line(str(each.type)), drop=1),
            Column("QUESTION", on_one_line(_text(each.question, each.note)), is_text=True),
        )
        for each in found
    ]
    show_rows(rows, empty="No task waits for an answer.")
    if len({each.task_id for each in found}) == limit:
        say(f"There might be more: --after {found[-1].task_id}")


def _text(question: str, note: str | None) -> str:
    return question if note is None else f"{question} ({note})"


@commands.command()
@with_app
def answer(
    app: App,
    task_id: TaskIdArgument,
    value: Annotated[
        str,
        typer.Argument(metavar="VALUE", help="The answer: a text, yes or no, or JSON.", show_default=False),
    ],
    *,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="STEP", help="The step of the question, if the task has several."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="NAME",
            help="Your name, which is stored, also in the audit log.  [default: user@host]",
        ),
    ] = None,
    as_json: bool,
) -> None:
    """Answer the question of a task, which then continues. The first answer counts."""
    task_id = str(to_task_id(full_task_id(app, task_id)))
    asked = database_answer(app, read_question(UUID(task_id), step=step))
    given: object = value if asked is None else asked.type.read(value)
    who = by or user_at_host()
    with named_as_options({"answer.by": "--by", "actor": "--by"}), acting_as(app, by):
        answered = app.answer(task_id, given, step=step, by=who)
    if as_json:
        show_json({"id": task_id, "step": answered, "value": given, "by": who})
    else:
        print(on_one_line(f"{task_id}  {answered}  answered {compact_json(given)}"))
