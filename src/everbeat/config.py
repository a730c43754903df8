"""Settings of recovery, queues and workers: frozen, checked as a whole, sent between processes as JSON.

What lives here: RecoveryConfig, QueueConfig, WorkerConfig. What may not: anything that acts on them, and the
options of a task function, which are in `domain.policy`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypedDict, cast

from everbeat.domain.checks import flag_name, optional, queue_name, sequence_of, slot_name, switch, whole
from everbeat.domain.duration import Duration, span
from everbeat.domain.policy import MOST_CRASHES, MOST_LOSSES
from everbeat.domain.settings import Settings, by, checked
from everbeat.domain.size import size
from everbeat.errors import Problem

INFRASTRUCTURE_RESILIENT: Final = "infrastructure_resilient"
LONGEST_RETENTION_HOURS: Final = 1_000_000

_DAY_MS: Final = 86_400_000
_ELSEWHERE: Final[Mapping[str, str]] = {
    "enabled": "leave it out: recovery is on; auto_requeue_stale_claimed=False and auto_fail_stale_running=False recover nothing by age",
    "heartbeat_interval": "use runner_heartbeat_interval_ms and claimer_heartbeat_interval_ms, in milliseconds",
    "sweep_interval": "use check_interval_ms, in milliseconds",
    "sweep_threshold": "use running_stale_threshold_ms and claimed_stale_threshold_ms, in milliseconds",
    "stale_threshold": "use running_stale_threshold_ms and claimed_stale_threshold_ms, in milliseconds",
    "recovery_delay": "use recovery_delay_ms, in milliseconds",
    "resilient_job_flags": "use resilient_task_flags",
}
"""What graphile_worker and the NATS recipe call a setting of RecoveryConfig, and what to write instead."""
_retention = by(optional(whole(1, LONGEST_RETENTION_HOURS), none="never prunes them"))


class PortableSettings(Settings):
    """Settings that travel between processes."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The settings as what JSON can hold."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.values().items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The settings from `to_dict`; raises ConfigurationError like the constructor."""
        return cls(**data)


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig(PortableSettings):
    """How deaths are noticed and what becomes of the work; times in milliseconds, retention in hours.

    A stale threshold must be at least twice the interval of its heartbeat. Raises ConfigurationError with
    every problem.

        RecoveryConfig(runner_heartbeat_interval_ms=10_000, running_stale_threshold_ms=30_000)
    """

    auto_requeue_stale_claimed: bool = field(default=True, metadata=by(switch))
    claimed_stale_threshold_ms: int = field(default=120_000, metadata=by(whole(1_000, 3_600_000)))
    auto_fail_stale_running: bool = field(default=True, metadata=by(switch))
    running_stale_threshold_ms: int = field(default=300_000, metadata=by(whole(1_000, 7_200_000)))
    check_interval_ms: int = field(default=30_000, metadata=by(whole(1_000, 600_000)))
    runner_heartbeat_interval_ms: int = field(default=30_000, metadata=by(whole(1_000, 120_000)))
    claimer_heartbeat_interval_ms: int = field(default=30_000, metadata=by(whole(1_000, 120_000)))
    heartbeat_retention_hours: int | None = field(default=24, metadata=_retention)
    worker_state_retention_hours: int | None = field(default=168, metadata=_retention)
    terminal_record_retention_hours: int | None = field(default=720, metadata=_retention)
    retention_interval_ms: int = field(default=3_600_000, metadata=by(whole(1_000, _DAY_MS)))

    worker_state_snapshot_interval_ms: int = field(default=30_000, metadata=by(whole(1_000, 300_000)))
    recovery_delay_ms: int = field(default=0, metadata=by(whole(0, _DAY_MS)))
    sweep_batch_size: int = field(default=100, metadata=by(whole(1, 10_000)))
    resilient_sweep_threshold_multiplier: int = field(default=3, metadata=by(whole(1, 100)))
    resilient_task_flags: Sequence[str] = field(
        default=(INFRASTRUCTURE_RESILIENT,), metadata=by(sequence_of(flag_name, longest=100))
    )
    detect_child_exit: bool = field(default=True, metadata=by(switch))
    detect_session_loss: bool = field(default=True, metadata=by(switch))
    session_grace_ms: int = field(default=1_500, metadata=by(whole(100, 60_000)))
    mass_session_grace_ms: int | None = field(
        default=30_000,
        metadata=by(optional(whole(1_000, 3_600_000), none="leaves them to the age of their heartbeats")),
    )
    hang_timeout_ms: int | None = field(
        default=None, metadata=by(optional(whole(2_000, _DAY_MS), none="lets a hanging process be"))
    )
    max_crashes: int = field(default=3, metadata=by(whole(1, MOST_CRASHES)))
    max_losses: int = field(default=10, metadata=by(whole(1, MOST_LOSSES)))
    startup_reconciliation: bool = field(default=True, metadata=by(switch))
    self_fence: bool = field(default=False, metadata=by(switch))
    hook_timeout_ms: int = field(default=5_000, metadata=by(whole(100, 60_000)))
    brake_after_crashes: int | None = field(
        default=50, metadata=by(optional(whole(1, 100_000), none="pauses no task type by itself"))
    )
    brake_window_ms: int = field(default=60_000, metadata=by(whole(1_000, _DAY_MS)))

    @property
    def beat_interval_ms(self) -> int:
        """The time between two beats of a supervisor, which speak for both roles."""
        return min(self.runner_heartbeat_interval_ms, self.claimer_heartbeat_interval_ms)

    @classmethod
    def graphile(cls, **overrides: Any) -> Self:
        """The defaults of graphile_worker: beat 30 s, sweep 60 s, dead after 5 min, delay 30 s."""
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
        fix = _ELSEWHERE.get(name.lower().removesuffix("_ms"))
        return None if fix is None else ("other systems have a setting of this name", fix)

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant."""
        found = []
        for threshold, interval in _BEATS_PER_THRESHOLD:
            least, given = 3 * getattr(self, interval), getattr(self, threshold)
            if given < least:
                found.append(
                    f"RecoveryConfig.{threshold} ({given}) is below 3 x {interval}: two beats lost in a row"
                    f" end a living task; {least} or more is calmer."
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
                rule=f"must be at least 2 x {interval} ({beat}), that is {2 * beat}, to outlast a lost beat",
                fix=f"set {threshold} to {2 * beat} or more{slower}",
            )


_BEATS_PER_THRESHOLD: Final = (
    ("running_stale_threshold_ms", "runner_heartbeat_interval_ms"),
    ("claimed_stale_threshold_ms", "claimer_heartbeat_interval_ms"),
)


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig(PortableSettings):
    """A queue and its priority, 1 to 100: among queues with waiting tasks the lowest number is served first.

    `serial`: its tasks run strictly one at a time across all workers, in the order they were sent.

    QueueConfig("mail", priority=10)
    """

    name: str = field(kw_only=False, metadata=by(queue_name))
    priority: int = field(default=100, metadata=by(whole(1, 100)))
    serial: bool = field(default=False, metadata=by(switch))


def processors() -> int:
    """The processors this process may use, which in a container are often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(PortableSettings):
    """How much a worker does at once, when it looks for work and how it leaves.

    `processes`: worker processes under one supervisor; the three concurrencies are the slots of each, 0 for
    none of that kind; `prefetch` tasks are claimed beyond free slots. `queues`: names to serve, None for all.
    `grace`: how long running tasks may finish after a stop is asked. `poll_interval`: the longest time
    between two looks for work. `slot`: a name that one supervisor bears at a time, so that its successor knows
    that it is gone. A worker or task process that has begun `max_tasks_per_process` tasks, or holds `max_rss`
    of memory, makes room for a fresh one. Raises ConfigurationError with every problem.

        WorkerConfig(processes=4, queues=["mail"], grace="1m")
    """

    processes: int = field(default=1, metadata=by(whole(1, 1_024)))
    async_concurrency: int = field(default=500, metadata=by(whole(0, 100_000)))
    thread_concurrency: int = field(default=32, metadata=by(whole(0, 10_000)))
    process_concurrency: int = field(default_factory=processors, metadata=by(whole(0, 1_024)))
    prefetch: int = field(default=4, metadata=by(whole(0, 10_000)))
    queues: Sequence[str] | None = field(
        default=None,
        metadata=by(optional(sequence_of(queue_name, shortest=1, longest=1_000), none="serves all queues")),
    )
    grace: Duration = field(default=25.0, metadata=by(span(0.0, 86_400.0)))
    poll_interval: Duration = field(default=5.0, metadata=by(span(0.1, 300.0)))
    slot: str | None = field(
        default=None, metadata=by(optional(slot_name, none="leaves this proof of a death out"))
    )
    max_tasks_per_process: int | None = field(
        default=None, metadata=by(optional(whole(1, 1_000_000_000), none="replaces no process for its tasks"))
    )
    max_rss: str | int | None = field(
        default=None, metadata=by(optional(size(16 << 20, 1 << 50), none="replaces no process for its size"))
    )

    @property
    def grace_s(self) -> float:
        """The grace in seconds."""
        return cast(float, self.grace)

    @property
    def max_rss_bytes(self) -> int | None:
        """The limit of memory in bytes."""
        return cast("int | None", self.max_rss)

    @property
    def poll_interval_s(self) -> float:
        """The poll interval in seconds."""
        return cast(float, self.poll_interval)

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant."""
        kinds = ("async", "thread", "process")
        idle = [kind for kind in kinds if getattr(self, f"{kind}_concurrency") == 0]
        return [
            f"WorkerConfig.{kind}_concurrency is 0: this worker runs no {kind} tasks, other workers must."
            for kind in idle
        ]

    def _contradictions(self) -> Iterator[Problem]:
        slots = (self.async_concurrency, self.thread_concurrency, self.process_concurrency)
        if all(count == 0 for count in slots):
            rule = "leaves no slot of any kind, so the worker could run nothing"
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
    """The settings of WorkerConfig that a worker in another program can have."""

    async_concurrency: int
    thread_concurrency: int
    process_concurrency: int
    prefetch: int
    queues: Sequence[str] | None
    grace: Duration
    poll_interval: Duration
    max_tasks_per_process: int | None
    max_rss: str | int | None
