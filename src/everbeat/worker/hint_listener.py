"""Passes hints to the parts of a worker, such as that tasks might be due, a cancel was requested, or a lease was lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from everbeat.hints import HintSource
from everbeat.hints.topics import (
    Everything,
    Hint,
    MessagesWritten,
    TasksMarked,
    TasksReady,
    TreesQuiet,
    TurnFree,
    WorkflowsMoved,
)
from everbeat.protocol import AskBeat
from everbeat.worker.claim.claimer import Claimer
from everbeat.worker.environment import Messenger, WorkerEnvironment
from everbeat.worker.leases import LeaseWatch
from everbeat.worker.workflow_advancer import Advancer

BEATS_APART_S: Final = 0.5


class HintListener:
    """Passes each hint to the worker's parts that need it.

    `make_hint_source` receives an `application_name` and returns a source that reads hints from a connection with that name.
    """

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        make_hint_source: Callable[[str], HintSource],
        claimer: Claimer,
        leases: LeaseWatch,
        advancer: Advancer,
        messenger: Messenger,
    ) -> None:
        self._environment = environment
        self._make_hint_source = make_hint_source
        self._claimer = claimer
        self._leases = leases
        self._advancer = advancer
        self._messenger = messenger
        self._asked_at = -math.inf
        self._asking: asyncio.TimerHandle | None = None
        self._listening: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Start listening on a new session under the worker's current name, and stop listening on the previous session, if any."""
        if self._listening is not None:
            self._listening.cancel()
        source = self._make_hint_source(f"{self._environment.identity.tree_session} listen")
        self._listening = self._environment.scope.start(
            source.run(self._on_hint, self._on_state), name="hint source"
        )

    def _on_hint(self, hint: Hint) -> None:
        match hint:
            case TasksReady(queue):
                self._claimer.claim_soon(queue)
            case WorkflowsMoved():
                self._advancer.advance_soon()
            case MessagesWritten():
                self._messenger.written(hint)
            case TurnFree():
                self._messenger.turn_free()
            case TreesQuiet():
                self._ask_for_beat()
            case TasksMarked():
                self._claimer.ask_for_marked()
            case Everything():
                self._messenger.written(MessagesWritten())
                self._claimer.claim_soon()
                self._claimer.ask_for_marked()
                self._advancer.advance_soon()
            case _:
                pass
        self._leases.on_hint(hint)

    def _ask_for_beat(self) -> None:
        """Request a heartbeat soon after a hint, but at most once per `BEATS_APART_S` seconds."""
        if self._asking is None:
            loop = asyncio.get_running_loop()
            self._asking = loop.call_at(max(loop.time(), self._asked_at + BEATS_APART_S), self._ask_now)

    def _ask_now(self) -> None:
        self._asking, self._asked_at = None, asyncio.get_running_loop().time()
        self._environment.link.tell(AskBeat())

    def _on_state(self, arrive: bool) -> None:
        self._leases.hints_changed(arrive=arrive)
        self._claimer.hints_changed(arrive=arrive)
