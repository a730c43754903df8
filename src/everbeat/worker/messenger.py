"""What carries messages to a worker and away from it, as the rest of the worker sees it.

What lives here: the protocol, and the worker without messages. What may not: any carrier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus
from everbeat.runtime.nursery import Nursery
from everbeat.runtime.service import Service
from everbeat.store.session import Session
from everbeat.wake.topics import MessagesWritten
from everbeat.worker.lane import Lane
from everbeat.worker.leases import LeaseTable
from everbeat.worker.plan import WorkerPlan


class Part(Service, Protocol):
    """A service of the worker that its other parts can wake."""

    wake: asyncio.Event


class Surroundings(Struct, frozen=True, kw_only=True):
    """What a messenger needs of its worker. `look(queue)`: tasks may be due there, None: anywhere.

    `is_quiet()`: the worker claims nothing, by an operator's order.
    """

    plan: WorkerPlan
    session: Session
    session_name: Callable[[], str]
    table: LeaseTable
    lanes: Sequence[Lane]
    worker_id: Callable[[], str]
    look: Callable[[str | None], None]
    is_quiet: Callable[[], bool]
    events: EventBus
    clock: Clock
    random: Random
    nursery: Nursery


class Messenger(Protocol):
    """Messages tell this worker of tasks, as long as they do."""

    parts: Sequence[Part]

    @property
    def tells(self) -> bool:
        """Whether messages arrive, so that the database need not tell this worker of tasks."""
        ...

    def start(self) -> None:
        """Deliver from now on."""
        ...

    def written(self, hint: MessagesWritten) -> None:
        """There is something to publish."""
        ...

    def turn_free(self) -> None:
        """Nobody may be publishing."""
        ...

    def beaten(self) -> None:
        """A beat that vouched for this worker was just acknowledged by the database."""
        ...

    def room_changed(self) -> None:
        """This worker has room for more tasks, or for fewer."""
        ...

    def state(self) -> dict[str, Any] | None:
        """What an operator may want to know of it, as JSON; None for no messages at all."""
        ...

    async def leave(self) -> None:
        """Take and publish no more; what this worker runs is still kept for it."""
        ...

    async def close(self) -> None:
        """Leave what is left to others."""
        ...


MakeMessenger: TypeAlias = Callable[[Surroundings], Messenger]


class NoMessenger:
    """A worker that the database tells of tasks."""

    parts: Sequence[Part] = ()
    tells = False

    def __init__(self, around: Surroundings) -> None:
        del around

    def start(self) -> None:
        """There is nothing to deliver."""

    def written(self, hint: MessagesWritten) -> None:
        """Somebody else publishes it."""

    def turn_free(self) -> None:
        """Nor is it this worker's."""

    def beaten(self) -> None:
        """Nothing is held."""

    def room_changed(self) -> None:
        """Nothing is asked for."""

    def state(self) -> None:
        """There is none."""

    async def leave(self) -> None:
        """Nothing is taken."""

    async def close(self) -> None:
        """There is nothing to leave."""
