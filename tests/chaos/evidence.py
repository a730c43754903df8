"""What is known after a run, as plain values. Times are seconds since boot, by a clock that no fault shifts.

What lives here: the values. What may not: gathering them (`gathering`) and judging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.plan import Kind, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One supervisor process of a tree; `exit_code` None while it lives. `struck`: a fault killed it."""

    tree: int
    pid: int
    began: float
    ended: float | None
    exit_code: int | None
    struck: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What NATS had to do with a run, looked at when all was healed and quiet. `in_stream` is negative where there is no stream;
    `drained_after_s` None: it was not over within the time that it was given. `delivered` is at least so many. `found_after_s`: when
    tasks had ended whose messages were destroyed before; None if they did not in time."""

    delivered: int
    in_outbox: int
    in_stream: int
    workers_away: int
    drained_after_s: float | None
    found_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a run went; `quiet` None: the last task never ended. `asked`: when the trees were told to leave.

    `held_by_orphans`: sessions and locks that were left when all trees had gone and children that task code had forked still lived.
    `messages`: None in a run without NATS. `stalls`: when the run itself was kept from running. `skipped`: faults that could not be done, and why.
    """

    ready: float
    healed: float
    quiet: float | None
    asked: float
    exit_codes: tuple[int | None, ...]
    longest_farewell_s: float
    left_behind: tuple[str, ...]
    stalls: tuple[tuple[float, float], ...]
    skipped: tuple[str, ...]
    messages: Messages | None = None
    held_by_orphans: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One line of the effects file: user code began or ended."""

    task: str
    name: str
    attempt: int
    fence: int
    claim: str
    pid: int
    step: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One fault as it was really done; `ended` None: never healed. `detail` is what the fault log says of it."""

    number: int
    kind: Kind
    tree: int | None
    began: float
    ended: float | None
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sends:
    """What the producers know: the numbers they meant to send, with the task's name; the ids that were acknowledged; and of
    each answered cancel the verdict and the time; of acknowledged workflows the numbers of their tasks.
    """

    intended: Mapping[int, str]
    acknowledged: Mapping[int, str]
    cancels: Mapping[str, tuple[str, float]]
    started: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A late attempt learned that it is none any more: by word, or when it wrote."""

    tree: int
    task: str
    by_word: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A task as it is in the end; `number` is the producers'."""

    id: str
    name: str
    number: int
    state: str
    attempt: int
    serial: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRow:
    """A workflow as it is in the end."""

    id: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """An ended attempt."""

    task_id: str
    attempt: int
    claim_id: str
    fence: int
    outcome: str
    will_retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRow:
    """A recovery; `at` by the machine's clock, `victim` the pid of the dead worker, `supervisor` its supervisor's."""

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
    """A supervisor that was ended, and how."""

    supervisor_id: str
    supervisor: int
    how: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything the judges read. `ledger`: task and claim of each row that user code wrote; `breaches`: what the
    queries of the invariants found; `sessions`: of workers that have left."""

    plan: Plan
    course: Course
    lives: Sequence[Life]
    deeds: Sequence[Deed]
    sends: Sends
    faults: Sequence[Struck]
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

    def tree_of(self, supervisor: int | None) -> int | None:
        """The tree that a supervisor's pid belongs to."""
        return next((life.tree for life in self.lives if life.pid == supervisor), None)


@dataclass(frozen=True, slots=True)
class Breach:
    """A promise that did not hold: the invariant's number, and what was seen."""

    number: str
    what: str
