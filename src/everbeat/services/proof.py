"""Proof of death: what the machine that a supervisor starts on knows of another one, beyond doubt.

What lives here: reading the proofs. What may not: guesses, which a host's name would be, and consequences.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from msgspec import Struct

from everbeat.runtime import tree_lock
from everbeat.runtime.identity import ProcessIdentity
from everbeat.runtime.tree_lock import TreeVerdict
from everbeat.store.predecessors import Predecessor

RETURN_S: Final = 20.0
"""A living tree whose server was replaced is back on the new one by then: it gives up an answer after at most 10 s, and a connection
after 5 s."""


class Doubt(Enum):
    """Why a supervisor is not proven dead."""

    LIVES = auto()
    """It lives, or this machine cannot know."""
    SOON = auto()
    """Its process is gone, but something of its tree is still there: it is about to end, or it lives on a copy of this machine."""
    RETURNING = auto()
    """It held its session on an earlier incarnation of the server, or before a crash of it. If it lives, it comes back within `RETURN_S`."""


class Proven(Struct, frozen=True):
    """It is dead; `cause` says how that is known."""

    cause: str


def finding_on(
    candidate: Predecessor, *, identity: ProcessIdentity, uptime_ms: int | None, watched_s: float
) -> Proven | Doubt:
    """What is known of `candidate` by the process that `identity` describes, on a machine started `uptime_ms` ago.

    `watched_s`: for how long this process has reached the server's present incarnation.

    A session of its tree that PostgreSQL still shows outweighs every proof: a machine that was copied while it ran has the
    boot id, the processes and the files of its original, which may live.
    """
    is_same_kernel = candidate.boot_id == identity.boot_id
    found = (
        _on_this_kernel(candidate, identity)
        if is_same_kernel
        else _before_this_boot(candidate, identity, uptime_ms, watched_s)
    )
    return Doubt.SOON if isinstance(found, Proven) and candidate.has_sessions else found


def lives_here(candidate: Predecessor, *, identity: ProcessIdentity) -> bool:
    """Return whether the machine of the process `identity` proves that `candidate` lives, which includes a frozen one.

    Its supervisor has not ended as far as can be seen, and its lock file is held. Without a readable lock file, its process is there.
    """
    if candidate.boot_id is None or candidate.boot_id != identity.boot_id:
        return False
    process = _process_of(candidate)
    if process.is_provably_gone():
        return False
    match _tree_of(candidate):
        case TreeVerdict.HELD:
            return True
        case TreeVerdict.GONE:
            return False
        case TreeVerdict.UNKNOWN:
            return _is_comparable(process, identity)


def _on_this_kernel(candidate: Predecessor, identity: ProcessIdentity) -> Proven | Doubt:
    process = _process_of(candidate)
    is_gone = process.is_provably_gone()
    match _tree_of(candidate):
        case TreeVerdict.HELD:
            return Doubt.SOON if is_gone else Doubt.LIVES
        case TreeVerdict.GONE if is_gone or not _is_comparable(process, identity):
            return Proven(
                f"its lock file is free: process {candidate.pid} and all it had started are gone, "
                "seen by a supervisor on the same machine"
            )
        case TreeVerdict.UNKNOWN if is_gone:
            return Proven(f"its process {candidate.pid} is gone, seen by a supervisor on the same machine")
        case _:
            return Doubt.LIVES


def _before_this_boot(
    candidate: Predecessor, identity: ProcessIdentity, uptime_ms: int | None, watched_s: float
) -> Proven | Doubt:
    """The machine was restarted since. Images give the same machine id to many machines, so more must fit: a beat since
    this boot, or no session that PostgreSQL could have freed, is no proof. A session of an earlier incarnation of the server
    is missing here also if the tree lives on another machine of that image and waits for the old server. So is one that a crash of the
    server ended."""
    if candidate.machine_id is None or candidate.machine_id != identity.machine_id:
        return Doubt.LIVES
    if candidate.boot_id is None or uptime_ms is None or candidate.silent_ms < uptime_ms:
        return Doubt.LIVES
    if not candidate.session_held:
        return Doubt.LIVES
    if (not candidate.held_here or candidate.lost_in_crash) and watched_s < RETURN_S:
        return Doubt.RETURNING
    return Proven(f"its machine was restarted: process {candidate.pid} ran before this boot")


def _tree_of(candidate: Predecessor) -> TreeVerdict:
    if candidate.lock_file is None:
        return TreeVerdict.UNKNOWN
    return tree_lock.verdict_on(candidate.lock_file, name=candidate.session_name)


def _is_comparable(process: ProcessIdentity, identity: ProcessIdentity) -> bool:
    """Whether this process would see the other one, if it were there."""
    return (
        process.start_ticks is not None
        and process.pid_namespace is not None
        and process.pid_namespace == identity.pid_namespace
    )


def _process_of(candidate: Predecessor) -> ProcessIdentity:
    namespace = candidate.pid_namespace
    return ProcessIdentity(
        hostname=candidate.hostname,
        pid=candidate.pid,
        boot_id=candidate.boot_id,
        pid_namespace=int(namespace) if namespace is not None and namespace.isdecimal() else None,
        start_ticks=candidate.process_started,
    )
