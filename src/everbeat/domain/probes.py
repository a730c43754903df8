"""The rules of the probes: whether a supervisor is alive, ready and started, and for what reason it is not."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

SHORTEST_LOOP_LIMIT_S: Final = 5.0
LONGEST_LOOP_LIMIT_S: Final = 15.0
"""How long the supervisor's event loop can stand still at most. A busy machine delays a loop for seconds, but not for this long."""
LONGEST_START_S: Final = 60.0
"""How long a program can take to load its code until its event loop runs, in seconds."""
_BEATS: Final = 2
_LONGEST_REPLY_S: Final = 10.0


class SupervisorFacts(Struct, frozen=True, kw_only=True):
    """The state of a supervisor, as its event loop saw it at the monotonic time `at`, in seconds.

    `beat_at`: when the last heartbeat was acknowledged, or when the supervisor registered; None before that. `has_outage`: whether the
    database cannot be reached or written. `ready` and `processes` count worker processes.
    """

    at: float
    has_loop: bool = True
    has_ended: bool = False
    beat_interval_s: float = 30.0
    beat_at: float | None = None
    has_outage: bool = False
    is_draining: bool = False
    was_ever_ready: bool = False
    ready: int = 0
    processes: int = 0


class ProbeVerdict(Struct, frozen=True):
    """The answer to a probe, with its reason. Clients without a password read it, so it does not say where the database is."""

    ok: bool
    reason: str


def liveness(facts: SupervisorFacts, *, now: float) -> ProbeVerdict:
    """Return whether the process works, which is false only if a restart could help. A restart does not end an outage of the database."""
    if facts.has_ended:
        return ProbeVerdict(True, "The supervisor is shutting down.")
    still_s = now - facts.at
    if not facts.has_loop:
        is_late = still_s > LONGEST_START_S
        return ProbeVerdict(not is_late, f"The supervisor has been starting for {still_s:.0f} s.")
    if still_s > loop_limit_s(facts.beat_interval_s):
        return ProbeVerdict(False, f"The supervisor's event loop has stood still for {still_s:.1f} s.")
    if facts.beat_at is None:
        return ProbeVerdict(True, "The supervisor is starting.")
    silent_s = now - facts.beat_at
    if silent_s <= beat_limit_s(facts.beat_interval_s):
        return ProbeVerdict(True, f"The last heartbeat was written {silent_s:.1f} s ago.")
    if facts.has_outage:
        return ProbeVerdict(
            True, "The database cannot be reached or written, which a restart does not change."
        )
    return ProbeVerdict(
        False, f"No heartbeat was written for {silent_s:.1f} s, although the database responds."
    )


def readiness(facts: SupervisorFacts, *, now: float) -> ProbeVerdict:
    """Return whether the tree takes tasks now."""
    alive = liveness(facts, now=now)
    if facts.is_draining or facts.has_ended:
        return ProbeVerdict(False, "The supervisor is draining.")
    if not alive.ok:
        return alive
    if facts.has_outage:
        return ProbeVerdict(False, "The database cannot be reached or written. The log has the reason.")
    if facts.beat_at is None:
        return ProbeVerdict(False, "The supervisor is not registered in the database yet.")
    if not facts.ready:
        return ProbeVerdict(False, f"None of {facts.processes} worker processes is ready.")
    return ProbeVerdict(True, f"{facts.ready} of {facts.processes} worker processes are ready.")


def startup(facts: SupervisorFacts) -> ProbeVerdict:
    """Return whether a worker process has ever been ready."""
    if facts.was_ever_ready:
        return ProbeVerdict(True, "The supervisor has started.")
    return ProbeVerdict(False, "No worker process has been ready yet.")


def loop_limit_s(beat_interval_s: float) -> float:
    """Return how long the event loop can stand still, in seconds: two heartbeats, within bounds."""
    return min(LONGEST_LOOP_LIMIT_S, max(SHORTEST_LOOP_LIMIT_S, _BEATS * beat_interval_s))


def beat_limit_s(beat_interval_s: float) -> float:
    """Return the greatest age of the last heartbeat in seconds: two intervals, and the time after which a lost reply counts as an outage."""
    return _BEATS * beat_interval_s + min(_LONGEST_REPLY_S, beat_interval_s)
