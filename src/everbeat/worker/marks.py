"""What this worker knows of marked tasks: tasks that say what the code of a worker must understand before it can lease them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.definition import TaskDefinition
from everbeat.errors import EverbeatError
from everbeat.runtime.clock import Clock
from everbeat.store.declining import BEGINNING, marked
from everbeat.store.lease_records import MarkedGroup
from everbeat.store.session import Session
from everbeat.worker.lookout import Lookout

PAGE: Final = 200
"""How many groups one question brings."""
APART_S: Final = 0.2
"""Hints make the worker ask no more often than this."""
PAGES_APART_S: Final = 1.0
"""How long the worker waits before it asks for the next page."""
FORGET_S: Final = 60.0
"""A group is kept for this long after it was seen last, since its tasks may come back: a retry, a task given back."""
MOST_KEPT: Final = 500
"""A claim looks into each group that the worker knows, so their number is bounded. The next pages replace the oldest."""

_log = logging.getLogger("everbeat.worker")


class _Seen(Struct):
    group: MarkedGroup
    at: float


class Marks:
    """The groups of marked tasks that the code of this worker understands; usually none.

    The worker asks at its start, at each poll, and after a hint. Whether a group fits is decided by the same rule by which arguments are
    declined (`domain.parameters`), so a worker never claims a task again that it declined.
    """

    def __init__(
        self,
        session: Session,
        *,
        definitions: Mapping[str, TaskDefinition],
        queues: Collection[str] | None,
        lookout: Lookout,
        clock: Clock,
    ) -> None:
        self._session = session
        self._definitions = definitions
        self._queues = queues
        self._lookout = lookout
        self._clock = clock
        self._known: dict[tuple[UUID, str | None, int | None], _Seen] = {}
        self._after = BEGINNING
        self._asked_at = -math.inf
        self._is_asked = True

    def ask(self) -> None:
        """Marked tasks may wait."""
        self._is_asked = True

    def known(self, names: Collection[str]) -> Sequence[MarkedGroup]:
        """Return the groups of these task names that a claim can take."""
        if not self._known:
            return ()
        return [seen.group for seen in self._known.values() if seen.group.name in names]

    async def learn(self) -> bool:
        """Ask which groups there are, if it is time. Return whether any of them is one that a claim can take."""
        self._is_asked |= self._lookout.is_poll
        goes_on = self._after != BEGINNING
        if not (self._is_asked or goes_on):
            return False
        now = self._clock.monotonic()
        early_s = self._asked_at + (PAGES_APART_S if goes_on else APART_S) - now
        if early_s > 0:
            self._lookout.expect(early_s * 1_000)
            return False
        self._asked_at = now
        try:
            page = await self._session.run(marked(self._after, most=PAGE))
        except EverbeatError as problem:
            # Tasks without a mark do not wait for this.
            self._after, self._is_asked = BEGINNING, False
            _log.error("marked_tasks_not_read problem=%s", problem)
            return False
        if not goes_on:
            self._is_asked = False
        if page.after is not None:
            self._lookout.expect(PAGES_APART_S * 1_000)
        self._after = page.after or BEGINNING
        fitting = [group for group in page.groups if self._understands(group)]
        self._keep(fitting)
        return bool(fitting)

    def _understands(self, group: MarkedGroup) -> bool:
        if group.queue is not None and self._queues is not None and group.queue not in self._queues:
            return False
        definition = self._definitions.get(group.name)
        return definition is not None and definition.codec.accepts.fits_needs(group.needs)

    def _keep(self, fitting: Sequence[MarkedGroup]) -> None:
        now = self._clock.monotonic()
        for group in fitting:
            place = group.needs_id, group.queue, group.priority
            self._known.pop(place, None)  # the one seen last stands last
            self._known[place] = _Seen(group, now)
        for place, seen in list(self._known.items()):
            if seen.at + FORGET_S > now and len(self._known) <= MOST_KEPT:
                break
            del self._known[place]
