"""The plan of the demo: who is struck, in which order, what must come of it, and which files are counted meanwhile.

What lives here: acts, promises about them, and shares of the work; pure. What may not: doing any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

TREES: Final = 3
PACE_S: Final = 1.0
"""How long a task waits before it counts: long enough for a death to find it running."""

CALM_PACE_S: Final = 0.2
"""The same once nobody is struck any more."""

LONGEST_S: Final = 50.0
"""When the demo gives up, whatever is missing: with the verdict it lasts a minute at most."""

NATS_VARIABLE: Final = "EVERBEAT_DEMO_NATS"
"""Where the demo's program reads by which NATS server its tasks are told; without it by PostgreSQL."""

AWAY_S: Final = 3.0
"""So long the NATS server stays away, at least."""

SAME_PRIORITY: Final = 10
"""So many files share a priority. Earlier files go first, and so does what is rescued before what has not begun."""


class Blow(StrEnum):
    """What is done to a victim."""

    KILL_WORKER = "kill_worker"
    FREEZE_TREE = "freeze_tree"
    KILL_TREE = "kill_tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One blow: how it must be noticed, and within how many seconds everything is in other hands."""

    blow: Blow
    noticed_by: str
    within_s: float
    words: str


ACTS: Final = (
    Act(blow=Blow.KILL_WORKER, noticed_by="child_exit", within_s=1.0, words="one worker process is killed"),
    # Stale after 3 s without a beat, looked for every second, twice: the look that sees it first and the one that acts.
    Act(blow=Blow.FREEZE_TREE, noticed_by="age", within_s=6.0, words="one whole tree is frozen"),
    Act(blow=Blow.KILL_TREE, noticed_by="session", within_s=3.0, words="one whole tree is killed"),
)

ALLOWANCE: Final = 3.0
"""A busy machine may take so many times longer before a promise counts as broken; what was measured is shown."""


MOST_A_SHARE: Final = 60
"""So many files are sent for an act: twice what the trees can do at once, so that nobody is idle when it begins."""

FINISH_BY_S: Final = 42.0
"""The last files are as many as will be counted by then, judged by how fast it went so far."""


def shares(paths: Sequence[str], *, acts: int) -> list[Sequence[str]]:
    """The files of each act and, last, those for the time after; at least one file to each act."""
    size = min(MOST_A_SHARE, max(1, len(paths) // (acts + 1)))
    return [*(paths[act * size : (act + 1) * size] for act in range(acts)), paths[acts * size :]]


def fitting(paths: Sequence[str], *, ended: int, in_s: float, elapsed_s: float) -> Sequence[str]:
    """As many of these files as fit into what is left of the time, where `ended` files took `in_s` seconds."""
    left_s = max(0.0, FINISH_BY_S - elapsed_s)
    return paths[: round(left_s * ended / in_s)] if in_s > 0 else paths
