"""The plan: which fault, when, for how long, to whom; made from a seed and written before anything starts.

What lives here: kinds, faults, the plan and its JSON; pure. What may not: doing any of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from random import Random
from typing import Final, Self

BEAT_S: Final = 1.0
THRESHOLD_S: Final = 3.0
"""After so much silence a lease is stale, claimed or running."""
GRACE_S: Final = 1.5
"""So long after its session a tree may come back."""
FIRST_AT_S: Final = 1.0
"""After the moment in which all trees have work."""
HOUR_S: Final = 3_600


class Kind(StrEnum):
    """What can be done to a tree, to a line, to the database, or to NATS."""

    CUT = "cut"
    DELAY = "delay"
    HALF_OPEN = "half_open"
    LOSE_REPLY = "lose_reply"
    KILL_TASK_PROCESS = "kill_task_process"
    KILL_WORKER = "kill_worker"
    KILL_SUPERVISOR = "kill_supervisor"
    KILL_TREE = "kill_tree"
    FREEZE_WORKER = "freeze_worker"
    FREEZE_SUPERVISOR = "freeze_supervisor"
    FREEZE_TREE = "freeze_tree"
    TERMINATE_SESSIONS = "terminate_sessions"
    RESTART_DATABASE = "restart_database"
    SHIFT_CLOCK = "shift_clock"
    FILL_DISK = "fill_disk"
    NATS_KILL = "nats_kill"
    NATS_EMPTY = "nats_empty"
    NATS_FREEZE = "nats_freeze"
    NATS_CUT = "nats_cut"
    NATS_DELETE_STREAM = "nats_delete_stream"
    NATS_DELETE_CONSUMER = "nats_delete_consumer"
    NATS_DELETE_MESSAGES = "nats_delete_messages"
    NATS_STRAYS = "nats_strays"
    READ_ONLY = "read_only"
    EXHAUST_CONNECTIONS = "exhaust_connections"
    FREEZE_DATABASE = "freeze_database"
    PROMOTE = "promote"
    FORK = "fork"
    KILL_TURN_HOLDER = "kill_turn_holder"


OF_NATS: Final = tuple(kind for kind in Kind if kind.startswith("nats_"))
OF_LIVENESS: Final = (
    Kind.READ_ONLY,
    Kind.EXHAUST_CONNECTIONS,
    Kind.FREEZE_DATABASE,
    Kind.PROMOTE,
    Kind.FORK,
    Kind.KILL_TURN_HOLDER,
)
"""Faults that came later: a plan without them is the same as before they existed."""
KINDS: Final = tuple(kind for kind in Kind if kind not in OF_NATS and kind not in OF_LIVENESS)
"""The kinds of a basic run."""
OF_THE_NATS_SERVER: Final = frozenset(OF_NATS) - {Kind.NATS_CUT}

OF_THE_DATABASE: Final = frozenset(
    {Kind.TERMINATE_SESSIONS, Kind.RESTART_DATABASE, Kind.SHIFT_CLOCK, Kind.FILL_DISK}
    | {Kind.READ_ONLY, Kind.EXHAUST_CONNECTIONS, Kind.FREEZE_DATABASE, Kind.PROMOTE, Kind.KILL_TURN_HOLDER}
)
OF_THE_CLOCK: Final = frozenset({Kind.SHIFT_CLOCK, Kind.KILL_TURN_HOLDER})
WITHOUT_A_TREE: Final = OF_THE_DATABASE | OF_THE_NATS_SERVER | {Kind.FORK}
"""Which tree is struck, if any, is known only when it happens: the one that holds the turn, or that forked."""
ONE_AT_A_TIME: Final = OF_THE_DATABASE - {Kind.SHIFT_CLOCK}
OF_A_LINE: Final = frozenset({Kind.CUT, Kind.DELAY, Kind.HALF_OPEN, Kind.LOSE_REPLY})
WORKER_VERBS: Final = {"claim": 3, "start": 3, "settle": 3, "beat": 3, "recover": 1, "release": 1}
PRODUCER_VERBS: Final = {"send": 3, "cancel": 1}
"""Whose replies are lost, and how often in comparison."""

GENTLE: Final = (
    Kind.KILL_WORKER,
    Kind.FREEZE_WORKER,
    Kind.KILL_TASK_PROCESS,
    Kind.LOSE_REPLY,
    Kind.DELAY,
)
"""What keeps nobody from seeing who falls silent."""

_PASSING: Final = frozenset({Kind.DELAY, Kind.LOSE_REPLY, Kind.KILL_TASK_PROCESS, Kind.NATS_CUT})
_GETS_UP_S: Final = 2.0
_UPON_ANOTHER: Final = 0.25
_ENDS_AT_ONCE: Final = frozenset(
    {
        *(Kind.KILL_TASK_PROCESS, Kind.KILL_WORKER, Kind.TERMINATE_SESSIONS),
        *(Kind.NATS_DELETE_STREAM, Kind.NATS_DELETE_CONSUMER, Kind.NATS_DELETE_MESSAGES, Kind.NATS_STRAYS),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `tree` None means the producers' line, the database, or NATS. `victim` picks a process of the tree.

    `amount`: of a delay its seconds, of a shifted clock its seconds, of a half-open line 1 if what was held back arrives
    late and 0 if never, of lost replies how many, of deleted messages their share, of strays how many, of a read-only phase 1 if
    sessions are ended, of a promotion 1 if the old primary is frozen before it is killed. `verb`: whose reply
    is lost. A killed tree is down for `lasts_s`.
    """

    number: int
    kind: Kind
    at_s: float
    lasts_s: float
    tree: int | None
    victim: int
    amount: float
    verb: str

    @property
    def end_s(self) -> float:
        """When it is healed."""
        return self.at_s + self.lasts_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that chance decides about a run. `nats`: its trees are told of tasks by NATS. `liveness`: the later kinds of faults
    are dealt, and the database has a synchronous standby."""

    seed: int
    seconds: float
    trees: int
    processes: int
    producers: int
    sends_per_s: float
    faults: Sequence[Fault]
    nats: bool = False
    liveness: bool = False

    def to_json(self) -> str:
        """The plan as a file holds it."""
        given = asdict(self)
        for later in ("nats", "liveness"):
            if not given[later]:
                del given[later]  # a plan without it looks as it always did
        return json.dumps(given, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan from its file; raises ValueError, TypeError or KeyError for anything else."""
        given = json.loads(text)
        faults = tuple(Fault(**{**fault, "kind": Kind(fault["kind"])}) for fault in given.pop("faults"))
        return cls(**given, faults=faults)


def make_plan(
    *,
    seed: int,
    seconds: float,
    trees: int = 3,
    producers: int = 2,
    kinds: Sequence[Kind] | None = None,
    nats: bool = False,
    liveness: bool = False,
) -> Plan:
    """The plan of a seed: the same for ever. `kinds` None: every kind that fits."""
    later = (*(OF_NATS if nats else ()), *(OF_LIVENESS if liveness else ()))
    chosen = kinds or (*KINDS, *later)
    is_short = seconds < 60
    return Plan(
        seed=seed,
        seconds=seconds,
        trees=trees,
        processes=1 if is_short else 2,
        producers=producers,
        sends_per_s=10.0,
        faults=tuple(_faults(Random(seed), seconds=seconds, trees=trees, kinds=chosen)),
        nats=nats,
        liveness=any(kind in OF_LIVENESS for kind in chosen),
    )


def _faults(dice: Random, *, seconds: float, trees: int, kinds: Sequence[Kind]) -> Iterator[Fault]:
    """Every kind comes once before any comes again; a server that is down, full or terminating is left to it."""
    at_s, number, server_free_at, nats_free_at = FIRST_AT_S, 0, 0.0, 0.0
    free_at = [0.0] * trees
    pace_s = min(2.2, (seconds - FIRST_AT_S - 2.0) / len(kinds))  # short runs too see every kind
    deal = _opening(dice, kinds)
    while True:
        for kind in deal:
            if at_s > seconds - 1.0 and number >= len(kinds):
                return
            start_s = round(max(at_s, server_free_at) if kind in ONE_AT_A_TIME else at_s, 2)
            if kind in OF_THE_NATS_SERVER:
                start_s = max(start_s, round(nats_free_at, 2))
            # Now and then blow falls upon blow; else each tree has time to get up.
            standing = [tree for tree in range(trees) if free_at[tree] <= start_s]
            upon_another = number >= len(kinds) and dice.random() < _UPON_ANOTHER
            least_hit = min(range(trees), key=lambda tree: free_at[tree])
            candidates = range(trees) if upon_another else standing or [least_hit]
            fault = _fault(
                dice, kind, number=number, at_s=start_s, trees=candidates, first=number < len(kinds)
            )
            if kind in ONE_AT_A_TIME:
                server_free_at = fault.end_s + 1.0
            if kind in OF_THE_NATS_SERVER:
                nats_free_at = fault.end_s + 1.0
            if fault.tree is not None and kind not in _PASSING:
                free_at[fault.tree] = fault.end_s + _GETS_UP_S
            yield fault
            number += 1
            at_s += pace_s * dice.uniform(0.5, 1.5)
        deal = dice.sample(list(kinds), k=len(kinds))


def _opening(dice: Random, kinds: Sequence[Kind]) -> list[Kind]:
    """A whole tree falls silent while others can see it; then what is gentle; then all else.

    Were the database disturbed all the time, the amnesties would follow each other and nobody would be judged by age.
    """
    first = [kind for kind in kinds if kind is Kind.FREEZE_TREE]
    gentle = [kind for kind in GENTLE if kind in kinds]
    rest = [kind for kind in kinds if kind not in first and kind not in gentle]
    return [*first, *dice.sample(gentle, k=len(gentle)), *dice.sample(rest, k=len(rest))]


def _fault(dice: Random, kind: Kind, *, number: int, at_s: float, trees: Sequence[int], first: bool) -> Fault:
    tree: int | None = dice.choice(trees)
    if kind in WITHOUT_A_TREE or (kind in OF_A_LINE and not first and dice.random() < 0.2):
        tree = None
    amount, verb = 0.0, ""
    match kind:
        case Kind.DELAY:
            amount = round(dice.uniform(0.02, 0.3), 3)
        case Kind.HALF_OPEN:
            amount = float(dice.random() < 0.6)
        case Kind.LOSE_REPLY:
            amount = float(dice.randint(1, 3))
            verbs = PRODUCER_VERBS if tree is None else WORKER_VERBS
            (verb,) = dice.choices(list(verbs), weights=list(verbs.values()))
        case Kind.SHIFT_CLOCK:
            amount = float(dice.choice((-HOUR_S, HOUR_S)))
        case Kind.READ_ONLY | Kind.PROMOTE:
            amount = float(dice.random() < 0.5)
        case Kind.NATS_DELETE_MESSAGES:
            amount = round(dice.uniform(0.2, 1.0), 2)
        case Kind.NATS_STRAYS:
            amount = float(dice.randint(20, 200))
        case _:
            pass
    return Fault(
        number=number,
        kind=kind,
        at_s=at_s,
        lasts_s=round(_lasts_s(dice, kind, first=first), 2),
        tree=tree,
        victim=dice.randrange(1_000),
        amount=amount,
        verb=verb,
    )


def _lasts_s(dice: Random, kind: Kind, *, first: bool) -> float:
    """Half of what may end in a death is over before the threshold; the first of a kind is not, so that it does something."""
    match kind:
        case _ if kind in _ENDS_AT_ONCE:
            return 0.0
        case Kind.FREEZE_TREE | Kind.FREEZE_SUPERVISOR | Kind.CUT | Kind.HALF_OPEN:
            is_long = first or dice.random() < 0.5
            return dice.uniform(1.6, 2.4) * THRESHOLD_S if is_long else dice.uniform(0.1, 0.8) * THRESHOLD_S
        case Kind.FREEZE_WORKER | Kind.DELAY | Kind.SHIFT_CLOCK | Kind.LOSE_REPLY:
            return dice.uniform(1.0, 2.0) * THRESHOLD_S
        case Kind.RESTART_DATABASE:
            return dice.choice((0.0, dice.uniform(0.3, 1.5) * THRESHOLD_S))
        case Kind.NATS_FREEZE | Kind.NATS_CUT:
            return dice.uniform(1.0, 8.0)
        case Kind.NATS_KILL | Kind.NATS_EMPTY:
            return dice.uniform(0.1, 6.0)
        case Kind.READ_ONLY:
            return dice.uniform(1.4, 2.2) * THRESHOLD_S if first else dice.uniform(0.3, 2.2) * THRESHOLD_S
        case Kind.EXHAUST_CONNECTIONS:
            return dice.uniform(2.1, 2.8) * THRESHOLD_S if first else dice.uniform(0.3, 2.8) * THRESHOLD_S
        case Kind.FREEZE_DATABASE:
            return dice.uniform(0.4, 2.0) * THRESHOLD_S
        case Kind.PROMOTE:
            return dice.uniform(0.3, 1.2) * THRESHOLD_S
        case Kind.FORK | Kind.KILL_TURN_HOLDER:
            return dice.uniform(1.0, 2.0) * THRESHOLD_S
        case Kind.FILL_DISK:
            return dice.uniform(0.5, 1.5) * THRESHOLD_S
        case _:
            return dice.uniform(0.2, 1.5) * THRESHOLD_S
