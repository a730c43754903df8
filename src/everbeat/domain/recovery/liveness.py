"""The rules by which a tree is judged. The reaper, the session watch and the dashboard share them, so they see the same picture."""

from __future__ import annotations

from typing import Final

LATE_BEATS: Final = 2
"""A tree is late when this many of its heartbeats are missing."""
FAREWELL: Final = "left"
"""How a supervisor or worker ended that shut down in an orderly way."""


def longer_silence(own_ms: int | None, tree_ms: int | None) -> int | None:
    """Return the silence after which a lease is stale: the longer of the observer's threshold and the one that the tree has registered.

    None means that the observer leaves such leases alone.
    """
    return None if own_ms is None else max(own_ms, tree_ms or 0)


def is_session_lost(*, held_here: bool, is_locked: bool, sessions: int) -> bool:
    """Return whether a tree has lost its session: its lock is free, and none of its `sessions` is left.

    `held_here`: the supervisor took its lock on this incarnation of the server. Otherwise, a missing lock proves nothing.
    """
    return held_here and not is_locked and sessions == 0
