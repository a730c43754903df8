"""The commands of `everbeat workflows`. The default command is `list`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer
from msgspec import Struct, structs
from rich.text import Text

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.output import (
    Column,
    brief,
    brief_moment,
    compact_json,
    duration,
    moment,
    optional_moment,
    paragraph,
    say,
    show_heading,
    show_json,
    show_pairs,
    show_rows,
    shown_labels,
    state,
    state_style,
    stdout_console,
)
from everbeat.cli.selection import (
    Done,
    LabelFilterOption,
    ShortIds,
    SinceOption,
    SmallLimitOption,
    UntilOption,
    for_each,
    full_task_id,
    full_workflow_id,
    labels_sought,
    short_ids,
    to_past,
    with_app,
)
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.domain.documents import listed_workflow_document, workflow_document
from everbeat.domain.drawing.diagrams import mermaid, svg
from everbeat.domain.drawing.picture import Drawn, folded, picture, printable, tally
from everbeat.domain.drawing.text import SYMBOLS, draw
from everbeat.domain.workflow.states import (
    STUCK,
    NodeInfo,
    NodeState,
    StuckWorkflow,
    WorkflowInfo,
    WorkflowRetry,
    WorkflowState,
)
from everbeat.errors import TaskError, UnknownName, WorkflowNotFound, WorkflowNotRetryable
from everbeat.errors.wording import amount, some
from everbeat.runtime.clock import SystemClock

_MOST_LINES: Final = 60
_UNREMARKABLE: Final = frozenset({NodeState.COMPLETED, NodeState.SKIPPED, NodeState.PENDING})


class _Snapshot(Struct, frozen=True):
    """A workflow and its nodes at one point in time."""

    info: WorkflowInfo
    nodes: Sequence[NodeInfo]
    at: datetime


def _remark(info: WorkflowInfo) -> str:
    """Return a workflow's error or progress, to show in the list."""
    if info.error is not None and info.state is WorkflowState.FAILED:
        return brief(str(info.error))
    if info.state is WorkflowState.COMPLETED:
        return ""
    return tally(info.counts)


def _show_workflow(seen: _Snapshot, *, ids: ShortIds) -> None:
    show_pairs(_facts(seen))
    boxes = folded(seen.nodes, at=seen.at, limit=_MOST_LINES)
    errors = {node.name: node.error for node in seen.nodes if node.error is not None}
    show_heading("Nodes")
    show_rows(
        (_node(box, errors, ids=ids) for box in _first_lines(boxes)), empty="The workflow has no nodes."
    )
    if len(boxes) > _MOST_LINES:
        left_out = amount(len(boxes) - _MOST_LINES, "line is", plural="lines are")
        say(f"{left_out} left out; failed and running nodes come first.")
    if seen.info.error is not None and seen.info.error.traceback:
        show_heading("Traceback")
        show_pairs([("", paragraph(seen.info.error.traceback.rstrip()))])


def _show_graph(seen: _Snapshot, *, width: int) -> None:
    console = stdout_console()
    head = f"{printable(seen.info.name)}  {seen.info.id}  "
    console.print(Text.assemble(head, state(seen.info.state)), soft_wrap=True)
    drawn = picture(seen.nodes, at=seen.at, limit=_MOST_LINES)
    for line in draw(drawn, width=width, plain=not _can_draw()):
        text = Text()
        for span in line:
            text.append(span.text, style="" if span.state is None else state_style(span.state))
        text.rstrip()
        console.print(text, soft_wrap=True)


def _can_draw() -> bool:
    try:
        "".join((*SYMBOLS.values(), "│─╭╮╰╯├┤┬┴┼…")).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _facts(seen: _Snapshot) -> Iterator[tuple[str, str | Text | None]]:
    info = seen.info
    yield "id", str(info.id)
    yield "name", info.name
    yield "key", info.key
    yield "state", state(info.state)
    yield "nodes", f"{info.nodes:,}: {_tally(seen.nodes)}" if info.nodes else "0"
    yield "on error", info.on_error
    yield "parent", None if info.parent_id is None else str(info.parent_id)
    yield "started by task", None if info.parent_task_id is None else str(info.parent_task_id)
    yield "labels", shown_labels(info.labels)
    yield "output", info.output
    yield (
        "result",
        compact_json(info.result) if info.state is WorkflowState.COMPLETED and info.output else None,
    )
    yield "error", None if info.error is None else paragraph(str(info.error))
    yield (
        "error data",
        None if info.error is None or info.error.data is None else compact_json(info.error.data),
    )
    yield "sent at", moment(info.sent_at)
    yield "paused at", optional_moment(info.paused_at)
    yield "cancel requested at", optional_moment(info.cancel_requested_at)
    yield "ended at", optional_moment(info.ended_at)
    yield (
        "took",
        duration(((info.ended_at or seen.at) - info.sent_at).total_seconds())
        + ("" if info.ended_at else " so far"),
    )


def _tally(nodes: Sequence[NodeInfo]) -> str:
    counts = dict.fromkeys((node.state for node in nodes), 0)
    for node in nodes:
        counts[node.state] += 1
    return tally(counts)


def _node(box: Drawn, errors: Mapping[str, TaskError], *, ids: ShortIds) -> tuple[Column, ...]:
    error = None if box.counts else errors.get(box.key)
    remarks = [box.status] if box.counts else [] if error is None else [brief(str(error))]
    if box.waiting:
        remarks.append(box.waiting)
    return (
        Column("NODE", printable(box.label)),
        Column("STATE", state(box.state)),
        Column("KIND", box.kind, drop=4),
        Column("TASK", box.task or "", drop=3),
        Column("TRY", str(box.attempt or ""), drop=2, is_number=True),
        Column("TOOK", duration(box.seconds), drop=1),
        Column("WHAT", "; ".join(remarks), is_text=True),
        Column("ID", ids.uuid(box.task_id)),
    )


def _first_lines(boxes: Sequence[Drawn]) -> Sequence[Drawn]:
    """Return the boxes that fit. If not all boxes fit, failed and running nodes take precedence."""
    if len(boxes) <= _MOST_LINES:
        return boxes
    return sorted(boxes, key=lambda box: box.state in _UNREMARKABLE and not box.counts)[:_MOST_LINES]


commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="List workflows (`list`, the default), show and draw one, pause, resume, cancel and retry them.",
)

WorkflowIdArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="ID", help="The workflow's id.", show_default=False)
]
WorkflowIdsArgument: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="ID...", help="The workflows' ids.", show_default=False)
]
_MOST_NAMED: Final = 20
_OPTIONS: Final = {
    "list_workflows.limit": "--limit",
    "list_workflows.state": "--state",
    "list_workflows.labels": "--label",
    "list_workflows.parent": "--parent",
    "until": "--until",
}


@commands.command("list")
@with_app
def list_workflows(
    app: App,
    *,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="With this name.")] = None,
    in_state: Annotated[
        WorkflowState | None,
        typer.Option(
            "--state",
            metavar="STATE",
            case_sensitive=False,
            help=f"In this state: {', '.join(WorkflowState).lower()}.",
        ),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Started with this key.")] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="ID", help="Started by this task.")
    ] = None,
    children: Annotated[
        bool, typer.Option("--children", help="Include workflows that are nodes of others.")
    ] = False,
    since: SinceOption = None,
    until: UntilOption = None,
    labels: LabelFilterOption = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="ID", help="The page after this workflow in the list.")
    ] = None,
    limit: SmallLimitOption = 50,
    as_json: bool,
) -> None:
    """List workflows, newest first."""
    with named_as_options(_OPTIONS):
        found = app.list_workflows(
            name=name,
            state=in_state,
            key=key,
            parent=full_task_id(app, parent),
            children=children,
            since=to_past(since),
            until=to_past(until, option="--until"),
            labels=labels_sought(labels),
            before=full_workflow_id(app, before),
            limit=limit,
        )
    if as_json:
        show_json({"workflows": [listed_workflow_document(each) for each in found]})
        return
    ids = short_ids(app, uuids=[each.id for each in found])
    rows = [
        (
            Column("ID", ids.uuid(each.id)),
            Column("STATE", state(each.state)),
            Column("NAME", each.name),
            Column("KEY", each.key or "", drop=2),
            Column("NODES", f"{each.nodes:,}", drop=3, is_number=True),
            Column("SENT", brief_moment(each.sent_at), drop=1),
            Column("WHAT", _remark(each), is_text=True),
        )
        for each in found
    ]
    show_rows(rows, empty="No matching workflows.")
    if len(found) == limit:
        say(f"There might be more: --before {found[-1].id}")


@commands.command()
@with_app
def show(
    app: App,
    workflow_id: WorkflowIdArgument,
    *,
    graph: Annotated[bool, typer.Option("--graph", help="Draw its nodes and their dependencies.")] = False,
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Write it as a Mermaid flowchart.")] = False,
    svg_file: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Draw it into this SVG file; - is stdout."),
    ] = None,
    as_json: bool,
) -> None:
    """Show everything about one workflow: times, result, nodes, and what the nodes are waiting for.

    The members of a map share one line. If there are too many nodes, COMPLETED ones are only counted.
    """
    formats = {"--graph": graph, "--mermaid": as_mermaid, "--svg": svg_file is not None, "--json": as_json}
    if len(chosen := [name for name, is_given in formats.items() if is_given]) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} exclude each other: give one of them.")
    handle = app.workflow_handle(full_workflow_id(app, workflow_id))
    seen = _Snapshot(handle.info(), handle.nodes(), SystemClock().wall())
    if as_json:
        show_json(workflow_document(seen.info) | {"nodes": seen.nodes})
    elif graph:
        _show_graph(seen, width=shutil.get_terminal_size().columns)
    elif as_mermaid:
        print(mermaid(picture(seen.nodes, at=seen.at)), end="")
    elif svg_file is not None:
        _write_svg(seen, svg_file)
    else:
        _show_workflow(seen, ids=short_ids(app, uuids=[each.task_id for each in seen.nodes]))


def _write_svg(seen: _Snapshot, file: Path) -> None:
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


def _add_action(name: str, act: Callable[[WorkflowHandle[Any]], WorkflowState], help_text: str) -> None:
    @commands.command(name, help=help_text)
    @with_app
    def command(app: App, workflow_ids: WorkflowIdsArgument, *, as_json: bool) -> None:
        def one(workflow_id: str) -> Done:
            workflow_id = full_workflow_id(app, workflow_id)
            now = act(app.workflow_handle(workflow_id))
            return Done({"id": workflow_id, "state": now}, f"{workflow_id}  {now}")

        for_each(
            workflow_ids,
            one,
            refusals=(WorkflowNotFound,),
            key="id",
            listed_as="workflows",
            as_json=as_json,
        )


_add_action(
    "pause",
    lambda handle: handle.pause(),
    "Start no more nodes in these workflows or their children. Running nodes finish.",
)
_add_action("resume", lambda handle: handle.resume(), "Let paused workflows and their children continue.")
_add_action(
    "cancel",
    lambda handle: handle.cancel(),
    "Cancel workflows and their children: skip nodes that have not started, ask running ones to stop.",
)


@commands.command()
@with_app
def retry(
    app: App,
    workflow_ids: WorkflowIdsArgument,
    *,
    keep: Annotated[
        bool,
        typer.Option("--keep-completed", help="Do not rerun COMPLETED nodes, even if their input changes."),
    ] = False,
    from_node: Annotated[
        str | None,
        typer.Option(
            "--from-node", metavar="NODE", help="Also rerun this node, even in a COMPLETED workflow."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show which nodes would run again.")
    ] = False,
    as_json: bool,
) -> None:
    """Rerun the unsuccessful nodes of FAILED, CANCELLED or PAUSED workflows, and all nodes downstream of them."""

    def one(workflow_id: str) -> Done:
        workflow_id = full_workflow_id(app, workflow_id)
        answer = app.workflow_handle(workflow_id).retry(
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
    for names, label in (
        (answer.again, f"{would} again"),
        (answer.completed, "had COMPLETED"),
        (answer.kept, "downstream, not run again"),
    ):
        if names:
            yield f"{label}: {some(names, limit=_MOST_NAMED)}"


@commands.command()
@with_app
def reconcile(
    app: App,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what is stuck.")] = False,
    as_json: bool,
) -> None:
    """Carry out workflow steps that have been overdue for more than 10 s.

    Every supervisor does this by itself. Use it to inspect stuck workflows, or when no supervisor is running.
    """
    found = app.recover_stuck_workflows(dry_run=dry_run)
    if as_json:
        show_json({"dry_run": dry_run, "stuck": found})
        return
    ids = short_ids(app, uuids=[each for stuck in found for each in (stuck.workflow_id, stuck.task_id)])
    show_rows((_stuck(each, ids=ids) for each in found), empty="Nothing is stuck.")
    problems = {each.workflow_id: each.problem for each in found if each.problem is not None}
    number = amount(sum(each.problem is None for each in found), "step")
    if found:
        say(f"Dry run: {number} would be repaired." if dry_run else f"{number} repaired.")
    for workflow_id, problem in problems.items():
        say(
            f"{workflow_id} cannot continue: {problem}. Correct its rows with SQL, or cancel it: everbeat workflows cancel {workflow_id}."
        )


def _stuck(found: StuckWorkflow, *, ids: ShortIds) -> tuple[Column, ...]:
    return (
        Column("WORKFLOW", ids.uuid(found.workflow_id)),
        Column("NAME", found.workflow, drop=1),
        Column("NODE", found.node or ""),
        Column("STUCK AT", f"{found.what}: {STUCK[found.what]}" if found.what in STUCK else found.what),
        Column("TASK", ids.uuid(found.task_id), drop=2),
    )
