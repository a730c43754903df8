"""The decision of one pass: which due ticks are sent, skipped or missed, and when the schedule is due again."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from everbeat.domain.schedule.model import (
    MOST_MISSED_ROWS,
    DecidedTick,
    DueSchedule,
    Overlap,
    Rule,
    TickDecision,
    Timing,
)
from everbeat.domain.schedule.ticks import decide, jitter_ms_of, next_due, rule_ticks, tick_task_id

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
HOURLY = Rule(timing=Timing(every_ms=3_600_000))


def due_schedule(
    rule: Rule = HOURLY, *, outage: timedelta = HOUR, now: datetime = NOON, **changes: Any
) -> DueSchedule:
    """Return a schedule whose ticks were last decided before an outage that ends now."""
    due = DueSchedule(
        name="digest",
        rule=rule,
        decided_to=now - outage,
        now=now,
        runs=0,
        live=0,
        waiting=0,
        failures=0,
        is_paused=False,
        resume_at=None,
        held_until=None,
        held_because=None,
    )
    return replace(due, **changes)


def decided(rule: Rule = HOURLY, **given: Any) -> TickDecision:
    return decide(due_schedule(rule, **given), installation="here")


def outcomes(decision: TickDecision) -> list[tuple[str, str]]:
    """Return each tick as its hour, or its first and last hour, with its reason or outcome."""

    def hours(tick: DecidedTick) -> str:
        return f"{tick.at:%H}" if tick.last_at is None else f"{tick.at:%H}-{tick.last_at:%H}"

    return [(hours(tick), tick.reason or tick.outcome) for tick in decision.ticks]


def test_a_due_tick_is_sent_and_the_next_one_is_awaited() -> None:
    decision = decided(outage=HOUR)
    assert outcomes(decision) == [("12", "SENT")]
    assert (decision.seen_decided_to, decision.decided_to, decision.next_at) == (
        NOON - HOUR,
        NOON,
        NOON + HOUR,
    )
    assert decision.ticks[0].task_id == tick_task_id("here", "digest", NOON)
    assert not decision.has_ended
    assert decision.pauses is None


def test_nothing_is_decided_before_a_tick_is_due() -> None:
    decision = decided(outage=59 * MINUTE)
    assert outcomes(decision) == [("12", "SENT")]
    early = decided(now=NOON - SECOND, outage=30 * MINUTE)
    assert early.ticks == ()
    assert early.decided_to == early.seen_decided_to
    assert early.next_at == NOON


def test_no_tick_is_decided_twice_after_the_clock_was_set_back() -> None:
    decision = decided(decided_to=NOON + HOUR)
    assert decision.ticks == ()
    assert (decision.decided_to, decision.next_at) == (NOON + HOUR, NOON + 2 * HOUR)


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("latest", [("09", "NOT_LATEST"), ("10", "NOT_LATEST"), ("11", "NOT_LATEST"), ("12", "SENT")]),
        ("all", [("09", "TOO_MANY"), ("10", "TOO_MANY"), ("11", "SENT"), ("12", "SENT")]),
        ("skip", [("09", "LATE"), ("10", "LATE"), ("11", "LATE"), ("12", "SENT")]),
    ],
)
def test_missed_ticks_are_handled_as_the_rule_says(missed: Any, expected: list[tuple[str, str]]) -> None:
    decision = decided(replace(HOURLY, missed=missed, most=2), outage=4 * HOUR)
    assert outcomes(decision) == expected
    assert decision.decided_to == NOON


@pytest.mark.parametrize(("late", "expected"), [(60 * SECOND, "SENT"), (61 * SECOND, "LATE")])
def test_skip_sends_only_ticks_that_are_at_most_a_minute_late(late: timedelta, expected: str) -> None:
    decision = decided(replace(HOURLY, missed="skip"), now=NOON + late)
    assert outcomes(decision) == [("12", expected)]
    if expected == "LATE":
        assert decision.ticks[0].detail == "decided 1 m 1 s after it was due"


@pytest.mark.parametrize("missed", ["latest", "all", "skip"])
def test_ticks_older_than_the_catchup_window_are_missed(missed: Any) -> None:
    rule = replace(HOURLY, missed=missed, catchup_ms=5_400_000)
    assert ("10", "CATCHUP_WINDOW") in outcomes(decided(rule, outage=3 * HOUR))
    late = decided(replace(rule, timing=Timing(every_ms=86_400_000)), now=NOON, outage=DAY)
    assert outcomes(late) == [("00", "CATCHUP_WINDOW")]


def test_ticks_during_a_pause_or_retirement_are_missed_with_that_reason() -> None:
    held = decided(
        replace(HOURLY, missed="all"), outage=4 * HOUR, held_until=NOON - HOUR, held_because="RETIRED"
    )
    assert outcomes(held) == [("09", "RETIRED"), ("10", "RETIRED"), ("11", "RETIRED"), ("12", "SENT")]
    all_held = decided(outage=2 * HOUR, held_until=NOON + MINUTE, held_because="PAUSED")
    assert outcomes(all_held) == [("11", "PAUSED"), ("12", "PAUSED")]
    assert (all_held.decided_to, all_held.next_at) == (NOON, NOON + HOUR)


def test_ticks_exist_only_from_the_start_to_before_the_end() -> None:
    rule = replace(HOURLY, missed="all", starts_at=NOON - 2 * HOUR, ends_at=NOON)
    decision = decided(rule, outage=5 * HOUR)
    assert outcomes(decision) == [("10", "SENT"), ("11", "SENT")]
    assert decision.has_ended
    assert decision.next_at is None
    later = decided(replace(HOURLY, starts_at=NOON + DAY))
    assert (later.ticks, later.next_at) == ((), NOON + DAY)


def test_a_schedule_of_single_moments_ends_after_the_last() -> None:
    rule = Rule(timing=Timing(at=(NOON - HOUR, NOON)), missed="all")
    decision = decided(rule, outage=2 * HOUR)
    assert outcomes(decision) == [("11", "SENT"), ("12", "SENT")]
    assert (decision.has_ended, decision.next_at, decision.decided_to) == (True, None, NOON)
    first = decided(rule, now=NOON - MINUTE, outage=HOUR)
    assert (first.has_ended, first.next_at) == (False, NOON)


def test_a_schedule_ends_when_it_has_sent_its_last_run() -> None:
    rule = replace(HOURLY, missed="all", most_runs=5)
    decision = decided(rule, outage=4 * HOUR, runs=3)
    assert outcomes(decision) == [("09", "SENT"), ("10", "SENT")]
    assert (decision.has_ended, decision.next_at, decision.decided_to) == (True, None, NOON - 2 * HOUR)
    over = decided(rule, runs=5)
    assert (over.has_ended, over.ticks) == (True, ())


def test_skipped_ticks_do_not_count_as_runs() -> None:
    decision = decided(replace(HOURLY, overlap="skip", most_runs=1), live=1)
    assert outcomes(decision) == [("12", "OVERLAP")]
    assert not decision.has_ended


def test_failures_pause_the_schedule_and_leave_its_ticks_undecided() -> None:
    rule = replace(HOURLY, pause_after_failures=3)
    decision = decided(rule, failures=4)
    assert decision.pauses == "the last 4 runs failed"
    assert (decision.ticks, decision.decided_to, decision.next_at) == ((), NOON - HOUR, None)
    assert not decision.has_ended
    assert decided(rule, failures=2).pauses is None
    assert decided(rule, failures=3, now=NOON - MINUTE, outage=MINUTE).pauses is None
    assert decided(replace(rule, pause_after_failures=1), failures=1).pauses == "the last run failed"


def test_ticks_of_a_pause_are_recorded_before_failures_pause_the_schedule_again() -> None:
    decision = decided(
        replace(HOURLY, pause_after_failures=3), failures=3, held_until=NOON, held_because="PAUSED"
    )
    assert outcomes(decision) == [("12", "PAUSED")]
    assert decision.pauses is None


def test_a_paused_schedule_resumes_at_its_moment() -> None:
    paused = decided(is_paused=True, resume_at=NOON + MINUTE)
    assert (paused.ticks, paused.resumes, paused.next_at) == ((), False, NOON + MINUTE)
    assert paused.decided_to == paused.seen_decided_to
    resumed = decided(is_paused=True, resume_at=NOON)
    assert (resumed.ticks, resumed.resumes, resumed.decided_to) == ((), True, NOON - HOUR)
    assert decided(is_paused=True).next_at is None


@pytest.mark.parametrize(
    ("overlap", "live", "waiting", "expected"),
    [
        ("allow", 3, 2, ["SENT", "SENT", "SENT"]),
        ("skip", 0, 0, ["SENT", "OVERLAP", "OVERLAP"]),
        ("skip", 1, 0, ["OVERLAP", "OVERLAP", "OVERLAP"]),
        ("buffer_one", 0, 0, ["SENT", "OVERLAP", "OVERLAP"]),
        ("buffer_one", 1, 0, ["SENT", "OVERLAP", "OVERLAP"]),
        ("buffer_one", 1, 1, ["OVERLAP", "OVERLAP", "OVERLAP"]),
        ("buffer_all", 5, 4, ["SENT", "SENT", "SENT"]),
        ("cancel_other", 1, 0, ["OVERLAP", "OVERLAP", "SENT"]),
    ],
)
def test_overlaps_are_judged_against_live_runs_and_earlier_ticks(
    overlap: Overlap, live: int, waiting: int, expected: list[str]
) -> None:
    decision = decided(
        replace(HOURLY, missed="all", overlap=overlap), outage=3 * HOUR, live=live, waiting=waiting
    )
    assert [reason for _, reason in outcomes(decision)] == expected
    sent = [tick for tick in decision.ticks if tick.outcome == "SENT"]
    skipped = [tick for tick in decision.ticks if tick.outcome != "SENT"]
    assert all(tick.is_serial == (overlap in ("buffer_one", "buffer_all")) for tick in sent)
    assert all(tick.cancels == (overlap == "cancel_other") for tick in sent)
    assert all(tick.outcome == "SKIPPED" and tick.detail and tick.task_id is None for tick in skipped)


def test_a_skipped_tick_names_what_it_overlapped_with() -> None:
    assert decided(replace(HOURLY, overlap="skip"), live=2).ticks[0].detail == "2 runs had not ended"
    assert (
        decided(replace(HOURLY, overlap="buffer_one"), live=1, waiting=1).ticks[0].detail
        == "1 run had not started"
    )


def test_a_run_expires_after_its_tick() -> None:
    decision = decided(replace(HOURLY, expires_ms=1_800_000), now=NOON + 5 * MINUTE)
    assert decision.ticks[0].good_until == NOON + HOUR / 2


def test_the_earliest_of_many_missed_ticks_share_a_row_for_each_reason() -> None:
    rule = Rule(timing=Timing(every_ms=1_000), catchup_ms=7_200_000)
    decision = decided(rule, outage=5 * HOUR, held_until=NOON - 3 * HOUR, held_because="PAUSED")
    series, own = decision.ticks[:3], decision.ticks[3:]
    assert [(tick.reason, tick.at, tick.last_at, tick.missed) for tick in series] == [
        ("PAUSED", NOON - 5 * HOUR + SECOND, NOON - 3 * HOUR, 7_200),
        ("CATCHUP_WINDOW", NOON - 3 * HOUR + SECOND, NOON - 2 * HOUR - SECOND, 3_599),
        ("NOT_LATEST", NOON - 2 * HOUR, NOON - 1_001 * SECOND, 6_200),
    ]
    assert len(own) == MOST_MISSED_ROWS + 1
    assert [later.at - earlier.at for earlier, later in pairwise(own)] == [SECOND] * MOST_MISSED_ROWS
    assert own[0].at == NOON - 1_000 * SECOND
    assert own[-1].outcome == "SENT"


def test_a_single_earlier_tick_has_an_ordinary_row() -> None:
    rule = Rule(timing=Timing(every_ms=1_000))
    first = decided(rule, outage=(MOST_MISSED_ROWS + 2) * SECOND).ticks[0]
    assert (first.at, first.last_at, first.missed) == (NOON - (MOST_MISSED_ROWS + 1) * SECOND, None, None)
    assert len(decided(rule, outage=(MOST_MISSED_ROWS + 2) * SECOND).ticks) == MOST_MISSED_ROWS + 2


def test_missed_ticks_share_a_row_also_if_none_is_sent() -> None:
    rule = Rule(timing=Timing(every_ms=1_000), missed="all", most=10_000)
    decision = decided(rule, outage=5 * HOUR, held_until=NOON, held_because="PAUSED")
    assert len(decision.ticks) == MOST_MISSED_ROWS + 1
    assert decision.ticks[0].missed == 5 * 3_600 - MOST_MISSED_ROWS


@pytest.mark.parametrize("missed", ["latest", "all", "skip"])
def test_a_cron_of_one_second_is_decided_quickly_after_an_outage_of_a_year(missed: Any) -> None:
    rule = Rule(timing=Timing(cron=("* * * * * *",), timezone="Europe/Berlin"), missed=missed, jitter_ms=900)
    due = due_schedule(rule, outage=365 * DAY)
    start = time.process_time()
    decision = decide(due, installation="here")
    assert time.process_time() - start < 0.8
    assert len(decision.ticks) <= 2 + MOST_MISSED_ROWS + 100
    assert sum(tick.missed or 1 for tick in decision.ticks) == 365 * 86_400 - (decision.decided_to < NOON)


def test_the_id_of_a_tick_s_task_depends_on_installation_schedule_and_tick_only() -> None:
    assert tick_task_id("here", "digest", NOON) == UUID("019de368-f600-71ac-91f1-46f3cf50fdeb")
    others = [
        tick_task_id("there", "digest", NOON),
        tick_task_id("here", "report", NOON),
        tick_task_id("here", "digest", NOON + timedelta(milliseconds=1)),
    ]
    assert len({tick_task_id("here", "digest", NOON), *others}) == 4
    assert tick_task_id("here", "digest", NOON.astimezone()) == tick_task_id("here", "digest", NOON)


def test_the_id_of_a_tick_s_task_sorts_by_the_tick() -> None:
    ids = [tick_task_id("here", "digest", NOON + number * SECOND) for number in range(100)]
    assert ids == sorted(ids)


def test_the_jitter_is_the_same_each_time_and_spreads_schedules() -> None:
    delays = [jitter_ms_of(f"digest-{number}", NOON, 60_000) for number in range(1_000)]
    assert delays == [jitter_ms_of(f"digest-{number}", NOON, 60_000) for number in range(1_000)]
    assert 0 <= min(delays) < 6_000
    assert 54_000 < max(delays) < 60_000
    assert jitter_ms_of("digest", NOON, 0) == 0
    assert jitter_ms_of("digest", NOON, 60_000) != jitter_ms_of("digest", NOON + MINUTE, 60_000)


def test_a_tick_with_jitter_is_decided_when_it_is_due() -> None:
    rule = replace(HOURLY, jitter_ms=1_800_000)
    delay = timedelta(milliseconds=jitter_ms_of("digest", NOON, rule.jitter_ms))
    assert delay
    early = decided(rule, now=NOON + delay - timedelta(milliseconds=1), decided_to=NOON - HOUR)
    assert (early.ticks, early.next_at) == ((), NOON + delay)
    there = decided(rule, now=NOON + delay, decided_to=NOON - HOUR)
    assert outcomes(there) == [("12", "SENT")]
    assert (there.ticks[0].at, there.ticks[0].due_at, there.decided_to) == (NOON, NOON + delay, NOON)


def test_the_next_tick_is_found_within_the_rule_s_bounds() -> None:
    rule = replace(HOURLY, starts_at=NOON, ends_at=NOON + 2 * HOUR)
    assert next_due(rule, "digest", NOON - DAY) == (NOON, NOON)
    assert [*rule_ticks(rule, after=NOON - DAY)] == [NOON, NOON + HOUR]
    assert next_due(rule, "digest", NOON + HOUR) is None
    (tick, due_at) = next_due(replace(HOURLY, jitter_ms=60_000), "digest", NOON) or (NOON, NOON)
    assert tick == NOON + HOUR
    assert due_at - tick == timedelta(milliseconds=jitter_ms_of("digest", tick, 60_000))


RULES = st.builds(
    Rule,
    timing=st.sampled_from(
        [
            Timing(every_ms=60_000),
            Timing(every_ms=1_000),
            Timing(cron=("*/7 * * * *", "0 1-3 * * *"), timezone="Europe/Berlin"),
            Timing(at=tuple(NOON + number * 17 * MINUTE for number in range(-50, 50))),
        ]
    ),
    missed=st.sampled_from(["latest", "all", "skip"]),
    most=st.integers(1, 30),
    catchup_ms=st.sampled_from([1_000, 600_000, 86_400_000]),
    overlap=st.sampled_from(["allow", "skip", "buffer_one", "buffer_all", "cancel_other"]),
    jitter_ms=st.sampled_from([0, 500, 55_000, 3_600_000]),
    most_runs=st.none() | st.integers(1, 50),
)


@given(
    rule=RULES,
    outage_s=st.integers(0, 20_000),
    runs=st.integers(0, 5),
    live=st.integers(0, 2),
    held_s=st.none() | st.integers(0, 20_000),
)
@settings(max_examples=300, deadline=None)
def test_each_due_tick_is_decided_once_and_in_order(
    rule: Rule, outage_s: int, runs: int, live: int, held_s: int | None
) -> None:
    held = None if held_s is None else NOON - held_s * SECOND
    because = None if held is None else "PAUSED"
    decision = decided(
        rule, outage=outage_s * SECOND, runs=runs, live=live, held_until=held, held_because=because
    )
    due = []
    for tick in rule_ticks(rule, after=NOON - outage_s * SECOND):
        if tick + timedelta(milliseconds=jitter_ms_of("digest", tick, rule.jitter_ms)) > NOON:
            break
        if tick > decision.decided_to and decision.has_ended:
            break
        due.append(tick)
    found = [tick.at for tick in decision.ticks if tick.last_at is None]
    series = [tick for tick in decision.ticks if tick.last_at is not None]
    covered = [tick for tick in due if any(each.at <= tick <= (each.last_at or each.at) for each in series)]
    assert sorted([*found, *covered]) == due
    assert found == sorted(found)
    assert all(
        each.missed in (None, sum(each.at <= tick <= (each.last_at or each.at) for tick in due))
        for each in series
    )
    sent = [tick for tick in decision.ticks if tick.outcome == "SENT"]
    assert len(sent) <= (rule.most if rule.missed == "all" else 1)
    assert all(held is None or tick.at > held for tick in sent)
    assert all(NOON - (tick.due_at or NOON) <= timedelta(milliseconds=rule.catchup_ms) for tick in sent)
    assert rule.most_runs is None or runs + len(sent) <= max(rule.most_runs, runs)
    assert (
        sum(tick.outcome == "MISSED" and tick.last_at is None for tick in decision.ticks)
        <= MOST_MISSED_ROWS + 3
    )
    assert decision.decided_to == (due[-1] if due else decision.seen_decided_to)
