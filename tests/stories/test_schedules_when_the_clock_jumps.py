"""The clock of the database server jumps by an hour in either direction: no tick occurs twice, and none is lost."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from everbeat import Schedule
from everbeat.embedded.server import EmbeddedServer
from tests.chaos.clock import ServerClock
from tests.conftest import NewServer
from tests.stories.scenario import SLACK, Scenario, program_of
from tests.stories.test_schedules import all_decided, judge, now, outcomes, start_scheduler, ticks
from tests.stories.test_the_clock_jumps import HOUR_S, scenario_on

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


def test_no_tick_occurs_twice_and_none_is_lost_when_the_clock_jumps_an_hour_ahead_and_back(
    new_server: NewServer, tmp_path: Path
) -> None:  # S5
    clock = ServerClock(tmp_path)
    if clock.obstacle:
        pytest.skip(f"LOUD: the clock of a server cannot be shifted here: {clock.obstacle}")
    with clock.ticking():
        server = new_server()
    figures = jump(server, clock, tmp_path)
    assert figures["SENT"] >= 3
    assert figures["MISSED"] > 3 * HOUR_S - 100


def jump(server: EmbeddedServer, clock: ServerClock, folder: Path) -> Counter[str]:
    with scenario_on(server, folder) as scenario, program_of(scenario, "ticking") as ticking:
        call = ticking.tick.call()
        for missed in ("latest", "all", "skip"):
            most: Any = {"most": 5} if missed == "all" else {}
            ticking.app.put_schedule(Schedule(missed, call, every="1s", missed=missed, **most))
        for _ in range(2):
            start_scheduler(scenario)
        names = ("latest", "all", "skip")
        scenario.until(
            lambda: all(outcomes(scenario, name)["SENT"] for name in names), within=30 * SLACK, what="ticks"
        )
        clock.shift(HOUR_S)
        ahead = now(scenario)
        scenario.until(lambda: all_decided(scenario, ahead), within=30 * SLACK, what="the hour is decided")
        judge(scenario)

        clock.shift(0)
        assert now(scenario) < ahead
        before = {name: decided(scenario, name) for name in names}
        ticking.app.put_schedule(Schedule("after", call, every="1s"))
        scenario.until(
            lambda: outcomes(scenario, "after")["SENT"] >= 3,
            within=30 * SLACK,
            what="a new schedule sends after the jump",
        )
        assert {name: decided(scenario, name) for name in names} == before, "nothing occurs a second time"
        judge(scenario)

        clock.shift(HOUR_S + 60)
        ahead += timedelta(minutes=1)
        scenario.until(lambda: all_decided(scenario, ahead), within=30 * SLACK, what="the ticks go on")
        figures = judge(scenario)
        ticking.app.close()
        return figures


def decided(scenario: Scenario, name: str) -> list[tuple[datetime, str]]:
    return [(row["at"], row["outcome"]) for row in ticks(scenario, name)]
