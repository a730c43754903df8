"""Statements about schedules: each tick is decided once, whichever statements run at the same time or are repeated."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from everbeat.domain.schedule.inspection import PAUSED_BY_FAILURES
from everbeat.domain.schedule.model import DecidedTick, DueSchedule, Overlap, Timing
from everbeat.store import inspection, schedules
from everbeat.store.database import Database
from everbeat.store.schedules import DecidedTicks, DueSchedules, ScheduleChange, StoredSchedule
from tests.store.conftest import StoreHarness
from tests.store.scheduling import (
    HOUR,
    SECOND,
    decide,
    decision,
    definition,
    due,
    due_one,
    heard,
    make_due,
    put,
    send_tick,
    sent,
)
from tests.store.test_steps import send_child


@pytest.fixture
def seen(db: StoreHarness) -> DueSchedule:
    """Return an hourly schedule that is due."""
    put(db)
    return due_one(db)


def ticks(db: StoreHarness, name: str = "hourly") -> list[tuple[str, str | None]]:
    """Return the outcomes and reasons of the decided ticks, oldest first."""
    found = db.run(schedules.list_ticks(name, limit=100))
    return [(each.outcome, each.reason) for each in reversed(found)]


def runs(db: StoreHarness, name: str = "hourly") -> int:
    found = db.run(schedules.read_schedule(name))
    assert found is not None
    return found.runs


# Which schedules are due


def test_without_schedules_none_is_due_and_there_is_nothing_to_wait_for(db: StoreHarness) -> None:
    assert due(db) == DueSchedules((), None)


def test_a_new_schedule_is_due_at_once_with_the_whole_rule(db: StoreHarness) -> None:
    given = definition(
        timing=Timing(cron=("30 2 * * *",), timezone="Europe/Berlin"), missed="all", most=7, catchup_ms=1_000, overlap="skip",
        jitter_ms=5, most_runs=9, pause_after_failures=3, expires_ms=60_000,
    )  # fmt: skip
    assert db.run(schedules.put_schedule(given)) == StoredSchedule("created")
    found = due_one(db)
    assert found.rule == given.rule
    assert (found.runs, found.live, found.waiting, found.failures, found.is_paused) == (0, 0, 0, 0, False)
    assert timedelta(0) <= found.now - found.decided_to < timedelta(minutes=1)


def test_a_schedule_whose_time_has_not_come_sets_how_long_the_scheduler_waits(
    db: StoreHarness, seen: DueSchedule
) -> None:
    decide(db, decision(seen, next_at=seen.now + HOUR))
    found = due(db)
    assert found.due == ()
    assert found.wait_s is not None
    assert 3_000 < found.wait_s <= 3_600


def test_schedules_in_unknown_zones_and_skipped_ones_are_not_read(db: StoreHarness) -> None:
    put(db, "a", timing=Timing(cron=("0 * * * *",), timezone="Mars/Olympus"))
    put(db, "b")
    put(db, "c")
    assert [each.name for each in due(db, unknown_zones=["Mars/Olympus"], skipped=["b"]).due] == ["c"]


def test_a_page_holds_the_schedules_that_are_due_for_the_longest_time(db: StoreHarness) -> None:
    for name in ("late", "later", "latest"):
        put(db, name)
    found = due(db, limit=2)
    assert ([each.name for each in found.due], found.is_full) == (["late", "later"], True)
    assert not due(db, limit=4).is_full


def test_a_schedule_with_an_unreadable_timing_is_named_and_the_others_are_read(db: StoreHarness) -> None:
    put(db, "bad")
    put(db, "good")
    db.connection.execute(
        db.plain("""update {schema}.schedules set timing = '{{"every_ms": "x"}}' where name = 'bad'""")
    )
    found = due(db)
    assert [each.name for each in found.due] == ["good"]
    assert [each.name for each in found.broken] == ["bad"]
    assert "every_ms" in found.broken[0].problem
    (bad, good) = db.run(schedules.list_schedules())
    assert bad.rule is None
    assert good.rule is not None


@pytest.mark.parametrize("overlap", ["skip", "buffer_one"])
def test_live_and_waiting_runs_are_counted_for_policies_that_ask(db: StoreHarness, overlap: Overlap) -> None:
    put(db, overlap=overlap)
    send_tick(db)
    assert (make_due(db).live, due_one(db).waiting) == (1, 1)
    (claimed,) = db.claim()
    assert (due_one(db).live, due_one(db).waiting) == (1, 1)  # its code has not begun
    db.start(claimed)
    assert (due_one(db).live, due_one(db).waiting) == (1, 0)
    db.settle(claimed, "FAILED", error=b'{"code": "X"}', retry_in_ms=60_000)
    assert (due_one(db).live, due_one(db).waiting) == (1, 0)  # it waits for its retry
    db.connection.execute(db.plain("update {schema}.tasks set enqueued_at = now()"))
    (again,) = db.claim()
    db.start(again)
    db.complete(again)
    assert (due_one(db).live, due_one(db).waiting) == (0, 0)


def fail_run(db: StoreHarness, **more: Any) -> None:
    """Send one more tick, and let its run fail."""
    send_tick(db, **more)
    (claimed,) = db.claim()
    db.start(claimed)
    db.settle(claimed, "FAILED", error=b'{"code": "X"}')


def test_failures_are_the_latest_runs_that_failed_since_the_schedule_was_held(db: StoreHarness) -> None:
    put(db, pause_after_failures=3)
    fail_run(db)
    fail_run(db)
    assert make_due(db).failures == 2
    send_tick(db)
    (claimed,) = db.claim()
    assert make_due(db).failures == 2  # a run that has not ended does not count
    db.start(claimed)
    db.complete(claimed)
    assert make_due(db).failures == 0
    for _ in range(4):
        fail_run(db)
    assert make_due(db).failures == 3  # as many as the rule asks for
    now = "update {schema}.schedules set held_until = decided_to, held_because = 'PAUSED'"
    db.connection.execute(db.plain(now))
    assert make_due(db).failures == 0


# Decisions


def test_a_tick_is_sent_with_the_call_of_the_schedule(db: StoreHarness) -> None:
    put(
        db,
        call={"queue": "mail", "priority": -2, "policy": '{"retries": 1}', "flags": '{"x": true}', "args": '{"n":  "\\u00e9"}'},
    )  # fmt: skip
    seen = due_one(db)
    tick = sent(seen, good_until=seen.now + HOUR)
    assert decide(db, decision(seen, tick)) == DecidedTicks(("hourly",), 1)
    assert tick.task_id is not None
    columns = "name, queue, priority, args::text, policy::text, flags::text, good_until, schedule, tick, serial, state"
    assert db.row(tick.task_id, columns) == (
        "work", "mail", -2, '{"n":  "\\u00e9"}', '{"retries": 1}', '{"x": true}', tick.good_until, "hourly", tick.at, None, "PENDING",
    )  # fmt: skip
    (claimed,) = db.claim()
    assert claimed.tick == tick.at
    stored = db.run(inspection.task(tick.task_id))
    assert stored is not None
    assert (stored.schedule, stored.tick) == ("hourly", tick.at)
    found = db.run(schedules.read_schedule("hourly"))
    assert found is not None
    assert (found.runs, found.decided_to, found.next_at) == (1, tick.at, seen.now + HOUR)
    assert found.last_tick is not None
    assert (found.last_tick.task_id, found.last_tick.decided_by) == (tick.task_id, "s1")


def test_a_repeated_decision_changes_nothing(db: StoreHarness, seen: DueSchedule) -> None:
    one = decision(seen, sent(seen))
    assert decide(db, one) == DecidedTicks(("hourly",), 1)
    assert decide(db, one) == DecidedTicks((), 0)
    assert (len(db.table("tasks")), ticks(db)) == (1, [("SENT", None)])


def test_of_two_decisions_that_were_made_at_once_only_the_first_counts(
    db: StoreHarness, seen: DueSchedule
) -> None:
    first, second = (decision(seen, sent(seen, number)) for number in (1, 2))
    assert decide(db, first).sent == 1
    assert decide(db, second) == DecidedTicks((), 0)
    assert len(db.table("tasks")) == 1


@pytest.fixture
def callers(db: StoreHarness) -> Iterator[list[Database]]:
    opened = [Database(db.target) for _ in range(6)]
    yield opened
    for each in opened:
        each.close()


def test_callers_that_decide_the_same_ticks_at_once_send_each_task_once(
    db: StoreHarness, callers: list[Database]
) -> None:
    names = [f"s{number}" for number in range(8)]
    for name in names:
        put(db, name)
    for _ in range(10):
        for name in names:
            make_due(db, name)
        found = due(db).due
        attempts = [[decision(each, sent(each), sent(each, 2)) for each in found] for _ in callers]
        for number, attempt in enumerate(attempts):  # each caller names the schedules in another order
            attempts[number] = attempt[number:] + attempt[:number]

        def run(pair: tuple[Database, Any]) -> DecidedTicks:
            return pair[0].run(schedules.decide_ticks(pair[1], channel=db.target.channel))

        with ThreadPoolExecutor(len(callers)) as pool:
            written = list(pool.map(run, zip(callers, attempts, strict=True)))
        assert sorted(name for each in written for name in each.changed) == names
        assert sum(each.sent for each in written) == 2 * len(names)
    assert len(db.table("tasks")) == len(db.table("ticks")) == 10 * 2 * len(names)
    assert {runs(db, name) for name in names} == {20}


def test_a_tick_that_has_a_row_is_not_sent_again_after_its_task_was_pruned(
    db: StoreHarness, seen: DueSchedule
) -> None:
    """The database's clock was set back, and the timing was replaced: decided_to is earlier than the tick."""
    tick = sent(seen)
    decide(db, decision(seen, tick))
    db.connection.execute(db.plain("delete from {schema}.tasks"))
    db.connection.execute(db.plain("update {schema}.schedules set decided_to = %s"), [seen.decided_to])
    again = make_due(db)
    assert decide(db, decision(again, tick, sent(again, 2))).sent == 1
    assert len(db.table("tasks")) == 1
    assert (ticks(db), runs(db)) == ([("SENT", None), ("SENT", None)], 2)


def test_missed_and_skipped_ticks_are_stored_with_their_reasons(db: StoreHarness, seen: DueSchedule) -> None:
    at = seen.decided_to
    decided = decide(
        db,
        decision(
            seen,
            DecidedTick(at=at + SECOND, outcome="MISSED", reason="CATCHUP_WINDOW", last_at=at + 5 * SECOND, missed=5),
            DecidedTick(at=at + 6 * SECOND, outcome="SKIPPED", reason="OVERLAP", detail="task x runs"),
        ),
    )  # fmt: skip
    assert decided.sent == 0
    later, series = db.run(schedules.list_ticks("hourly", limit=10))
    assert (series.outcome, series.reason, series.missed, series.last_at) == (
        "MISSED", "CATCHUP_WINDOW", 5, at + 5 * SECOND,
    )  # fmt: skip
    assert (later.outcome, later.detail, later.task_id, later.state) == ("SKIPPED", "task x runs", None, None)
    assert db.run(schedules.list_ticks("hourly", limit=10, before=later.at)) == [series]


@pytest.mark.parametrize(
    "change",
    [
        lambda db: put(db, note="other"),
        lambda db: db.run(schedules.pause_schedule("hourly", paused_by="ann")),
        lambda db: (
            db.run(schedules.pause_schedule("hourly", paused_by="ann")),
            db.run(schedules.resume_schedule("hourly")),
        ),
        lambda db: (db.run(schedules.delete_schedule("hourly")), put(db)),
        lambda db: db.run(schedules.delete_schedule("hourly")),
    ],
    ids=["replaced", "paused", "paused and resumed", "deleted and made again", "deleted"],
)
def test_a_decision_about_a_schedule_that_has_changed_since_does_not_count(
    db: StoreHarness, seen: DueSchedule, change: Any
) -> None:
    change(db)
    assert decide(db, decision(seen, sent(seen))) == DecidedTicks((), 0)
    assert db.table("tasks") == db.table("ticks") == []


def test_a_decision_with_a_bad_row_stores_nothing_of_the_others(db: StoreHarness, seen: DueSchedule) -> None:
    bad = DecidedTick(at=seen.now, outcome="SENT")  # without a task's id
    with pytest.raises(Exception, match="null value"):
        decide(db, decision(seen, sent(seen), bad))
    assert db.table("tasks") == db.table("ticks") == []
    assert due_one(db).decided_to == seen.decided_to


def test_serial_runs_form_a_line_in_the_order_of_their_ticks(db: StoreHarness, seen: DueSchedule) -> None:
    one, two = sent(seen, 1, is_serial=True), sent(seen, 2, is_serial=True)
    assert one.task_id is not None
    assert two.task_id is not None
    if one.task_id.int > two.task_id.int:  # the ids of real ticks increase, because they contain the time
        one, two = (
            sent(seen, 1, is_serial=True, task_id=two.task_id),
            sent(seen, 2, is_serial=True, task_id=one.task_id),
        )
    decide(db, decision(seen, two, one))
    (claimed,) = db.claim()
    assert (claimed.id, claimed.in_line) == (one.task_id, True)
    assert {row[0] for row in db.table("tasks", "serial")} == {"schedule:hourly"}


def test_a_call_keeps_its_own_serial_line(db: StoreHarness) -> None:
    put(db, call={"serial": "printer"}, overlap="buffer_all")
    assert db.row(send_tick(db, is_serial=True), "serial") == "printer"


def test_a_tick_whose_key_a_live_task_has_is_skipped(db: StoreHarness) -> None:
    put(db, call={"key": "one"})
    holder = db.send(key="one")
    seen = make_due(db)
    assert decide(db, decision(seen, sent(seen))).sent == 0
    (tick,) = db.run(schedules.list_ticks("hourly", limit=10))
    assert (tick.outcome, tick.reason, tick.detail) == ("SKIPPED", "OVERLAP", f"task {holder} has the key")
    db.cancel(holder)
    seen = make_due(db)
    assert decide(db, decision(seen, sent(seen), sent(seen, 2))).sent == 1  # the second tick finds the first
    assert ticks(db) == [("SKIPPED", "OVERLAP"), ("SENT", None), ("SKIPPED", "OVERLAP")]
    assert runs(db) == 1


def test_a_tick_that_cancels_ends_waiting_runs_and_children_and_asks_the_running_one_to_stop(
    db: StoreHarness,
) -> None:
    put(db, overlap="cancel_other")
    running = send_tick(db)
    (claimed,) = db.claim()
    db.start(claimed)
    send_child(db, claimed)
    (child,) = (row[0] for row in db.table("tasks", "id, parent_id") if row[1] == running)
    waiting = send_tick(db)
    other = db.send()
    seen = make_due(db)
    last = sent(seen, cancels=True)
    with heard(db) as notifications:
        found = decide(db, decision(seen, last))
        payloads = set(notifications())
    assert (found.sent, set(found.cancelled)) == (1, {running, waiting, child})
    assert db.row(child, "state, error ->> 'message'") == ("CANCELLED", "cancelled with its parent")
    assert db.row(running, "state, cancel_requested_at is not null") == ("RUNNING", True)
    assert db.row(waiting, "state, error ->> 'message'") == (
        "CANCELLED", "cancelled by the next run of schedule hourly",
    )  # fmt: skip
    assert db.row(other, "state, cancel_requested_at is null") == ("PENDING", True)
    assert db.row(last.task_id, "state, cancel_requested_at is null") == ("PENDING", True)
    assert payloads & {f"d:{waiting},{child}", f"d:{child},{waiting}"}
    assert f"c:{running}" in payloads


def test_listening_workers_are_notified_of_the_queues(db: StoreHarness) -> None:
    put(db, call={"queue": "mail"})
    db.connection.execute(db.plain("update {schema}.workers set listens = true"))
    with heard(db) as notifications:
        send_tick(db)
        assert notifications() == ["t:mail"]


def test_a_decision_can_end_the_schedule(db: StoreHarness, seen: DueSchedule) -> None:
    decide(db, decision(seen, sent(seen), has_ended=True, next_at=None))
    found = db.run(schedules.read_schedule("hourly"))
    assert found is not None
    assert (found.state, found.next_at) == ("ENDED", None)
    assert due(db) == DueSchedules((), None)


# Pauses


def test_a_paused_schedule_is_not_due_and_on_resume_its_ticks_until_now_are_held(
    db: StoreHarness, seen: DueSchedule
) -> None:
    assert db.run(schedules.pause_schedule("hourly", paused_by="ann", reason="holiday")) == ScheduleChange(
        "changed"
    )
    again = schedules.pause_schedule("hourly", paused_by="bob", reason="other")
    assert db.run(again) == ScheduleChange("unchanged")
    found = db.run(schedules.read_schedule("hourly"))
    assert found is not None
    assert (found.state, found.paused_by, found.pause_reason, found.next_at) == (
        "PAUSED",
        "ann",
        "holiday",
        None,
    )
    assert due(db) == DueSchedules((), None)
    assert db.run(schedules.resume_schedule("hourly")) == ScheduleChange("changed")
    assert db.run(schedules.resume_schedule("hourly")) == ScheduleChange("unchanged")
    held = due_one(db)
    assert (held.decided_to, held.held_because, held.is_paused) == (seen.decided_to, "PAUSED", False)
    assert held.held_until is not None
    assert seen.now < held.held_until <= held.now


def test_a_pause_with_an_end_is_due_then_and_the_pass_resumes_the_schedule(db: StoreHarness) -> None:
    put(db)
    now = due_one(db).now
    db.run(schedules.pause_schedule("hourly", paused_by="ann", resume_at=now + HOUR))
    assert due(db).due == ()
    ended = "update {schema}.schedules set resume_at = %(at)s, next_at = %(at)s"
    db.connection.execute(db.plain(ended), {"at": now - HOUR})
    paused = due_one(db)
    assert (paused.is_paused, paused.resume_at) == (True, now - HOUR)
    assert decide(db, decision(paused, sent(paused))) == DecidedTicks((), 0)  # a pause is never overlooked
    assert decide(db, decision(paused, resumes=True)).changed == ("hourly",)
    found = due_one(db)
    assert (found.is_paused, found.held_until, found.held_because) == (False, now - HOUR, "PAUSED")


def test_a_decision_cannot_end_a_pause_that_is_not_over(db: StoreHarness, seen: DueSchedule) -> None:
    db.run(schedules.pause_schedule("hourly", paused_by="ann", resume_at=seen.now + HOUR))
    assert decide(db, decision(seen, resumes=True, seen_changed_at=None)) == DecidedTicks((), 0)


def test_a_decision_can_pause_the_schedule_because_its_runs_failed(
    db: StoreHarness, seen: DueSchedule
) -> None:
    decide(db, decision(seen, pauses="the last 3 runs failed", next_at=None))
    found = db.run(schedules.read_schedule("hourly"))
    assert found is not None
    assert (found.state, found.paused_by, found.pause_reason) == (
        "PAUSED", PAUSED_BY_FAILURES, "the last 3 runs failed",
    )  # fmt: skip
    problems = db.run(schedules.find_problems(overdue_ms=1_000))
    assert [(each.name, each.reason) for each in problems.failing] == [("hourly", "the last 3 runs failed")]


# Definitions


def test_an_equal_definition_changes_nothing(db: StoreHarness, seen: DueSchedule) -> None:
    assert put(db) == "unchanged"
    assert due_one(db).changed_at == seen.changed_at


def test_a_change_keeps_the_decided_ticks_unless_the_timing_changes(
    db: StoreHarness, seen: DueSchedule
) -> None:
    decide(db, decision(seen, sent(seen)))
    assert put(db, missed="all") == "changed"
    kept = due_one(db)
    assert (kept.decided_to, kept.rule.missed, kept.runs) == (seen.decided_to + SECOND, "all", 1)
    assert put(db, timing=Timing(every_ms=60_000)) == "changed"
    moved = due_one(db)
    assert moved.decided_to != kept.decided_to
    assert abs(moved.now - moved.decided_to) < timedelta(minutes=1)


def test_a_changed_definition_revives_an_ended_schedule_without_its_past_ticks(
    db: StoreHarness, seen: DueSchedule
) -> None:
    decide(db, decision(seen, has_ended=True, next_at=None))
    past = "update {schema}.schedules set decided_to = decided_to - interval '1 day'"
    db.connection.execute(db.plain(past))
    assert put(db) == "unchanged"
    assert due(db).due == ()
    assert put(db, most_runs=10) == "changed"
    found = due_one(db)
    assert found.decided_to >= seen.decided_to


def test_a_change_of_a_paused_schedule_does_not_resume_it(db: StoreHarness, seen: DueSchedule) -> None:
    db.run(schedules.pause_schedule("hourly", paused_by="ann"))
    assert put(db, note="x") == "changed"
    assert due(db).due == ()


def test_schedules_are_listed_by_name_state_task_and_pages(db: StoreHarness) -> None:
    for name in ("b1", "a2", "a1"):
        put(db, name, call={"task": name})
    db.run(schedules.pause_schedule("a2", paused_by="ann"))

    def names(**filters: Any) -> list[str]:
        return [each.name for each in db.run(schedules.list_schedules(**filters))]

    assert names() == ["a1", "a2", "b1"] == db.run(schedules.known_schedules())
    assert names(prefix="a") == ["a1", "a2"]
    assert names(state="PAUSED") == ["a2"]
    assert names(state="ACTIVE") == ["a1", "b1"]
    assert names(task="b1") == ["b1"]
    assert names(owner="shop") == []
    assert names(after="a1", limit=1) == ["a2"]


def test_statements_about_an_unknown_schedule_return_none(db: StoreHarness) -> None:
    channel = db.target.channel
    assert db.run(schedules.read_schedule("x")) is None
    assert db.run(schedules.pause_schedule("x", paused_by="ann")) is None
    assert db.run(schedules.resume_schedule("x")) is None
    assert db.run(schedules.delete_schedule("x")) is None
    assert db.run(schedules.run_schedule("x", task_id=uuid4(), channel=channel)) is None
    assert db.run(schedules.backfill_ticks("x", [], channel=channel)) is None


def test_a_deleted_schedule_leaves_its_runs_and_ticks(db: StoreHarness) -> None:
    put(db)
    task = send_tick(db)
    assert db.run(schedules.delete_schedule("hourly")) == ScheduleChange("changed")
    assert db.run(schedules.read_schedule("hourly")) is None
    assert db.row(task, "state") == "PENDING"
    assert ticks(db) == [("SENT", None)]


# Runs by hand


def test_a_run_by_hand_is_a_run_without_a_tick(db: StoreHarness) -> None:
    put(db, expires_ms=60_000)
    asked = schedules.run_schedule("hourly", task_id=uuid4(), channel=db.target.channel)
    first, again = db.run(asked), db.run(asked)
    assert first == again
    assert first is not None
    assert first.task_id is not None
    assert db.row(first.task_id, "schedule, tick, serial, good_until > now()") == ("hourly", None, None, True)
    assert (len(db.table("tasks")), ticks(db), runs(db)) == (1, [], 0)
    (live,) = db.run(schedules.list_live_runs("hourly"))
    assert (live.task_id, live.tick, live.state) == (first.task_id, None, "PENDING")


def test_a_run_by_hand_joins_the_line_of_a_buffering_schedule_and_respects_its_key(db: StoreHarness) -> None:
    put(db, "line", overlap="buffer_one")
    put(db, "keyed", call={"key": "one"})
    db.run(schedules.run_schedule("line", task_id=uuid4(), channel=db.target.channel))
    assert db.table("tasks", "serial") == [("schedule:line",)]
    holder = db.send(key="one")
    found = db.run(schedules.run_schedule("keyed", task_id=uuid4(), channel=db.target.channel))
    assert found is not None
    assert found.task_id == holder


def test_a_backfill_sends_only_ticks_that_were_not_sent_and_keeps_the_rest_of_a_series(
    db: StoreHarness, seen: DueSchedule
) -> None:
    at, before = seen.decided_to, sent(seen, 6)
    decide(
        db,
        decision(
            seen,
            DecidedTick(at=at + SECOND, outcome="MISSED", reason="NOT_LATEST", last_at=at + 4 * SECOND, missed=4),
            DecidedTick(at=at + 5 * SECOND, outcome="SKIPPED", reason="OVERLAP"),
            before,
        ),
    )  # fmt: skip
    asked = [sent(seen, number, is_serial=True) for number in (1, 3, 5, 6)]
    fill = schedules.backfill_ticks("hourly", asked, channel=db.target.channel, decided_by="ann")
    assert db.run(fill) == 3
    assert db.run(fill) == 0
    found = {each.at: each for each in db.run(schedules.list_ticks("hourly", limit=10))}
    assert {moment: each.task_id for moment, each in found.items()} == {
        tick.at: tick.task_id for tick in (*asked[:3], before)
    }
    assert (found[asked[0].at].missed, found[asked[0].at].last_at) == (3, at + 4 * SECOND)
    assert db.run(schedules.list_sent_ticks("hourly", since=at, until=before.at)) == {
        tick.at for tick in asked[:3]
    }
    assert due(db).due == ()
    assert runs(db) == 1


# Findings for the doctor


def test_overdue_schedules_are_found_with_their_problem_and_all_zones_are_named(db: StoreHarness) -> None:
    put(db, "fine")
    put(db, "late", timing=Timing(cron=("0 * * * *",), timezone="Europe/Berlin"))
    put(db, "bad")
    db.connection.execute(
        db.plain(
            """update {schema}.schedules set next_at = now() - interval '1 hour',
                   timing = case when name = 'bad' then '{{"at": 1}}' else timing end where name <> 'fine'"""
        )
    )
    found = db.run(schedules.find_problems(overdue_ms=60_000))
    assert {each.name: each.problem is None for each in found.overdue} == {"late": True, "bad": False}
    assert all(3_500_000 < each.overdue_ms < 3_700_000 for each in found.overdue)
    assert found.zones == ("Europe/Berlin", "UTC")
    assert found.failing == ()
