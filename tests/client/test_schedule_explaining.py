"""Test the reasons why a schedule sends no tasks, on rows that the statements of schedulers have written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat import App
from everbeat.domain.schedule.model import DecidedTick, DueSchedule, Timing
from everbeat.domain.schedule.ticks import decide as decision_of
from everbeat.errors import UnknownName
from everbeat.inspection import Reason, ReasonCode, ScheduleExplanation
from tests.store.conftest import StoreHarness
from tests.store.scheduling import HOUR, decide, decision, due_one, put

SECONDS = timedelta(seconds=1)


def codes(found: ScheduleExplanation) -> list[str]:
    return [each.code for each in found.reasons]


def reason(found: ScheduleExplanation, code: str) -> Reason:
    (one,) = (each for each in found.reasons if each.code == code)
    return one


def change(db: StoreHarness, assignments: str, *values: Any, name: str = "hourly") -> None:
    statement = db.plain(f"update {{schema}}.schedules set {assignments} where name = %s")
    db.connection.execute(statement, [*values, name])


def scheduled(db: StoreHarness, name: str = "hourly", **more: Any) -> None:
    """Store a schedule whose next tick is in an hour, and a live worker that knows its task."""
    put(db, name, **more)
    change(db, "next_at = statement_timestamp() + interval '1 hour'", name=name)
    know(db, "work")


def know(db: StoreHarness, *names: str) -> None:
    """Let the live workers know these task functions."""
    db.connection.execute(
        db.plain("update {schema}.workers set metadata = jsonb_build_object('tasks', to_jsonb(%s::text[]))"),
        [list(names)],
    )


def passed(db: StoreHarness, *, by: timedelta, name: str = "hourly") -> DueSchedule:
    """Let a scheduler decide the ticks of the past `by`."""
    change(db, "decided_to = statement_timestamp() - %s, next_at = statement_timestamp()", by, name=name)
    seen = due_one(db, name)
    decide(db, decision_of(seen, installation="i"))
    return seen


def test_a_schedule_that_nothing_blocks_has_the_time_of_its_next_tick(app: App, db: StoreHarness) -> None:
    scheduled(db)
    found = app.explain_schedule("hourly")
    assert codes(found) == [ReasonCode.SCHEDULED]
    assert (found.schedule, found.state, found.task) == ("hourly", "ACTIVE", "work")
    assert found.reasons[0].until == found.next_at


def test_the_explanation_of_an_unknown_schedule_names_similar_ones(app: App, db: StoreHarness) -> None:
    scheduled(db)
    with pytest.raises(UnknownName, match="hourly") as caught:
        app.explain_schedule("hourli")
    assert caught.value.kind == "schedule"


def test_a_paused_schedule_is_explained_by_its_pause_and_its_reason(app: App, db: StoreHarness) -> None:
    scheduled(db)
    until = datetime.now(UTC) + HOUR
    app.pause_schedule("hourly", reason="the mail server moves", until=until)
    found = app.explain_schedule("hourly")
    assert codes(found) == [ReasonCode.SCHEDULE_PAUSED]
    pause = found.reasons[0]
    assert "operator: the mail server moves" in pause.text
    assert pause.until is not None
    assert abs(pause.until - until) < SECONDS
    assert pause.command == "everbeat schedules resume hourly"


@pytest.mark.parametrize(
    ("because", "command"),
    [("UNDECLARED", "everbeat schedules delete hourly"), ("NO_WORKER", "everbeat worker MODULE:APP")],
)
def test_a_retired_schedule_is_explained_by_the_workers_of_its_app(
    app: App, db: StoreHarness, because: str, command: str
) -> None:
    scheduled(db)
    change(
        db,
        "owner = 'shop', declaration = 'x', retired_at = statement_timestamp(), next_at = null, retired_because = %s",
        because,
    )
    found = app.explain_schedule("hourly")
    assert codes(found) == [ReasonCode.SCHEDULE_RETIRED]
    assert (found.reasons[0].command, found.reasons[0].blocked_by) == (command, "shop")


def test_a_schedule_that_has_ended_says_whether_its_runs_or_its_ticks_are_used_up(
    app: App, db: StoreHarness
) -> None:
    scheduled(db)
    scheduled(db, "few", most_runs=3)
    for name in ("hourly", "few"):
        change(db, "ended_at = statement_timestamp(), next_at = null, runs = 3", name=name)
    assert "no further ticks" in reason(app.explain_schedule("hourly"), "SCHEDULE_ENDED").text
    assert "its 3 runs" in reason(app.explain_schedule("few"), "SCHEDULE_ENDED").text


def test_a_tick_that_no_supervisor_decides_is_late(app: App, db: StoreHarness) -> None:
    scheduled(db)
    change(db, "next_at = statement_timestamp() - interval '9 seconds'")
    assert "TICKS_LATE" not in codes(app.explain_schedule("hourly"))
    change(db, "next_at = statement_timestamp() - interval '1 minute'")
    found = app.explain_schedule("hourly")
    assert codes(found) == ["TICKS_LATE"]
    assert "although 1 supervisor is alive" in found.reasons[0].text
    db.connection.execute(
        db.plain("update {schema}.supervisors set last_beat_at = last_beat_at - interval '1 day'")
    )
    db.connection.execute(
        db.plain("update {schema}.workers set last_beat_at = last_beat_at - interval '1 day'")
    )
    late = reason(app.explain_schedule("hourly"), "TICKS_LATE")
    assert "no supervisor is alive" in late.text
    assert late.command == "everbeat worker MODULE:APP"


def test_a_late_tick_in_a_zone_that_this_machine_does_not_know_names_the_zone(
    app: App, db: StoreHarness
) -> None:
    scheduled(db)
    timing = '{"cron": ["0 * * * *"], "timezone": "Moon/Tranquility"}'
    change(
        db,
        "timing = %s, timezone = 'Moon/Tranquility', next_at = statement_timestamp() - interval '1 minute'",
        timing,
    )
    assert "time zone Moon/Tranquility" in reason(app.explain_schedule("hourly"), "TICKS_LATE").text


def test_an_unreadable_rule_is_explained(app: App, db: StoreHarness) -> None:
    scheduled(db)
    change(db, "timing = %s", '{"every_ms": "often"}')
    found = app.explain_schedule("hourly")
    assert codes(found) == ["BAD_ROW"]
    assert found.reasons[0].command == "everbeat schedules delete hourly"


def test_a_task_name_that_no_live_worker_knows_is_explained_with_a_similar_name(
    app: App, db: StoreHarness
) -> None:
    scheduled(db)
    know(db, "walk", "works")
    unknown = reason(app.explain_schedule("hourly"), "NAME_UNKNOWN")
    assert "did you mean 'works'?" in unknown.text
    assert unknown.blocked_by == "work"
    know(db, "work")
    assert codes(app.explain_schedule("hourly")) == ["SCHEDULED"]


def test_a_schedule_without_live_workers_says_that_its_runs_wait(app: App, db: StoreHarness) -> None:
    scheduled(db)
    db.connection.execute(
        db.plain("update {schema}.workers set ended_at = statement_timestamp(), ended_how = 'stopped'")
    )
    assert codes(app.explain_schedule("hourly")) == ["NO_WORKER", "SCHEDULED"]


def test_a_skipped_tick_names_the_run_that_was_live(app: App, db: StoreHarness) -> None:
    scheduled(db, overlap="skip")
    run = app.run_schedule("hourly").id
    passed(db, by=HOUR)
    found = app.explain_schedule("hourly")
    skipped = reason(found, "TICK_SKIPPED")
    assert skipped.blocked_by == str(run)
    assert skipped.command == f"everbeat explain {run}"
    assert "1 run had not ended" in skipped.text
    waiting = next(each for each in found.reasons if each.text.startswith(f"its run {run} is PENDING"))
    assert found.reasons.index(waiting) < found.reasons.index(skipped)


def test_missed_ticks_share_a_reason_that_says_when_no_supervisor_decided_them(
    app: App, db: StoreHarness
) -> None:
    scheduled(db)
    passed(db, by=5 * HOUR)
    ticks = app.list_ticks("hourly")
    assert [each.outcome for each in ticks] == ["SENT", *["MISSED"] * 4]
    missed = reason(app.explain_schedule("hourly"), "TICK_MISSED")
    assert missed.text.startswith("4 ticks from ")
    assert "only the latest of several missed ticks is sent" in missed.text
    assert (missed.since, missed.until) == (ticks[-1].at, ticks[1].decided_at)


@pytest.mark.parametrize(
    ("rule", "phrase"),
    [
        ({"missed": "skip", "timing": Timing(every_ms=3_600_000)}, 'missed is "skip"'),
        ({"catchup_ms": 1}, "longer than the catchup_window"),
        ({"missed": "all", "most": 1}, "more ticks were missed than the option most allows"),
    ],
)
def test_the_reason_for_missed_ticks_names_the_option_that_applied(
    app: App, db: StoreHarness, rule: dict[str, Any], phrase: str
) -> None:
    scheduled(db, **rule)
    passed(db, by=6 * HOUR)
    texts = [each.text for each in app.explain_schedule("hourly").reasons if each.code == "TICK_MISSED"]
    assert any(phrase in text for text in texts), texts


def test_ticks_that_were_missed_during_a_pause_are_not_blamed_on_a_supervisor(
    app: App, db: StoreHarness
) -> None:
    scheduled(db)
    app.pause_schedule("hourly")
    app.resume_schedule("hourly")
    passed(db, by=3 * HOUR)
    missed = reason(app.explain_schedule("hourly"), "TICK_MISSED")
    assert "the schedule was paused" in missed.text
    assert "supervisor" not in missed.text


def test_a_series_of_ticks_that_were_not_counted_has_no_number(app: App, db: StoreHarness) -> None:
    scheduled(db)
    change(db, "next_at = statement_timestamp()")
    seen = due_one(db)
    series = DecidedTick(
        at=seen.decided_to + SECONDS,
        outcome="MISSED",
        reason="CATCHUP_WINDOW",
        last_at=seen.decided_to + 9 * SECONDS,
    )
    decide(db, decision(seen, series))
    assert reason(app.explain_schedule("hourly"), "TICK_MISSED").text.startswith("the ticks from ")


def test_a_failed_run_of_the_latest_tick_is_shown_with_the_command_that_explains_it(
    app: App, db: StoreHarness
) -> None:
    scheduled(db)
    passed(db, by=HOUR)
    (tick,) = app.list_ticks("hourly")
    change(db, "next_at = statement_timestamp() + interval '1 hour'")
    (run,) = db.claim(limit=1)
    assert run.id == tick.task_id
    assert db.start(run) == ["started"]
    assert db.settle(run, "FAILED", error=b'{"code": "BROKEN", "message": "m"}') == "FAILED"
    found = reason(app.explain_schedule("hourly"), "SCHEDULED")
    assert "is FAILED" in found.text
    assert found.command == f"everbeat explain {tick.task_id}"


async def test_the_async_method_gives_the_same_explanation(app: App, db: StoreHarness) -> None:
    scheduled(db)
    assert codes(await app.aexplain_schedule("hourly")) == ["SCHEDULED"]
