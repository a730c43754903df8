"""What there is to see at one moment: a line per worker, and how far the work is; made from one look, pure.

What lives here: choosing what is shown, and who is shown it. What may not: how it is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from everbeat import RecoveryInfo, TaskState, WorkerInfo
from everbeat.cli.demo.evidence import Strike
from everbeat.cli.demo.plan import Blow
from everbeat.cli.demo.watch import Sight

Condition: TypeAlias = Literal["alive", "frozen", "taken over", "killed", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLine:
    """One worker; `beats` of its supervisor so far, None once nobody beats for it any more; `rescued` in words."""

    tree: int
    pid: int
    condition: Condition
    beats: int | None
    beat_age_s: float
    running: Sequence[str]
    claimed: int
    rescued: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything a view shows of one moment."""

    elapsed_s: float
    total: int
    sent: int
    ended: int
    lines: Sequence[WorkerLine]


class Audience(Protocol):
    """Whoever watches."""

    def show(self, moment: Scene, /) -> None:
        """A new moment."""
        ...

    def tell(self, elapsed_s: float, text: str, /) -> None:
        """Something happened."""
        ...


def scene(
    sight: Sight,
    strikes: Sequence[Strike],
    *,
    trees: Mapping[int, int],
    elapsed_s: float,
    sent: int,
    total: int,
) -> Scene:
    """The scene of one look; `trees` gives the number of each tree by its supervisor's pid."""
    lines = [_line(worker, sight, strikes, trees=trees) for worker in sight.workers]
    # Oldest life first; a tree that came back shows its old life and its new one.
    began = {worker.pid: worker.started_at for worker in reversed(sight.workers)}
    lines.sort(key=lambda line: (line.tree, began[line.pid], line.condition == "alive"))
    return Scene(elapsed_s=elapsed_s, total=total, sent=sent, ended=sent - sight.unfinished, lines=lines)


def _line(
    worker: WorkerInfo, sight: Sight, strikes: Sequence[Strike], *, trees: Mapping[int, int]
) -> WorkerLine:
    supervisor = sight.supervisors[worker.supervisor_id]
    held = sight.held_by((worker.worker_id,))
    condition = _condition(worker, strikes)
    return WorkerLine(
        tree=trees.get(supervisor.pid, 0),
        pid=worker.pid,
        condition=condition,
        beats=supervisor.beat_seq if condition in ("alive", "frozen") else None,
        beat_age_s=max(0.0, (sight.at - worker.last_heartbeat_at).total_seconds()),
        running=[lease.name for lease in held if lease.state is TaskState.RUNNING],
        claimed=sum(lease.state is TaskState.CLAIMED for lease in held),
        rescued=_rescued(sight.rescued_from((worker.worker_id,)), strikes),
    )


def _condition(worker: WorkerInfo, strikes: Sequence[Strike]) -> Condition:
    strike = next((one for one in strikes if worker.worker_id in one.worker_ids), None)
    if strike is None:
        return "alive" if worker.ended_at is None else "left"
    if strike.act.blow is not Blow.FREEZE_TREE:
        return "killed"
    return "frozen" if strike.thawed_after_s is None else "taken over"


def _rescued(recoveries: Sequence[RecoveryInfo], strikes: Sequence[Strike]) -> str:
    if not recoveries:
        return ""
    strike = next((one for one in strikes if recoveries[0].worker_id in one.worker_ids), None)
    last = max(recovery.noticed_at for recovery in recoveries)
    after = "" if strike is None else f" in {(last - strike.at).total_seconds():.2f} s"
    return f"{len(recoveries)} tasks{after} ({recoveries[0].noticed_by})"
