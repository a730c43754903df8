"""The commands of `everbeat batches`. The default command is `list`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import typer
from msgspec import structs
from rich.text import Text

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.output import Column, brief_moment, optional_moment, say, show_json, show_pairs, show_rows
from everbeat.cli.selection import Done, SmallLimitOption, for_each, full_batch_id, with_app
from everbeat.domain.batch import BatchInfo
from everbeat.errors import BatchNotFound

commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="List batches (`list`, the default), show their progress, seal and cancel them.",
)

BatchIdsArgument: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="ID...",
        help="The ids of batches, or at least the first 4 digits of each.",
        show_default=False,
    ),
]


@commands.command("list")
@with_app
def list_batches(
    app: App,
    *,
    live: Annotated[bool, typer.Option("--live", help="Omit batches that have ended.")] = False,
    before: Annotated[
        str | None, typer.Option("--before", metavar="ID", help="The page after this batch in the list.")
    ] = None,
    limit: SmallLimitOption = 50,
    as_json: bool,
) -> None:
    """List batches with their progress, the newest first."""
    after_it = None if before is None else full_batch_id(app, before)
    with named_as_options({"list_batches.before": "--before"}):
        found = app.list_batches(live=live, before=after_it, limit=limit)
    if as_json:
        show_json({"batches": [_document(each) for each in found]})
        return
    rows = [
        (
            Column("ID", str(each.id)),
            Column("STATE", each.state),
            Column("NAME", each.name),
            Column("TASKS", f"{each.total:,}", is_number=True),
            Column("LIVE", f"{each.waiting + each.running:,}", is_number=True),
            Column("COMPLETED", f"{each.completed:,}", drop=2, is_number=True),
            Column("NOT COMPLETED", f"{_missed(each):,}", drop=1, is_number=True),
            Column("CREATED", brief_moment(each.created_at), drop=3),
        )
        for each in found
    ]
    show_rows(rows, empty="No batches.")
    if len(found) == limit:
        say(f"There might be more: --before {found[-1].id}")


@commands.command()
@with_app
def show(
    app: App,
    batch_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The id of a batch, or at least its first 4 digits.", show_default=False
        ),
    ],
    *,
    as_json: bool,
) -> None:
    """Show the progress of one batch: the numbers of its tasks by state, its times, and its callbacks."""
    found = app.open_batch(full_batch_id(app, batch_id)).status()
    if as_json:
        show_json(_document(found))
        return
    show_pairs(_facts(found))


@commands.command()
@with_app
def seal(app: App, batch_ids: BatchIdsArgument, *, as_json: bool) -> None:
    """Seal batches, so that they end when all their tasks have ended."""

    def one(batch_id: str) -> Done:
        batch = app.open_batch(full_batch_id(app, batch_id))
        batch.seal()
        return _done(batch.status())

    for_each(batch_ids, one, refusals=(BatchNotFound,), key="id", listed_as="batches", as_json=as_json)


@commands.command()
@with_app
def cancel(app: App, batch_ids: BatchIdsArgument, *, as_json: bool) -> None:
    """Seal batches, cancel their waiting tasks, and ask the workers to stop the running ones."""

    def one(batch_id: str) -> Done:
        return _done(app.open_batch(full_batch_id(app, batch_id)).cancel())

    for_each(batch_ids, one, refusals=(BatchNotFound,), key="id", listed_as="batches", as_json=as_json)


def _done(found: BatchInfo) -> Done:
    live = f"{found.waiting:,} waiting, {found.running:,} running"
    return Done(_document(found), f"{found.id}  {found.state}", None if found.ended else live)


def _document(found: BatchInfo) -> dict[str, object]:
    return structs.asdict(found) | {"state": found.state}


def _missed(found: BatchInfo) -> int:
    return found.failed + found.cancelled + found.expired


def _facts(found: BatchInfo) -> Iterator[tuple[str, str | Text | None]]:
    yield "id", str(found.id)
    yield "name", found.name
    yield "state", found.state
    yield "tasks", f"{found.total:,}"
    for name in ("waiting", "running", "completed", "failed", "cancelled", "expired"):
        yield name, f"{getattr(found, name):,}"
    yield "created", optional_moment(found.created_at)
    yield "sealed", optional_moment(found.sealed_at)
    yield "cancelled at", optional_moment(found.cancelled_at)
    yield "ended", optional_moment(found.ended_at)
    yield "on end", None if found.on_end_id is None else f"task {found.on_end_id}"
    yield "on success", None if found.on_success_id is None else f"task {found.on_success_id}"
    yield "problem", found.problem
