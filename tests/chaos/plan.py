"""The plan of a run: the type, time, duration and target of each fault.

A plan is made from a seed, and written before anything starts.
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
"""The silence after which a claimed or running lease is stale, in seconds."""
GRACE_S: Final = 1.5
"""How long a tree has to come back after its session was lost, in seconds."""
FIRST_AT_S: Final = 1.0
"""When the first fault begins, in seconds after all trees have work."""
HOUR_S: Final = 3_600


class Kind(StrEnum):
    """The types of faults of a tree, a line, the database or NATS."""

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
"""Types of faults that were added later. Plans without them remain the same."""
KINDS: Final = tuple(kind for kind in Kind if kind not in OF_NATS and kind not in OF_LIVENESS)
"""The types of faults in a basic run."""
OF_THE_NATS_SERVER: Final = frozenset(OF_NATS) - {Kind.NATS_CUT}

OF_THE_DATABASE: Final = frozenset(
    {Kind.TERMINATE_SESSIONS, Kind.RESTART_DATABASE, Kind.SHIFT_CLOCK, Kind.FILL_DISK}
    | {Kind.READ_ONLY, Kind.EXHAUST_CONNECTIONS, Kind.FREEZE_DATABASE, Kind.PROMOTE, Kind.KILL_TURN_HOLDER}
)
OF_THE_CLOCK: Final = frozenset({Kind.SHIFT_CLOCK, Kind.KILL_TURN_HOLDER})
WITHOUT_A_TREE: Final = OF_THE_DATABASE | OF_THE_NATS_SERVER | {Kind.FORK}
"""Types of faults whose target tree, if any, is chosen only when the fault begins: the tree that holds the turn or has forked."""
ONE_AT_A_TIME: Final = OF_THE_DATABASE - {Kind.SHIFT_CLOCK}
OF_A_LINE: Final = frozenset({Kind.CUT, Kind.DELAY, Kind.HALF_OPEN, Kind.LOSE_REPLY})
WORKER_VERBS: Final = {"claim": 3, "start": 3, "settle": 3, "beat": 3, "recover": 1, "release": 1}
PRODUCER_VERBS: Final = {"send": 3, "cancel": 1}
"""The verbs of producers whose replies can be lost, with their weights."""

GENTLE: Final = (
    Kind.KILL_WORKER,
    Kind.FREEZE_WORKER,
    Kind.KILL_TASK_PROCESS,
    Kind.LOSE_REPLY,
    Kind.DELAY,
)
"""Types of faults that do not prevent other trees from noticing a silent tree."""

_PASSING: Final = frozenset({Kind.DELAY, Kind.LOSE_REPLY, Kind.KILL_TASK_PROCESS, Kind.NATS_CUT})
_RECOVERY_PAUSE_S: Final = 2.0
_OVERLAP_SHARE: Final = 0.25
_ENDS_AT_ONCE: Final = frozenset(
    {
        *(Kind.KILL_TASK_PROCESS, Kind.KILL_WORKER, Kind.TERMINATE_SESSIONS),
        *(Kind.NATS_DELETE_STREAM, Kind.NATS_DELETE_CONSUMER, Kind.NATS_DELETE_MESSAGES, Kind.NATS_STRAYS),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A planned fault. If `tree` is None, the fault affects the producers' line, the database or NATS.

    `victim` selects a process of the tree. `verb` is the statement whose reply is lost. A killed tree is down for `lasts_s` seconds.

    `amount` is the seconds of a delay or a shifted clock, the number of lost replies or strays, or the share of deleted messages. For a
    half-open line, 1 means that held data arrives late, and 0 that it never arrives. For a read-only phase, 1 means that
    sessions are terminated. For a promotion, 1 means that the old primary is frozen before it is killed.
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
        """Return when the fault ends."""
        return self.at_s + self.lasts_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All random decisions of a run.

    `nats`: whether NATS notifies the trees of tasks. `liveness`: whether the newer types of faults are included and the database has a
    synchronous standby.
    """

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
        """Return the plan as JSON for a file."""
        given = asdict(self)
        for later in ("nats", "liveness"):
            if not given[later]:
                del given[later]  # older plans remain the same
        return json.dumps(given, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan in the content of a file. Raises ValueError, TypeError or KeyError if the content is not a plan."""
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
    """Return the plan for a seed, which never changes. If `kinds` is None, include every type of fault that fits."""
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


def _faults(random: Random, *, seconds: float, trees: int, kinds: Sequence[Kind]) -> Iterator[Fault]:
    """Yield faults, with every type once before any type repeats.

    No other fault affects a server while it is down, full or terminating sessions.
    """
    at_s, number, server_free_at, nats_free_at = FIRST_AT_S, 0, 0.0, 0.0
    free_at = [0.0] * trees
    pace_s = min(2.2, (seconds - FIRST_AT_S - 2.0) / len(kinds))  # short runs also include every type
    deal = _opening(random, kinds)
    while True:
        for kind in deal:
            if at_s > seconds - 1.0 and number >= len(kinds):
                return
            start_s = round(max(at_s, server_free_at) if kind in ONE_AT_A_TIME else at_s, 2)
            if kind in OF_THE_NATS_SERVER:
                start_s = max(start_s, round(nats_free_at, 2))
            # Sometimes one fault follows another at once. Otherwise, each tree has time to recover.
            standing = [tree for tree in range(trees) if free_at[tree] <= start_s]
            upon_another = number >= len(kinds) and random.random() < _OVERLAP_SHARE
            least_hit = min(range(trees), key=lambda tree: free_at[tree])
            candidates = range(trees) if upon_another else standing or [least_hit]
            fault = _fault(
                random, kind, number=number, at_s=start_s, trees=candidates, first=number < len(kinds)
            )
            if kind in ONE_AT_A_TIME:
                server_free_at = fault.end_s + 1.0
            if kind in OF_THE_NATS_SERVER:
                nats_free_at = fault.end_s + 1.0
            if fault.tree is not None and kind not in _PASSING:
                free_at[fault.tree] = fault.end_s + _RECOVERY_PAUSE_S
            yield fault
            number += 1
            at_s += pace_s * random.uniform(0.5, 1.5)
        deal = random.sample(list(kinds), k=len(kinds))


def _opening(random: Random, kinds: Sequence[Kind]) -> list[Kind]:
    """Return the types in order: first a whole tree is silent while others can see it, then light faults, then all others.

    If the database were constantly disturbed, one amnesty would follow another, and no tree would be judged by age.
    """
    first = [kind for kind in kinds if kind is Kind.FREEZE_TREE]
    gentle = [kind for kind in GENTLE if kind in kinds]
    rest = [kind for kind in kinds if kind not in first and kind not in gentle]
    return [*first, *random.sample(gentle, k=len(gentle)), *random.sample(rest, k=len(rest))]


def _fault(
    random: Random, kind: Kind, *, number: int, at_s: float, trees: Sequence[int], first: bool
) -> Fault:
    tree: int | None = random.choice(trees)
    if kind in WITHOUT_A_TREE or (kind in OF_A_LINE and not first and random.random() < 0.2):
        tree = None
    amount, verb = 0.0, ""
    match kind:
        case Kind.DELAY:
            amount = round(random.uniform(0.02, 0.3), 3)
        case Kind.HALF_OPEN:
            amount = float(random.random() < 0.6)
        case Kind.LOSE_REPLY:
            amount = float(random.randint(1, 3))
            verbs = PRODUCER_VERBS if tree is None else WORKER_VERBS
            (verb,) = random.choices(list(verbs), weights=list(verbs.values()))
        case Kind.SHIFT_CLOCK:
            amount = float(random.choice((-HOUR_S, HOUR_S)))
        case Kind.READ_ONLY | Kind.PROMOTE:
            amount = float(random.random() < 0.5)
        case Kind.NATS_DELETE_MESSAGES:
            amount = round(random.uniform(0.2, 1.0), 2)
        case Kind.NATS_STRAYS:
            amount = float(random.randint(20, 200))
        case _:
            pass
    return Fault(
        number=number,
        kind=kind,
        at_s=at_s,
        lasts_s=round(_lasts_s(random, kind, first=first), 2),
        tree=tree,
        victim=random.randrange(1_000),
        amount=amount,
        verb=verb,
    )


def _lasts_s(random: Random, kind: Kind, *, first: bool) -> float:
    """Return how long a fault lasts, in seconds.

    Half of the faults that can cause a death end before the threshold. The first fault of a type lasts longer, so that it has an effect.
    """
    match kind:
        case _ if kind in _ENDS_AT_ONCE:
            return 0.0
        case Kind.FREEZE_TREE | Kind.FREEZE_SUPERVISOR | Kind.CUT | Kind.HALF_OPEN:
            is_long = first or random.random() < 0.5
            return (
                random.uniform(1.6, 2.4) * THRESHOLD_S if is_long else random.uniform(0.1, 0.8) * THRESHOLD_S
            )
        case Kind.FREEZE_WORKER | Kind.DELAY | Kind.SHIFT_CLOCK | Kind.LOSE_REPLY:
            return random.uniform(1.0, 2.0) * THRESHOLD_S
        case Kind.RESTART_DATABASE:
            return random.choice((0.0, random.uniform(0.3, 1.5) * THRESHOLD_S))
        case Kind.NATS_FREEZE | Kind.NATS_CUT:
            return random.uniform(1.0, 8.0)
        case Kind.NATS_KILL | Kind.NATS_EMPTY:
            return random.uniform(0.1, 6.0)
        case Kind.READ_ONLY:
            return random.uniform(1.4, 2.2) * THRESHOLD_S if first else random.uniform(0.3, 2.2) * THRESHOLD_S
        case Kind.EXHAUST_CONNECTIONS:
            return random.uniform(2.1, 2.8) * THRESHOLD_S if first else random.uniform(0.3, 2.8) * THRESHOLD_S
        case Kind.FREEZE_DATABASE:
            return random.uniform(0.4, 2.0) * THRESHOLD_S
        case Kind.PROMOTE:
            return random.uniform(0.3, 1.2) * THRESHOLD_S
        case Kind.FORK | Kind.KILL_TURN_HOLDER:
            return random.uniform(1.0, 2.0) * THRESHOLD_S
        case Kind.FILL_DISK:
            return random.uniform(0.5, 1.5) * THRESHOLD_S
        case _:
            return random.uniform(0.2, 1.5) * THRESHOLD_S
