"""Oracles about trees and the server: deaths that were declared, how trees stopped, and the contents of logs. No side effects."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from tests.chaos.evidence import Breach, Evidence
from tests.chaos.plan import OF_THE_CLOCK, THRESHOLD_S, Kind
from tests.chaos.silence import Explainer
from tests.chaos.task_oracles import SELF_KILL
from tests.invariants import BY_THE_CLOCK

CANARY: Final = "canary-8d1f"
"""A text in every payload and result. No log or error may contain it."""
LONGEST_STOP_S: Final = 3 * (4.0 + 2.0)
"""How long a tree can take to stop, in seconds: the grace period plus 2 s, tripled for a busy machine."""

_TOLERANCE_S: Final = 0.3
_RETURNS: Final = frozenset(
    {Kind.RESTART_DATABASE, Kind.READ_ONLY, Kind.EXHAUST_CONNECTIONS, Kind.FREEZE_DATABASE}
)
"""Types of faults after whose end every process can use the database again."""
_KEEPS_ITS_CONNECTIONS: Final = frozenset({Kind.FREEZE_TREE, Kind.FREEZE_SUPERVISOR, Kind.HALF_OPEN})
"""A tree that such a fault silences keeps its connections, so a server that rejects new connections is not an excuse."""


def no_live_tree_is_declared_dead(evidence: Evidence) -> Iterator[Breach]:
    """I13: a supervisor that was declared dead had been killed or silenced for long enough, and sent no further heartbeat."""
    explainer = Explainer(evidence, self_kill=SELF_KILL)
    for death in explainer.ends():
        if death.why is None:
            silent_s = death.at - explainer.last_beat(death.subject, death.at)
            what = f"supervisor {death.subject} was ended by {death.way}, {silent_s:.2f} s after a beat"
            yield Breach(
                "I13", f"{what}, at {death.at:.2f} (tree {death.tree}): nothing that was done explains it"
            )
    for row in evidence.recoveries:
        death = explainer.recovery(row)
        if death.why is None:
            what = f"task {row.task_id} ({row.name}) was recovered by {death.way}: {row.cause}"
            yield Breach(
                "I13", f"{what}, at {death.at:.2f} (tree {death.tree}): nothing that was done explains it"
            )


def no_tree_is_judged_right_after_an_outage(evidence: Evidence) -> Iterator[Breach]:
    """I14: no death by age is declared within a threshold after the database came back or the observer was thawed.

    The death of a supervisor counts only if its process was alive. In a mass silence, the reaper searches its machine for proofs. A proof
    is not a judgement of silence, so no outage makes it wrong.

    The statement that declares a proven death is repeated until the database replies, and writes `ended_how = 'age'`. So a proof from
    before a restart commits right after the restart, unless the tree has sent a heartbeat in the meantime.
    `tests/recovering/notice/test_late_proof.py` provokes this order. A judgement by silence is tried once, and dropped if the observer
    was disturbed since its check.
    """
    thaws = defaultdict[int | None, list[float]](list)
    for fault in evidence.faults:
        if fault.kind in (Kind.FREEZE_TREE, Kind.FREEZE_SUPERVISOR) and fault.ended is not None:
            thaws[fault.tree].append(fault.ended)
    ended = {end.supervisor_id for end in evidence.ends}
    gone = {life.pid: life.ended for life in evidence.lives if life.ended is not None}
    for row in evidence.recoveries:
        if row.noticed_by != "age" or row.supervisor_id in ended:
            continue
        returns = _returns(evidence, evidence.tree_of(row.supervisor))
        for at in [*returns, *thaws[evidence.tree_of(row.observer)]]:
            if at < row.at < at + THRESHOLD_S - _TOLERANCE_S:
                yield Breach(
                    "I14", f"task {row.task_id} was recovered by age {row.at - at:.2f} s after {at:.2f}"
                )
    for end in evidence.ends:
        for at in _returns(evidence, evidence.tree_of(end.supervisor)):
            was_alive = gone.get(end.supervisor, end.at) >= end.at
            if end.how == "age" and was_alive and at < end.at < at + THRESHOLD_S - _TOLERANCE_S:
                yield Breach(
                    "I14",
                    f"supervisor {end.supervisor_id} was ended by age {end.at - at:.2f} s after the return",
                )


def _returns(evidence: Evidence, tree: int | None) -> list[float]:
    """Return the times at which the database became available again for a tree."""
    silences = [one for one in evidence.faults if one.tree == tree and one.kind in _KEEPS_ITS_CONNECTIONS]
    found = []
    for fault in evidence.faults:
        if fault.ended is None or not (fault.kind in _RETURNS or fault.detail.get("server_died")):
            continue
        overlaps = any(
            one.began < fault.ended and (one.ended is None or one.ended > fault.began) for one in silences
        )
        if not (overlaps and fault.kind is Kind.EXHAUST_CONNECTIONS):
            found.append(fault.ended)
    return found


def no_tree_ends_by_itself(evidence: Evidence) -> Iterator[Breach]:
    """Promise 4: a tree that once worked exits only because it is killed or stopped. Without a database, it waits."""
    worked = {int(supervisor_id.rsplit("-", 2)[1]) for supervisor_id in evidence.beats}
    for life in evidence.lives:
        if (
            life.pid in worked
            and life.ended is not None
            and not life.was_killed
            and life.ended < evidence.timeline.asked
        ):
            yield Breach(
                "P4",
                f"tree {life.tree} (pid {life.pid}) ended by itself with {life.exit_code} at {life.ended:.2f}",
            )


def nothing_is_left(evidence: Evidence) -> Iterator[Breach]:
    """I26, L7: all trees stop cleanly and in time, and none of their processes, sessions or locks remains."""
    timeline = evidence.timeline
    for what in [*timeline.left_behind, *evidence.sessions]:
        yield Breach("I26", f"left behind: {what}")
    for what in timeline.held_by_orphans:
        yield Breach("I26", f"left behind while forked children live: {what}")
    if any(code != 0 for code in timeline.exit_codes):
        yield Breach("L7", f"trees ended with {timeline.exit_codes}")
    if timeline.longest_stop_s > LONGEST_STOP_S:
        yield Breach("L7", f"a tree took {timeline.longest_stop_s:.1f} s to leave")


def turns_survive_a_clock_set_back(evidence: Evidence) -> Iterator[Breach]:
    """L3: while the clock is set back and the holder of the turns is dead, another supervisor takes over the holder's work."""
    for fault in evidence.faults:
        if fault.kind is Kind.KILL_TURN_HOLDER and fault.detail.get("expired_after_s") is None:
            yield Breach(
                "L3",
                f"a task was not expired in time: the holder of the turns died at {fault.began:.2f}, with the clock back",
            )


def the_server_logs_no_problem(evidence: Evidence) -> Iterator[Breach]:
    """I27: the server logs no deadlock, no lock wait of 2 s, and no panic except for a full disk."""
    for line in evidence.server_log.splitlines():
        if re.search(r"deadlock detected|still waiting for", line):
            yield Breach("I27", line)
        if "PANIC" in line and "No space left" not in line:
            yield Breach("I27", line)


def no_secret_is_logged(evidence: Evidence) -> Iterator[Breach]:
    """I29: no log and no recovery contains a payload."""
    for line in f"{evidence.logs}\n{evidence.server_log}".splitlines():
        if CANARY in line:
            yield Breach("I29", line[:300])
    for row in evidence.recoveries:
        if CANARY in row.cause:
            yield Breach("I29", row.cause)


def the_tables_agree(evidence: Evidence) -> Iterator[Breach]:
    """I3 to I26: yield the findings of the invariant queries. With a shifted clock, times cannot be compared (I17, and one rule of I39)."""
    was_shifted = any(fault.kind in OF_THE_CLOCK for fault in evidence.faults)
    for number, text in evidence.breaches:
        if not (was_shifted and (number == "I17" or text.startswith(BY_THE_CLOCK))):
            yield Breach(number, text)


TREE_ORACLES: Final = (
    no_live_tree_is_declared_dead,
    no_tree_is_judged_right_after_an_outage,
    no_tree_ends_by_itself,
    nothing_is_left,
    turns_survive_a_clock_set_back,
    the_server_logs_no_problem,
    no_secret_is_logged,
    the_tables_agree,
)
