"""How the dashboard writes the names of trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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


def host_of(party_id: str) -> str:
    """Return the host in the id of a worker or supervisor, which is `hostname-pid-random`."""
    return party_id.rsplit("-", 2)[0]
