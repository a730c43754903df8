"""One sample of the pulse: what it finds, that it writes nothing, and that it stays cheap with many rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from psycopg import sql

from everbeat.client.explaining import silence_rules
from everbeat.config import RecoveryConfig
from everbeat.domain.pulse.sample import PulseSample
from everbeat.store import pulse, workers
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.store.plans import check_plan, filled, nodes, plan

RULES = silence_rules(RecoveryConfig())
WINDOW_MS = 90_000


def a_sample(**more: Any) -> Statement[PulseSample]:
    given: dict[str, Any] = {
        "margin_ms": 15_000, "window_ms": WINDOW_MS, "known": None, "after_recovery": None,
    }  # fmt: skip
    return pulse.sample(RULES, **(given | more))


def beat(db: StoreHarness, supervisor: str = "s1") -> None:
    db.run(workers.beat(supervisor, [], draining=False))


def test_a_sample_shows_trees_with_their_workers_and_leases(db: StoreHarness) -> None:
    db.running("w1")
    db.send()
    db.claim("w2", limit=1)
    found = db.run(a_sample())
    (tree,) = found.trees
    assert (tree.id, tree.hostname, tree.ended_at, tree.is_dead) == ("s1", "host", None, False)
    held = {worker.id: (worker.claimed, worker.running) for worker in found.workers}
    assert held == {"w1": (0, 1), "w2": (1, 0)}
    assert (found.overdue, found.recoveries, found.last_recovery) == (0, (), 0)


def test_a_sample_shows_only_recoveries_after_the_last_one(db: StoreHarness) -> None:
    db.running("w1")
    before = db.run(a_sample()).last_recovery
    (lease,) = db.leases()
    db.recover(lease, "retry")
    found = db.run(a_sample(after_recovery=before))
    (recovery,) = found.recoveries
    assert (recovery.task_id, recovery.action, recovery.noticed_by) == (lease.id, "retry", "age")
    assert found.last_recovery == recovery.id
    assert db.run(a_sample(after_recovery=recovery.id)).recoveries == ()


def test_a_tree_that_ended_is_shown_for_the_window_and_only_if_it_is_known(db: StoreHarness) -> None:
    db.run(workers.end_supervisor("s1", how="session"))
    (tree,) = db.run(a_sample()).trees
    assert tree.is_dead
    assert [each.id for each in db.run(a_sample(known=["s1"])).trees] == ["s1"]
    assert db.run(a_sample(known=["other"])).trees == ()
    assert db.run(a_sample(window_ms=0)).trees == ()


def test_a_lease_of_an_ended_worker_becomes_overdue(db: StoreHarness) -> None:
    db.running("w1")
    db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="SIGKILL"))
    assert db.run(a_sample()).overdue == 0
    db.connection.execute(db.plain("update {schema}.workers set ended_at = now() - interval '1 minute'"))
    found = db.run(a_sample())
    assert found.overdue == 1
    assert found.overdue_ms is not None
    assert 40_000 < found.overdue_ms < 60_000
    (lease,) = db.leases()
    db.recover(lease, "retry")
    assert db.run(a_sample()).overdue == 0


def test_times_and_figures_that_are_not_plausible_do_not_break_a_sample(db: StoreHarness) -> None:
    db.connection.execute(
        db.plain("update {schema}.supervisors set started_at = 'infinity', last_beat_at = '-infinity'")
    )
    db.connection.execute(
        db.plain(
            "insert into {schema}.worker_states (worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)"
            " values ('w1', 0, 0, 4, 1, 'NaN', 'infinity')"
        )
    )
    found = db.run(a_sample())
    (tree,) = found.trees
    assert tree.started_at.year == tree.last_beat_at.year == 2
    (worker,) = [each for each in found.workers if each.id == "w1"]
    assert (worker.slots, worker.cpu_percent, worker.loop_lag_ms) == (4, None, None)


def test_a_sample_writes_nothing(db: StoreHarness) -> None:
    beat(db)
    with db.connection.transaction(force_rollback=True):
        db.connection.execute("set transaction read only")
        db.connection.execute(db.text("pulse/sample"), a_sample().parameters)
        db.connection.execute(db.text("pulse/list_beats"), pulse.stored_beats(window_ms=WINDOW_MS).parameters)
        row = db.connection.execute("select pg_current_xact_id_if_assigned() is null").fetchone()
    assert row == (True,)


def test_stored_heartbeats_are_listed_oldest_first(db: StoreHarness) -> None:
    for _ in range(3):
        beat(db)
    found = db.run(pulse.stored_beats(window_ms=WINDOW_MS))
    assert [(each.supervisor_id, each.seq) for each in found] == [("s1", 1), ("s1", 2), ("s1", 3)]
    assert timedelta() <= found[2].sent_at - found[0].sent_at < timedelta(minutes=1)


@pytest.fixture(scope="module")
def grown(database_url: str) -> Iterator[StoreHarness]:
    """A schema with 300,000 tasks, 100,000 recoveries, 20,000 snapshots, 20,000 stored heartbeats, 100,000 audited actions and 500 ended
    supervisors."""
    with filled(database_url, rows=100_000, in_flight=500) as db:
        for text in GROWN:
            db.connection.execute(db.plain(text))
        for table in ("recoveries", "audit_log", "worker_states", "beats", "supervisors", "workers"):
            db.connection.execute(
                sql.SQL("vacuum analyze {}.{}").format(
                    sql.Identifier(db.target.schema), sql.Identifier(table)
                )
            )
        yield db


GROWN = (
    """insert into {schema}.recoveries (task_id, name, queue, fence, claim_id, attempt, worker_id, was, cause, noticed_by, action, noticed_at)
       select gen_random_uuid(), 'work', 'default', 1, gen_random_uuid(), 1, 'w1', 'RUNNING', 'SIGKILL', 'child_exit', 'retry',
           now() - n * interval '10 seconds' from generate_series(1, 100000) n""",
    """insert into {schema}.worker_states (worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms, at)
       select 'w' || (n % 3 + 1), 1, 1, 4, 1, 1, 1, now() - n * interval '10 seconds' from generate_series(1, 20000) n""",
    """insert into {schema}.beats (supervisor_id, seq, sent_at, held)
       select 's1', n, now() - n * interval '3 seconds', 1 from generate_series(1, 20000) n""",
    """insert into {schema}.audit_log (actor, origin, action, target, outcome, at)
       select 'ann', 'web', 'retry', gen_random_uuid()::text, 'done', now() - n * interval '1 minute' from generate_series(1, 100000) n""",
    """insert into {schema}.supervisors (id, hostname, pid, lock_key, session_name, ended_at, ended_how)
       select 'gone-' || n, 'host', n, n, 'gone', now() - n * interval '1 hour', 'left' from generate_series(1, 500) n""",
)


def test_a_sample_reads_few_pages_with_many_rows(grown: StoreHarness) -> None:
    last = grown.run(a_sample()).last_recovery
    check_plan(grown, a_sample(known=["s1", "s2"], after_recovery=last - 5), pages=3_500)


def test_a_sample_scans_no_table_but_supervisors_and_workers(grown: StoreHarness) -> None:
    last = grown.run(a_sample()).last_recovery
    found = plan(grown, a_sample(known=["s1", "s2"], after_recovery=last - 5))
    scanned = {each["Relation Name"] for each in nodes(found["Plan"]) if each["Node Type"] == "Seq Scan"}
    assert scanned <= {"supervisors", "workers", "pg_database"}


def test_the_latest_actions_are_found_by_the_primary_key(grown: StoreHarness) -> None:
    for after in (None, 99_990):
        check_plan(grown, pulse.latest_actions(after), pages=12)


def test_the_heartbeats_of_the_window_are_found_by_their_time(grown: StoreHarness) -> None:
    statement = pulse.stored_beats(window_ms=WINDOW_MS)
    check_plan(grown, statement, pages=40)
    scans = {each.get("Index Name") for each in nodes(plan(grown, statement)["Plan"])}
    assert "beats_by_time" in scans
