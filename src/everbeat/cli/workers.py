"""The commands of `everbeat workers`. The default command is `list`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer
from msgspec import structs
from rich.text import Text

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.maintenance import show_swept
from everbeat.cli.output import (
    ON_STANDBY,
    Column,
    duration,
    moment,
    say,
    show_heading,
    show_json,
    show_rows,
    stdout_console,
)
from everbeat.cli.selection import LimitOption, ShortIds, full_worker_id, short_ids, with_app
from everbeat.client.database_access import database_of
from everbeat.client.trees import states_of_trees
from everbeat.domain.inspection import QuietTree, SupervisorInfo, WorkerInfo, WorkerStateInfo
from everbeat.domain.pulse.judging import TreeState
from everbeat.errors import UnknownName
from everbeat.errors.wording import amount, on_one_line
from everbeat.runtime.clock import SystemClock

commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="Show workers and supervisors, and whether they beat (`list`, the default); quiet or release workers.",
)

_MOST_WORKERS: Final = 100_000
_MOST_SNAPSHOTS: Final = 10_000


@commands.command()
@with_app
def quiet(
    app: App,
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID...]", help="Supervisors; a worker selects its whole tree.", show_default=False
        ),
    ] = None,
    *,
    host: Annotated[str | None, typer.Option(metavar="HOST", help="All supervisors on this host.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="All running supervisors.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Let the supervisors' workers claim tasks again.")
    ] = False,
    as_json: bool,
) -> None:
    """Stop these supervisors from claiming until they are resumed or end. Running tasks continue.

    Their workers release tasks that have not started and keep beating. Supervisors that start later are not quiet.
    """
    _require_one({"ids": bool(ids), "--host": host is not None, "--all": everyone}, resume=resume)
    ids = [full_worker_id(app, each, supervisors=True, prefer_live=True) for each in ids or ()]
    order = app.resume_workers if resume else app.quiet_workers
    before = {each.supervisor_id: each.quiet_since for each in app.list_supervisors(limit=_MOST_WORKERS)}
    found = order(ids, host=host, everyone=everyone)
    if as_json:
        show_json({"supervisors": found})
        return
    for tree in found:
        say(_quiet_line(tree, was_quiet=before.get(tree.supervisor_id) is not None))
    if not found:
        say("No supervisor runs. Start one: everbeat worker MODULE:APP.")


def _require_one(given: Mapping[str, bool], *, resume: bool) -> None:
    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} exclude each other: give ids, or --host, or --all.")
    if not chosen:
        action = "resume" if resume else "quiet"
        raise typer.BadParameter(
            f"give ids, or --host, or --all: the supervisors to {action}. List them: everbeat workers."
        )


def _quiet_line(tree: QuietTree, *, was_quiet: bool) -> str:
    name = f"Supervisor {tree.supervisor_id} (host {tree.hostname}, PID {tree.pid}, {amount(len(tree.workers), 'worker')})"
    if tree.quiet_since is not None:
        return f"{name} has been quiet since {moment(tree.quiet_since)}."
    return f"{name} claims again." if was_quiet else f"{name} was not quiet."


def liveness(one: WorkerInfo | SupervisorInfo, tree: TreeState | None, *, ended: str | None) -> Text:
    """Return the state in one word: that of its `tree`, as the dashboard shows it. `ended` says how the worker or supervisor ended.

    `tree` is None if the operator chose the age of a beat after which the worker is stale.
    """
    if one.ended_at is not None:
        return Text("ended" if ended is None else f"ended ({ended})", style="dim")
    if one.is_stale is None:
        return Text("unknown", style="yellow")
    if tree is None and one.is_stale:
        return Text("stale", style="red")
    if one.session_lost:
        return Text("no session", style="red")
    if tree in (TreeState.SUSPECT, TreeState.LATE):
        return Text(tree.value, style="red" if tree is TreeState.SUSPECT else "yellow")
    if one.draining:
        return Text("draining", style="yellow")
    return Text("live", style="green") if one.quiet_since is None else Text("quiet", style="yellow")


def beat_age(one: WorkerInfo | SupervisorInfo) -> Column:
    """Return the age of the last heartbeat as a column."""
    silent_s = (SystemClock().wall() - one.last_heartbeat_at).total_seconds()
    return Column("LAST BEAT", f"{duration(max(0.0, silent_s))} ago", is_number=True)


def _show_supervisors(
    found: Sequence[SupervisorInfo], states: Mapping[str, TreeState], *, ids: ShortIds
) -> None:
    """Write a table of supervisors, then the problems of supervisors that cannot start a worker process."""
    if not found:
        return
    show_heading("Supervisors")
    show_rows(
        (
            Column("SUPERVISOR", ids.party(each.supervisor_id)),
            Column("HOST", each.hostname, drop=2),
            Column("PID", str(each.pid)),
            Column("STATE", liveness(each, states.get(each.supervisor_id), ended=each.ended_how)),
            Column("STARTED", moment(each.started_at), drop=1),
            Column("PROCESSES", _processes(each)),
            beat_age(each),
        )
        for each in found
    )
    for each in found:
        if each.start_problem is not None:
            _show_problem(each)


def _processes(supervisor: SupervisorInfo) -> Text:
    if supervisor.processes is None:
        return Text(str(supervisor.workers))
    text = f"{supervisor.workers} of {supervisor.processes}"
    return Text(text, style="" if supervisor.start_problem is None else "red")


def _show_problem(supervisor: SupervisorInfo) -> None:
    since = "" if supervisor.start_problem_at is None else f" since {moment(supervisor.start_problem_at)}"
    text = f"Supervisor {supervisor.supervisor_id} cannot start a worker process{since}: {supervisor.start_problem}"
    stdout_console().print(Text(on_one_line(text), style="red"))


@commands.command("list")
@with_app
def list_workers(
    app: App,
    *,
    history: Annotated[
        str | None,
        typer.Option("--history", metavar="WORKER", help="The snapshots of one worker, newest first."),
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Include ended workers and supervisors.")] = False,
    stale_after: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Call a worker stale after this long without a beat."),
    ] = None,
    limit: LimitOption = 200,
    as_json: bool,
) -> None:
    """Show workers, the tasks they hold, whether they beat, and their supervisors.

    The newest beat comes first. By the database's clock, a worker is late after two missing beats, and suspect once it
    has been silent for its threshold. RSS, CPU, LAG and NATS come from
    the last snapshot. PROCESSES is the number of live worker processes of a supervisor, and how many it should have. If
    it cannot start one, the reason follows.
    """
    if everyone and stale_after is not None:
        raise typer.BadParameter("--stale-after applies to workers that have not ended; leave --all out.")
    if history is not None:
        history = full_worker_id(app, history)
        _show_history(_history(app, history, limit=limit), worker=history, as_json=as_json)
        return
    with named_as_options({"stale_after": "--stale-after"}):
        found = (
            app.list_workers(limit=limit)
            if everyone
            else app.list_active_workers(stale_after=stale_after, limit=limit)
        )
        supervisors = app.list_supervisors(ended=everyone, stale_after=stale_after, limit=limit)
    states = {} if stale_after is not None else _states(app)
    snapshots = _latest_snapshots(app)
    if as_json:
        workers = [structs.asdict(each) | {"snapshot": snapshots.get(each.worker_id)} for each in found]
        show_json({"workers": workers, "supervisors": supervisors})
        return
    names = [*(each.worker_id for each in found), *(each.supervisor_id for each in supervisors)]
    ids = short_ids(app, parties=names)
    _show_workers(found, snapshots, states, ids=ids)
    _show_supervisors(supervisors, states, ids=ids)


@commands.command()
@with_app
def release(
    app: App,
    worker_ids: Annotated[list[str], typer.Argument(metavar="WORKER...", show_default=False)],
    *,
    as_json: bool,
) -> None:
    """End these workers, dead or alive, and recover their tasks at once.

    The tasks are settled by their policies. A worker that is still alive loses its leases and continues under a new id.
    """
    worker_ids = [full_worker_id(app, each) for each in worker_ids]
    result = app.release_workers(worker_ids)
    if as_json:
        show_json(structs.asdict(result))
        return
    if result.tasks:
        show_swept(app, result, empty="")
    holders = {task.worker_id for task in result.tasks}
    for worker_id in dict.fromkeys(worker_ids):
        held = "" if worker_id in holders else " and held nothing"
        if worker_id not in result.worker_ids:
            say(f"{worker_id} had already ended{held}.")
        elif held:
            say(f"{worker_id} was released{held}.")
    if result.worker_ids or result.recovered_count:
        released = amount(len(result.worker_ids), "worker")
        say(f"Released {released}; recovered {amount(result.recovered_count, 'task')}.")


def _history(app: App, worker_id: str, *, limit: int) -> list[WorkerStateInfo]:
    """Return the snapshots of a worker. Raises UnknownName if the worker has neither snapshots nor a row."""
    found = app.worker_states(worker_id, limit=limit)
    if not found:
        ended = {each.worker_id: each.ended_at is not None for each in app.list_workers(limit=_MOST_WORKERS)}
        if worker_id not in ended:
            live = [name for name, is_over in ended.items() if not is_over]
            former = [name for name, is_over in ended.items() if is_over]
            raise UnknownName("worker", [worker_id], known=live, former=former)
    return found


def _states(app: App) -> Mapping[str, TreeState]:
    """Return the state of each tree by the id of its supervisor."""
    return database_of(app).run(states_of_trees(app.recovery), name="workers", twin="workers")


def _latest_snapshots(app: App) -> dict[str, WorkerStateInfo]:
    latest: dict[str, WorkerStateInfo] = {}
    for snapshot in app.worker_states(limit=_MOST_SNAPSHOTS):
        latest.setdefault(snapshot.worker_id, snapshot)
    return latest


def _show_workers(
    found: list[WorkerInfo],
    snapshots: dict[str, WorkerStateInfo],
    states: Mapping[str, TreeState],
    *,
    ids: ShortIds,
) -> None:
    show_rows(
        (
            _worker(each, snapshots.get(each.worker_id), states.get(each.supervisor_id), ids=ids)
            for each in found
        ),
        empty="No worker is registered.",
    )
    if any(worker.is_stale is None and worker.ended_at is None for worker in found):
        say(f"{ON_STANDBY} Ask the primary.")


def _worker(
    worker: WorkerInfo, snapshot: WorkerStateInfo | None, tree: TreeState | None, *, ids: ShortIds
) -> tuple[Column, ...]:
    queues = "all" if worker.queues is None else ",".join(worker.queues)
    return (
        Column("WORKER", ids.party(worker.worker_id)),
        Column("HOST", worker.hostname, drop=8),
        Column("PID", str(worker.pid)),
        Column("STATE", liveness(worker, tree, ended=worker.ended_cause or worker.ended_how)),
        Column("QUEUES", queues, drop=3, is_text=True),
        Column("CLAIMED", str(worker.claimed), drop=2, is_number=True),
        Column("RUNNING", str(worker.running), drop=1, is_number=True),
        *_load(snapshot, rss=6, cpu=7, lag=4, nats=5),
        beat_age(worker),
    )


def _load(snapshot: WorkerStateInfo | None, **drop: int) -> tuple[Column, ...]:
    """Return the columns for a snapshot. The keywords in `drop` set the `drop` values of columns by name."""
    rss = cpu = lag = ""
    if snapshot is not None:
        rss = f"{snapshot.rss_bytes / 2**20:.0f} MiB"
        cpu = f"{snapshot.cpu_percent:.0f} %"
        lag = f"{snapshot.loop_lag_ms:.0f} ms"
    return (
        Column("RSS", rss, drop=drop.get("rss", 0), is_number=True),
        Column("CPU", cpu, drop=drop.get("cpu", 0), is_number=True),
        Column("LAG", lag, drop=drop.get("lag", 0), is_number=True),
        Column("NATS", _nats(snapshot), drop=drop.get("nats", 0)),
    )


def _nats(snapshot: WorkerStateInfo | None) -> Text:
    """Return the state of the worker's NATS connection, or an empty string if the worker does not use NATS.

    The state shows whether the worker relays messages and whether the stream is full. It also counts the queues that NATS refuses, and
    the queues that are not published because no live worker serves them through NATS.
    """
    found = None if snapshot is None else snapshot.messages
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
    rows = [
        (
            Column("AT", moment(each.at)),
            Column("PID", "" if each.pid is None else str(each.pid)),
            Column("RUNNING", str(each.running), is_number=True),
            Column("CLAIMED", str(each.claimed), is_number=True),
            Column("SLOTS", str(each.slots), drop=1, is_number=True),
            *_load(each, cpu=1, nats=2),
        )
        for each in found
    ]
    show_rows(rows, empty=f"Worker {worker!r} has no snapshots.")
