"""The protocol as a small state machine: the content of the database, the memory of each party, and the possible next steps.

Two trees (a supervisor with a worker) serve one or two tasks. There is no clock; one step is a whole threshold, in
which every running tree beats. A holder is the present incarnation of a tree (its number) or its former one (number +
trees). Claim ids are the smallest numbers that no party remembers, so the graph stays finite however often a task is
claimed. `grant` is known to no database: the true identity of a claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple, TypeVar

from everbeat.domain.task.states import TASK_TERMINAL_STATES, TRANSITIONS

T = TypeVar("T")

# Plain text with a cheap hash: the search looks up millions of worlds.
PENDING: Final = "PENDING"
CLAIMED: Final = "CLAIMED"
RUNNING: Final = "RUNNING"
COMPLETED: Final = "COMPLETED"
FAILED: Final = "FAILED"
CANCELLED: Final = "CANCELLED"
TERMINAL: Final = frozenset(state.value for state in TASK_TERMINAL_STATES)
LEGAL: Final = frozenset((move.old.value, move.new.value) for move in TRANSITIONS if move.old is not None)
NO_HOLDER: Final = -1
MAX_CRASHES: Final = 2
MAX_LOSSES: Final = 3
LIVE: Final = 0
ENDED: Final = 1
BURIED: Final = 2
KILLED: Final = 3
"""Buried by its supervisor, which saw the process killed."""
CRASHED: Final = 4
"""Buried by its supervisor, which saw the process die of its code."""

Guard = Literal["claim_id", "nothing", "state", "name"]
Fault = Literal["freeze", "kill tree", "kill worker", "lose reply", "delay settle", "outage", "failover"]
EVERY_FAULT: Final[tuple[Fault, ...]] = (
    "freeze", "kill tree", "kill worker", "lose reply", "delay settle", "outage",
)  # fmt: skip


class Broken(Enum):
    """The invariant that a variant is expected to break; the numbers are those of the protocol."""

    I5 = "I5: a final state was left"
    I6 = "I6: an illegal transition"
    I8 = "I8: a write of another attempt than the present one"
    I10 = "I10: code started that held no lease"
    I13 = "I13: somebody alive was declared dead"
    I15 = "I15: a neighbour was charged for the guilty"
    E13 = "E13: code was suspected for the loss of a host"
    I18 = "I18: run again after a cancel request"
    I26 = "I26: a buried worker was given a task"
    L1 = "L1: a death that nobody can notice"
    L3 = "L3: stuck although a worker lives"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The design of the protocol. The defaults are everbeat; each other value is a known mistake."""

    guard: Guard = "claim_id"
    random_claim_ids: bool = True
    fenced_start: bool = True
    recovery_swaps_claim: bool = True
    recovery_swaps_beat: bool = True
    amnesty: bool = True
    beats_vouch_for_memory: bool = True
    beats_name_claims: bool = True
    beats_refuse_the_ended: bool = True
    sweeps_revisit_the_ended: bool = True
    claims_refuse_the_ended: bool = True
    start_up_by_proof: bool = True
    crash_limit: bool = True
    suspects_run_alone: bool = True
    hosts_are_no_evidence: bool = True
    crash_honours_cancel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of the world is explored."""

    tasks: int = 1
    faults: int = 2
    kinds: tuple[Fault, ...] = EVERY_FAULT
    cancels: bool = True
    workers: int = 2
    """How many of the trees claim; the others only observe."""
    begins: bool = True
    """A claim can start the task at once if a slot is free, or claim it ahead of one."""
    drains: bool = True
    """Workers can also release and return their tasks."""
    poison: bool = False
    """Task 0 kills its process whenever it runs; the others are innocent."""


class Row(NamedTuple):
    """A task as stored, plus `grant`."""

    state: str = PENDING
    holder: int = NO_HOLDER
    claim: int = 0
    grant: int = 0
    fence: int = 0
    crashes: int = 0
    losses: int = 0
    process_died: bool = False
    suspect: bool = False
    alone: bool = False
    cancel: bool = False


class Lease(NamedTuple):
    """A lease as a party read it; `suspect` and `charge` are the decision about it."""

    task: int
    claim: int
    grant: int
    state: str
    charge: Literal["crash", "loss"] = "loss"
    suspect: bool = False


class Tables(NamedTuple):
    """The content of the database: the tasks, and the state of each holder: live, ended, or its worker buried, and why."""

    rows: tuple[Row, ...]
    ended: tuple[int, ...]

    def with_row(self, task: int, row: Row) -> Tables:
        """Return the tables with one task changed."""
        return self._replace(rows=put(self.rows, task, row))

    def leases_of(self, holder: int) -> tuple[Lease, ...]:
        """Return the leases of this holder."""
        return tuple(
            Lease(task, row.claim, row.grant, row.state)
            for task, row in enumerate(self.rows)
            if row.holder == holder and row.state in (CLAIMED, RUNNING)
        )


class Answer(NamedTuple):
    """The result of a statement: the tables after it, whether it was accepted, and the invariant that it broke."""

    tables: Tables
    accepted: bool
    broken: Broken | None = None


class Database:
    """The statements. Each is one atomic step on the tables."""

    def __init__(self, choices: Choices, size: Size, trees: int) -> None:
        self._choices = choices
        self._size = size
        self._trees = trees

    def claim(self, tables: Tables, task: int, holder: int, grant: int) -> Answer:
        """PENDING -> CLAIMED, never for a buried worker."""
        row = tables.rows[task]
        if row.state != PENDING:
            return Answer(tables, False)
        if tables.ended[holder] >= BURIED and self._choices.claims_refuse_the_ended:
            return Answer(tables, False)
        fence = 0 if self._choices.random_claim_ids else row.fence + 1
        claim = grant if self._choices.random_claim_ids else fence
        taken = row._replace(state=CLAIMED, holder=holder, claim=claim, grant=grant, fence=fence, alone=False)
        return self._write(tables, task, taken, Broken.I26 if tables.ended[holder] >= BURIED else None)

    def start(self, tables: Tables, task: int, lease: Lease, *, alone: bool) -> Answer:
        """CLAIMED -> RUNNING; a repetition is accepted again."""
        row = tables.rows[task]
        holds = row.claim == lease.claim if self._choices.fenced_start else True
        if not holds or row.state not in (CLAIMED, RUNNING):
            return Answer(tables, False)
        broken = None if row.grant == lease.grant else Broken.I10
        if row.state == RUNNING:
            return Answer(tables, True, broken)
        return self._write(tables, task, row._replace(state=RUNNING, alone=alone), broken)

    def settle(self, tables: Tables, lease: Lease, tree: int, *, released: bool = False) -> Answer:
        """RUNNING -> COMPLETED, or released."""
        row = tables.rows[lease.task]
        if not self._is_accepted(row, lease, tree):
            return Answer(tables, False)
        state = COMPLETED
        if released:
            state = CANCELLED if row.cancel else PENDING
        ended = _unheld(row)._replace(state=state, suspect=row.suspect and released)
        return self._write(tables, lease.task, ended, None if row.grant == lease.grant else Broken.I8)

    def release(self, tables: Tables, lease: Lease) -> Answer:
        """CLAIMED -> PENDING."""
        row = tables.rows[lease.task]
        if row.state != CLAIMED or row.claim != lease.claim:
            return Answer(tables, False)
        broken = None if row.grant == lease.grant else Broken.I8
        return self._write(tables, lease.task, _unheld(row)._replace(state=PENDING), broken)

    def cancel(self, tables: Tables, task: int) -> Answer:
        """PENDING and CLAIMED end at once; for RUNNING the cancel is requested."""
        row = tables.rows[task]
        if row.state == RUNNING:
            return Answer(tables.with_row(task, row._replace(cancel=True)), True)
        return self._write(tables, task, _unheld(row)._replace(state=CANCELLED, cancel=True))

    def recover(self, tables: Tables, lease: Lease, *, process_died: bool) -> Answer:
        """Recover the lease of a dead holder, by a compare-and-swap on the values that were read."""
        row = tables.rows[lease.task]
        if self._choices.recovery_swaps_claim and (row.claim, row.state) != (lease.claim, lease.state):
            return Answer(tables, False)
        broken = None if row.grant == lease.grant else Broken.I8
        free = _unheld(row)
        if row.cancel and self._choices.crash_honours_cancel:
            return self._write(tables, lease.task, free._replace(state=CANCELLED), broken)
        if lease.state == CLAIMED:
            return self._write(tables, lease.task, free._replace(state=PENDING), broken)
        if row.state in TERMINAL:
            return self._write(tables, lease.task, free._replace(state=PENDING), broken)
        charged = self._charged(free, lease)._replace(process_died=row.process_died or process_died)
        if lease.suspect and not process_died:
            broken = broken or Broken.E13
        if self._is_neighbour(lease.task) and (charged.crashes > row.crashes or charged.state == FAILED):
            broken = broken or Broken.I15
        return self._write(tables, lease.task, charged, broken)

    def _charged(self, row: Row, lease: Lease) -> Row:
        if not self._choices.crash_limit:
            return row._replace(state=PENDING)
        crashes = row.crashes + (lease.charge == "crash")
        losses = row.losses + (lease.charge == "loss")
        is_over = crashes >= MAX_CRASHES or losses >= MAX_LOSSES
        return row._replace(
            state=FAILED if is_over else PENDING,
            crashes=crashes,
            losses=losses,
            suspect=row.suspect or lease.suspect,
        )

    def _is_neighbour(self, task: int) -> bool:
        return self._size.poison and task != 0

    def _is_accepted(self, row: Row, lease: Lease, tree: int) -> bool:
        match self._choices.guard:
            case "claim_id":
                return row.state == RUNNING and row.claim == lease.claim
            case "nothing":
                return True
            case "state":
                return row.state == RUNNING
            case "name":
                return row.state == RUNNING and row.holder % self._trees == tree

    def _write(self, tables: Tables, task: int, new: Row, broken: Broken | None = None) -> Answer:
        old = tables.rows[task]
        if old.state in TERMINAL:
            broken = Broken.I5
        elif (old.state, new.state) not in LEGAL:
            broken = broken or Broken.I6
        elif old.state == RUNNING and old.cancel and new.state == PENDING:
            broken = broken or Broken.I18
        if new.state in TERMINAL:
            # The history of the task no longer matters; the graph is smaller without it.
            new = Row(state=new.state, fence=new.fence)
        return Answer(tables.with_row(task, new), True, broken)


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """Return the tuple with one item changed."""
    return (*items[:index], item, *items[index + 1 :])


def _unheld(row: Row) -> Row:
    return row._replace(holder=NO_HOLDER, claim=0, grant=0, alone=False)
