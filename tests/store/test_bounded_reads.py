"""Lists, `explain` and the doctor read a bounded number of waiting tasks. The list of queues says where it stopped counting."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from everbeat.domain.inspection import QueueInfo
from everbeat.store import diagnosis, inspection, tasks
from tests.store.conftest import StoreHarness
from tests.store.plans import check_plan, check_plans

SEND = """
insert into {schema}.tasks (id, name, queue, priority, args, serial, enqueued_at, serial_at, needs, needs_id)
select gen_random_uuid(), 'work', %(queue)s, n %% %(priorities)s, '{{}}', %(serial)s::text || n %% %(lines)s, now() + %(after)s, now() + %(after)s,
    %(needs)s::text::json, case when %(needs)s::text is not null then {schema}.mark_of('work', %(needs)s::text::json) end
from generate_series(1, %(count)s) n
"""
NOW, LATER = timedelta(minutes=-5), timedelta(hours=1)


def fill(
    db: StoreHarness,
    count: int,
    queue: str,
    *,
    after: timedelta = NOW,
    serial: str | None = None,
    needs: str | None = None,
    priorities: int = 1,
    lines: int = 1,
) -> None:
    parameters = {
        "count": count, "queue": queue, "after": after, "serial": serial, "needs": needs, "priorities": priorities, "lines": lines,
    }  # fmt: skip
    db.connection.execute(db.plain(SEND), parameters)


def counts(db: StoreHarness, *, most: int = 100) -> dict[str, tuple[int, int, int, int]]:
    return {each.name: numbers(each) for each in db.run(inspection.queues(most=most))}


def numbers(each: QueueInfo) -> tuple[int, int, int, int]:
    return each.pending, each.scheduled, each.claimed, each.running


def test_plain_marked_and_serial_tasks_are_counted_together(db: StoreHarness) -> None:  # R4
    for queue, after in (("mail", NOW), ("mail", LATER), ("films", LATER)):
        fill(db, 5, queue, after=after, priorities=3)
        fill(db, 3, queue, after=after, needs='{"arguments": ["a"]}')
        fill(db, 4, queue, after=after, serial="key:", lines=2)
    assert counts(db) == {"films": (0, 12, 0, 0), "mail": (12, 12, 0, 0)}
    assert [(each.at_least, each.oldest_due_s is None) for each in db.run(inspection.queues())] == [
        ((), True),
        ((), False),
    ]


def test_a_queue_with_tasks_in_flight_only_is_listed(db: StoreHarness) -> None:  # R4
    for _ in range(3):
        db.send(queue="mail")
    first, *_ = db.claim(limit=3)
    db.start(first)
    assert counts(db) == {"mail": (0, 0, 2, 1)}


def test_counts_stop_at_the_bound_in_each_queue_and_state(db: StoreHarness) -> None:  # R4
    fill(db, 3, "exact")
    fill(db, 9, "many", priorities=3)
    fill(db, 4, "later", after=LATER, needs='{"arguments": ["a"]}')
    found = {each.name: each for each in db.run(inspection.queues(most=3))}
    assert {name: (numbers(each), each.at_least) for name, each in found.items()} == {
        "exact": ((3, 0, 0, 0), ()),
        "many": ((3, 0, 0, 0), ("pending",)),
        "later": ((0, 3, 0, 0), ("scheduled",)),
    }


def test_more_lines_than_are_read_make_the_counts_of_all_queues_uncertain(db: StoreHarness) -> None:  # R4
    fill(db, 1, "other")
    fill(db, 50, "mail", serial="key:a")
    fill(db, 1, "films", serial="key:b")
    (films, mail, other) = db.run(inspection.queues(most=2))
    assert numbers(films) == (1, 0, 0, 0)
    assert (numbers(mail), numbers(other)) == ((2, 0, 0, 0), (1, 0, 0, 0))
    assert (films.at_least, other.at_least) == ((), ())  # the first line is cut, and the others are complete
    fill(db, 3, "more", serial="key:c", lines=3)
    assert {each.at_least for each in db.run(inspection.queues(most=2))} == {("pending", "scheduled")}


def test_more_tasks_in_flight_than_are_read_make_their_counts_uncertain(db: StoreHarness) -> None:  # R4
    for _ in range(11):
        db.send(queue="mail")
    assert len(db.claim(limit=11)) == 11
    (mail,) = db.run(inspection.queues(most=1))
    assert numbers(mail) == (0, 0, 1, 0)
    assert mail.at_least == ("claimed", "running")


def test_an_unusable_due_time_does_not_hide_the_wait_of_the_others(db: StoreHarness) -> None:  # R4
    fill(db, 2, "mail")
    db.connection.execute(
        db.plain(
            "insert into {schema}.tasks (id, name, queue, args, enqueued_at) values (%s, 'work', 'mail', '{{}}', '-infinity')"
        ),
        [uuid4()],
    )
    (mail,) = db.run(inspection.queues())
    assert mail.oldest_due_s is not None
    assert 300 <= mail.oldest_due_s < 900
    db.connection.execute(db.plain("truncate {schema}.tasks cascade"))  # the row breaks the invariants


def test_the_lines_of_many_keys_are_found_one_by_one_without_statistics(db: StoreHarness) -> None:  # R4
    fill(db, 20_000, "mail", serial="key:", lines=10_000)
    check_plan(db, inspection.queues(), pages=200_000)


def test_explain_does_not_read_scheduled_tasks_of_higher_priority(db: StoreHarness) -> None:  # R4
    fill(db, 20_000, "mail", after=LATER)
    db.send(queue="mail", priority=1)
    second = db.send(queue="mail", priority=1)
    db.connection.execute(db.plain("vacuum analyze {schema}.tasks"))
    found = db.run(diagnosis.waiting(second, stale_ms=60_000))
    assert found is not None
    assert found.ahead == 1
    check_plan(db, diagnosis.waiting(second, stale_ms=60_000), pages=100)


def test_explain_reads_a_bounded_part_of_a_serial_line(db: StoreHarness) -> None:  # R4
    fill(db, 20_000, "mail", serial="key:")
    mine = db.send(serial="key:0")
    db.connection.execute(db.plain("vacuum analyze {schema}.tasks"))
    found = db.run(diagnosis.waiting(mine, stale_ms=60_000))
    assert found is not None
    assert found.before == 1_001
    check_plan(db, diagnosis.waiting(mine, stale_ms=60_000), pages=1_300)


def test_the_doctor_finds_no_work_without_reading_all_scheduled_tasks(db: StoreHarness) -> None:  # R4
    fill(db, 20_000, "mail", after=LATER, priorities=3)
    fill(db, 1, "mail", after=LATER, serial="key:")
    fill(db, 5_000, "mail", after=LATER, needs='{"arguments": ["a"]}')
    db.connection.execute(db.plain("vacuum analyze {schema}.tasks"))
    assert not db.run(diagnosis.crew(stale_ms=60_000)).has_work
    check_plan(db, diagnosis.crew(stale_ms=60_000), pages=60)
    for more in ({}, {"serial": "key:"}, {"needs": '{"arguments": ["a"]}'}):
        with db.connection.transaction(force_rollback=True):
            fill(db, 1, "films", **more)
            crew = diagnosis.crew(stale_ms=60_000)
            (row,) = db.connection.execute(db.text(crew.name), crew.parameters).fetchall()
            assert crew.read([row]).has_work, more


def test_names_to_pause_are_found_in_the_front_of_each_lane(db: StoreHarness) -> None:  # R4
    fill(db, 20_000, "mail", priorities=3)
    db.send("later", queue="mail")
    db.send("first", queue="films")
    db.send("serial", queue="lines", serial="key:a")
    db.connection.execute(db.plain("vacuum analyze {schema}.tasks"))
    assert set(db.run(tasks.known_names("task"))) == {"work", "first", "serial"}
    assert set(db.run(tasks.known_names("queue"))) == {"mail", "films", "lines"}
    check_plan(db, tasks.known_names("task"), pages=500)


def test_names_to_pause_are_found_in_the_latest_rates_without_reading_the_old_ones(db: StoreHarness) -> None:
    db.connection.execute(
        db.plain(
            "insert into {schema}.rates (seconds, at, queue, name, supervisor)"
            " select 60, date_trunc('minute', now()) - (minutes.n + case when names.n = 0 then 0 else 12 end) * interval '1 minute',"
            " 'queue-' || names.n, 'task', 's1' from generate_series(0, 999) minutes (n), generate_series(0, 99) names (n)"
        )
    )
    db.connection.execute(db.plain("vacuum analyze {schema}.rates"))
    assert db.run(tasks.known_names("queue")) == ["queue-0"]
    check_plans(db, tasks.known_names("queue"), pages=60, tables=["rates"], by="client")


def test_the_doctor_finds_due_tasks_behind_many_ended_ones_in_the_table(db: StoreHarness) -> None:  # R4
    fill(db, 30_000, "mail")
    db.connection.execute(db.plain("update {schema}.tasks set state = 'EXPIRED', expired_at = now()"))
    fill(db, 10_000, "mail")
    db.connection.execute(db.plain("vacuum analyze {schema}.tasks"))
    assert db.run(diagnosis.crew(stale_ms=60_000)).has_work
    check_plan(db, diagnosis.crew(stale_ms=60_000), pages=60)
