"""How a blow falls: on whoever holds most running work, stopped first so that nothing is finished unseen.

What lives here: choosing a victim, striking it, and telling what came of it. What may not: when, and for how long.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from everbeat import TaskState, TaskSummary
from everbeat.cli.demo.evidence import Strike
from everbeat.cli.demo.plan import Act, Blow
from everbeat.cli.demo.trees import Tree
from everbeat.cli.demo.watch import Sight


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A process to strike, alone or with its whole tree, and the workers that fall with it."""

    tree: Tree
    pid: int
    worker_ids: frozenset[str]
    whole: bool

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to it, or to all of its tree."""
        if self.whole:
            self.tree.strike_all(number)
        else:
            self.tree.strike(self.pid, number)


def strike(
    act: Act,
    sight: Sight,
    *,
    trees: Collection[Tree],
    spared: Collection[int],
    look: Callable[[], Sight],
    now: Callable[[], tuple[datetime, float]],
) -> Strike | None:
    """Strikes, if anybody runs something; trees `spared` by number are struck only if no other does.

    `now` tells the database's time and the seconds since the beginning.
    """
    victim = _choice(_victims(act, sight, trees), sight, spared=spared)
    if victim is None:
        return None
    victim.signal(signal.SIGSTOP)
    held = look().held_by(victim.worker_ids)
    if not _running(held):
        victim.signal(signal.SIGCONT)  # it was done in that very moment
        return None
    at, at_s = now()
    if act.blow is not Blow.FREEZE_TREE:
        victim.signal(signal.SIGKILL)
    return Strike(
        act=act,
        tree=victim.tree.number,
        pid=victim.pid,
        worker_ids=victim.worker_ids,
        at=at,
        at_s=at_s,
        held=frozenset(lease.id for lease in held),
    )


def settled(strike: Strike, sight: Sight) -> str | None:
    """In words, once nothing is left in the victim's name."""
    recoveries = sight.rescued_from(strike.worker_ids)
    if sight.held_by(strike.worker_ids) or not recoveries:
        return None
    after_s = (max(recovery.noticed_at for recovery in recoveries) - strike.at).total_seconds()
    return f"noticed by {recoveries[0].noticed_by}: {len(recoveries)} tasks rescued after {after_s:.2f} s"


def ran_again(strike: Strike, sight: Sight) -> bool:
    """Whether every task that was recovered runs again, or has ended since."""
    return all(recovery.ran_again_at is not None for recovery in sight.rescued_from(strike.worker_ids))


def _victims(act: Act, sight: Sight, trees: Collection[Tree]) -> Iterator[Victim]:
    for tree in trees:
        workers = sight.live_workers(tree.pid)
        if act.blow is not Blow.KILL_WORKER:
            ids = frozenset(worker.worker_id for worker in workers)
            yield Victim(tree=tree, pid=tree.pid, worker_ids=ids, whole=True)
            continue
        for worker in workers:
            ids = frozenset({worker.worker_id})
            if tree.holds(worker.pid):
                yield Victim(tree=tree, pid=worker.pid, worker_ids=ids, whole=False)


def _choice(victims: Iterator[Victim], sight: Sight, *, spared: Collection[int]) -> Victim | None:
    def worth(victim: Victim) -> tuple[bool, int]:
        return victim.tree.number not in spared, _running(sight.held_by(victim.worker_ids))

    busy = [victim for victim in victims if _running(sight.held_by(victim.worker_ids))]
    return max(busy, key=worth, default=None)


def _running(leases: Sequence[TaskSummary]) -> int:
    return sum(lease.state is TaskState.RUNNING for lease in leases)
