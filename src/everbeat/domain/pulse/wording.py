"""How the dashboard writes the names of trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import zip_longest

from everbeat.domain.inspection import SupervisorInfo
from everbeat.domain.pulse.sample import SampledTree


def names_of(trees: Iterable[SampledTree]) -> dict[str, str]:
    """Return a name for each tree by its id: its slot, or its host. The pid distinguishes trees that share a host."""
    known = list(trees)
    shared = Counter(tree.slot or tree.hostname for tree in known)
    named = {}
    for tree in known:
        name = tree.slot or tree.hostname
        named[tree.id] = name if shared[name] == 1 else f"{name} {tree.pid}"
    return named


def names_in_incidents(trees: Iterable[SupervisorInfo]) -> dict[str, str]:
    """Return a name for each tree by its id, as `names_of` does for the trees that the pulse shows.

    The pid is added only if another tree with this name lived at the same time. So a tree that was alone on its host has the host's name.
    """
    by_name: dict[str, list[SupervisorInfo]] = {}
    for tree in sorted(trees, key=lambda tree: tree.started_at):
        by_name.setdefault(tree.slot or tree.hostname, []).append(tree)
    return {
        tree.supervisor_id: f"{name} {tree.pid}" if is_shared else name
        for name, same in by_name.items()
        for tree, is_shared in zip(same, _overlaps(same), strict=True)
    }


def _overlaps(trees: Sequence[SupervisorInfo]) -> Iterator[bool]:
    """Yield for each tree, in the order of their starts, whether another one lived at the same time.

    A life reaches to the last heartbeat, because a successor can start before the death of a frozen tree is noticed.
    """
    reached = datetime.min.replace(tzinfo=UTC)
    for tree, after in zip_longest(trees, trees[1:]):
        end = datetime.max.replace(tzinfo=UTC) if tree.ended_at is None else tree.last_heartbeat_at
        yield reached > tree.started_at or (after is not None and after.started_at < end)
        reached = max(reached, end)


def host_of(party_id: str) -> str:
    """Return the host in the id of a worker or supervisor, which is `hostname-pid-random`."""
    return party_id.rsplit("-", 2)[0]
