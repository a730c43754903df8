"""The commands of `everbeat recoveries`. The default command is `list`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.output import (
    Column,
    brief_moment,
    compact_json,
    duration,
    moment,
    optional_moment,
    say,
    show_heading,
    show_json,
    show_pairs,
    show_rows,
    state,
)
from everbeat.cli.selection import (
    LimitOption,
    ShortIds,
    SinceOption,
    full_task_id,
    full_worker_id,
    short_ids,
    to_moment,
    to_past,
    with_app,
)
from everbeat.domain.inspection import RecoveryInfo
from everbeat.domain.recovery.decision import counted_from
from everbeat.errors import RecoveryNotFound
from everbeat.errors.wording import amount

_ACTIONS: Final = {
    "requeue": "returned to its place in the queue, not charged",
    "retry": "will run again",
    "reschedule": "rescheduled by a hook",
    "fail": "failed",
    "cancel": "cancelled, as requested",
}
_CHARGES: Final = {
    "crash": "a crash: its process died while running only this task",
    "loss": "a loss: its holder died or vanished for an unknown reason",
}


def _show_recovery(recovery: RecoveryInfo) -> None:
    death = _certificate(recovery.certificate)
    show_pairs(_task(recovery))
    show_heading("Death")
    show_pairs(_death(recovery, death))
    show_heading("Recovery")
    show_pairs(_action(recovery, death))
    show_heading("After the recovery")
    show_pairs(_aftermath(recovery))


def _certificate(stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the data of the death certificate, which is stored as the error of the attempt."""
    data = None if stored is None else stored.get("data")
    return data if isinstance(data, Mapping) else {}


def _task(recovery: RecoveryInfo) -> Iterator[tuple[str, str | Text | None]]:
    yield "no", str(recovery.id)
    yield "task", str(recovery.task_id)
    yield "name", recovery.name
    yield "queue", recovery.queue
    yield "was", state(recovery.was)
    yield "attempt", str(recovery.attempt)


def _death(recovery: RecoveryInfo, death: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    pid = death.get("pid", recovery.pid)
    place = "not registered" if recovery.hostname is None else f"pid {pid} on {recovery.hostname}"
    yield "worker", f"{recovery.worker_id} ({place})"
    yield "supervisor", recovery.supervisor_id
    yield "cause", recovery.cause
    yield "exit code", _number(death.get("exit_code"))
    yield "signal", _number(death.get("signal"))
    yield "out of memory", "yes" if death.get("out_of_memory") else None
    rss = death.get("last_rss_bytes")
    yield "last memory", f"{rss / 2**20:.0f} MiB" if isinstance(rss, int) else None
    progress = death.get("last_progress")
    yield "last progress", None if progress is None else compact_json(progress)
    yield "last beat", optional_moment(recovery.last_beat_at)
    after_ms = recovery.noticed_after_ms
    since = counted_from(recovery.noticed_by)
    after = "" if after_ms is None else f", {duration(after_ms / 1_000)} after {since}"
    yield "noticed", f"by {recovery.noticed_by.replace('_', ' ')}{after}"


def _action(recovery: RecoveryInfo, death: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    meaning = _ACTIONS.get(recovery.action)
    yield "recovered", f"{moment(recovery.noticed_at)} by {recovery.recovered_by}"
    yield "action", recovery.action if meaning is None else f"{recovery.action} ({meaning})"
    yield "hook", recovery.hook
    yield "charged", None if recovery.charge is None else _CHARGES.get(recovery.charge, recovery.charge)
    counts = [
        amount(death[name], one, plural=many)
        for name, one, many in _COUNTS
        if isinstance(death.get(name), int)
    ]
    yield "counted so far", ", ".join(counts) or None
    yield "poison", "yes: it does not run again" if death.get("poison") else None
    yield "suspect", "yes: its next attempt runs alone in a process" if recovery.suspect else None
    yield "run again from", optional_moment(recovery.next_retry_at)


_COUNTS: Final = (("crash_count", "crash", "crashes"), ("loss_count", "loss", "losses"))


def _aftermath(recovery: RecoveryInfo) -> Iterator[tuple[str, str | Text | None]]:
    yield "ran again", optional_moment(recovery.ran_again_at) or "not yet"
    yield "on worker", recovery.ran_again_on
    yield "is now", "its record was pruned" if recovery.became is None else state(recovery.became)


def _number(value: object) -> str | None:
    return str(value) if isinstance(value, int) else None


commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="Show tasks that were recovered from dead workers: `list` (the default) or one recovery.",
)


@commands.command("list")
@with_app
def list_recoveries(
    app: App,
    *,
    task: Annotated[
        str | None, typer.Option("--task", metavar="ID", help="Only recoveries of this task.")
    ] = None,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="WORKER", help="Of tasks that this dead worker held.")
    ] = None,
    since: SinceOption = None,
    cause: Annotated[
        str | None,
        typer.Option(
            "--cause",
            metavar="TEXT",
            help="Only recoveries whose cause contains this text, or whose death was noticed in this way.",
        ),
    ] = None,
    ended_before: Annotated[
        str | None,
        typer.Option(
            "--ended-before", metavar="TIME", help="Of tasks that ended before 2030-01-31T12:00:00Z."
        ),
    ] = None,
    limit: LimitOption = 50,
    as_json: bool,
) -> None:
    """List the tasks that were recovered from dead workers, newest first.

    Each line shows the cause of death, how and how soon it was noticed, and the action taken.
    """
    with named_as_options({"cause": "--cause"}):
        found = app.recoveries(
            full_task_id(app, task),
            worker=full_worker_id(app, worker),
            since=to_past(since),
            cause=cause,
            ended_before=None if ended_before is None else to_moment(ended_before, option="--ended-before"),
            limit=limit,
        )
    if as_json:
        more = {"examined": found.examined, "continue_before": found.continue_before}
        show_json({"recoveries": found, **more})
        return
    is_all = (task, worker, since, cause, ended_before) == (None,) * 5
    show_recoveries(
        found,
        ids=short_ids(
            app, uuids=[each.task_id for each in found], parties=[each.worker_id for each in found]
        ),
        empty="No recoveries." if is_all else "No matching recoveries.",
    )
    if found.continue_before is not None:
        say(
            f"The search stopped after the {found.examined:,} recovered tasks that ended last. Continue with older tasks:"
            f" --ended-before {found.continue_before.astimezone(UTC).isoformat()}"
        )


@commands.command()
@with_app
def show(
    app: App,
    number: Annotated[int, typer.Argument(metavar="NO", help="The recovery's number.", show_default=False)],
    *,
    as_json: bool,
) -> None:
    """Show everything about one recovery: the death, the action taken, and the task's later state."""
    found = app.recoveries(number=number, limit=1)
    if not found:
        raise RecoveryNotFound(
            f"Recovery {number} does not exist: this schema never had it, or it was pruned with its task.",
            fix="list all with 'everbeat recoveries', or those of one task with --task.",
        )
    if as_json:
        show_json({"recovery": found[0]})
    else:
        _show_recovery(found[0])


def show_recoveries(found: Sequence[RecoveryInfo], *, ids: ShortIds, empty: str = "") -> None:
    """Write a table of recoveries to stdout."""
    rows = [
        (
            Column("NO", str(each.id), is_number=True),
            Column("TASK", ids.uuid(each.task_id), drop=2),
            Column("NAME", each.name),
            Column("WAS", str(each.was), drop=6),
            Column("CAUSE", each.cause, is_text=True),
            Column("NOTICED BY", each.noticed_by, drop=5),
            Column("AFTER", _seconds(each.noticed_after_ms), drop=4, is_number=True),
            Column("ACTION", each.action, drop=1),
            Column("RECOVERED", brief_moment(each.noticed_at), drop=3),
            Column("RAN AGAIN", brief_moment(each.ran_again_at), drop=7),
            Column("WORKER", ids.party(each.worker_id)),
        )
        for each in found
    ]
    show_rows(rows, empty=empty)


def _seconds(milliseconds: int | None) -> str:
    return duration(None if milliseconds is None else milliseconds / 1_000)
