"""The commands of `everbeat schedules`. The default command is `list`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, timedelta
from itertools import islice
from typing import Annotated, Any, Final, TypeAlias

import typer
from msgspec import structs

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.output import (
    Column,
    brief_moment,
    moment,
    say,
    show_heading,
    show_json,
    show_pairs,
    show_rows,
)
from everbeat.cli.schedule_tables import (
    facts,
    in_zone,
    outcome_of,
    run_of,
    run_row,
    show_upcoming,
    spelled,
    state_of,
    tick_row,
    timing_of,
    upcoming_document,
)
from everbeat.cli.selection import (
    AppOption,
    Done,
    JsonOption,
    LimitOption,
    SchemaOption,
    UrlOption,
    database_answer,
    for_each,
    moment_or_length,
    moment_or_span,
    selected_app,
    short_ids,
    to_moment,
    with_app,
)
from everbeat.client.database_access import database_of
from everbeat.client.schedule_runs import last_runs
from everbeat.domain.schedule.inspection import ScheduleInfo, ScheduleState
from everbeat.domain.schedule.model import Timing
from everbeat.domain.schedule.timing import parse_timing, ticks_after
from everbeat.errors import ConfigurationError, NotPaused, ScheduleNotChanged, UnknownName
from everbeat.errors.wording import amount
from everbeat.runtime.clock import SystemClock
from everbeat.store.schedules import list_live_runs

commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="List schedules (`list`, the default), show one and its ticks, pause, resume, run, backfill and delete them.",
)

NameArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="The schedule's name.", show_default=False)
]
SchedulesArgument: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="The schedules' names.", show_default=False)
]
_STATES: Final[tuple[ScheduleState, ...]] = ("ACTIVE", "PAUSED", "RETIRED", "ENDED")
_SHOWN_TICKS: Final = 5
_SHOWN_RUNS: Final = 20
_FEW: Final = 1_000
_MOMENT_FORMS: Final = "2030-01-31T12:00:00Z"


@commands.command("list")
@with_app
def list_schedules(
    app: App,
    *,
    in_state: Annotated[
        str | None,
        typer.Option("--state", metavar="STATE", help=f"In this state: {', '.join(_STATES).lower()}."),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help="That send tasks with this name.")
    ] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="APP", help="That the code of this app declares.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="TEXT", help="Whose names start with this text.")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="NAME", help="The page after this schedule in the list.")
    ] = None,
    limit: LimitOption = 50,
    as_json: bool,
) -> None:
    """List schedules by name: when they tick, their next tick, what happened to the latest tick, and how the last run ended.

    LAST RUN is the state of the latest run. While it has not ended, it is that of the run before, if that one has.
    """
    # An unknown state stays as it was typed, because the error shows it.
    chosen: Any = in_state if in_state is None or in_state.upper() not in _STATES else in_state.upper()
    with named_as_options({"list_schedules.state": "--state"}):
        found = app.list_schedules(
            state=chosen, task=task, owner=owner, prefix=prefix, after=after, limit=limit
        )
    runs = database_of(app).run(last_runs(found), name="list_schedules", twin="alist_schedules")
    if as_json:
        show_json({"schedules": [_document(each) | {"last_run": runs.get(each.name)} for each in found]})
        return
    rows = [
        (
            Column("NAME", each.name),
            Column("STATE", state_of(each)),
            Column("TICKS", timing_of(each.rule), drop=1),
            Column("NEXT", brief_moment(each.next_at)),
            Column("LATEST", "" if each.last_tick is None else brief_moment(each.last_tick.at), drop=2),
            Column("OUTCOME", "" if each.last_tick is None else outcome_of(each.last_tick), drop=4),
            Column("LAST RUN", run_of(runs.get(each.name))),
            Column("RUNS", f"{each.runs:,}", drop=5, is_number=True),
            Column("TASK", each.task, drop=3),
        )
        for each in found
    ]
    show_rows(rows, empty="No matching schedules.")
    if len(found) == limit:
        say(f"There might be more: --after {found[-1].name}")


@commands.command()
@with_app
def show(app: App, name: NameArgument, *, as_json: bool) -> None:
    """Show everything about one schedule: its rule, its live runs, its latest ticks and its next ticks."""
    found = app.schedule_info(name)
    ticks = app.list_ticks(name, limit=_SHOWN_TICKS)
    runs = database_answer(app, list_live_runs(name, limit=_SHOWN_RUNS))
    try:
        upcoming = app.next_ticks(name, _SHOWN_TICKS)
    except ConfigurationError:  # the stored rule is unreadable, or this machine does not know its time zone
        upcoming = []
    if as_json:
        show_json(_document(found) | {"runs_live": runs, "ticks": ticks, "next_ticks": upcoming})
        return
    show_pairs(facts(found))
    ids = short_ids(app, uuids=[*(each.task_id for each in runs), *(each.task_id for each in ticks)])
    if runs:
        show_heading("Live runs")
        show_rows(run_row(each, ids=ids) for each in runs)
    if ticks:
        show_heading("Latest ticks")
        show_rows(tick_row(each, ids=ids) for each in ticks)
    if upcoming:
        show_heading("Next ticks")
        zone = "UTC" if found.rule is None else found.rule.timing.timezone
        show_upcoming(upcoming, zone=zone, now=found.at)


@commands.command("next")
def next_ticks(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The schedule's name.", show_default=False),
    ] = None,
    *,
    number: Annotated[
        int, typer.Option("-n", "--number", min=1, max=_FEW, help="Show this number of ticks.")
    ] = 5,
    cron: Annotated[
        list[str] | None,
        typer.Option(
            "--cron", metavar="EXPRESSION", help="Show the ticks of this cron expression; can be repeated."
        ),
    ] = None,
    every: Annotated[
        str | None, typer.Option("--every", metavar="DURATION", help="Show the ticks of this interval.")
    ] = None,
    offset: Annotated[
        str | None, typer.Option("--offset", metavar="DURATION", help="The offset of --every.")
    ] = None,
    timezone: Annotated[
        str | None, typer.Option("--timezone", metavar="ZONE", help="The time zone of --cron. Default: UTC.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="WHEN", help=f"With --cron or --every: begin at {_MOMENT_FORMS}."),
    ] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the next ticks of a schedule, or of --cron or --every without a database.

    Each tick is shown in the time zone of the schedule and in UTC, without jitter.
    """
    own = {"--cron": cron, "--every": every, "--offset": offset, "--timezone": timezone, "--since": since}
    given = [option for option, value in own.items() if value]
    if cron and every:
        raise typer.BadParameter("--cron and --every exclude each other: give one of them.")
    if name is None:
        if not (cron or every):
            raise typer.BadParameter("give the name of a schedule, or --cron or --every.")
        _show_of_timing(_parsed(cron, every, offset, timezone), since=since, number=number, as_json=as_json)
        return
    if given:
        raise typer.BadParameter(
            f"a schedule has its own rule: give either a name, or {' and '.join(given)}."
        )
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        found, ticks = chosen.schedule_info(name), chosen.next_ticks(name, number)
    timing = Timing() if found.rule is None else found.rule.timing
    if as_json:
        show_json({"schedule": name, "state": found.state} | upcoming_document(timing, ticks))
        return
    show_upcoming(ticks, zone=timing.timezone, now=found.at)
    if found.state == "PAUSED":
        until = "it is resumed" if found.resume_at is None else moment(found.resume_at)
        say(f"The schedule is paused. Ticks until {until} are not sent.")
    elif not ticks:
        say(f"The schedule is {found.state}: it has no further ticks.")
    elif found.rule is not None and found.rule.jitter_ms:
        say(f"Each task is sent up to {spelled(found.rule.jitter_ms)} after its tick (jitter).")


@commands.command()
@with_app
def ticks(
    app: App,
    name: NameArgument,
    *,
    before: Annotated[
        str | None, typer.Option("--before", metavar="WHEN", help=f"Before this moment: {_MOMENT_FORMS}.")
    ] = None,
    limit: LimitOption = 50,
    as_json: bool,
) -> None:
    """List the decided ticks of a schedule, latest first: the task that was sent, or the reason why not."""
    page = None if before is None else to_moment(before, option="--before")
    found = app.list_ticks(name, before=page, limit=limit)
    if as_json:
        show_json({"ticks": found})
        return
    ids = short_ids(app, uuids=[each.task_id for each in found])
    show_rows((tick_row(each, ids=ids) for each in found), empty="No tick has been decided.")
    if len(found) == limit:
        say(f"There might be more: --before {found[-1].at.isoformat()}")


@commands.command()
@with_app
def pause(
    app: App,
    names: SchedulesArgument,
    *,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The reason, shown to other operators.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="WHEN", help=f"Resume after a duration (2h), or at {_MOMENT_FORMS}."),
    ] = None,
    as_json: bool,
) -> None:
    """Stop schedules from sending tasks until `resume` or --until. Runs that were sent before continue."""
    resume_at = None if until is None else moment_or_length(until, option="--until")

    def one(name: str) -> Done:
        was_paused = app.schedule_info(name).paused_at is not None
        found = app.pause_schedule(name, reason=reason, until=resume_at)
        ends = "" if found.resume_at is None else f", until {moment(found.resume_at)}"
        because = "" if found.pause_reason is None else f": {found.pause_reason}"
        paused = "was paused already," if was_paused else "is paused"
        line = (
            f"schedule {name} {paused} since {moment(found.paused_at)}{ends}, by {found.paused_by}{because}"
        )
        note = None
        if was_paused and ((reason or found.pause_reason) != found.pause_reason or resume_at is not None):
            note = (
                f"The earlier pause is unchanged. To change it: everbeat schedules resume {name}, then pause"
                " it again."
            )
        return Done(_document(found), line, note)

    with named_as_options({"pause_schedule.reason": "--reason", "pause_schedule.until": "--until"}):
        for_each(names, one, refusals=(UnknownName,), key="name", listed_as="schedules", as_json=as_json)


@commands.command()
@with_app
def resume(app: App, names: SchedulesArgument, *, as_json: bool) -> None:
    """End the pauses of schedules. The ticks during a pause are recorded as missed."""

    def one(name: str) -> Done:
        found = app.resume_schedule(name)
        return Done(_document(found), f"schedule {name} is resumed")

    refusals = (UnknownName, NotPaused)
    for_each(names, one, refusals=refusals, key="name", listed_as="schedules", as_json=as_json)


@commands.command()
@with_app
def run(app: App, names: SchedulesArgument, *, as_json: bool) -> None:
    """Send the tasks of schedules now, outside their ticks, even if they are paused or have ended."""

    def one(name: str) -> Done:
        handle = app.run_schedule(name)
        return Done({"name": name, "task_id": handle.id}, f"{handle.id}  sent for schedule {name}")

    for_each(names, one, refusals=(UnknownName,), key="name", listed_as="runs", as_json=as_json)


@commands.command()
@with_app
def delete(app: App, names: SchedulesArgument, *, as_json: bool) -> None:
    """Delete schedules that were made at run time or that are retired. Their runs and ticks remain."""

    def one(name: str) -> Done:
        app.delete_schedule(name)
        return Done({"name": name, "deleted": True}, f"schedule {name} is deleted")

    refusals = (UnknownName, ScheduleNotChanged)
    for_each(names, one, refusals=refusals, key="name", listed_as="schedules", as_json=as_json)


_BACKFILL_OPTIONS: Final = {
    "backfill.since": "--since", "backfill.until": "--until", "backfill.overlap": "--overlap",
}  # fmt: skip


@commands.command()
@with_app
def backfill(
    app: App,
    name: NameArgument,
    *,
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="WHEN", help=f"The first tick: since {_MOMENT_FORMS}, or within the last 7d."
        ),
    ],
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="WHEN", help="Only ticks before this moment. Default: now."),
    ] = None,
    overlap: Annotated[
        str,
        typer.Option(
            "--overlap",
            metavar="POLICY",
            help="buffer_all or buffer_one: the runs start one at a time. allow: all can start at once.",
        ),
    ] = "buffer_all",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the ticks that would be sent.")
    ] = False,
    as_json: bool,
) -> None:
    """Send a task for each past tick in a range that has none, in order."""
    policy: Any = overlap
    end = SystemClock().wall() if until is None else moment_or_span(until, option="--until")
    with named_as_options(_BACKFILL_OPTIONS):
        found = app.backfill(
            name,
            since=moment_or_span(since, option="--since"),
            until=end,
            overlap=policy,
            dry_run=dry_run,
        )
    if as_json:
        show_json({"schedule": name, "dry_run": dry_run, "ticks": found})
        return
    for tick in found:
        print(in_zone(tick, UTC))
    counted = amount(len(found), "tick")
    say(f"Dry run: {counted} would be sent." if dry_run else f"Sent {counted}.")


def _document(found: ScheduleInfo) -> dict[str, Any]:
    return structs.asdict(found)


def _parsed(
    cron: Sequence[str] | None, every: str | None, offset: str | None, timezone: str | None
) -> Timing:
    options = {f"ticks.{name}": f"--{name}" for name in ("cron", "every", "offset", "timezone")}
    with named_as_options(options):
        return parse_timing(
            cron=list(cron) if cron else None,
            every=every,
            offset=offset,
            at=None,
            timezone=timezone,
            subject="ticks",
        )


def _show_of_timing(timing: Timing, *, since: str | None, number: int, as_json: bool) -> None:
    now = SystemClock().wall()
    begin = now if since is None else to_moment(since, option="--since") - timedelta(microseconds=1)
    found = list(islice(ticks_after(timing, begin), number))
    if as_json:
        show_json(upcoming_document(timing, found))
        return
    show_upcoming(found, zone=timing.timezone, now=now)
