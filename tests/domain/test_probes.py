"""The rules of the probes, without a process."""

from __future__ import annotations

import pytest

from everbeat.domain.probes import (
    LONGEST_LOOP_LIMIT_S,
    LONGEST_START_S,
    SupervisorFacts,
    beat_limit_s,
    liveness,
    loop_limit_s,
    readiness,
    startup,
)

BEAT_S = 30.0
WORKING = SupervisorFacts(
    at=1_000.0, beat_interval_s=BEAT_S, beat_at=1_000.0, was_ever_ready=True, ready=2, processes=2
)


def facts(**changes: object) -> SupervisorFacts:
    values = {name: getattr(WORKING, name) for name in WORKING.__struct_fields__}
    return SupervisorFacts(**{**values, **changes})


def test_a_working_supervisor_is_alive_ready_and_started() -> None:
    assert liveness(WORKING, now=1_000.5).ok
    assert readiness(WORKING, now=1_000.5).ok
    assert startup(WORKING).ok


def test_a_loop_that_stands_still_is_neither_alive_nor_ready_even_during_an_outage() -> None:
    now = WORKING.at + LONGEST_LOOP_LIMIT_S + 0.1
    for each in (WORKING, facts(has_outage=True)):
        assert not liveness(each, now=now).ok
        assert "event loop" in readiness(each, now=now).reason
    assert liveness(WORKING, now=WORKING.at + LONGEST_LOOP_LIMIT_S - 0.1).ok


@pytest.mark.parametrize(("beat_s", "limit_s"), [(1, 5), (4, 8), (30, 15), (120, 15)])
def test_the_loop_has_two_intervals_but_from_5_to_15_seconds(beat_s: float, limit_s: float) -> None:
    assert loop_limit_s(beat_s) == limit_s


def test_a_supervisor_without_a_heartbeat_for_two_intervals_is_not_alive_if_the_database_responds() -> None:
    late = facts(beat_at=WORKING.at - beat_limit_s(BEAT_S) - 0.1)
    assert not liveness(late, now=late.at).ok
    in_time = facts(beat_at=WORKING.at - 2 * BEAT_S)
    assert liveness(in_time, now=in_time.at).ok


def test_an_outage_of_any_length_leaves_a_supervisor_alive_but_not_ready() -> None:
    away = facts(beat_at=WORKING.at - 86_400, has_outage=True)
    assert liveness(away, now=away.at).ok
    verdict = readiness(away, now=away.at)
    assert (verdict.ok, "cannot be reached" in verdict.reason) == (False, True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_draining": True}, "draining"),
        ({"has_ended": True}, "draining"),
        ({"ready": 0}, "None of 2"),
        ({"beat_at": None}, "not registered"),
    ],
)
def test_a_supervisor_that_takes_no_tasks_is_alive_but_not_ready(
    changes: dict[str, object], reason: str
) -> None:
    found = facts(**changes)
    assert liveness(found, now=found.at).ok
    verdict = readiness(found, now=found.at)
    assert (verdict.ok, reason in verdict.reason) == (False, True)


def test_a_program_that_loads_its_code_is_alive_for_a_minute_and_not_started() -> None:
    loading = SupervisorFacts(at=1_000.0, has_loop=False)
    assert liveness(loading, now=1_000.0 + LONGEST_START_S - 1).ok
    assert not liveness(loading, now=1_000.0 + LONGEST_START_S + 1).ok
    assert not startup(loading).ok
    assert not readiness(loading, now=1_001.0).ok


def test_a_supervisor_that_has_ended_is_alive_however_long_its_last_steps_take() -> None:
    assert liveness(facts(has_ended=True), now=WORKING.at + 600).ok
