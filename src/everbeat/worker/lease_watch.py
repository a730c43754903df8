"""Cancels and losses that arrive by hints: each is verified before it is acted on. Without hints, a poll once a second.

What lives here: asking the database about leases we hold. What may not: beats, whose answers say the same more slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from uuid import UUID

from everbeat.runtime.clock import Clock
from everbeat.store.leases import check_leases
from everbeat.store.session import Session
from everbeat.wake.hint_rate import HintRate
from everbeat.wake.topics import CancelAsked, Everything, Hint, LeaseLost
from everbeat.worker.attempt import Attempt, Stage
from everbeat.worker.leases import LeaseTable

DEAF_POLL_S: Final = 1.0
MOST_SUSPECTS: Final = 10_000
"""With more hints than this during one claim, all leases are checked: ids of hints must not fill the memory."""


class LeaseWatch:
    """A service. `claims()`: how many claims were asked for, and of how many it is known what they brought."""

    name = "lease watch"

    def __init__(
        self,
        session: Session,
        *,
        table: LeaseTable,
        on_cancel: Callable[[Attempt], None],
        on_lost: Callable[[Attempt], None],
        claims: Callable[[], tuple[int, int]],
        clock: Clock,
    ) -> None:
        self.wake = asyncio.Event()
        self.is_deaf = True
        self._session = session
        self._table = table
        self._on_cancel = on_cancel
        self._on_lost = on_lost
        self._claims = claims
        self._clock = clock
        self._hint_rate = HintRate()
        self._suspects: dict[UUID, int] = {}
        self._all_of_claim: int | None = None
        self._check_all = False

    @property
    def interval_s(self) -> float:
        """Once a second where nothing is heard."""
        return DEAF_POLL_S if self.is_deaf else 3_600.0

    def heard(self, hint: Hint) -> None:
        """A hint arrived, perhaps about a task of ours."""
        match hint:
            case CancelAsked(task_id) if self._may_hold(task_id):
                self._note(task_id)
            case LeaseLost(ids) if suspects := {task_id for task_id in ids if self._may_hold(task_id)}:
                self._note(*suspects)
            case Everything():
                self._check_all = True
                self.wake.set()
            case _:
                pass

    def hears(self, hears: bool) -> None:
        """Hints arrive from now on, or do not."""
        self.is_deaf = not hears
        self.wake.set()

    def claimed(self) -> None:
        """A claim was answered: what was hinted at meanwhile may be ours."""
        if self._suspects:
            self.wake.set()

    def _may_hold(self, task_id: UUID) -> bool:
        asked, known = self._claims()
        return asked > known or self._table.by_task(task_id) is not None

    def _note(self, *task_ids: UUID) -> None:
        asked, _ = self._claims()
        if len(self._suspects) < MOST_SUSPECTS:
            self._suspects.update(dict.fromkeys(task_ids, asked))
        else:
            self._all_of_claim = asked
        self.wake.set()

    async def tick(self) -> float | None:
        """Ask about those that were hinted at, or about all."""
        suspects = self._suspects
        # What the claim that was under way may bring is asked about when that is known.
        _, known = self._claims()
        self._suspects = {
            one: claim for one, claim in suspects.items() if claim > known and not self._table.by_task(one)
        }
        everything, self._check_all = (
            self._check_all or self.is_deaf or self._all_of_claim is not None,
            False,
        )
        if self._all_of_claim is not None and self._all_of_claim <= known:
            self._all_of_claim = None
        held = self._table.at(Stage.CLAIMED, Stage.STARTING, Stage.RUNNING)
        asked = [attempt for attempt in held if everything or attempt.id in suspects]
        if asked:
            if not self.is_deaf:
                await self._clock.sleep(self._hint_rate.pause_s(self._clock.monotonic()))
            for _, claim_id, verdict in await self._session.run(check_leases([one.lease for one in asked])):
                attempt = self._table.by_claim(claim_id)
                match verdict:
                    case "lost" if attempt is not None:
                        self._hint_rate.paid_off()
                        self._on_lost(attempt)
                    case "cancel" if attempt is not None:
                        self._hint_rate.paid_off()
                        self._on_cancel(attempt)
                    case _:
                        pass
        return None
