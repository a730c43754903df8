"""The commands of `everbeat tasks` that change tasks: those that are named, or all that match filters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Final, TypeAlias

import typer
from msgspec import Struct, structs

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.output import say, show_json
from everbeat.cli.selection import (
    Done,
    acting_as,
    for_each,
    full_task_id,
    with_app,
)
from everbeat.cli.task_filters import FILTERS, filter_parameters, filters_as_options, read_filters
from everbeat.client.bulk_methods import BulkAction
from everbeat.domain.bulk_actions import SKIPPED, BulkActionInfo, BulkState
from everbeat.domain.inspection import CancelVerdict
from everbeat.domain.task.states import TaskState
from everbeat.errors import ActionRefused, TaskNotFound, TaskNotRetryable
from everbeat.errors.wording import amount, on_one_line

AsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="NAME",
        help="The name for the audit log.  [env: EVERBEAT_ACTOR; default: user and host]",
    ),
]
_NOT_RETRIED: Final = (TaskNotFound, TaskNotRetryable)
_CANCELLED: Final = {
    CancelVerdict.CANCELLED: "cancelled",
    CancelVerdict.REQUESTED: "asked to stop",
    CancelVerdict.ALREADY_ENDED: "had already ended; unchanged",
}


class Selection(Struct, frozen=True, kw_only=True):
    """The tasks that a command acts on: `ids`, or all that match `filters` if `is_bulk` is set."""

    app: App
    ids: Sequence[str]
    is_bulk: bool
    filters: Mapping[str, Any]
    dry_run: bool
    is_confirmed: bool
    reason: str | None
    as_json: bool


_OPTIONS: Final[Mapping[str, tuple[Any, Any]]] = {
    "is_bulk": (
        Annotated[bool, typer.Option("--all", help="Act on all tasks that match the filters.")],
        False,
    ),
    "everything": (
        Annotated[bool, typer.Option("--everything", help="With --all: allow the action without a filter.")],
        False,
    ),
    "dry_run": (Annotated[bool, typer.Option("--dry-run", help="With --all: only count the tasks.")], False),
    "is_confirmed": (
        Annotated[bool, typer.Option("--yes", help="With --all: do not ask for confirmation.")],
        False,
    ),
    "reason": (
        Annotated[
            str | None, typer.Option("--reason", metavar="TEXT", help="With --all: a note for the audit log.")
        ],
        None,
    ),
    "actor": (AsOption, None),
}
_IDS: Final = Annotated[
    list[str] | None, typer.Argument(metavar="[ID...]", help="The tasks' ids, or --all.", show_default=False)
]


def with_selection(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument ID... and the options that select tasks to a command, and pass them to it as `selection`."""
    declared = signature(command, eval_str=True)
    own = [each for each in declared.parameters.values() if each.name != "selection"]
    first = Parameter("ids", Parameter.POSITIONAL_OR_KEYWORD, annotation=_IDS, default=None)
    shared = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=option, default=default)
        for name, (option, default) in _OPTIONS.items()
    ]
    filters = filter_parameters(prefix="With --all: ")

    @wraps(command)
    def run(app: App, *, as_json: bool, **given: Any) -> None:
        chosen = {name: given.pop(name) for name in ("ids", *FILTERS, *_OPTIONS)}
        with acting_as(app, chosen["actor"]), filters_as_options():
            command(app, selection=_selection(app, chosen, as_json=as_json), **given)

    run.__signature__ = declared.replace(parameters=[own[0], first, *own[1:], *filters, *shared])  # type: ignore[attr-defined]
    return run


def _selection(app: App, given: Mapping[str, Any], *, as_json: bool) -> Selection:
    filters = read_filters(app, given)
    ids, is_bulk = given["ids"] or [], given["is_bulk"]
    wants_bulk = (
        any(value is not None for value in filters.values()) or given["everything"] or given["dry_run"]
    )
    if bool(ids) is is_bulk or (ids and wants_bulk):
        raise typer.BadParameter(
            "give either the ids of tasks, or --all with filters such as --name and --state."
        )
    return Selection(
        app=app,
        ids=ids,
        is_bulk=is_bulk,
        filters=filters | {"everything": given["everything"]},
        dry_run=given["dry_run"],
        is_confirmed=given["is_confirmed"],
        reason=given["reason"],
        as_json=as_json,
    )


def act(
    selection: Selection,
    bulk: Callable[..., BulkAction],
    one: Callable[[str], Done],
    *,
    refusals: tuple[type[Any], ...] = (TaskNotFound, ActionRefused),
) -> None:
    """Request the bulk action, or act on each task that is named."""
    if not selection.is_bulk:
        for_each(
            selection.ids, one, refusals=refusals, key="id", listed_as="tasks", as_json=selection.as_json
        )
    if selection.dry_run or not selection.is_confirmed:
        counted = bulk(**selection.filters, dry_run=True).info
        if selection.dry_run:
            _show(counted, selection)
            return
        _confirm(counted)
    _show(bulk(**selection.filters, reason=selection.reason).info, selection)


def _confirm(counted: BulkActionInfo) -> None:
    """Ask whether to act on this many tasks. Without a terminal, --yes is required."""
    count = f"{'' if counted.is_exact else 'at least '}{amount(counted.done, 'task')}"
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"this would change {count}: add --yes, or --dry-run to count only.")
    typer.confirm(f"{counted.action.value.replace('_', ' ').capitalize()} {count}?", abort=True, err=True)


def _show(info: BulkActionInfo, selection: Selection) -> None:
    if selection.as_json:
        show_json(document(info))
        return
    if info.state is BulkState.DRY_RUN:
        count = f"{'' if info.is_exact else 'at least '}{amount(info.done, 'task')}"
        print(f"{info.action.value}  would change {count}")
        for reason, skipped in info.reasons.items():
            print(f"{info.action.value}  would skip {amount(skipped, 'task')}: {SKIPPED.get(reason, reason)}")
        return
    verb = "joined; an identical action has not ended" if info.joined else "requested"
    print(on_one_line(f"{info.id}  {info.action.value}  {verb}"))
    say(f"The supervisors carry it out. To follow it: everbeat bulk show {info.id}")
    say_who_waits(selection.app, info)


def say_who_waits(app: App, info: BulkActionInfo) -> None:
    """Say so if no supervisor is alive that could carry out the action."""
    is_served = any(not each.is_stale for each in app.list_supervisors(ended=False))
    if not info.state.has_ended and not is_served:
        say("No supervisor is alive, so the action waits. Start a worker: everbeat worker module:app")


def document(info: BulkActionInfo) -> dict[str, object]:
    """Return a bulk action as a JSON document."""
    return structs.asdict(info) | {"examples": [structs.asdict(each) for each in info.examples]}


def add_acting(commands: typer.Typer) -> None:
    """Add the commands that change tasks."""
    for name, command in (
        ("cancel", cancel), ("retry", retry), ("run-now", run_now), ("move", move), ("reprioritise", reprioritise), ("delete", delete),
    ):  # fmt: skip
        commands.command(name)(with_app(with_selection(command)))


def cancel(app: App, *, selection: Selection) -> None:
    """Cancel tasks: waiting tasks end at once, running tasks are asked to stop."""

    def one(given: str) -> Done:
        task_id = full_task_id(app, given)
        result = app.cancel(task_id)
        stored = {"id": task_id, "verdict": result.verdict, "state": result.state}
        return Done(stored, f"{task_id}  {result.state}  {_CANCELLED[result.verdict]}")

    act(selection, app.cancel_all, one, refusals=(TaskNotFound,))


def retry(app: App, *, selection: Selection) -> None:
    """Run FAILED, CANCELLED or EXPIRED tasks again, now and with all their retries."""
    act(selection, app.retry_all, _retrying(app), refusals=_NOT_RETRIED)


def retry_tasks(app: App, task_ids: list[str], *, as_json: bool) -> None:
    """Retry tasks, and print the result for each."""
    for_each(task_ids, _retrying(app), refusals=_NOT_RETRIED, key="id", listed_as="tasks", as_json=as_json)


def _retrying(app: App) -> Callable[[str], Done]:
    def one(given: str) -> Done:
        task_id = full_task_id(app, given)
        app.retry(task_id)
        return Done(
            {"id": task_id, "state": TaskState.PENDING}, f"{task_id}  {TaskState.PENDING}  runs again"
        )

    return one


def run_now(app: App, *, selection: Selection) -> None:
    """Make scheduled and retrying tasks due now."""
    act(selection, app.run_all_now, _changing(app, app.run_now, "is due now"))


def move(
    app: App,
    *,
    selection: Selection,
    to: Annotated[str, typer.Option("--to", metavar="QUEUE", help="The new queue.", show_default=False)],
) -> None:
    """Move PENDING tasks to another queue."""

    def moved(**filters: Any) -> BulkAction:
        return app.move_all(to=to, **filters)

    with named_as_options({"move.queue": "--to", "move_all.to": "--to"}):
        act(selection, moved, _changing(app, lambda task: app.move(task, queue=to), f"moved to {to}"))


def reprioritise(
    app: App,
    *,
    selection: Selection,
    to: Annotated[
        int, typer.Option("--to", metavar="PRIORITY", help="The new priority.", show_default=False)
    ],
) -> None:
    """Give PENDING tasks another priority. Tasks with lower numbers run first."""

    def changed(**filters: Any) -> BulkAction:
        return app.reprioritise_all(to=to, **filters)

    with named_as_options({"reprioritise.priority": "--to", "reprioritise_all.to": "--to"}):
        act(
            selection,
            changed,
            _changing(app, lambda task: app.reprioritise(task, priority=to), f"has priority {to}"),
        )


def delete(app: App, *, selection: Selection) -> None:
    """Delete ended tasks with their records."""
    act(selection, app.delete_all, _changing(app, app.delete, "deleted"))


def _changing(app: App, change: Callable[[str], None], done: str) -> Callable[[str], Done]:
    def one(given: str) -> Done:
        task_id = full_task_id(app, given)
        change(task_id)
        return Done({"id": task_id, "verdict": "done"}, f"{task_id}  {done}")

    return one
