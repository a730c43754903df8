"""What a worker hears: hints that tasks may be due, that one is asked to cancel, that a lease is gone.

What lives here: the listening, and who is told. What may not: what follows; a hint is never the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from everbeat.runtime.nursery import Nursery
from everbeat.wake import Wake
from everbeat.wake.topics import Everything, Hint, MessagesWritten, TasksReady, TurnFree, WorkflowsMoved
from everbeat.worker.advancer import Advancer
from everbeat.worker.claimer import Claimer
from everbeat.worker.lease_watch import LeaseWatch
from everbeat.worker.messenger import Messenger


class Ears:
    """`make_wake(application_name)` gives the hints, on a connection of that name."""

    def __init__(
        self,
        make_wake: Callable[[str], Wake],
        *,
        claimer: Claimer,
        leases: LeaseWatch,
        advancer: Advancer,
        messenger: Messenger,
        nursery: Nursery,
    ) -> None:
        self._make_wake = make_wake
        self._claimer = claimer
        self._leases = leases
        self._advancer = advancer
        self._messenger = messenger
        self._nursery = nursery
        self._wake: asyncio.Task[None] | None = None

    def listen(self, session_name: str) -> None:
        """Hear from now on, on a session of this name and no other."""
        if self._wake is not None:
            self._wake.cancel()
        wake = self._make_wake(f"{session_name} listen")
        self._wake = self._nursery.start(wake.run(self._on_hint, self._on_state), name="wake")

    def _on_hint(self, hint: Hint) -> None:
        match hint:
            case TasksReady(queue):
                self._claimer.look(queue)
            case WorkflowsMoved():
                self._advancer.look()
            case MessagesWritten():
                self._messenger.written(hint)
            case TurnFree():
                self._messenger.turn_free()
            case Everything():
                self._messenger.written(MessagesWritten())
                self._claimer.look()
                self._advancer.look()
            case _:
                pass
        self._leases.heard(hint)

    def _on_state(self, hears: bool) -> None:
        self._leases.hears(hears)
        self._claimer.wake.set()
