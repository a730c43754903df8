"""The facts that `explain` and `doctor` read about marked tasks, and about workers that cannot run them."""

from __future__ import annotations

from uuid import uuid4

from everbeat.domain.task.needs import Parameters
from everbeat.store import diagnosis, workers
from tests.store.conftest import StoreHarness

STALE_MS = 60_000


def set_metadata(db: StoreHarness, worker: str, metadata: str) -> None:
    db.connection.execute(
        db.plain("update {schema}.workers set metadata = %s where id = %s"), [metadata, worker]
    )


def test_waiting_excludes_workers_that_cannot_run_the_task_from_slots_lag_and_quiet(  # J2
    db: StoreHarness,
) -> None:
    task = db.send()
    set_metadata(db, "w1", '{"tasks": ["work"], "parameters": {"work": {"takes": ["a"], "requires": []}}}')
    db.supervisor("s2", "w3")
    for worker, slots, lag_ms in (("w1", 1, 0.0), ("w2", 10, 5_000.0), ("w3", 100, 0.0)):
        state = workers.WorkerState(
            worker_id=worker, running=0, claimed=0, slots=slots, rss_bytes=1, cpu_percent=0, loop_lag_ms=lag_ms
        )  # fmt: skip
        db.run(workers.record_states([state]))
    db.connection.execute(db.plain("update {schema}.supervisors set quiet_since = now() where id = 's2'"))
    all_of_them = db.run(diagnosis.waiting(task, stale_ms=STALE_MS))
    assert all_of_them is not None
    assert (all_of_them.knowing, all_of_them.fitting, all_of_them.slots) == (3, 3, 11)
    assert (all_of_them.lagging, all_of_them.quiet) == (1, 1)
    assert {(each.parameters, each.workers) for each in all_of_them.registered} == {
        (Parameters(("a",)), ("w1",)),
        (None, ("w2", "w3")),
    }
    some = db.run(diagnosis.waiting(task, stale_ms=STALE_MS, unfit=["w2", "w3"]))
    assert some is not None
    assert (some.knowing, some.fitting, some.slots, some.lagging) == (3, 1, 1, 0)
    assert (some.quiet, some.quiet_since) == (0, None)


def test_marked_counts_waiting_marked_tasks_by_their_needs_and_queue(db: StoreHarness) -> None:  # J2
    first, second = uuid4(), uuid4()

    def marked(group: object, needs: str, **options: object) -> None:
        task = db.send(**options)
        db.connection.execute(
            db.plain("update {schema}.tasks set needs = %s, needs_id = %s where id = %s"),
            [needs, group, task],
        )

    marked(first, '{"arguments": ["a"]}')
    marked(first, '{"arguments": ["a"]}', serial="key:a")
    marked(first, '{"arguments": ["a"]}', queue="mail")
    marked(second, '{"arguments": ["b"]}')
    db.send()
    taken = db.running()
    db.connection.execute(
        db.plain("update {schema}.tasks set needs = '{{}}', needs_id = %s where id = %s"),
        [uuid4(), taken.id],
    )
    found = db.run(diagnosis.marked())
    assert found[0].waiting == 2, "the largest group comes first"
    assert sorted((each.name, each.queue, each.needs.arguments, each.waiting) for each in found) == [
        ("work", "default", ("a",), 2),
        ("work", "default", ("b",), 1),
        ("work", "mail", ("a",), 1),
    ]
    db.settle(taken, result=b"1")


def test_knowing_groups_live_workers_by_queues_and_parameters(db: StoreHarness) -> None:  # J2
    set_metadata(db, "w1", '{"tasks": ["work"], "parameters": {"work": {"takes": ["a"], "requires": ["a"]}}}')
    set_metadata(db, "w2", '{"tasks": ["other"]}')
    db.supervisor("s2", "w3", "w4")
    row = workers.WorkerRow(
        id="w5", supervisor_id="s2", hostname="host", pid=2, process_started=None, queues=["mail"]
    )
    db.run(workers.register_worker(row))
    found = db.run(diagnosis.knowing(["work", "none"], stale_ms=STALE_MS))
    assert {
        (each.name, each.queues, each.registered.parameters, each.registered.workers) for each in found
    } == {
        ("work", None, Parameters(("a",), ("a",)), ("w1",)),
        ("work", None, None, ("w3", "w4")),
        ("work", ("mail",), None, ("w5",)),
        ("none", None, None, ("w3", "w4")),
        ("none", ("mail",), None, ("w5",)),
    }
    db.connection.execute(
        db.plain("update {schema}.supervisors set last_beat_at = now() - interval '1 hour' where id = 's2'")
    )
    assert [each.registered.workers for each in db.run(diagnosis.knowing(["work"], stale_ms=STALE_MS))] == [
        ("w1",)
    ]
