"""What a worker hears: hints that tasks may be due, that one is asked to cancel, that a lease is gone.

What lives here: the listening, and who is told. What may not: what follows; a hint is never the truth.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from everbeat.runtime.nursery import Nursery
from everbeat.wake import Wake
from everbeat.wake.topics import (
    Everything,
    Hint,
    MessagesWritten,
    TasksMarked,
    TasksReady,
    TreesQuiet,
    TurnFree,
    WorkflowsMoved,
)
from everbeat.worker.advancer import Advancer
from everbeat.worker.claimer import Claimer
from everbeat.worker.lease_watch import LeaseWatch
from everbeat.worker.messenger import Messenger

ORDERS_APART_S: Final = 0.5


class Ears:
    """`make_wake(application_name)` gives the hints, on a connection of that name. `ask_beat()` asks for a beat at once."""

    def __init__(
        self,
        make_wake: Callable[[str], Wake],
        *,
        claimer: Claimer,
        leases: LeaseWatch,
        advancer: Advancer,
        messenger: Messenger,
        ask_beat: Callable[[], None],
        nursery: Nursery,
    ) -> None:
        self._make_wake = make_wake
        self._claimer = claimer
        self._leases = leases
        self._advancer = advancer
        self._messenger = messenger
        self._ask_beat = ask_beat
        self._nursery = nursery
        self._asked_at = -math.inf
        self._asking: asyncio.TimerHandle | None = None
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
            case TreesQuiet():
                self._ask_for_orders()
            case TasksMarked():
                self._claimer.look_for_marked()
            case Everything():
                self._messenger.written(MessagesWritten())
                self._claimer.look()
                self._claimer.look_for_marked()
                self._advancer.look()
            case _:
                pass
        self._leases.heard(hint)

    def _ask_for_orders(self) -> None:
        """However many hints come: at once, then once in `ORDERS_APART_S`, and once after the last."""
        if self._asking is None:
            loop = asyncio.get_running_loop()
            self._asking = loop.call_at(max(loop.time(), self._asked_at + ORDERS_APART_S), self._ask_now)

    def _ask_now(self) -> None:
        self._asking, self._asked_at = None, asyncio.get_running_loop().time()
        self._ask_beat()

    def _on_state(self, hears: bool) -> None:
        self._leases.hears(hears)
        self._claimer.wake.set()
