"""Two supervisors decide the same ticks: each tick is decided once. Mutants of the guards must fail these tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest
from msgspec.structs import replace

from everbeat.domain.schedule.model import Definition, Rule, ScheduledCall, TickDecision, Timing
from everbeat.domain.schedule.ticks import decide
from everbeat.store import schedules
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.store.test_mutants import Mutant, notices, scenario

__all__ = ["scenario"]

NAME = "contested"
INSTALLATION = "the installation"


def make_due(db: StoreHarness) -> None:
    """Store a schedule that ticks every second, of which ten ticks are due."""
    call = ScheduledCall(task="work", args="{}", queue="default", priority=0)
    rule = Rule(timing=Timing(every_ms=1_000), missed="all")
    db.run(schedules.put_schedule(Definition(name=NAME, call=call, rule=rule)))
    db.connection.execute(
        db.plain(
            "update {schema}.schedules set decided_to = now() - interval '10 s', created_at = now() - interval '10 s'"
        )
    )


def decision(db: StoreHarness, *, seconds_ago: int = 0) -> TickDecision:
    """Return what a supervisor decides that read the schedule this many seconds ago."""
    (due,) = db.run(schedules.list_due(limit=10)).due
    return decide(replace(due, now=due.now - timedelta(seconds=seconds_ago)), installation=INSTALLATION)


def store(db: StoreHarness, decided: TickDecision, by: str) -> Statement[schedules.DecidedTicks]:
    return schedules.decide_ticks([decided], channel=db.target.channel, decided_by=by)


def sent(db: StoreHarness) -> list[tuple[object, ...]]:
    return db.connection.execute(
        db.plain("select tick from {schema}.tasks where schedule = %s order by tick"), [NAME]
    ).fetchall()


def decided_to(db: StoreHarness) -> object:
    return db.connection.execute(db.plain("select decided_to from {schema}.schedules")).fetchone()


def test_a_decision_that_was_overtaken_by_a_later_one_changes_nothing(db: StoreHarness) -> None:
    make_due(db)
    early, late = decision(db, seconds_ago=5), decision(db)
    assert db.run(store(db, late, "first")).changed == (NAME,)
    after = decided_to(db), sent(db)
    assert db.run(store(db, early, "second")).changed == ()
    assert (decided_to(db), sent(db)) == after
    assert len(sent(db)) >= 9


def test_a_decision_that_waits_for_the_decision_of_another_supervisor_changes_nothing(
    db: StoreHarness,
) -> None:
    make_due(db)
    both = decision(db)
    first = store(db, both, "first")
    with psycopg.connect(db.target.url) as connection, ThreadPoolExecutor(1) as pool:
        connection.execute(db.text(first.name), first.parameters)
        waiting = pool.submit(db.run, store(db, both, "second"))
        until_one_waits_for(db, connection.info.backend_pid)
        connection.commit()
        assert waiting.result(timeout=60).changed == ()
    assert len(sent(db)) == len(both.ticks)
    deciders = db.connection.execute(db.plain("select distinct decided_by from {schema}.ticks")).fetchall()
    assert deciders == [("first",)]


def until_one_waits_for(db: StoreHarness, pid: int) -> None:
    for _ in range(1_000):
        waiting = db.connection.execute(
            "select pid from pg_stat_activity where %s = any(pg_blocking_pids(pid))", [pid]
        ).fetchall()
        if waiting:
            return
        db.connection.execute("select pg_sleep(0.02)")
    pytest.fail("no statement waited for the row of the schedule")


def test_a_tick_is_not_sent_again_after_its_task_was_deleted_and_its_schedule_set_back(
    db: StoreHarness,
) -> None:
    """A restored row, or an operator's update, must not run work a second time."""
    make_due(db)
    before = decided_to(db)
    db.run(store(db, decision(db), "first"))
    db.connection.execute(db.plain("delete from {schema}.tasks"))
    again = before
    db.connection.execute(
        db.plain("update {schema}.schedules set decided_to = %s, next_at = now()"),
        again,  # type: ignore[arg-type]
    )
    late = decision(db)
    assert db.run(store(db, late, "second")).changed == (NAME,)
    known = {
        row[0]
        for row in db.connection.execute(db.plain("select at from {schema}.ticks where decided_by = 'first'"))
    }
    assert not known & {tick for (tick,) in sent(db)}


MUTANTS = [
    Mutant(
        "a decision without compare-and-swap, overtaken", "schedule/decide_ticks", "s.decided_to = d.seen_decided_to and", "true and",
        test_a_decision_that_was_overtaken_by_a_later_one_changes_nothing,
    ),
    Mutant(
        "a decision without compare-and-swap, at once", "schedule/decide_ticks", "s.decided_to = d.seen_decided_to and", "true and",
        test_a_decision_that_waits_for_the_decision_of_another_supervisor_changes_nothing,
    ),
    Mutant(
        "tasks that are inserted without the row of their tick", "schedule/decide_ticks",
        "where (select o.at from {schema}.ticks o where o.schedule = h.name and o.at = k.at) is null", "",
        test_a_tick_is_not_sent_again_after_its_task_was_deleted_and_its_schedule_set_back,
    ),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_the_guards_of_ticks_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:
    assert not notices(mutant, scenario(None)), "the unchanged protocol passes its own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
