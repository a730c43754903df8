"""How the runs of listed schedules ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everbeat.domain.schedule.inspection import ScheduleInfo, TickInfo
from everbeat.store.plan import Plan, ask
from everbeat.store.schedules import list_earlier_runs


def last_runs(schedules: Sequence[ScheduleInfo]) -> Plan[Mapping[str, TickInfo]]:
    """Return the tick of the last run of each schedule. While the latest run has not ended, it is the one before, if that one has."""
    latest = {each.name: each.last_tick for each in schedules if each.last_tick is not None}
    found = {name: tick for name, tick in latest.items() if tick.state is not None}
    asked = {
        name: tick.at for name, tick in latest.items() if tick.state is None or not tick.state.is_terminal
    }
    earlier = (yield from ask(list_earlier_runs(asked))) if asked else {}
    for name, tick in earlier.items():
        if tick.state is not None and (tick.state.is_terminal or name not in found):
            found[name] = tick
    return found
