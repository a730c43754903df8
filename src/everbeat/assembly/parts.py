"""The parts that are made alike wherever a worker runs: its supervision, and what all parts of a process share.

What lives here: their making. What may not: processes, threads and loops, and the worker itself (`worker_parts`), which a
supervisor's process never loads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

from everbeat.config import RecoveryConfig
from everbeat.domain.commands import sweep_command
from everbeat.domain.hooks import HookRunner, HookSet
from everbeat.runtime.clock import Clock, SystemClock
from everbeat.runtime.events import EventBus
from everbeat.runtime.failure_log import LOG
from everbeat.runtime.nursery import end_process
from everbeat.runtime.tree_lock import TreeLock
from everbeat.services.caretakers import Caretakers
from everbeat.services.hooks import LocalHooks
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.worker.supervision import Supervision

OnFatal = Callable[[str, BaseException], None]

_log = logging.getLogger("everbeat.worker")


class Surroundings:
    """What all parts of one process share: the clock, the dice, and where events go (to the log)."""

    def __init__(self) -> None:
        self.clock: Clock = SystemClock()
        self.random = Random()
        self.events = EventBus()
        self.events.subscribe(LOG)


def local_hooks(
    hooks: HookSet,
    recovery: RecoveryConfig,
    *,
    around: Surroundings,
    loop: asyncio.AbstractEventLoop | None = None,
) -> LocalHooks:
    """The hooks of an app that is imported in this process; `loop`: where async ones run, if not where they are called."""
    return LocalHooks(hooks, timeout_s=recovery.hook_timeout_ms / 1_000, events=around.events, loop=loop)


def take_tree_lock() -> TreeLock | None:
    """The lock file of a tree that starts in this process; without one, other proofs of its death must do."""
    try:
        return TreeLock.take()
    except OSError as problem:
        _log.warning("no_lock_file problem=%r", str(problem))
        return None


def make_supervision(
    target: Target,
    recovery: RecoveryConfig,
    *,
    around: Surroundings,
    lock: TreeLock | None,
    slot: str | None = None,
    hooks: HookRunner | None = None,
    on_fatal: OnFatal = end_process,
) -> Supervision:
    """A supervision with all its caretakers; called in the loop it will run on."""

    def care(supervision: Supervision) -> Caretakers:
        return Caretakers(
            supervision.session,
            supervision.config,
            channel=target.channel,
            observer=supervision,
            states=supervision.states,
            holders=lambda: supervision.seats,
            open_spare=lambda: Session(target, f"{supervision.session_name} pruner", random=around.random),
            identity=supervision.identity,
            events=around.events,
            clock=around.clock,
            random=around.random,
            slot=slot,
            hooks=hooks,
            command=sweep_command(beat_interval_ms=recovery.beat_interval_ms, schema=target.schema),
        )

    return Supervision(
        target,
        recovery,
        care=care,
        events=around.events,
        clock=around.clock,
        random=around.random,
        lock=lock,
        on_fatal=on_fatal,
    )
