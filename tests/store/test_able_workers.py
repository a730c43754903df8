"""When a worker that could run a task was last seen, and which live supervisors are about to start one."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from everbeat.store import diagnosis, workers
from tests.store.conftest import StoreHarness

STALE_MS = 60_000


def last_able_at(db: StoreHarness, task_id: UUID) -> Any:
    waiting = db.run(diagnosis.waiting(task_id, stale_ms=STALE_MS))
    assert waiting is not None
    return waiting.last_able_at


def beat_on(db: StoreHarness) -> None:
    """Renew the supervisor's beat, as if it lived on without a worker."""
    db.connection.execute(
        db.plain("update {schema}.supervisors set last_beat_at = statement_timestamp()"), []
    )


def ended_at(db: StoreHarness, worker: str) -> Any:
    return dict(db.table("workers", "id, ended_at"))[worker]


def test_waiting_reports_the_end_of_the_last_able_worker_while_its_supervisor_still_beats(
    db: StoreHarness,
) -> None:  # J10
    task_id = db.send()
    db.run(workers.bury_workers(worker_ids=["w2"], how="test"))
    db.run(workers.bury_workers(worker_ids=["w1"], how="test"))
    beat_on(db)
    assert last_able_at(db, task_id) == ended_at(db, "w1")


def test_waiting_ignores_workers_of_other_queues_or_tasks(db: StoreHarness) -> None:  # J10
    task_id = db.send()
    db.run(workers.bury_workers(worker_ids=["w1", "w2"], how="test"))
    for name, queues, metadata in (("w3", ["mails"], None), ("w4", None, '{"tasks": ["welcome"]}')):
        row = workers.WorkerRow(
            id=name, supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=queues, metadata=metadata
        )  # fmt: skip
        db.run(workers.register_worker(row))
    beat_on(db)
    assert last_able_at(db, task_id) == ended_at(db, "w1")


def test_restarting_lists_only_live_supervisors_that_miss_workers_and_have_no_problem(
    db: StoreHarness,
) -> None:  # J10
    task_id = db.send()

    def restarting() -> list[str]:
        found = db.run(diagnosis.restarting(task_id, stale_ms=STALE_MS))
        return [each.supervisor_id for each in found]

    def change(setting: str) -> None:
        db.connection.execute(db.plain(f"update {{schema}}.supervisors set {setting}"), [])

    db.run(workers.record_starts("s1", processes=2, problem=None, age_ms=0))
    assert restarting() == [], "none is missing"
    db.run(workers.bury_workers(worker_ids=["w1"], how="test"))
    assert restarting() == ["s1"]
    for setting, healed in (
        ("start_problem = 'no module'", "start_problem = null"),
        ("draining = true", "draining = false"),
        ("processes = null", "processes = 2"),
        (
            "last_beat_at = last_beat_at - interval '1 hour'",
            "last_beat_at = last_beat_at + interval '1 hour'",
        ),
    ):
        change(setting)
        assert restarting() == [], setting
        change(healed)
    db.connection.execute(db.plain("update {schema}.workers set queues = array['mails']"), [])
    assert restarting() == [], "its workers serve another queue"
    assert db.run(diagnosis.restarting(stale_ms=STALE_MS))[0].supervisor_id == "s1"
