"""The commands of `everbeat limits`. The default command is `list`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, TypeAlias

import typer
from msgspec import structs
from rich.text import Text

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.output import (
    Column,
    brief_moment,
    moment,
    optional_moment,
    say,
    show_heading,
    show_json,
    show_pairs,
    show_rows,
    state,
)
from everbeat.cli.selection import Done, ShortIds, for_each, moment_or_length, short_ids, with_app
from everbeat.domain.limit.inspection import LimitChanges, LimitInfo, LimitKey, LimitNumbers, Permit
from everbeat.errors import UnknownName
from everbeat.store.limits import MOST_LISTED

commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="List limits (`list`, the default), show one with its holders, replace its numbers and restore them.",
)

LimitArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="The limit's name.", show_default=False)
]
_NONE: Final = "none"
_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")
_SHOWN: Final = 20
_OPTIONS: Final = {
    "set_limit": "limits set",
    "set_limit.concurrency": "--concurrency",
    "set_limit.rate": "--rate",
    "set_limit.burst": "--burst",
    "set_limit.until": "--until",
    "set_limit.reason": "--reason",
}


@commands.command("list")
@with_app
def list_limits(app: App, *, as_json: bool) -> None:
    """List limits by name: the numbers in force, the permits in use, and the tasks that wait."""
    found = app.limits()
    if as_json:
        show_json({"limits": [_document(each) for each in found]})
        return
    rows = [
        (
            Column("LIMIT", each.name),
            Column("CONCURRENCY", _permits(each.numbers)),
            Column("RATE", each.numbers.rate or "", drop=1),
            Column("HELD", f"{each.held:,}", is_number=True),
            Column("WAITING", _counted(each, each.waiting), is_number=True),
            Column("KEY", each.key or "", drop=3),
            Column("KEYS", _counted(each, each.keys) if each.key is not None else "", drop=4, is_number=True),
            Column("SET BY", each.set_by or "", drop=2),
            Column("UNTIL", "" if each.until is None else brief_moment(each.until), drop=5),
        )
        for each in found
    ]
    show_rows(rows, empty="No limits.")


@commands.command()
@with_app
def show(app: App, name: LimitArgument, *, as_json: bool) -> None:
    """Show everything about one limit: its numbers, its keys in use, and the tasks that hold its permits."""
    found = app.limit_info(name)
    if as_json:
        show_json(_document(found) | {"in_use": found.in_use, "holders": found.holders})
        return
    show_pairs(_facts(found))
    if found.in_use and (found.key is not None or len(found.in_use) > 1):
        show_heading("Keys in use")
        show_rows(_key_row(each) for each in found.in_use[:_SHOWN])
        _say_rest(len(found.in_use))
    if found.holders:
        ids = short_ids(app, uuids=[each.task_id for each in found.holders[:_SHOWN]])
        show_heading("Holders of permits")
        show_rows(_holder_row(each, ids=ids) for each in found.holders[:_SHOWN])
        _say_rest(len(found.holders))


@commands.command("set")
@with_app
def set_limit(
    app: App,
    name: LimitArgument,
    *,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N", help="The number of permits; 0 lets no task start, 'none' sets no limit."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="The starts per period, such as 100/10s; 'none' sets no limit."),
    ] = None,
    burst: Annotated[
        int | None, typer.Option(metavar="N", help="The number of starts of the rate that can be at once.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="Restore the numbers of the code after a duration (2h), or at 2030-01-31T12:00:00Z.",
        ),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The reason, shown to other operators.")
    ] = None,
    as_json: bool,
) -> None:
    """Replace numbers of a limit in all processes, until `clear` or --until. Omitted options keep their values."""
    changes: LimitChanges = {}
    if reason is not None:
        changes["reason"] = reason
    if concurrency is not None:
        changes["concurrency"] = None if concurrency == _NONE else _number(concurrency)
    if rate is not None:
        changes["rate"] = None if rate == _NONE else rate
    if burst is not None:
        changes["burst"] = burst
    if until is not None:
        changes["until"] = moment_or_length(until, option="--until")
    with named_as_options(_OPTIONS):
        found = app.set_limit(name, **changes)
    _show_changed(found, as_json=as_json)


@commands.command()
@with_app
def clear(
    app: App,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="The limits' names.", show_default=False)
    ],
    *,
    as_json: bool,
) -> None:
    """Restore the numbers that the code declares."""

    def one(name: str) -> Done:
        was_set = app.limit_info(name).set_by is not None
        found = app.clear_limit(name)
        line = f"limit {name}: {_spelled(found.numbers)}"
        return Done(_document(found), line if was_set else f"{line}; no operator had set it")

    for_each(names, one, refusals=(UnknownName,), key="name", listed_as="limits", as_json=as_json)


def _number(text: str) -> Any:
    """Return a number in the form that `set_limit` checks. Other text stays, so that the check reports it."""
    return int(text) if _NUMBER.fullmatch(text) else text


def _document(found: LimitInfo) -> dict[str, Any]:
    document = structs.asdict(found)
    del document["in_use"], document["holders"]
    return document


def _show_changed(found: LimitInfo, *, as_json: bool) -> None:
    if as_json:
        show_json(_document(found))
        return
    ends = "" if found.until is None else f", until {moment(found.until)}"
    because = "" if found.reason is None else f": {found.reason}"
    print(f"limit {found.name}: {_spelled(found.numbers)}, set by {found.set_by}{ends}{because}")


def _permits(numbers: LimitNumbers) -> str:
    return "any" if numbers.concurrency is None else f"{numbers.concurrency:,}"


def _spelled(numbers: LimitNumbers) -> str:
    parts = [] if numbers.concurrency is None else [f"concurrency {numbers.concurrency:,}"]
    if numbers.rate is not None:
        parts.append(f"rate {numbers.rate}" + (f", burst {numbers.burst:,}" if numbers.burst > 1 else ""))
    return ", ".join(parts) or "no limit"


def _facts(found: LimitInfo) -> Iterator[tuple[str, str | Text | None]]:
    yield "name", found.name
    yield "in force", _spelled(found.numbers)
    yield "declared", None if found.declared is None else _spelled(found.declared)
    if found.declared_by is not None:
        yield "declared by", f"{found.declared_by}, {moment(found.declared_at)}"
    yield "key", found.key
    yield "window", found.window if found.numbers.rate is not None else None
    yield "fairness", found.fairness if found.key is not None else None
    yield "weights", ", ".join(f"{key}: {weight}" for key, weight in found.weights.items()) or None
    yield "when full", found.when_full
    if found.set_by is not None:
        because = "" if found.reason is None else f": {found.reason}"
        yield "set", f"by {found.set_by}, {moment(found.set_at)}{because}"
        yield "until", optional_moment(found.until) or "cleared"
    yield "held", f"{found.held:,}"
    yield "waiting", _counted(found, found.waiting)
    yield "closed until", optional_moment(found.closed_until)


def _counted(limit: LimitInfo, number: int) -> str:
    return f"{number:,}{'+' if limit.at_least else ''}"


def _key_row(each: LimitKey) -> tuple[Column, ...]:
    return (
        Column("KEY", each.key or ""),
        Column("HELD", f"{each.held:,}", is_number=True),
        Column("WAITING", f"{each.waiting:,}", is_number=True),
        Column("OPENS", brief_moment(each.opens_at), drop=1),
        Column("CLOSED UNTIL", brief_moment(each.closed_until), drop=2),
    )


def _holder_row(each: Permit, *, ids: ShortIds) -> tuple[Column, ...]:
    return (
        Column("TASK", ids.uuid(each.task_id)),
        Column("NAME", each.name, drop=2),
        Column("KEY", each.key or "", drop=3),
        Column("STATE", state(each.state)),
        Column("SINCE", brief_moment(each.claimed_at), drop=4),
        Column("WORKER", each.worker_id or "", drop=1),
        Column("HOST", each.hostname or "", drop=5),
        Column("PID", "" if each.pid is None else str(each.pid), drop=6, is_number=True),
        Column("BEAT", brief_moment(each.last_beat_at)),
    )


def _say_rest(count: int) -> None:
    if count >= MOST_LISTED:
        say(f"At least {count - _SHOWN:,} more. --json lists the first {MOST_LISTED:,}.")
    elif count > _SHOWN:
        say(f"{count - _SHOWN:,} more: --json")
