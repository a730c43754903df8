"""A worker as its supervision knows it: its row, what it says it holds, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from uuid import UUID

import msgspec

from everbeat.runtime.clock import Clock
from everbeat.runtime.identity import cpu_seconds, new_id, rss_bytes, start_ticks
from everbeat.store.workers import WorkerRow, WorkerState
from everbeat.worker.protocol import REPORT_EVERY_S, FromSupervisor, Held, Lease, Lost, Quiet, Tick


class Seat:
    """One worker under a supervision. `tell` hands a message to the worker, never blocks and never raises.

    `on_loop`: the task functions whose code runs on the worker's own event loop, so that none of it goes on while that stands
    still. `heard_at`: when the worker last said anything, by the supervision's monotonic clock; `ticked_at`: its last tick.
    """

    def __init__(
        self,
        *,
        pid: int,
        queues: Sequence[str] | None,
        metadata: Mapping[str, object],
        tell: Callable[[FromSupervisor], None],
        clock: Clock,
        on_loop: Collection[str] = (),
    ) -> None:
        self.pid = pid
        self.on_loop = frozenset(on_loop)
        self.heard_at = clock.monotonic()
        self.tell = tell
        self.worker_id = new_id(pid)
        self.held: dict[UUID, UUID] = {}
        self.is_quiet = False
        self.tick: Tick | None = None
        self.ticked_at = self.heard_at
        self._cpu_s: float | None = None
        self._lost_since = 0
        self._clock = clock
        self._queues = queues
        self._metadata = msgspec.json.encode(metadata).decode()
        self._process_started = start_ticks(pid)

    def rename(self) -> None:
        """The worker goes on under a new id, holding nothing: its old self was declared dead."""
        self.worker_id = new_id(self.pid)
        self._lost_since += len(self.held)
        self.held.clear()

    @property
    def astray(self) -> int:
        """How many attempts may be over while their code goes on in the worker's own process: rather too many than too few."""
        return self._lost_since + (0 if self.tick is None else self.tick.astray)

    def lose(self, leases: list[Lease]) -> None:
        """Tells the worker that these are somebody else's now."""
        for _, claim_id in leases:
            self.held.pop(claim_id, None)
        self._lost_since += len(leases)
        self.tell(Lost(leases))

    def quieten(self, on: bool) -> None:
        """Tells the worker whether it may claim, if that has changed."""
        if self.is_quiet is not on:
            self.is_quiet = on
            self.tell(Quiet(on))

    def hear(self, message: Held | Tick) -> None:
        """Takes notice of what the worker says of itself."""
        self.heard_at = self._clock.monotonic()
        match message:
            case Held(added=added, removed=removed):
                self.held.update((claim_id, task_id) for task_id, claim_id in added)
                for claim_id in removed:
                    self.held.pop(claim_id, None)
            case Tick():
                self.tick, self._lost_since = message, 0
                self.ticked_at, self._cpu_s = self.heard_at, cpu_seconds(self.pid)

    def row(self, supervisor_id: str, hostname: str) -> WorkerRow:
        """What is registered about the worker."""
        return WorkerRow(
            id=self.worker_id,
            supervisor_id=supervisor_id,
            hostname=hostname,
            pid=self.pid,
            process_started=self._process_started,
            queues=self._queues,
            metadata=self._metadata,
        )

    def state(self) -> WorkerState | None:
        """A snapshot for the record; None before the worker's first tick.

        A worker whose event loop is blocked cannot say so: its silence is the lag, and its processor time is looked up.
        """
        tick = self.tick
        if tick is None:
            return None
        lag_ms, cpu_percent = tick.loop_lag_ms, tick.cpu_percent
        now = self._clock.monotonic()
        overdue_s = now - self.heard_at - REPORT_EVERY_S
        if overdue_s > 0:
            lag_ms = max(lag_ms, overdue_s * 1_000)
            cpu_percent = self._cpu_percent_since_tick(now)
        return WorkerState(
            worker_id=self.worker_id,
            running=tick.running,
            claimed=tick.claimed,
            slots=tick.slots,
            rss_bytes=rss_bytes(self.pid) or 0,
            cpu_percent=cpu_percent,
            loop_lag_ms=lag_ms,
            messages=None if tick.messages is None else msgspec.json.encode(tick.messages).decode(),
        )

    def _cpu_percent_since_tick(self, now: float) -> float:
        """Of one core; 0 where the system does not tell."""
        used_s = cpu_seconds(self.pid)
        if used_s is None or self._cpu_s is None:
            return 0.0
        return 100.0 * max(0.0, used_s - self._cpu_s) / (now - self.ticked_at)
