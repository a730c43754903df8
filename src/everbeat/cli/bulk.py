"""`everbeat bulk` lists, shows and cancels bulk actions. `everbeat audit` lists the actions of operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Annotated, Any, Final
from uuid import UUID

import typer
from msgspec import structs
from rich.text import Text

from everbeat.app import App
from everbeat.cli.acting import AsOption, document, say_who_waits
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.output import (
    Column,
    brief_moment,
    compact_json,
    moment,
    optional_moment,
    say,
    show_heading,
    show_json,
    show_pairs,
    show_rows,
)
from everbeat.cli.selection import (
    SinceOption,
    SmallLimitOption,
    acting_as,
    database_answer,
    to_past,
    with_app,
)
from everbeat.domain.bulk_actions import SKIPPED, AuditEntry, BulkActionInfo
from everbeat.domain.identifiers import bounds
from everbeat.domain.labels import decode_labels
from everbeat.errors import AmbiguousId, BulkActionNotFound
from everbeat.errors.wording import amount, on_one_line
from everbeat.store.bulk import actions_between

commands = typer.Typer(rich_markup_mode=None, add_completion=False)
bulk = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="List bulk actions (`list`, the default), show and cancel one.",
)
commands.add_typer(bulk, name="bulk")
_ActionId = Annotated[str, typer.Argument(metavar="ID", help="The action's id.", show_default=False)]


@bulk.command("list")
@with_app
def list_actions(app: App, *, limit: SmallLimitOption = 50, as_json: bool) -> None:
    """List bulk actions: those that have not ended, and then the latest."""
    with named_as_options({"bulk_actions.limit": "--limit"}):
        found = app.bulk_actions(limit=limit)
    if as_json:
        show_json({"bulk_actions": [document(each) for each in found]})
        return
    rows = [
        (
            Column("ID", str(each.id)),
            Column("ACTION", each.action.value),
            Column("STATE", each.state.value),
            Column("DONE", f"{each.done:,}", is_number=True),
            Column("SKIPPED", f"{each.skipped:,}", drop=2, is_number=True),
            Column("REQUESTED", brief_moment(each.requested_at), drop=3),
            Column("BY", each.requested_by, drop=4),
            Column("FILTERS", _as_options(each.filters), drop=1, is_text=True),
        )
        for each in found
    ]
    show_rows(rows, empty="No bulk actions.")


@bulk.command()
@with_app
def show(app: App, action_id: _ActionId, *, as_json: bool) -> None:
    """Show how far a bulk action has come, and which tasks it skipped."""
    info = app.bulk_action(_whole(app, action_id)).info
    if as_json:
        show_json(document(info))
        return
    show_pairs(_facts(info))
    if info.reasons:
        show_heading("Skipped")
        show_pairs(
            (f"{count:,}", f"{reason}: {SKIPPED.get(reason, 'for another reason')}")
            for reason, count in info.reasons.items()
        )
    if info.examples:
        show_heading("First skipped tasks")
        show_pairs(
            (str(each.id), " ".join(filter(None, (each.reason, each.detail)))) for each in info.examples
        )
    say_who_waits(app, info)


@bulk.command()
@with_app
def cancel(app: App, action_id: _ActionId, *, actor: AsOption = None, as_json: bool) -> None:
    """Stop a bulk action after its current portion. Tasks that it has changed stay as they are."""
    with acting_as(app, actor):
        info = app.bulk_action(_whole(app, action_id)).cancel()
    if as_json:
        show_json(document(info))
    else:
        verb = (
            f"had already ended as {info.state}"
            if info.state.has_ended
            else "stops after its current portion"
        )
        print(on_one_line(f"{info.id}  {info.action.value}  {verb}"))


def _facts(info: BulkActionInfo) -> Iterator[tuple[str, str | Text | None]]:
    yield "id", str(info.id)
    yield "action", info.action.value
    yield "state", info.state.value
    yield "filters", _as_options(info.filters)
    yield "parameters", compact_json(info.parameters) if info.parameters else None
    yield "requested", f"{moment(info.requested_at)} by {info.requested_by} ({info.origin})"
    for name in ("started_at", "ended_at", "cancel_requested_at"):
        yield name.replace("_", " "), optional_moment(getattr(info, name))
    yield "cancelled by", info.cancelled_by
    yield "carried out by", info.carried_out_by
    yield "examined", amount(info.examined, "task")
    yield "matched", amount(info.matched, "task")
    yield "done", amount(info.done, "task")
    yield "skipped", amount(info.skipped, "task") if info.skipped else None
    yield "problem", info.problem


_PARTS: Final = frozenset(
    ("first_id", "last_id", "states", "plain_states", "virtual_states", "labels", "label_keys")
)
"""Stored parameters that are shown as the options that they come from, or come from the option of another parameter."""


def _as_options(filters: Mapping[str, Any]) -> str:
    """Return stored filters as the options of a command that mean the same."""
    virtual: Sequence[str] = filters.get("virtual_states") or ()
    plain: Sequence[str] = filters.get("plain_states" if virtual else "states") or ()
    labels = decode_labels(filters.get("labels"))
    options = [("state", state.lower()) for state in (*plain, *virtual)]
    options += [("label", f"{key}={value}") for key, value in labels.items()]
    options += [("label", key) for key in filters.get("label_keys") or ()]
    options += [
        (name.replace("_", "-"), str(value)) for name, value in sorted(filters.items()) if name not in _PARTS
    ]
    return " ".join(f"--{name} {quote(value)}" for name, value in options) or "--everything"


def _whole(app: App, given: str) -> str:
    """Return the full id for a prefix. Raises BulkActionNotFound or AmbiguousId."""
    between = bounds(given)
    if between is None:
        return given
    found = database_answer(app, actions_between(*between, limit=6))
    if not found:
        raise BulkActionNotFound(given)
    if len(found) > 1:
        named = [f"{each.id}  {each.name} {each.state}" for each in found[:5]]
        raise AmbiguousId(given, named, more=len(found) > len(named))
    return str(UUID(found[0].id))


@commands.command()
@with_app
def audit(
    app: App,
    *,
    since: SinceOption = None,
    actor: Annotated[str | None, typer.Option("--actor", metavar="NAME", help="By this operator.")] = None,
    action: Annotated[str | None, typer.Option("--action", metavar="ACTION", help="This action.")] = None,
    before: Annotated[
        int | None, typer.Option("--before", metavar="NO", help="The page after this entry in the list.")
    ] = None,
    limit: SmallLimitOption = 50,
    as_json: bool,
) -> None:
    """List the actions of operators, newest first. They are kept for 90 days."""
    with named_as_options({"audit_log.limit": "--limit", "since": "--since", "before": "--before"}):
        found = app.audit_log(since=to_past(since), actor=actor, action=action, before=before, limit=limit)
    if as_json:
        show_json({"entries": [structs.asdict(each) for each in found]})
        return
    show_rows([_row(each) for each in found], empty="No matching actions.")
    if len(found) == limit:
        say(f"There might be more: --before {found[-1].id}")


def _row(entry: AuditEntry) -> tuple[Column, ...]:
    affected = "" if entry.affected is None else f"{entry.affected:,}"
    filters = "" if entry.filters is None else _as_options(entry.filters)
    return (
        Column("NO", str(entry.id), is_number=True),
        Column("AT", brief_moment(entry.at)),
        Column("ACTOR", entry.actor),
        Column("VIA", entry.origin, drop=4),
        Column("ACTION", entry.action),
        Column("TARGET", entry.target or "", drop=3),
        Column("TASKS", affected, drop=2, is_number=True),
        Column("OUTCOME", entry.outcome),
        Column("NOTE", " ".join(filter(None, (filters, entry.note))), drop=1, is_text=True),
    )
