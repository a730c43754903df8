"""The names of all metrics, with their types, labels and descriptions. No other module spells a name."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

MetricKind = Literal["counter", "gauge", "histogram"]


class Metric(Struct, frozen=True):
    """A metric. Units are seconds and bytes, and the names of counters end in `_total`. No label is an id."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """Return the name without the suffix of a counter."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name


BUILD_INFO: Final = Metric(
    "everbeat_build_info", "gauge", "Always 1. The labels are the versions.", ("version", "schema", "python")
)

# Metrics of a cluster, from the database.

TASKS: Final = Metric(
    "everbeat_tasks",
    "gauge",
    "Live tasks. Counting stops at 10,000 of each queue and state.",
    ("queue", "state"),
)
OLDEST_DUE_SECONDS: Final = Metric(
    "everbeat_oldest_due_seconds",
    "gauge",
    "How long the oldest due task of a queue has been due. 0 if no task is due.",
    ("queue",),
)
QUEUE_PAUSED: Final = Metric(
    "everbeat_queue_paused", "gauge", "1 if a queue is paused, also by a pause of everything.", ("queue",)
)
TASK_PAUSED: Final = Metric(
    "everbeat_task_paused", "gauge", "1 for each task function that is paused.", ("task",)
)
ALL_PAUSED: Final = Metric("everbeat_all_paused", "gauge", "1 if everything is paused.")
WORKERS: Final = Metric(
    "everbeat_workers",
    "gauge",
    "Workers that have not ended. late: the last heartbeat is older than the threshold. suspect: the tree has no session.",
    ("state",),
)
SUPERVISORS: Final = Metric("everbeat_supervisors", "gauge", "Supervisors that have not ended.")
BEAT_AGE_SECONDS: Final = Metric(
    "everbeat_beat_age_seconds",
    "gauge",
    "The age of the last heartbeat of the supervisor that has been silent for longest.",
)
LEASES_OVERDUE: Final = Metric(
    "everbeat_leases_overdue",
    "gauge",
    "Leases of dead workers that recovery should have recovered already. Must be 0.",
)
LAST_LOOK: Final = Metric(
    "everbeat_last_look_timestamp_seconds",
    "gauge",
    "When a supervisor last took the turn of a service of the cluster.",
    ("service",),
)
SLOTS_WANTED: Final = Metric(
    "everbeat_slots_wanted",
    "gauge",
    "Slots with which the due tasks of a queue would start within a minute, with those that are in use.",
    ("queue",),
)
SUSPECTS: Final = Metric("everbeat_suspects", "gauge", "Tasks that might kill their worker, and run alone.")
WORKFLOWS: Final = Metric(
    "everbeat_workflows",
    "gauge",
    "Workflows that have not ended. Counting stops at 10,000.",
    ("state",),
)
WORKFLOWS_STUCK: Final = Metric(
    "everbeat_workflows_stuck",
    "gauge",
    "Workflows with a transition that is overdue, among the first 1,000 live workflows. Must be 0.",
)
SCHEDULE_NEXT: Final = Metric(
    "everbeat_schedule_next_timestamp_seconds",
    "gauge",
    "When the next tick of an active schedule is due. 0 if there is none.",
    ("schedule",),
)
LIMIT_PERMITS: Final = Metric(
    "everbeat_limit_permits",
    "gauge",
    "Permits of a limit that are held, and the permits that are free if the limit has no key.",
    ("limit", "state"),
)
LIMIT_WAITING: Final = Metric(
    "everbeat_limit_waiting", "gauge", "Tasks that wait in the lines of a limit.", ("limit",)
)
TRANSACTION_OLDEST_SECONDS: Final = Metric(
    "everbeat_db_transaction_oldest_seconds",
    "gauge",
    "The age of the oldest transaction that keeps dead rows, as far as the role can see it.",
)
TABLE_DEAD_ROWS: Final = Metric(
    "everbeat_table_dead_rows", "gauge", "Dead rows of a table, from the server's statistics.", ("table",)
)

# Metrics of a process, from the memory of a supervisor.

TASKS_SENT: Final = Metric(
    "everbeat_tasks_sent_total",
    "counter",
    "Tasks that the code of this process or tree sent.",
    ("queue", "task"),
)
ATTEMPTS_STARTED: Final = Metric(
    "everbeat_attempts_started_total", "counter", "Attempts whose code began.", ("queue", "task")
)
ATTEMPTS_ENDED: Final = Metric(
    "everbeat_attempts_ended_total",
    "counter",
    "Attempts that ended, by outcome.",
    ("queue", "task", "outcome"),
)
TASKS_EXPIRED: Final = Metric(
    "everbeat_tasks_expired_total",
    "counter",
    "Tasks that expired before an attempt started.",
    ("queue", "task"),
)
TASK_WAIT_SECONDS: Final = Metric(
    "everbeat_task_wait_seconds", "histogram", "The time from due to started.", ("queue",)
)
TASK_RUN_SECONDS: Final = Metric(
    "everbeat_task_run_seconds", "histogram", "The time from started to ended.", ("queue", "task")
)
SLOTS: Final = Metric("everbeat_slots", "gauge", "Slots of the worker processes.", ("state",))
LOOP_LAG_SECONDS: Final = Metric(
    "everbeat_loop_lag_seconds", "gauge", "The greatest lag of the event loops of the worker processes."
)
PROCESSES: Final = Metric(
    "everbeat_processes",
    "gauge",
    "Worker processes of this supervisor. wanted: how many there should be.",
    ("state",),
)
PROCESS_EXITS: Final = Metric(
    "everbeat_process_exits_total", "counter", "Worker processes that exited, in order or not.", ("in_order",)
)
BEAT_WRITE_SECONDS: Final = Metric(
    "everbeat_beat_write_seconds", "histogram", "How long a heartbeat took to write."
)
BEATS_FAILED: Final = Metric(
    "everbeat_beats_failed_total", "counter", "Heartbeats that could not be written."
)
RECOVERIES: Final = Metric(
    "everbeat_recoveries_total",
    "counter",
    "Leases of dead holders that this tree recovered.",
    ("queue", "was", "noticed_by", "action"),
)
NOTICE_SECONDS: Final = Metric(
    "everbeat_notice_seconds",
    "histogram",
    "The time from a holder's last sign of life, or its exit, until the death was noticed.",
    ("noticed_by",),
)
RERUN_SECONDS: Final = Metric(
    "everbeat_rerun_seconds",
    "histogram",
    "The time from a holder's last sign of life, or its exit, until the code of the recovered task began again.",
    ("noticed_by",),
)
POISONED: Final = Metric(
    "everbeat_poisoned_total",
    "counter",
    "Tasks that this tree failed because they had used up their crashes or losses.",
    ("task",),
)
LATE_WRITES_REFUSED: Final = Metric(
    "everbeat_late_writes_refused_total",
    "counter",
    "Writes that were refused because the attempt had lost its lease.",
    ("verb",),
)
SCHEDULE_TICKS: Final = Metric(
    "everbeat_schedule_ticks_total",
    "counter",
    "Ticks of schedules that this supervisor decided.",
    ("outcome",),
)
SCHEDULE_LATE_SECONDS: Final = Metric(
    "everbeat_schedule_late_seconds",
    "histogram",
    "The time from a tick until this supervisor sent its task.",
)
DATABASE_UP: Final = Metric(
    "everbeat_database_up", "gauge", "1 if the supervisor reaches a writable database, otherwise 0."
)
