"""What `explain` and `doctor` read of marked tasks, and of workers that cannot run them."""

from __future__ import annotations

from uuid import uuid4

from everbeat.domain.parameters import Parameters
from everbeat.store import diagnosis, explanation, workers
from tests.store.conftest import Hands

STALE_MS = 60_000


def tell(hands: Hands, worker: str, metadata: str) -> None:
    hands.connection.execute(
        hands.plain("update {schema}.workers set metadata = %s where id = %s"), [metadata, worker]
    )


def test_workers_that_cannot_run_a_task_count_neither_as_fitting_nor_for_slots_lag_and_quiet(  # J2
    hands: Hands,
) -> None:
    task = hands.send()
    tell(hands, "w1", '{"tasks": ["work"], "parameters": {"work": {"takes": ["a"], "requires": []}}}')
    hands.supervisor("s2", "w3")
    for worker, slots, lag_ms in (("w1", 1, 0.0), ("w2", 10, 5_000.0), ("w3", 100, 0.0)):
        state = workers.WorkerState(
            worker_id=worker, running=0, claimed=0, slots=slots, rss_bytes=1, cpu_percent=0, loop_lag_ms=lag_ms
        )  # fmt: skip
        hands.run(workers.record_states([state]))
    hands.connection.execute(
        hands.plain("update {schema}.supervisors set quiet_since = now() where id = 's2'")
    )
    all_of_them = hands.run(explanation.waiting(task, stale_ms=STALE_MS))
    assert all_of_them is not None
    assert (all_of_them.knowing, all_of_them.fitting, all_of_them.slots) == (3, 3, 11)
    assert (all_of_them.lagging, all_of_them.quiet) == (1, 1)
    assert {(each.parameters, each.workers) for each in all_of_them.registered} == {
        (Parameters(("a",)), ("w1",)),
        (None, ("w2", "w3")),
    }
    some = hands.run(explanation.waiting(task, stale_ms=STALE_MS, unfit=["w2", "w3"]))
    assert some is not None
    assert (some.knowing, some.fitting, some.slots, some.lagging) == (3, 1, 1, 0)
    assert (some.quiet, some.quiet_since) == (0, None)


def test_marked_tasks_that_wait_are_counted_by_what_they_need_and_their_queue(hands: Hands) -> None:  # J2
    first, second = uuid4(), uuid4()

    def marked(group: object, needs: str, **options: object) -> None:
        task = hands.send(**options)
        hands.connection.execute(
            hands.plain("update {schema}.tasks set needs = %s, needs_id = %s where id = %s"),
            [needs, group, task],
        )

    marked(first, '{"arguments": ["a"]}')
    marked(first, '{"arguments": ["a"]}', serial="key:a")
    marked(first, '{"arguments": ["a"]}', queue="mail")
    marked(second, '{"arguments": ["b"]}')
    hands.send()
    taken = hands.running()
    hands.connection.execute(
        hands.plain("update {schema}.tasks set needs = '{{}}', needs_id = %s where id = %s"),
        [uuid4(), taken.id],
    )
    found = hands.run(diagnosis.marked())
    assert found[0].waiting == 2, "the most first"
    assert sorted((each.name, each.queue, each.needs.arguments, each.waiting) for each in found) == [
        ("work", "default", ("a",), 2),
        ("work", "default", ("b",), 1),
        ("work", "mail", ("a",), 1),
    ]
    hands.settle(taken, result=b"1")


def test_what_live_workers_registered_is_grouped_by_queues_and_parameters(hands: Hands) -> None:  # J2
    tell(hands, "w1", '{"tasks": ["work"], "parameters": {"work": {"takes": ["a"], "requires": ["a"]}}}')
    tell(hands, "w2", '{"tasks": ["other"]}')
    hands.supervisor("s2", "w3", "w4")
    row = workers.WorkerRow(
        id="w5", supervisor_id="s2", hostname="host", pid=2, process_started=None, queues=["mail"]
    )
    hands.run(workers.register_worker(row))
    found = hands.run(diagnosis.knowing(["work", "none"], stale_ms=STALE_MS))
    assert {
        (each.name, each.queues, each.registered.parameters, each.registered.workers) for each in found
    } == {
        ("work", None, Parameters(("a",), ("a",)), ("w1",)),
        ("work", None, None, ("w3", "w4")),
        ("work", ("mail",), None, ("w5",)),
        ("none", None, None, ("w3", "w4")),
        ("none", ("mail",), None, ("w5",)),
    }
    hands.connection.execute(
        hands.plain(
            "update {schema}.supervisors set last_beat_at = now() - interval '1 hour' where id = 's2'"
        )
    )
    assert [
        each.registered.workers for each in hands.run(diagnosis.knowing(["work"], stale_ms=STALE_MS))
    ] == [("w1",)]
