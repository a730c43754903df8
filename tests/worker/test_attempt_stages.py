"""Test the table of an attempt's stages in memory: it keeps the promises of the worker in every order of events."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.worker.attempt import CODE_RUNS, LIFE, OVER, UNSETTLED, Effect, Stage, StageEvent

EVENTS: tuple[StageEvent, ...] = get_args(StageEvent)
EFFECTS: tuple[Effect, ...] = get_args(Effect)
STEPS = list(product(Stage, EVENTS))
HELD = [stage for stage in Stage if stage not in OVER]


def after(stage: Stage, event: StageEvent) -> tuple[Stage, Effect]:
    """Return the next stage and its effect, as `Attempt.move` reads the table."""
    return LIFE.get((stage, event), (stage, "IGNORE"))


COMMIT_ENDS = ("COMMIT_FAILED", "COMMIT_LANDED")


def test_an_event_that_the_attempt_table_does_not_list_is_ignored() -> None:
    for stage, event in STEPS:
        if (stage, event) not in LIFE:
            assert after(stage, event) == (stage, "IGNORE")
    assert all(effect != "IGNORE" for _, effect in LIFE.values())


def test_the_attempt_table_uses_every_stage_event_and_effect() -> None:
    assert {event for _, event in LIFE} == set(EVENTS)
    assert {effect for _, effect in LIFE.values()} == set(EFFECTS) - {"IGNORE"}
    assert {stage for stage, _ in LIFE.values()} | {Stage.CLAIMED} == set(Stage)


@pytest.mark.parametrize("stage", HELD)
def test_an_attempt_can_reach_an_end_from_every_stage(stage: Stage) -> None:
    reached, news = {stage}, {stage}
    while news:
        news = {after(one, event)[0] for one in news for event in EVENTS} - reached
        reached |= news
    assert reached & set(OVER)


def test_an_attempt_that_is_over_changes_only_if_its_own_commit_took_effect() -> None:
    for stage, event in product(OVER, EVENTS):
        expected = Stage.COMMITTED if event == "COMMIT_LANDED" else stage
        assert after(stage, event)[0] is expected


def test_the_attempt_table_releases_a_lease_exactly_when_the_attempt_is_over() -> None:
    for stage, event in STEPS:
        new, effect = after(stage, event)
        if stage not in OVER:
            assert (effect in ("LET_GO", "LET_GO_AND_STOP")) == (new in OVER)


def test_the_attempt_table_stops_code_only_in_stages_where_code_runs() -> None:
    for stage, event in STEPS:
        _, effect = after(stage, event)
        if effect in ("STOP_CODE", "LET_GO_AND_STOP", "SETTLE_WITHOUT_CODE", "DEFER"):
            assert stage in CODE_RUNS


def test_the_attempt_table_decides_one_outcome_each_time_running_code_ends() -> None:
    for stage, event in STEPS:
        new, effect = after(stage, event)
        assert (effect in ("WRITE", "RECOVER")) == (new in UNSETTLED and stage not in UNSETTLED)
        if effect in ("WRITE", "RECOVER"):
            assert stage in CODE_RUNS


def test_while_code_commits_only_its_end_a_stall_or_the_commit_change_the_stage() -> None:  # G4
    for event in EVENTS:
        stage, effect = after(Stage.COMMITTING, event)
        if event in ("STOP", "LOSE", "GRACE_OVER"):
            assert (stage, effect) == (Stage.COMMITTING, "DEFER")
        elif stage is not Stage.COMMITTING:
            assert event in (*COMMIT_ENDS, "STALL", "DIE", "OUTCOME")


def test_an_attempt_that_is_being_settled_ignores_reports_of_a_lost_lease() -> None:
    for stage in (*UNSETTLED, Stage.LEFT):
        assert after(stage, "LOSE") == (stage, "IGNORE")


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_every_order_of_events_starts_code_at_most_once_and_writes_one_outcome(
    events: list[StageEvent],
) -> None:
    stage, effects = Stage.CLAIMED, Counter[Effect]()
    for event in events:
        stage, effect = after(stage, event)
        effects[effect] += 1
        if effect in ("WRITE", "RECOVER", "STOP_CODE"):
            assert effects["BEGIN_CODE"] == 1
    assert effects["BEGIN_CODE"] <= 1
    assert effects["WRITE"] + effects["RECOVER"] <= 1
    if stage is Stage.CLAIMED:
        assert not effects["BEGIN_CODE"]
