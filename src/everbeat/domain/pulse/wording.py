"""How the dashboard writes the names of trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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
    for tree in trees:
        by_name.setdefault(tree.slot or tree.hostname, []).append(tree)
    return {
        tree.supervisor_id: f"{name} {tree.pid}" if any(_met(tree, other) for other in same) else name
        for name, same in by_name.items()
        for tree in same
    }


def _met(tree: SupervisorInfo, other: SupervisorInfo) -> bool:
    """Return whether another tree lived at the same time. A successor starts after the last heartbeat of the dead."""
    return (
        other.supervisor_id != tree.supervisor_id
        and (tree.ended_at is None or other.started_at < tree.last_heartbeat_at)
        and (other.ended_at is None or tree.started_at < other.last_heartbeat_at)
    )


def host_of(party_id: str) -> str:
    """Return the host in the id of a worker or supervisor, which is `hostname-pid-random`."""
    return party_id.rsplit("-", 2)[0]
