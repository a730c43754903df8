"""Compute the figures of a run: one line for each type of fault, and totals. This module has no side effects."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.chaos.evidence import Breach, Evidence, Refusal
from tests.chaos.plan import Kind
from tests.chaos.silence import Explainer
from tests.chaos.task_oracles import SELF_KILL


@dataclass(slots=True, kw_only=True)
class Line:
    """The effects of one type of fault. `notice_s`: the seconds from the fault to each recovery that it caused."""

    injected: int = 0
    recovered: int = 0
    lost: int = 0
    duplicated: int = 0
    refused: int = 0
    notice_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float | None:
        return median(self.notice_s) if self.notice_s else None

    @property
    def longest_s(self) -> float | None:
        return max(self.notice_s, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a whole run. Seconds are measured on the machine's clock."""

    lines: dict[str, Line]
    sent: int
    in_doubt: int
    states: dict[str, int]
    moved: int
    starts: int
    run_again: int
    recovered_running: int
    recovered_claimed: int
    noticed_by: dict[str, int]
    refused: int
    false_deaths: int
    replies_lost: dict[str, int]
    writes_without_room: int
    works_again_s: list[float]
    quiet_after_s: float | None
    stop_s: float
    stalls: int
    ended_by_themselves: int

    @property
    def injected(self) -> int:
        return sum(line.injected for line in self.lines.values())

    @property
    def emptiness(self) -> str:
        """Return the reason why this run proves nothing, or an empty string if it proves something."""
        if not self.injected:
            return "no fault was injected"
        if not self.recovered_running:
            return "no attempt was lost"
        if not self.refused:
            return "no late attempt was refused"
        return ""


LOST = frozenset({"I1", "L3"})
DUPLICATED = frozenset({"I10", "I11", "P2", "I7", "I12"})


def figures(evidence: Evidence, found: Sequence[Breach]) -> Figures:
    """Compute the figures of a run from its evidence and the breaches that the oracles found."""
    lines = defaultdict[str, Line](Line)
    for fault in evidence.faults:
        lines[fault.kind].injected += 1
    explainer = Explainer(evidence, self_kill=SELF_KILL)
    for row in evidence.recoveries:
        death = explainer.recovery(row)
        line = lines[death.why or "unexplained"]
        line.recovered += 1
        if death.since is not None:
            line.notice_s.append(row.at - death.since)
        broken = {breach.number for breach in found if row.task_id in breach.what}
        line.lost += bool(broken & LOST)
        line.duplicated += bool(broken & DUPLICATED)
    refusals = _distinct(evidence.refusals)
    for refusal in refusals:
        lines[_cause_of(refusal, evidence, explainer)].refused += 1
    replies = Counter[str]()
    for fault in evidence.faults:
        if "verb" in fault.detail:
            replies[fault.detail["verb"]] += fault.detail.get("lost", 0)
    starts = [effect for effect in evidence.effects if effect.step == "start"]
    timeline = evidence.timeline
    return Figures(
        lines=dict(lines),
        sent=len(evidence.sends.acknowledged),
        in_doubt=len(evidence.sends.intended) - len(evidence.sends.acknowledged),
        states=dict(Counter(task.state for task in evidence.tasks)),
        moved=evidence.moved,
        starts=len(starts),
        run_again=len(starts) - len({effect.task for effect in starts}),
        recovered_running=sum(row.was == "RUNNING" for row in evidence.recoveries),
        recovered_claimed=sum(row.was == "CLAIMED" for row in evidence.recoveries),
        noticed_by=dict(Counter(row.noticed_by for row in evidence.recoveries)),
        refused=len(refusals),
        false_deaths=sum(breach.number == "I13" for breach in found),
        replies_lost=dict(replies),
        writes_without_room=evidence.server_log.count("No space left on device"),
        works_again_s=list(_works_again(evidence, [effect.at for effect in starts])),
        quiet_after_s=None if timeline.quiet is None else timeline.quiet - timeline.healed,
        stop_s=timeline.longest_stop_s,
        stalls=len(timeline.stalls),
        ended_by_themselves=sum(
            life.ended is not None and not life.was_killed and life.ended < timeline.healed
            for life in evidence.lives
        ),
    )


def _works_again(evidence: Evidence, starts: Sequence[float]) -> Iterator[float]:
    """L6: yield the seconds from each return of the database until the next code started."""
    for fault in evidence.faults:
        back = fault.ended if fault.kind is Kind.RESTART_DATABASE else None
        if back is not None and (after := [at for at in starts if at >= back]):
            yield min(after) - back


def _distinct(refusals: Sequence[Refusal]) -> list[Refusal]:
    """Return one refusal per late attempt. An attempt can learn of its loss from its worker and again from a refused write."""
    seen = dict[tuple[int, str, int], Refusal]()
    for refusal in refusals:
        seen.setdefault((refusal.tree, refusal.task, round(refusal.at / 5)), refusal)
    return list(seen.values())


def _cause_of(refusal: Refusal, evidence: Evidence, explainer: Explainer) -> str:
    """Return the earlier fault because of which the task was taken from that tree."""
    taken = [
        death
        for death in (explainer.recovery(row) for row in evidence.recoveries if row.task_id == refusal.task)
        if death.tree == refusal.tree and death.at < refusal.at + 1.0
    ]
    if not taken and refusal.task in evidence.sends.cancels:
        return "cancel"
    return (taken[-1].why if taken else None) or "unexplained"
