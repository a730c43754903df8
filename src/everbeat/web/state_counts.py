"""The numbers in the tabs of the list of tasks. They are exact for small installations, and otherwise bounded counts and estimates."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from everbeat.client.database_access import database_of
from everbeat.domain.task.states import TaskState, VirtualState
from everbeat.store import past, state_counts
from everbeat.store.plan import Plan, ask
from everbeat.store.state_counts import MOST_COUNTED, Estimates, LiveCounts, NewestCounts
from everbeat.web import wording
from everbeat.web.page import Visit

ALL: Final = "all"
"""The key of the number of all tasks."""
Precision: TypeAlias = Literal["exact", "at_least", "about"]
StateCounts: TypeAlias = dict[str, "StateCount"]
_FRESH_S: Final = 2.0
_SAMPLE_AGE_S: Final = 60.0
"""An older sample of the depths says nothing about now."""
_ENDED: Final = (TaskState.COMPLETED, TaskState.CANCELLED, TaskState.EXPIRED)
_LIVE: Final = (TaskState.PENDING, TaskState.RUNNING, TaskState.FAILED)


class StateCount(Struct, frozen=True):
    """How many tasks are in a state or virtual state. The number can be exact, too low (`at_least`), or an estimate (`about`)."""

    count: int
    precision: Precision = "exact"

    @property
    def words(self) -> str:
        """Return the number as a tab shows it: 1,204, 10,000+ or ≈ 9.8M."""
        match self.precision:
            case "exact":
                return wording.number(self.count)
            case "at_least":
                return f"{self.count:,}+"
            case "about":
                return f"≈ {wording.count(self.count)}"


async def read_state_counts(visit: Visit) -> StateCounts:
    """Return the numbers by state, which all viewers of a process share for two seconds. An unknown number is missing. Raises DatabaseError."""

    async def reading() -> StateCounts:
        return await database_of(visit.app).arun(_counted(visit.app.schema, now=visit.now))

    return await visit.web.kept_charts.read_for(("state counts",), _FRESH_S, reading)


def _counted(schema: str, *, now: datetime) -> Plan[StateCounts]:
    """Return a plan that counts the newest tasks, unless there are certainly more, and then the live ones."""
    guessed = yield from ask(state_counts.estimates(schema))
    newest = None
    if guessed.tasks <= 2 * MOST_COUNTED:  # it can be old
        newest = yield from ask(state_counts.newest())
        if newest.examined <= MOST_COUNTED:
            return _exact(newest)
    live = yield from ask(state_counts.live())
    found = of_many(live, guessed, newest)
    if VirtualState.SCHEDULED in live.at_least:
        sampled = yield from ask(past.depths(now))
        scheduled = sum(each.scheduled for each in sampled)
        is_fresh = bool(sampled) and (now - sampled[0].at).total_seconds() < _SAMPLE_AGE_S
        if is_fresh and scheduled > live.scheduled:
            cut = any("scheduled" in each.at_least for each in sampled)
            found[VirtualState.SCHEDULED] = StateCount(scheduled, "at_least" if cut else "about")
    return found


def _exact(newest: NewestCounts) -> StateCounts:
    counted = {
        each.value: StateCount(getattr(newest, each.lower())) for each in (*_LIVE, *_ENDED, *VirtualState)
    }
    return {ALL: StateCount(newest.examined), **counted}


def of_many(live: LiveCounts, guessed: Estimates, newest: NewestCounts | None) -> StateCounts:
    """Return the numbers of an installation with more tasks than are counted. `newest` are those of its newest tasks, if they were counted."""
    found = {ALL: _at_least(MOST_COUNTED, guessed.tasks)}
    for state in _LIVE:
        count: int = getattr(live, state.lower())
        is_cut = state in live.at_least
        found[state.value] = (
            _at_least(min(count, MOST_COUNTED), guessed.by_state.get(state)) if is_cut else StateCount(count)
        )
    for state in _ENDED:
        least = 0 if newest is None else getattr(newest, state.lower())
        found[state.value] = _at_least(least, guessed.by_state.get(state))
    for virtual in VirtualState:
        count = getattr(live, virtual.value)
        is_cut = virtual in live.at_least
        found[virtual.value] = _at_least(min(count, MOST_COUNTED), None) if is_cut else StateCount(count)
    return {name: each for name, each in found.items() if each.count or each.precision == "exact"}


def _at_least(least: int, guessed: int | None) -> StateCount:
    """Return the estimate, unless more tasks were counted than it says."""
    return (
        StateCount(least, "at_least") if guessed is None or guessed <= least else StateCount(guessed, "about")
    )
