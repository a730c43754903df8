"""Settings for recovery, queues and workers. They are immutable and validated together, and can be sent between processes as JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Self, TypedDict, cast

from everbeat.domain.limit.options import concurrency
from everbeat.domain.settings.checks import (
    flag_name,
    one_of,
    optional,
    queue_name,
    sequence_of,
    slot_name,
    switch,
    whole,
)
from everbeat.domain.settings.settings import Settings, by, checked
from everbeat.domain.settings.units import Duration, size, span, whole_time
from everbeat.domain.task.captured_log import LogLevel, capture_level
from everbeat.domain.task.policy import MOST_CRASHES, MOST_LOSSES
from everbeat.errors import Problem

INFRASTRUCTURE_RESILIENT: Final = "infrastructure_resilient"
LONGEST_RETENTION_HOURS: Final = 1_000_000

_DAY_MS: Final = 86_400_000
_ms: Final = partial(whole_time, unit="milliseconds")
_WORKFLOWS_ARE_MENDED: Final = "omit it: supervisors repair workflows every 30 seconds"
_ELSEWHERE: Final[Mapping[str, str]] = {
    "enabled": "omit it: recovery is on; to switch off recovery by age, set auto_requeue_stale_claimed=False and auto_fail_stale_running=False",
    "heartbeat_interval": "use runner_heartbeat_interval_ms and claimer_heartbeat_interval_ms, in milliseconds",
    "sweep_interval": "use check_interval_ms, in milliseconds",
    "sweep_threshold": "use running_stale_threshold_ms and claimed_stale_threshold_ms, in milliseconds",
    "stale_threshold": "use running_stale_threshold_ms and claimed_stale_threshold_ms, in milliseconds",
    "recovery_delay": "use recovery_delay_ms, in milliseconds",
    "resilient_job_flags": "use resilient_task_flags",
    "finalizing_stale_threshold": "leave it out: a worker beats until the outcome is stored, and running_stale_threshold_ms holds until then",
    "crashed_worker_recovery_grace": _WORKFLOWS_ARE_MENDED,
    "phase2_quarantine_after_attempts": _WORKFLOWS_ARE_MENDED,
    "auto_terminate_orphaned_workflow_tasks": _WORKFLOWS_ARE_MENDED,
    "orphan_task_audit_interval": "use check_interval_ms, in milliseconds: each check also finds orphans",
    "retention_sweep_interval": "use retention_interval_ms, in milliseconds",
    "grace_period": "use WorkerConfig(grace=...)",
    "ack_wait": "use NatsConfig(ack_wait=...)",
    "stall_timeout": "use App(stall_timeout=...), or @app.task(stall_timeout=...)",
}
"""The fixes to suggest for setting names that belong to other systems, such as Horsies and graphile_worker, or to other classes."""
_retention = by(optional(whole_time(1, LONGEST_RETENTION_HOURS, unit="hours"), none="never prunes them"))


class PortableSettings(Settings):
    """Base class for settings that can be sent between processes."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict of JSON-compatible values."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.values().items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the settings that `to_dict` converted to `data`. Raises ConfigurationError if a value is invalid."""
        return cls(**data)


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig(PortableSettings):
    """Settings for detecting dead workers, recovering their tasks and pruning old rows.

    Retention periods are in hours, all other times in milliseconds.

    A stale threshold must be at least twice its heartbeat interval. Raises ConfigurationError, which lists every problem, if any
    setting is invalid.

        RecoveryConfig(runner_heartbeat_interval_ms=10_000, running_stale_threshold_ms=30_000)
    """

    auto_requeue_stale_claimed: bool = field(default=True, metadata=by(switch))
    claimed_stale_threshold_ms: int = field(default=120_000, metadata=by(_ms(1_000, 3_600_000)))
    auto_fail_stale_running: bool = field(default=True, metadata=by(switch))
    running_stale_threshold_ms: int = field(default=300_000, metadata=by(_ms(1_000, 7_200_000)))
    check_interval_ms: int = field(default=30_000, metadata=by(_ms(1_000, 600_000)))
    runner_heartbeat_interval_ms: int = field(default=30_000, metadata=by(_ms(1_000, 120_000)))
    claimer_heartbeat_interval_ms: int = field(default=30_000, metadata=by(_ms(1_000, 120_000)))
    heartbeat_retention_hours: int | None = field(default=24, metadata=_retention)
    worker_state_retention_hours: int | None = field(default=168, metadata=_retention)
    terminal_record_retention_hours: int | None = field(default=720, metadata=_retention)
    captured_log_retention_hours: int | None = field(default=168, metadata=_retention)
    retention_interval_ms: int = field(default=3_600_000, metadata=by(_ms(1_000, _DAY_MS)))

    worker_state_snapshot_interval_ms: int = field(default=30_000, metadata=by(_ms(1_000, 300_000)))
    recovery_delay_ms: int = field(default=0, metadata=by(_ms(0, _DAY_MS)))
    sweep_batch_size: int = field(default=100, metadata=by(whole(1, 10_000)))
    resilient_sweep_threshold_multiplier: int = field(default=3, metadata=by(whole(1, 100)))
    resilient_task_flags: Sequence[str] = field(
        default=(INFRASTRUCTURE_RESILIENT,), metadata=by(sequence_of(flag_name, longest=100))
    )
    detect_child_exit: bool = field(default=True, metadata=by(switch))
    detect_session_loss: bool = field(default=True, metadata=by(switch))
    session_grace_ms: int = field(default=1_500, metadata=by(_ms(100, 60_000)))
    mass_session_grace_ms: int | None = field(
        default=30_000,
        metadata=by(
            optional(_ms(1_000, 3_600_000), none="recovers them only by the age of their heartbeats")
        ),
    )
    hang_timeout_ms: int | None = field(
        default=None, metadata=by(optional(_ms(2_000, _DAY_MS), none="never kills a hanging process"))
    )
    max_crashes: int = field(default=3, metadata=by(whole(1, MOST_CRASHES)))
    max_losses: int = field(default=10, metadata=by(whole(1, MOST_LOSSES)))
    startup_reconciliation: bool = field(default=True, metadata=by(switch))
    self_fence: bool = field(default=False, metadata=by(switch))
    hook_timeout_ms: int = field(default=5_000, metadata=by(_ms(100, 60_000)))
    brake_after_crashes: int | None = field(
        default=50, metadata=by(optional(whole(1, 100_000), none="never pauses a task type automatically"))
    )
    brake_window_ms: int = field(default=60_000, metadata=by(_ms(1_000, _DAY_MS)))

    @property
    def beat_interval_ms(self) -> int:
        """Return a supervisor's heartbeat interval in milliseconds. Each heartbeat serves both the runner and the claimer role."""
        return min(self.runner_heartbeat_interval_ms, self.claimer_heartbeat_interval_ms)

    @classmethod
    def graphile(cls, **overrides: Any) -> Self:
        """Return settings with the defaults of graphile_worker. `overrides` replace some of them.

        Heartbeats are sent every 30 s, and workers are declared dead after 5 minutes of silence. Sweeps run every 60 s, and
        recovered tasks wait for at least 30 s.
        """
        defaults = {
            "runner_heartbeat_interval_ms": 30_000,
            "claimer_heartbeat_interval_ms": 30_000,
            "check_interval_ms": 60_000,
            "claimed_stale_threshold_ms": 300_000,
            "running_stale_threshold_ms": 300_000,
            "recovery_delay_ms": 30_000,
            "resilient_sweep_threshold_multiplier": 3,
            "resilient_task_flags": (INFRASTRUCTURE_RESILIENT,),
        }
        return cls(**{**defaults, **overrides})

    @classmethod
    def _decided_elsewhere(cls, name: str) -> tuple[str, str] | None:
        fix = _ELSEWHERE.get(re.sub(r"_(ms|s|secs|seconds)$", "", name.lower()))
        return None if fix is None else ("other systems have a setting of this name", fix)

    def warnings(self) -> list[str]:
        """Return warnings about values that are valid but probably unintended."""
        found = []
        for threshold, interval in _BEATS_PER_THRESHOLD:
            least, given = 3 * getattr(self, interval), getattr(self, threshold)
            if given < least:
                found.append(
                    f"RecoveryConfig.{threshold} ({given}) is below 3 x {interval}: two consecutive lost heartbeats"
                    f" are enough to recover the task of a live worker. Set it to {least} or more."
                )
        for name, state in (
            ("auto_requeue_stale_claimed", "CLAIMED"),
            ("auto_fail_stale_running", "RUNNING"),
        ):
            if not getattr(self, name):
                found.append(
                    f"RecoveryConfig.{name} is False: {state} tasks of a dead worker stay as they are until"
                    " an operator resolves them."
                )
        if not (self.detect_child_exit or self.detect_session_loss):
            found.append(
                "RecoveryConfig.detect_child_exit and detect_session_loss are both False: a death is noticed"
                " only by the age of its heartbeat."
            )
        return found

    def _contradictions(self) -> Iterator[Problem]:
        for threshold, interval in _BEATS_PER_THRESHOLD:
            given: object = getattr(self, threshold)
            beat: object = getattr(self, interval)
            if (
                type(given) is not int
                or type(beat) is not int
                or not 1_000 <= beat <= 120_000
                or given >= 2 * beat
            ):
                continue
            slower = f", or {interval} to {given // 2} or less" if given >= 2_000 else ""
            yield Problem(
                code="THRESHOLD_TOO_LOW",
                subject=f"RecoveryConfig.{threshold}",
                value=str(given),
                rule=f"must be at least 2 x {interval} ({beat}), that is {2 * beat}, to tolerate a lost heartbeat",
                fix=f"set {threshold} to {2 * beat} or more{slower}",
            )


_BEATS_PER_THRESHOLD: Final = (
    ("running_stale_threshold_ms", "runner_heartbeat_interval_ms"),
    ("claimed_stale_threshold_ms", "claimer_heartbeat_interval_ms"),
)


MOST_WAITING: Final = 1_000_000


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig(PortableSettings):
    """A queue and its priority, from 1 to 100. Among queues with waiting tasks, the queue with the lowest number is served first.

    If `serial` is set, the queue's tasks run strictly one at a time across all workers, in the order in which they were sent.
    `concurrency`: at most this many tasks of the queue run at the same time across all workers.

    `max_waiting`: a send into the queue is refused while at least this many of its tasks are waiting. `when_full`: "reject" raises QueueFull
    at once, and "wait" waits for up to the patience of the send first.

    QueueConfig("mail", priority=10)
    """

    name: str = field(kw_only=False, metadata=by(queue_name))
    priority: int = field(default=100, metadata=by(whole(1, 100)))
    serial: bool = field(default=False, metadata=by(switch))
    max_waiting: int | None = field(
        default=None, metadata=by(optional(whole(1, MOST_WAITING), none="sets no limit"))
    )
    when_full: Literal["reject", "wait"] = field(default="reject", metadata=by(one_of("reject", "wait")))
    concurrency: int | None = field(default=None, metadata=by(concurrency))

    def _contradictions(self) -> Iterator[Problem]:
        if self.serial is True and self.concurrency is not None:
            rule = "has no effect with serial=True, which runs the tasks of the queue one at a time"
            yield Problem(
                code="CONTRADICTION",
                subject="QueueConfig.concurrency",
                value=repr(self.concurrency),
                rule=rule,
                fix="omit concurrency, or serial",
            )
        if self.when_full == "wait" and self.max_waiting is None:
            rule = "has no effect without max_waiting, because the queue is never full"
            yield Problem(
                code="CONTRADICTION",
                subject="QueueConfig.when_full",
                value=repr(self.when_full),
                rule=rule,
                fix="set max_waiting, or omit when_full",
            )


def processors() -> int:
    """Return the number of processors available to this process, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(PortableSettings):
    """Settings for a worker: how many tasks it runs concurrently, how often it polls for work, and how it shuts down.

    `processes`: the number of worker processes of one supervisor.
    `async_concurrency`, `thread_concurrency` and `process_concurrency`: the number of slots of each type in each worker process.
    `prefetch`: the maximum number of tasks of each type to claim beyond the free slots. Only tasks that are expected to start
    within 0.25 s are prefetched.
    `queues`: the names of the queues to serve, or None for all queues.
    `grace`: how long running tasks may continue after a stop is requested.
    `poll_interval`: the longest time between two polls for work.
    `slot`: a name that only one supervisor holds at a time. A supervisor that takes over the name knows that the previous holder is
    dead.
    `max_tasks_per_process` and `max_rss`: a worker process or task process that has started this many tasks, or uses this much
    memory, is replaced.
    `capture_logs`: the lowest level of the log records that are stored with each attempt, True for "info", or False. A task's own option
    takes precedence.

    Raises ConfigurationError, which lists every problem, if any setting is invalid.

        WorkerConfig(processes=4, queues=["mail"], grace="1m")
    """

    processes: int = field(default=1, metadata=by(whole(1, 1_024)))
    async_concurrency: int = field(default=100, metadata=by(whole(0, 100_000)))
    thread_concurrency: int = field(default=32, metadata=by(whole(0, 10_000)))
    process_concurrency: int = field(default_factory=processors, metadata=by(whole(0, 1_024)))
    prefetch: int = field(default=1_000, metadata=by(whole(0, 10_000)))
    queues: Sequence[str] | None = field(
        default=None,
        metadata=by(optional(sequence_of(queue_name, shortest=1, longest=1_000), none="serves all queues")),
    )
    grace: Duration = field(default=25.0, metadata=by(span(0.0, 86_400.0)))
    poll_interval: Duration = field(default=2.0, metadata=by(span(0.1, 300.0)))
    slot: str | None = field(
        default=None, metadata=by(optional(slot_name, none="disables this proof of a death"))
    )
    max_tasks_per_process: int | None = field(
        default=None,
        metadata=by(
            optional(whole(1, 1_000_000_000), none="never replaces a process because of its number of tasks")
        ),
    )
    max_rss: str | int | None = field(
        default=None,
        metadata=by(
            optional(size(16 << 20, 1 << 50), none="never replaces a process because of its memory use")
        ),
    )
    capture_logs: bool | LogLevel = field(default=False, metadata=by(capture_level))

    @property
    def grace_s(self) -> float:
        """Return the grace period in seconds."""
        return cast(float, self.grace)

    @property
    def max_rss_bytes(self) -> int | None:
        """Return the memory limit in bytes, or None if there is no limit."""
        return cast("int | None", self.max_rss)

    @property
    def capture_level(self) -> LogLevel | Literal[False]:
        """Return the lowest level of log records to capture, or False."""
        return cast("LogLevel | Literal[False]", self.capture_logs)

    @property
    def poll_interval_s(self) -> float:
        """Return the poll interval in seconds."""
        return cast(float, self.poll_interval)

    def warnings(self) -> list[str]:
        """Return warnings about values that are valid but probably unintended."""
        kinds = ("async", "thread", "process")
        idle = [kind for kind in kinds if getattr(self, f"{kind}_concurrency") == 0]
        return [
            f"WorkerConfig.{kind}_concurrency is 0: this worker runs no {kind} tasks, so other workers must run them."
            for kind in idle
        ]

    def _contradictions(self) -> Iterator[Problem]:
        slots = (self.async_concurrency, self.thread_concurrency, self.process_concurrency)
        if all(count == 0 for count in slots):
            rule = "leaves the worker without any slots, so it cannot run tasks"
            fix = "give async_concurrency, thread_concurrency or process_concurrency 1 or more"
            yield Problem(code="CONTRADICTION", subject="WorkerConfig", value="0, 0, 0", rule=rule, fix=fix)
        queues: object = self.queues
        if isinstance(queues, tuple) and len(set(queues)) < len(queues):
            twice = sorted({name for name in queues if queues.count(name) > 1})
            rule = f"names {', '.join(twice)} more than once"
            subject = "WorkerConfig.queues"
            yield Problem(
                code="DUPLICATE", subject=subject, value=str(queues), rule=rule, fix="name each queue once"
            )


class WorkerSettings(TypedDict, total=False):
    """Keyword arguments that override settings of the app's WorkerConfig."""

    async_concurrency: int
    thread_concurrency: int
    process_concurrency: int
    prefetch: int
    queues: Sequence[str] | None
    grace: Duration
    poll_interval: Duration
    slot: str | None
    max_tasks_per_process: int | None
    max_rss: str | int | None
    capture_logs: bool | LogLevel
