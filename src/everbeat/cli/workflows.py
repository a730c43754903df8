"""`everbeat workflows list | show | pause | resume | cancel | retry | reconcile`; `list` is meant where none is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer
from msgspec import structs

from everbeat.cli.default_command import ListByDefault
from everbeat.cli.output import amount, brief_moment, say, show_json, show_table, state
from everbeat.cli.selection import AppOption, JsonOption, LimitOption, SchemaOption, UrlOption, selected_app
from everbeat.cli.several import Done, for_each
from everbeat.cli.typed import typed_as
from everbeat.cli.workflow_page import (
    WorkflowSeen,
    show_graph,
    show_workflow,
    workflow_document,
    workflow_remark,
)
from everbeat.client.workflow_handle import WorkflowHandle
from everbeat.domain.drawing import picture
from everbeat.domain.drawing_mermaid import mermaid
from everbeat.domain.drawing_svg import svg
from everbeat.domain.workflow_info import StuckWorkflow, WorkflowRetry, WorkflowState
from everbeat.errors import UnknownName, WorkflowNotFound, WorkflowNotRetryable
from everbeat.runtime.clock import SystemClock

commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="List workflows (`list`, meant where nothing is named), show and draw one, pause, resume, cancel and retry them.",
)

IdArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="ID", help="The workflow's id.", show_default=False)
]
IdsArgument: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="ID...", help="The workflows' ids.", show_default=False)
]
_MOST_NAMED: Final = 20
_UNREAD: Final = ("output", "result")
_LISTED: Final = {"list_workflows.limit": "--limit", "list_workflows.state": "--state"}


@commands.command("list")
def list_workflows(
    *,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Of this name.")] = None,
    in_state: Annotated[
        WorkflowState | None, typer.Option("--state", case_sensitive=False, help="In this state.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Started with this key.")] = None,
    children: Annotated[
        bool, typer.Option("--children", help="Also those that are nodes of others.")
    ] = False,
    limit: LimitOption = 50,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """List workflows, newest first."""
    with selected_app(url=url, schema=schema, locator=app) as chosen, typed_as(_LISTED):
        found = chosen.list_workflows(name=name, state=in_state, key=key, children=children, limit=limit)
    if as_json:
        # A list does not read results: nothing is better than a null that says there is none.
        documents = [workflow_document(each) for each in found]
        show_json(
            {"workflows": [{name: one[name] for name in one if name not in _UNREAD} for one in documents]}
        )
        return
    rows = [
        (
            str(each.id),
            state(each.state),
            each.name,
            each.key or "",
            f"{each.nodes:,}",
            brief_moment(each.sent_at),
            workflow_remark(each),
        )
        for each in found
    ]
    columns = ("ID", "STATE", "NAME", "KEY", "NODES", "SENT", "WHAT")
    show_table(columns, rows, numbers=("NODES",), empty="No workflow is like that.")
    if len(found) == limit:
        say("There may be more: ask with a larger --limit.")


@commands.command()
def show(
    workflow_id: IdArgument,
    *,
    graph: Annotated[bool, typer.Option("--graph", help="Draw it: what waits for what.")] = False,
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Write it as a Mermaid flowchart.")] = False,
    svg_file: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Draw it into this SVG file; - is stdout."),
    ] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything about one workflow: times, what it came to, its nodes and what they wait for.

    Members of a map are one line, and of nodes that are too many those that ended well are counted only.
    """
    wanted = [name for name, given in _formats(graph, as_mermaid, svg_file, as_json) if given]
    if len(wanted) > 1:
        raise typer.BadParameter(f"give one of {' and '.join(wanted)}: each is another document.")
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        handle = chosen.workflow_handle(workflow_id)
        seen = WorkflowSeen(handle.info(), handle.nodes(), SystemClock().wall())
    if as_json:
        show_json(workflow_document(seen.info) | {"nodes": seen.nodes})
    elif graph:
        show_graph(seen, width=shutil.get_terminal_size().columns)
    elif as_mermaid:
        print(mermaid(picture(seen.nodes, at=seen.at)), end="")
    elif svg_file is not None:
        _write_svg(seen, svg_file)
    else:
        show_workflow(seen)


def _formats(
    graph: bool, as_mermaid: bool, svg_file: Path | None, as_json: bool
) -> tuple[tuple[str, bool], ...]:
    return ("--graph", graph), ("--mermaid", as_mermaid), ("--svg", svg_file is not None), ("--json", as_json)


def _write_svg(seen: WorkflowSeen, file: Path) -> None:
    drawn = picture(seen.nodes, at=seen.at)
    document = svg(drawn, title=f"workflow {seen.info.name} {seen.info.id}: {seen.info.state}")
    if str(file) == "-":
        print(document, end="")
        return
    try:
        file.write_text(document, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error.strerror}.") from None
    say(f"Drew {amount(len(drawn.boxes), 'box', plural='boxes')} into {file}.")
    if drawn.left_out:
        say(f"{amount(drawn.left_out, 'more node is', plural='more nodes are')} not drawn.")


def _acting(
    word: str,
    help_text: str,
    act: Callable[[WorkflowHandle[Any]], WorkflowState],
    refusals: tuple[type[WorkflowNotFound] | type[WorkflowNotRetryable], ...],
) -> None:
    @commands.command(word, help=help_text)
    def command(
        workflow_ids: IdsArgument,
        *,
        url: UrlOption = None,
        schema: SchemaOption = None,
        app: AppOption = None,
        as_json: JsonOption = False,
    ) -> None:
        with selected_app(url=url, schema=schema, locator=app) as chosen:

            def one(workflow_id: str) -> Done:
                now = act(chosen.workflow_handle(workflow_id))
                return Done({"id": workflow_id, "state": now}, f"{workflow_id}  {now}")

            for_each(workflow_ids, one, refusals=refusals, key="id", listed_as="workflows", as_json=as_json)


_acting(
    "pause",
    "Let nothing more begin in these workflows, nor in their children; what runs ends.",
    lambda handle: handle.pause(),
    (WorkflowNotFound,),
)
_acting(
    "resume",
    "Let paused workflows go on, their children too.",
    lambda handle: handle.resume(),
    (WorkflowNotFound,),
)
_acting(
    "cancel",
    "Cancel workflows and their children: what has not begun is skipped, what runs is asked to stop.",
    lambda handle: handle.cancel(),
    (WorkflowNotFound,),
)


@commands.command()
def retry(
    workflow_ids: IdsArgument,
    *,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep-completed", help="Run no node again that completed, although its input changes."
        ),
    ] = False,
    from_node: Annotated[
        str | None,
        typer.Option(
            "--from-node", metavar="NODE", help="Run this node again, too, also of a workflow that COMPLETED."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which nodes would run again.")] = False,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Begin again what ended badly in workflows that FAILED, were CANCELLED or are PAUSED, and everything downstream of it."""
    with selected_app(url=url, schema=schema, locator=app) as chosen:

        def one(workflow_id: str) -> Done:
            answer = chosen.workflow_handle(workflow_id).retry(
                completed="keep" if keep else "rerun", from_node=from_node, dry_run=dry_run
            )
            return Done(
                {"id": workflow_id} | structs.asdict(answer),
                f"{workflow_id}  {answer.state}",
                "; ".join(_retried(answer)) or None,
            )

        refusals = (WorkflowNotFound, WorkflowNotRetryable, UnknownName)
        for_each(workflow_ids, one, refusals=refusals, key="id", listed_as="workflows", as_json=as_json)


def _retried(answer: WorkflowRetry) -> Iterator[str]:
    would = "would run" if answer.dry_run else "run"
    for names, said in (
        (answer.again, f"{would} again"),
        (answer.completed, "had COMPLETED"),
        (answer.kept, "downstream, not run again"),
    ):
        if names:
            more = "" if len(names) <= _MOST_NAMED else f" and {len(names) - _MOST_NAMED:,} more"
            yield f"{said}: {', '.join(names[:_MOST_NAMED])}{more}"


@commands.command()
def reconcile(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is stuck.")] = False,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find what should have happened in workflows more than 10 s ago and has not, and do it.

    Every supervisor does so by itself; this is for whoever has none running, or wants to know.
    """
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        found = chosen.recover_stuck_workflows(dry_run=dry_run)
    if as_json:
        show_json({"dry_run": dry_run, "stuck": found})
        return
    show_table(
        ("WORKFLOW", "NAME", "NODE", "STUCK AT", "TASK"), map(_stuck, found), empty="Nothing is stuck."
    )
    problems = {each.workflow_id: each.problem for each in found if each.problem is not None}
    number = amount(sum(each.problem is None for each in found), "thing")
    if found:
        say(f"Dry run: {number} would be put right." if dry_run else f"{number} put right.")
    for workflow_id, problem in problems.items():
        say(
            f"{workflow_id} cannot go on: {problem}. Correct its rows with SQL, or cancel it: everbeat workflows cancel {workflow_id}."
        )


def _stuck(found: StuckWorkflow) -> tuple[str, ...]:
    task = "" if found.task_id is None else str(found.task_id)
    return str(found.workflow_id), found.workflow, found.node or "", found.what, task
