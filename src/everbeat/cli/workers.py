"""`everbeat workers list | quiet | release`; `list` is meant where none is named."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import structs
from rich.text import Text

from everbeat.app import App
from everbeat.cli.default_command import ListByDefault
from everbeat.cli.output import ON_STANDBY, duration, moment, say, show_json, show_table
from everbeat.cli.quiet import add_quiet
from everbeat.cli.selection import AppOption, JsonOption, LimitOption, SchemaOption, UrlOption, selected_app
from everbeat.cli.supervisors import condition, show_supervisors
from everbeat.cli.sweep import show_swept, swept_document
from everbeat.cli.typed import typed_as
from everbeat.domain.explanation import counted
from everbeat.domain.inspection import WorkerInfo, WorkerStateInfo
from everbeat.errors import UnknownName
from everbeat.runtime.clock import SystemClock

commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="Show workers and supervisors, and whether they beat (`list`, meant where nothing is named); release workers.",
)
add_quiet(commands)

_MOST_SNAPSHOTS = 10_000
_MOST_WORKERS = 100_000


@commands.command("list")
def list_workers(
    *,
    history: Annotated[
        str | None,
        typer.Option("--history", metavar="WORKER", help="The snapshots of one worker, newest first."),
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Also workers and supervisors that ended.")] = False,
    stale_after: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Call a worker stale after so long without a beat.")
    ] = None,
    limit: LimitOption = 200,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show workers, what they hold and whether they beat, and the supervisors that keep them.

    Newest beat first; STALE is judged by the database's clock. RSS, CPU, LAG and NATS are of the last snapshot. PROCESSES are the live
    worker processes of a supervisor, and how many it keeps. If it cannot start one, the reason follows.
    """
    if everyone and stale_after is not None:
        raise typer.BadParameter("--stale-after is about workers that have not ended; leave --all out.")
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        if history is not None:
            _show_history(_history(chosen, history, limit=limit), worker=history, as_json=as_json)
            return
        with typed_as({"stale_after": "--stale-after"}):
            found = (
                chosen.list_workers(limit=limit)
                if everyone
                else chosen.list_active_workers(stale_after=stale_after, limit=limit)
            )
            supervisors = chosen.list_supervisors(ended=everyone, stale_after=stale_after, limit=limit)
        snapshots = _latest_snapshots(chosen)
    if as_json:
        workers = [_document(worker, snapshots.get(worker.worker_id)) for worker in found]
        show_json({"workers": workers, "supervisors": supervisors})
    else:
        _show_workers(found, snapshots)
        show_supervisors(supervisors)


@commands.command()
def release(
    worker_ids: Annotated[list[str], typer.Argument(metavar="WORKER...", show_default=False)],
    *,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """End these workers, dead or alive, and recover what they hold at once.

    Their tasks are settled by their policies. One that lives after all loses what it held, and goes on under another id.
    """
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        result = chosen.release_workers(worker_ids)
    if as_json:
        show_json(swept_document(result))
        return
    if result.tasks:
        show_swept(result, empty="")
    holders = {task.worker_id for task in result.tasks}
    for worker_id in dict.fromkeys(worker_ids):
        held = "" if worker_id in holders else " and held nothing"
        if worker_id not in result.worker_ids:
            say(f"{worker_id} had ended already{held}.")
        elif held:
            say(f"{worker_id} was released{held}.")
    if result.worker_ids or result.recovered_count:
        released = counted(len(result.worker_ids), "worker")
        say(f"Released {released}; recovered {counted(result.recovered_count, 'task')}.")


def _history(app: App, worker_id: str, *, limit: int) -> list[WorkerStateInfo]:
    """The snapshots of a worker. Raises UnknownName where neither they nor the worker are on record."""
    found = app.worker_states(worker_id, limit=limit)
    if not found:
        ended = {each.worker_id: each.ended_at is not None for each in app.list_workers(limit=_MOST_WORKERS)}
        if worker_id not in ended:
            live = [name for name, is_over in ended.items() if not is_over]
            former = [name for name, is_over in ended.items() if is_over]
            raise UnknownName("worker", [worker_id], known=live, former=former)
    return found


def _latest_snapshots(app: App) -> dict[str, WorkerStateInfo]:
    latest: dict[str, WorkerStateInfo] = {}
    for snapshot in app.worker_states(limit=_MOST_SNAPSHOTS):
        latest.setdefault(snapshot.worker_id, snapshot)
    return latest


def _document(worker: WorkerInfo, snapshot: WorkerStateInfo | None) -> dict[str, object]:
    return structs.asdict(worker) | {"snapshot": snapshot}


def _show_workers(found: list[WorkerInfo], snapshots: dict[str, WorkerStateInfo]) -> None:
    now = SystemClock().wall()
    numbers = ("CLAIMED", "RUNNING", "RSS", "CPU", "LAG", "LAST BEAT")
    rows = []
    for worker in found:
        snapshot = snapshots.get(worker.worker_id)
        silent_s = max(0.0, (now - worker.last_heartbeat_at).total_seconds())
        rows.append(
            (
                worker.worker_id,
                worker.hostname,
                str(worker.pid),
                condition(worker, ended=worker.ended_cause or worker.ended_how),
                "all" if worker.queues is None else ",".join(worker.queues),
                str(worker.claimed),
                str(worker.running),
                "" if snapshot is None else f"{snapshot.rss_bytes / 2**20:.0f} MiB",
                "" if snapshot is None else f"{snapshot.cpu_percent:.0f} %",
                "" if snapshot is None else f"{snapshot.loop_lag_ms:.0f} ms",
                "" if snapshot is None else _messages(snapshot),
                f"{duration(silent_s)} ago",
            )
        )
    columns = ("WORKER", "HOST", "PID", "STATE", "QUEUES", *numbers[:-1], "NATS", numbers[-1])
    show_table(columns, rows, numbers=numbers, empty="No worker is registered.")
    if any(worker.is_stale is None and worker.ended_at is None for worker in found):
        say(f"{ON_STANDBY} Ask the primary.")


def _messages(snapshot: WorkerStateInfo) -> Text:
    """Whether NATS tells the worker of tasks, and whether it is the one that publishes; nothing where NATS is not in use.

    Also whether the stream is full, and how many queues it does not carry.
    """
    found = snapshot.messages
    if found is None:
        return Text()
    if not found.get("up"):
        return Text("away", style="yellow")
    text = Text("up, relays" if found.get("relay") else "up")
    if found.get("refusal"):
        text.append(", full", style="yellow")
    if refused := found.get("refused"):
        text.append(f", {len(refused)} refused", style="yellow")
    if not_taken := found.get("not_taken"):
        text.append(f", {len(not_taken)} not taken")
    return text


def _show_history(found: list[WorkerStateInfo], *, worker: str, as_json: bool) -> None:
    if as_json:
        show_json({"worker_id": worker, "snapshots": found})
        return
    numbers = ("RUNNING", "CLAIMED", "SLOTS", "RSS", "CPU", "LAG")
    rows = [
        (
            moment(each.at),
            str(each.running),
            str(each.claimed),
            str(each.slots),
            f"{each.rss_bytes / 2**20:.0f} MiB",
            f"{each.cpu_percent:.0f} %",
            f"{each.loop_lag_ms:.0f} ms",
            _messages(each),
        )
        for each in found
    ]
    show_table(("AT", *numbers, "NATS"), rows, numbers=numbers, empty=f"Worker {worker!r} has no snapshots.")
