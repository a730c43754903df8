"""How the dashboard writes durations, names of trees and ways to notice a death."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from everbeat.domain.pulse.sample import SampledTree


def brief_duration(seconds: float) -> str:
    """Return a duration for lists, such as "96 ms", "2.1 s", "46 s", "1 m 8 s" or "2 h 5 m"."""
    seconds = max(0.0, seconds)
    if seconds < 0.0995:
        return f"{seconds * 1_000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, size_of_rest, rest in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            left = whole % size // size_of_rest
            return f"{whole // size} {unit} {left} {rest}" if left else f"{whole // size} {unit}"
    return f"{whole} s"


def spoken_way(noticed_by: str) -> str:
    """Return how a death was noticed, as words: `child_exit` is "child exit"."""
    return noticed_by.replace("_", " ")


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
