"""How statements judge a tree whose thresholds differ from those of the observer: the longer threshold decides."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg.errors import CheckViolation

from everbeat.config import RecoveryConfig
from everbeat.domain.explain.reasons import SilenceRules
from everbeat.recovering.observer import Thresholds
from everbeat.store import diagnosis, inspection, messages, retention, workers
from tests.store.conftest import StoreHarness

OWN_MS = 2_000
RARE_MS = 20_000
LISTED: dict[str, Any] = {"stale_ms": OWN_MS, "ended_too": False, "limit": 9}
RULES = SilenceRules(
    claimed_ms=OWN_MS,
    running_ms=OWN_MS,
    beat_interval_ms=OWN_MS // 2,
    check_interval_ms=1_000,
    multiplier=1,
    resilient_flags=(),
)


def tree(db: StoreHarness, supervisor: str, worker: str) -> None:
    """Register a tree with a worker and a long interval between beats."""
    db.run(
        workers.register_supervisor(
            workers.SupervisorRow(
                id=supervisor, hostname="host", pid=1, boot_id=None, pid_namespace=None, process_started=None,
                lock_key=db.target.lock_key(supervisor), session_name=f"everbeat-{supervisor}",
                beat_ms=RARE_MS // 2, claimed_stale_ms=RARE_MS, running_stale_ms=RARE_MS,
            )
        )
    )  # fmt: skip
    db.run(
        workers.register_worker(
            workers.WorkerRow(
                id=worker, supervisor_id=supervisor, hostname="host", pid=2, process_started=None, queues=None,
                metadata='{"tasks": ["work"]}',
            )
        )
    )  # fmt: skip


def age(db: StoreHarness, seconds: int) -> None:
    """Move the last beat of every tree this many seconds back, and the start of every lease before that."""
    ago = f"statement_timestamp() - interval '{seconds} s'"
    db.connection.execute(db.plain(f"update {{schema}}.supervisors set last_beat_at = {ago}"))
    db.connection.execute(db.plain(f"update {{schema}}.workers set last_beat_at = {ago}, started_at = {ago}"))
    db.connection.execute(
        db.plain(
            f"update {{schema}}.tasks set claimed_at = {ago}, started_at = {ago} where claim_id is not null"
        )
    )


def seen(db: StoreHarness, held: UUID, waits: UUID) -> dict[str, Any]:
    """Return the judgement of each reading statement about the two trees, one of which holds a task."""
    staff = db.run(diagnosis.crew(stale_ms=OWN_MS))
    waiting = db.run(diagnosis.waiting(waits, stale_ms=OWN_MS))
    holding = db.run(diagnosis.holding(held, stale_ms=OWN_MS))
    assert waiting is not None
    assert holding is not None
    silent = db.run(diagnosis.silent_trees(silent_ms=OWN_MS, stale_ms=OWN_MS))
    unswept = db.run(diagnosis.unswept(RULES, margin_ms=0, stale_ms=OWN_MS))
    return {
        "crew": (staff.supervisors, staff.workers),
        "waiting": waiting.alive,
        "holding": (holding.observers, RULES.is_silent(holding), RULES.threshold_ms(holding)),
        "silent_trees": (silent.silent, silent.living),
        "unswept": unswept.silent,
        "unserved": len(db.run(diagnosis.unserved(stale_ms=OWN_MS))),
        "knowing": sum(
            len(each.registered.workers) for each in db.run(diagnosis.knowing(["work"], stale_ms=OWN_MS))
        ),
        "workers": {each.is_stale for each in db.run(inspection.workers(**LISTED))},
        "supervisors": {each.is_stale for each in db.run(inspection.supervisors(**LISTED))},
        "known_names": db.run(diagnosis.known_names(stale_ms=OWN_MS))[0],
        "movement": db.run(diagnosis.movement(uuid4(), stale_ms=OWN_MS)).alive,
        "failing_starts": len(db.run(diagnosis.failing_starts(stale_ms=OWN_MS))),
        "messages": db.run(messages.delivery_facts([held], stale_ms=OWN_MS))[held].stale,
        "sweep": len(db.run(retention.silent_supervisors(silent_ms=OWN_MS))),
    }


ALIVE = {
    "crew": (2, 2), "waiting": 2, "holding": (1, False, RARE_MS), "silent_trees": (0, 2), "unswept": 0, "unserved": 0, "knowing": 2,
    "workers": {False}, "supervisors": {False}, "known_names": ("work",), "movement": 2, "failing_starts": 1, "messages": False, "sweep": 0,
}  # fmt: skip
DEAD = {
    "crew": (0, 0), "waiting": 0, "holding": (0, True, RARE_MS), "silent_trees": (2, 0), "unswept": 1, "unserved": 1, "knowing": 0,
    "workers": {True}, "supervisors": {True}, "known_names": (), "movement": 0, "failing_starts": 0, "messages": True, "sweep": 2,
}  # fmt: skip


def test_every_reading_statement_judges_a_tree_by_the_longer_of_both_thresholds(
    db: StoreHarness,
) -> None:  # D1 J1
    db.run(workers.bury_workers(supervisor_id="s1", how="left"))
    db.run(workers.end_supervisor("s1", how="left"))
    tree(db, "holds", "holds-w")
    tree(db, "looks", "looks-w")
    db.run(workers.record_starts("looks", processes=1, problem="broken"))
    held, waits = db.running("holds-w").id, db.send()
    age(db, 6)
    assert seen(db, held, waits) == ALIVE
    beats = db.run(workers.watch_beats())
    assert [(each.claimed_stale_ms, each.running_stale_ms) for each in beats] == [(RARE_MS, RARE_MS)] * 2
    (lease,) = db.leases("holds")
    assert (lease.claimed_stale_ms, lease.running_stale_ms) == (RARE_MS, RARE_MS)
    assert {each.is_stale for each in db.run(inspection.workers(**LISTED, exact=True))} == {True}
    assert {each.is_stale for each in db.run(inspection.supervisors(**LISTED, exact=True))} == {True}
    assert len(db.run(retention.silent_supervisors(silent_ms=OWN_MS, exact=True))) == 2
    age(db, 60)
    assert seen(db, held, waits) == DEAD


def test_a_tree_without_stored_thresholds_is_judged_by_those_of_the_observer(db: StoreHarness) -> None:  # D1
    held = db.running("w1").id
    age(db, 6)
    holding = db.run(diagnosis.holding(held, stale_ms=OWN_MS))
    assert holding is not None
    assert (RULES.is_silent(holding), RULES.threshold_ms(holding)) == (True, OWN_MS)
    assert db.run(diagnosis.crew(stale_ms=OWN_MS)).supervisors == 0
    assert db.run(diagnosis.unswept(RULES, margin_ms=0, stale_ms=OWN_MS)).silent == 1
    (lease,) = db.leases("s1")
    assert Thresholds.automatic(RecoveryConfig()).of(lease) == 300_000


@pytest.mark.parametrize("column", ["beat_ms", "claimed_stale_ms", "running_stale_ms"])
@pytest.mark.parametrize("value", [-1, 0, 7_200_001, 2**31 - 1])
def test_a_threshold_that_no_configuration_allows_is_rejected(
    db: StoreHarness, column: str, value: int
) -> None:  # J17
    with pytest.raises(CheckViolation):
        db.connection.execute(db.plain(f"update {{schema}}.supervisors set {column} = {value}"))
