"""Show workers and leases, as a live view on a terminal and as lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from everbeat import App, TaskState
from everbeat.demo.verification import FaultKind, InjectedFault
from everbeat.inspection import RecoveryInfo, SupervisorInfo, TaskSummary, WorkerInfo
from everbeat.runtime.clock import Clock

_MOST = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoState:
    """A snapshot of the database, taken at `at` by the database's clock. It includes workers and supervisors that have ended."""

    at: datetime
    workers: Sequence[WorkerInfo]
    supervisors: Mapping[str, SupervisorInfo]
    leases: Sequence[TaskSummary]
    recoveries: Sequence[RecoveryInfo]
    unfinished: int

    def held_by(self, worker_ids: Collection[str]) -> list[TaskSummary]:
        """Return the leases of these workers."""
        return [lease for lease in self.leases if lease.claimed_by_worker_id in worker_ids]

    def recovered_from(self, worker_ids: Collection[str]) -> list[RecoveryInfo]:
        """Return the recoveries of tasks that these workers held."""
        return [recovery for recovery in self.recoveries if recovery.worker_id in worker_ids]

    def live_workers(self, pid: int) -> list[WorkerInfo]:
        """Return the workers that belong to the supervisor with this process id and have not ended."""
        return [
            worker
            for worker in self.workers
            if worker.ended_at is None and self.supervisors[worker.supervisor_id].pid == pid
        ]


class DatabaseClock:
    """Estimates the database's time from the machine's clock and the `sent_at` of stored tasks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead: tuple[timedelta, timedelta] | None = None

    def learn(self, stored_at: datetime, *, before: datetime, after: datetime) -> None:
        """Refine the estimate with a task that was sent between `before` and `after` by the machine's clock and stored at `stored_at`."""
        least, most = stored_at - after, stored_at - before
        if self._ahead is not None:
            least, most = max(least, self._ahead[0]), min(most, self._ahead[1])
        if least <= most:  # else a clock was changed
            self._ahead = least, most

    def now(self) -> datetime:
        """Return the database's estimated time."""
        least, most = self._ahead or (timedelta(0), timedelta(0))
        return self._clock.wall() + (least + most) / 2


def read_state(app: App, clock: DatabaseClock) -> DemoState:
    """Read and return the current state."""
    # Read the leases first, so that each holder is among the workers.
    leases = app.list_tasks(state=[TaskState.CLAIMED, TaskState.RUNNING], limit=_MOST)
    workers = app.list_workers(limit=_MOST)
    supervisors = app.list_supervisors(limit=_MOST)
    queues = app.queues()
    return DemoState(
        at=clock.now(),
        workers=workers,
        supervisors={supervisor.supervisor_id: supervisor for supervisor in supervisors},
        leases=leases,
        recoveries=app.recoveries(limit=_MOST),
        unfinished=sum(queue.pending + queue.scheduled + queue.claimed + queue.running for queue in queues),
    )


WorkerCondition: TypeAlias = Literal["alive", "frozen", "recovered", "killed", "ended"]


@dataclass(frozen=True, slots=True)
class ViewState:
    """The contents of a view at one point in time. `trees` maps the pid of each supervisor to the number of its tree."""

    elapsed_s: float
    state: DemoState
    faults: Sequence[InjectedFault]
    trees: Mapping[int, int]
    sent: int
    total: int

    @property
    def ended(self) -> int:
        """Return the number of tasks that have finished."""
        return self.sent - self.state.unfinished

    def workers(self) -> list[tuple[int, WorkerCondition, WorkerInfo]]:
        """Return each worker with its tree and its condition. For a thawed tree, the workers from before the fault come first."""
        found = [
            (
                self.trees.get(self.state.supervisors[worker.supervisor_id].pid, 0),
                _condition(worker, self.faults),
                worker,
            )
            for worker in self.state.workers
        ]
        return sorted(found, key=lambda row: (row[0], row[2].started_at, row[1] == "alive"))


def _condition(worker: WorkerInfo, faults: Sequence[InjectedFault]) -> WorkerCondition:
    fault = next((one for one in faults if worker.worker_id in one.worker_ids), None)
    if fault is None:
        return "alive" if worker.ended_at is None else "ended"
    if fault.planned.kind is not FaultKind.FREEZE_TREE:
        return "killed"
    return "frozen" if fault.thawed_after_s is None else "recovered"


def _recovered(recoveries: Sequence[RecoveryInfo], faults: Sequence[InjectedFault]) -> str:
    if not recoveries:
        return ""
    fault = next((one for one in faults if recoveries[0].worker_id in one.worker_ids), None)
    last = max(recovery.noticed_at for recovery in recoveries)
    after = "" if fault is None else f" in {(last - fault.at).total_seconds():.2f} s"
    return f"{len(recoveries)} tasks{after} ({recoveries[0].noticed_by})"


_STYLES: Final = {
    "alive": "green",
    "frozen": "bold cyan",
    "killed": "bold red",
    "recovered": "yellow",
    "ended": "dim",
}
_SIGNS: Final = {"alive": "♥", "frozen": "❄", "killed": "✝", "recovered": "↻", "ended": "·"}
_SHORT: Final = {
    "count_on_the_loop": "async",
    "count_in_a_thread": "thread",
    "count_in_a_process": "process",
}
_SHOWN_EVENTS: Final = 9
_STATUS_EVERY_S: Final = 2.0
_BAR_WIDTH: Final = 40


class LineView:
    """Prints a line for each event, and the progress every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status_at_s = 0.0

    def show(self, shown: ViewState) -> None:
        """Print the progress if it is time to do so."""
        if shown.elapsed_s - self._status_at_s < _STATUS_EVERY_S:
            return
        self._status_at_s = shown.elapsed_s
        alive = sum(condition == "alive" for _, condition, _ in shown.workers())
        running = sum(lease.state is TaskState.RUNNING for lease in shown.state.leases)
        line = f"  {shown.ended}/{shown.total} files, {running} running, {alive} workers alive"
        self.report(shown.elapsed_s, line)

    def report(self, elapsed_s: float, text: str) -> None:
        """Print a line."""
        self._console.print(f"{elapsed_s:5.1f} s  {text}", soft_wrap=True)


class LiveView:
    """Draws a row for each worker, the progress, and the latest events."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._events: deque[Text] = deque(maxlen=_SHOWN_EVENTS)
        self._shown: ViewState | None = None

    def show(self, shown: ViewState) -> None:
        """Draw the state."""
        self._shown = shown
        self._live.update(self._drawn())

    def report(self, elapsed_s: float, text: str) -> None:
        """Add an event."""
        line = Text(f"{elapsed_s:5.1f} s  ", style="dim")
        self._events.append(line.append(text, style=_event_style(text)))
        self._live.update(self._drawn())

    def _drawn(self) -> Panel:
        parts: list[Table | Text] = [*self._events]
        if self._shown is not None:
            parts = [_workers(self._shown), Text(), _progress(self._shown), Text(), *parts]
        return Panel(Group(*parts), title="everbeat demo", border_style="blue", padding=(1, 2), expand=True)


View: TypeAlias = LineView | LiveView


@contextmanager
def open_view(console: Console, *, headless: bool) -> Iterator[View]:
    """Yield the view that is suitable for this console."""
    if headless or not console.is_terminal:
        console.quiet = headless
        try:
            yield LineView(console)
        finally:
            console.quiet = False
    else:
        with Live(console=console, refresh_per_second=12, transient=True) as live:
            yield LiveView(live)


def _event_style(text: str) -> str:
    if "SIGKILL" in text:
        return "bold red"
    if "SIGSTOP" in text or "SIGCONT" in text:
        return "bold cyan"
    return "green" if "recovered" in text or "refused" in text else ""


def _progress(shown: ViewState) -> Table:
    progress = Table.grid(padding=(0, 2))
    progress.add_row(
        ProgressBar(total=max(1, shown.total), completed=shown.ended, width=_BAR_WIDTH),
        f"{shown.ended} of {shown.total} files counted",
        Text(f"{shown.elapsed_s:.1f} s", style="dim"),
    )
    return progress


def _workers(shown: ViewState) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, width in (("TREE", 4), ("WORKER", 7), ("", 12), ("BEATS", 5), ("LAST", 6)):
        table.add_column(name, min_width=width, justify="right" if name in ("BEATS", "LAST") else "left")
    for name in ("WORKS ON", "RECOVERED FROM IT"):
        table.add_column(name, no_wrap=True)
    state = shown.state
    for tree, condition, worker in shown.workers():
        ids = (worker.worker_id,)
        beats = state.supervisors[worker.supervisor_id].beat_seq
        age_s = max(0.0, (state.at - worker.last_heartbeat_at).total_seconds())
        runs = condition in ("alive", "frozen")
        table.add_row(
            str(tree),
            str(worker.pid),
            Text(f"{_SIGNS[condition]} {condition}", style=_STYLES[condition]),
            str(beats) if runs else "",
            f"{age_s:.1f} s" if runs else "",
            Text(_work(state.held_by(ids)), style="" if condition == "alive" else "dim"),
            Text(_recovered(state.recovered_from(ids), shown.faults), style="green"),
        )
    return table


def _work(held: Sequence[TaskSummary]) -> str:
    names = sorted(_SHORT.get(lease.name, lease.name) for lease in held if lease.state is TaskState.RUNNING)
    kinds = [f"{names.count(kind)} {kind}" for kind in dict.fromkeys(names)]
    claimed = sum(lease.state is TaskState.CLAIMED for lease in held)
    return " ".join([*kinds, *([f"+{claimed}"] if claimed else [])])
