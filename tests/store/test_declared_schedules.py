"""Declared schedules: the version of the live workers counts, a rollback brings the other back, and liveness decides what is retired."""

from __future__ import annotations

import pytest

from everbeat.domain.schedule.inspection import ScheduleInfo
from everbeat.domain.schedule.model import Declared, Timing
from everbeat.store import retention, schedules
from everbeat.store.schedules import ScheduleChange, StoredSchedule
from tests.store.conftest import StoreHarness
from tests.store.scheduling import (
    STALE_MS,
    apply,
    decide,
    decision,
    definition,
    due,
    due_one,
    end_worker,
    put,
    sent,
    start_worker,
    version,
)


def info(db: StoreHarness, name: str = "nightly") -> ScheduleInfo:
    found = db.run(schedules.read_schedule(name))
    assert found is not None
    return found


def test_the_schedules_of_a_live_worker_are_stored_once(db: StoreHarness) -> None:
    start_worker(db, "a1", version(1, "nightly", "hourly"))
    assert apply(db) == {"nightly": "ADDED", "hourly": "ADDED"}
    assert apply(db) == {}
    assert [each.name for each in due(db).due] == ["hourly", "nightly"]
    assert (info(db).owner, info(db).state) == ("shop", "ACTIVE")


def test_a_worker_without_declarations_changes_nothing(db: StoreHarness) -> None:
    start_worker(db, "a1", None)
    assert apply(db) == {}
    assert db.table("schedule_versions") == []


def test_a_changed_declaration_replaces_the_schedule_and_keeps_its_history(db: StoreHarness) -> None:
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    seen = due_one(db, "nightly")
    decide(db, decision(seen, sent(seen)))
    start_worker(db, "a2", version(2, "nightly", missed="all"))
    assert apply(db) == {"nightly": "CHANGED"}
    found = due_one(db, "nightly")
    assert (found.rule.missed, found.runs, found.decided_to > seen.decided_to) == ("all", 1, True)


def test_the_version_that_became_live_last_counts_and_a_rollback_brings_the_other_back(
    db: StoreHarness,
) -> None:  # S6
    start_worker(db, "a1", version(1, "nightly", "old"))
    apply(db)
    start_worker(db, "b1", version(2, "nightly", "new", missed="skip"))
    start_worker(
        db, "a2", version(1, "nightly", "old")
    )  # another worker of the old version does not make it newer
    assert apply(db) == {"nightly": "CHANGED", "new": "ADDED", "old": "RETIRED UNDECLARED"}
    end_worker(db, "b1")
    assert apply(db) == {"nightly": "CHANGED", "new": "RETIRED UNDECLARED", "old": "RETURNED"}
    start_worker(db, "b2", version(2, "nightly", "new", missed="skip"))
    assert apply(db) == {"nightly": "CHANGED", "new": "RETURNED", "old": "RETIRED UNDECLARED"}


def test_the_statement_that_registers_a_worker_can_be_repeated(db: StoreHarness) -> None:
    one, two = version(1, "nightly"), version(2, "hourly")
    start_worker(db, "a1", one)
    start_worker(db, "b1", two)
    start_worker(db, "a1", one)
    assert apply(db) == {"hourly": "ADDED"}


def test_schedules_of_an_owner_without_live_workers_are_retired_after_the_threshold(
    db: StoreHarness,
) -> None:  # S6
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    end_worker(db, "a1", ago_ms=STALE_MS // 2)
    assert apply(db) == {}
    end_worker(db, "a1", ago_ms=STALE_MS * 2)
    decided_to = info(db).decided_to
    assert apply(db) == {"nightly": "RETIRED NO_WORKER"}
    assert apply(db) == {}
    assert (info(db).state, info(db).next_at, due(db).due) == ("RETIRED", None, ())
    start_worker(db, "a2", version(1, "nightly"))
    assert apply(db) == {"nightly": "RETURNED"}
    found = due_one(db, "nightly")  # the rule for missed ticks decides about the ticks in between
    assert (found.held_until, found.decided_to) == (None, decided_to)


def test_the_ticks_of_a_schedule_that_live_code_omitted_are_held_when_it_returns(db: StoreHarness) -> None:
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    start_worker(db, "b1", version(2))
    assert apply(db) == {"nightly": "RETIRED UNDECLARED"}
    end_worker(db, "b1")
    assert apply(db) == {"nightly": "RETURNED"}
    found = due_one(db, "nightly")
    assert found.held_because == "RETIRED"
    assert found.held_until is not None
    assert found.held_until <= found.now


def test_a_schedule_that_was_retired_for_want_of_workers_is_later_omitted_by_live_code(
    db: StoreHarness,
) -> None:
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    end_worker(db, "a1", ago_ms=STALE_MS * 2)
    apply(db)
    start_worker(db, "b1", version(2))
    assert apply(db) == {"nightly": "RETIRED UNDECLARED"}
    assert apply(db) == {}


def test_a_decision_about_a_retired_schedule_does_not_count(db: StoreHarness) -> None:
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    seen = due_one(db, "nightly")
    start_worker(db, "b1", version(2))
    apply(db)
    assert decide(db, decision(seen, sent(seen), seen_changed_at=None)).changed == ()


def test_a_declared_schedule_can_be_paused_but_not_replaced_or_deleted(db: StoreHarness) -> None:
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    other = definition("nightly", timing=Timing(every_ms=1_000))
    assert db.run(schedules.put_schedule(other)) == StoredSchedule("declared", "shop")
    assert db.run(schedules.delete_schedule("nightly")) == ScheduleChange("declared", "shop")
    assert db.run(schedules.pause_schedule("nightly", paused_by="ann")) == ScheduleChange("changed", "shop")
    start_worker(db, "a2", version(2, "nightly", missed="all"))
    assert apply(db) == {"nightly": "CHANGED"}
    assert (info(db).state, due(db).due) == ("PAUSED", ())
    assert db.run(schedules.resume_schedule("nightly")) == ScheduleChange("changed", "shop")
    assert due_one(db, "nightly").rule.missed == "all"


def test_a_retired_schedule_can_be_deleted(db: StoreHarness) -> None:
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    start_worker(db, "b1", version(2))
    apply(db)
    assert db.run(schedules.delete_schedule("nightly")) == ScheduleChange("changed", "shop")


def test_a_name_stays_with_the_schedule_that_has_it(db: StoreHarness) -> None:
    put(db, "mine")
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    start_worker(db, "b1", version(1, "nightly", "mine", owner="bank"))
    assert apply(db) == {
        "mine": "TAKEN it was made at run time", "nightly": "TAKEN the code of shop declares it",
    }  # fmt: skip
    assert (info(db).owner, info(db, "mine").owner) == ("shop", None)


def test_two_apps_that_declare_a_new_name_at_once_get_one_schedule(db: StoreHarness) -> None:
    start_worker(db, "a1", version(1, "nightly", owner="bank"))
    start_worker(db, "b1", version(1, "nightly", owner="shop"))
    changes = db.run(schedules.apply_declared(after_ms=STALE_MS))
    assert [(each.owner, each.verdict) for each in changes] == [("bank", "ADDED"), ("shop", "TAKEN")]


def test_another_app_takes_over_a_name_after_it_was_retired(db: StoreHarness) -> None:
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    end_worker(db, "a1", ago_ms=STALE_MS * 2)
    apply(db)
    start_worker(db, "b1", version(1, "nightly", owner="bank"))
    assert apply(db) == {"nightly": "RETURNED"}
    assert info(db).owner == "bank"


def test_an_ended_schedule_that_is_declared_again_unchanged_stays_ended(db: StoreHarness) -> None:
    start_worker(db, "a1", version(1, "nightly"))
    apply(db)
    seen = due_one(db, "nightly")
    decide(db, decision(seen, has_ended=True, next_at=None))
    start_worker(db, "b1", version(2))
    apply(db)
    end_worker(db, "b1")
    assert apply(db) == {"nightly": "RETURNED"}
    assert (info(db).state, info(db).next_at) == ("ENDED", None)


@pytest.mark.parametrize("schedules_of", [1, 300])
def test_a_worker_declares_any_number_of_schedules(db: StoreHarness, schedules_of: int) -> None:
    names = [f"s{number:03}" for number in range(schedules_of)]
    declared = Declared(owner="shop", version="v1", schedules=tuple(map(definition, names)))
    start_worker(db, "a1", declared)
    assert list(apply(db)) == names


def test_old_versions_are_deleted_when_no_worker_names_them(db: StoreHarness) -> None:
    for number in (1, 2, 3):
        start_worker(db, f"a{number}", version(number, "nightly"))
    db.connection.execute(
        db.plain("update {schema}.schedule_versions set live_since = now() - interval '2 hours' where version <> 'v3'")
    )  # fmt: skip
    end_worker(db, "a1")
    step = retention.prune_schedule_versions(hours=1, limit=100, after="")
    assert db.run(step).deleted == {"schedule_versions": 0}
    db.connection.execute(db.plain("delete from {schema}.workers where id in ('a1', 'a3')"))
    assert db.run(step).deleted == {"schedule_versions": 1}
    assert sorted(db.table("schedule_versions", "version")) == [("v2",), ("v3",)]
