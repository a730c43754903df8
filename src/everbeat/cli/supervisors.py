"""The supervisors in `everbeat workers`: their processes, and why they cannot start one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from everbeat.cli.output import data_console, duration, moment, show_heading, show_table
from everbeat.domain.inspection import SupervisorInfo, WorkerInfo
from everbeat.errors.visible import on_one_line
from everbeat.runtime.clock import SystemClock


def condition(one: WorkerInfo | SupervisorInfo, *, ended: str | None) -> Text:
    """Whether it lives, in a word; `ended`: how it ended, if it has."""
    if one.ended_at is not None:
        return Text("ended" if ended is None else f"ended ({ended})", style="dim")
    if one.is_stale is None:
        return Text("unknown", style="yellow")
    if one.is_stale:
        return Text("stale", style="red")
    if one.session_lost:
        return Text("no session", style="red")
    if one.draining:
        return Text("draining", style="yellow")
    return Text("live", style="green") if one.quiet_since is None else Text("quiet", style="yellow")


def show_supervisors(found: Sequence[SupervisorInfo]) -> None:
    """The supervisors as a table, then the reasons of those that cannot start a worker process; nothing if there is none."""
    if not found:
        return
    now = SystemClock().wall()
    rows = [
        (
            each.supervisor_id,
            each.hostname,
            str(each.pid),
            condition(each, ended=each.ended_how),
            moment(each.started_at),
            _processes(each),
            f"{duration(max(0.0, (now - each.last_heartbeat_at).total_seconds()))} ago",
        )
        for each in found
    ]
    show_heading("Supervisors")
    columns = ("SUPERVISOR", "HOST", "PID", "STATE", "STARTED", "PROCESSES", "LAST BEAT")
    show_table(columns, rows, numbers=("LAST BEAT",), empty="")
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
    data_console().print(Text(on_one_line(text), style="red"))
