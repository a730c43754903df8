"""The facts after a run, as plain values. Times are in seconds since boot, on a clock that no fault shifts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.plan import Kind, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One supervisor process of a tree. `exit_code` is None while it is running. `was_killed`: whether a fault killed it."""

    tree: int
    pid: int
    began: float
    ended: float | None
    exit_code: int | None
    was_killed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """The state of NATS after the run has recovered.

    `in_stream` is negative if there is no stream. `drained_after_s` is None if the stream was not drained in time. `delivered` is a lower
    bound. `found_after_s` is how many seconds tasks took whose messages were destroyed, or None if they did not finish in time.
    """

    delivered: int
    in_outbox: int
    in_stream: int
    workers_away: int
    drained_after_s: float | None
    found_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The times and other observations of a run. `quiet` is None if the last task never finished.

    `asked`: when the trees were asked to stop. `held_by_orphans`: sessions and locks that remained after all trees had exited while
    forked children of task code were alive. `messages`: None without NATS. `stalls`: when the run itself was not scheduled. `skipped`:
    faults that could not be injected, and why.
    """

    ready: float
    healed: float
    quiet: float | None
    asked: float
    exit_codes: tuple[int | None, ...]
    longest_stop_s: float
    left_behind: tuple[str, ...]
    stalls: tuple[tuple[float, float], ...]
    skipped: tuple[str, ...]
    messages: Messages | None = None
    held_by_orphans: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One line of the effects file, which records that user code started or finished."""

    task: str
    name: str
    attempt: int
    fence: int
    claim: str
    pid: int
    step: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """An injected fault. `ended` is None if the fault never ended. `detail` is the text in the fault log."""

    number: int
    kind: Kind
    tree: int | None
    began: float
    ended: float | None
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sends:
    """The records of the producers.

    They are the numbers that the producers intended to send, with task names, and the acknowledged ids. There are also the verdict and
    time of each acknowledged cancel, and the task numbers of acknowledged workflows.
    """

    intended: Mapping[int, str]
    acknowledged: Mapping[int, str]
    cancels: Mapping[str, tuple[str, float]]
    started: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A record that a late attempt learned that it had lost its lease, either from its worker or from a refused write."""

    tree: int
    task: str
    by_word: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """The final state of a task. `number` is the number that its producer gave it (None: a schedule sent the task)."""

    id: str
    name: str
    number: int | None
    state: str
    attempt: int
    serial: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRow:
    """The final state of a workflow."""

    id: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """An attempt that has ended."""

    task_id: str
    attempt: int
    claim_id: str
    fence: int
    outcome: str
    will_retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRow:
    """A recovery. `at` is a time on the machine's clock. `victim` and `supervisor` are the pids of the dead worker and its supervisor."""

    task_id: str
    name: str
    claim_id: str
    was: str
    noticed_by: str
    noticed_after_ms: int | None
    action: str
    cause: str
    victim: int | None
    supervisor: int | None
    supervisor_id: str | None
    observer: int | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRow:
    """A supervisor whose row was ended, and how."""

    supervisor_id: str
    supervisor: int
    how: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The input of all oracles.

    `ledger`: task and claim of each row that user code wrote. `breaches`: the findings of the invariant queries. `sessions`: the remaining
    database sessions of workers that have stopped. `moved`: how many tasks were in the history.
    """

    plan: Plan
    timeline: Timeline
    lives: Sequence[Life]
    effects: Sequence[Effect]
    sends: Sends
    faults: Sequence[InjectedFault]
    refusals: Sequence[Refusal]
    tasks: Sequence[TaskRow]
    workflows: Sequence[WorkflowRow] = ()
    attempts: Sequence[AttemptRow]
    recoveries: Sequence[RecoveryRow]
    ends: Sequence[EndRow]
    beats: Mapping[str, Sequence[float]]
    ledger: Sequence[tuple[str, str]]
    breaches: Sequence[tuple[str, str]]
    sessions: Sequence[str]
    logs: str
    server_log: str
    moved: int = 0

    def tree_of(self, supervisor: int | None) -> int | None:
        """Return the tree to which the supervisor with this pid belongs, or None if the pid is unknown."""
        return next((life.tree for life in self.lives if life.pid == supervisor), None)


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken promise: the number of the invariant, and the observation."""

    number: str
    what: str
