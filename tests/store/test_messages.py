"""The message outbox: written with the task while a relay is active, read by one relay at a time, and cleared as tasks progress."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.store import leases, messages, tasks, workers
from everbeat.store.messages import DueMessages, OutstandingMessages
from tests.store.conftest import StoreHarness


@pytest.fixture
def relayed(db: StoreHarness) -> StoreHarness:
    return in_use(db)


def in_use(db: StoreHarness) -> StoreHarness:
    """Enable messages and give the relay's turn to w1."""
    assert db.run(messages.use_messages(channel=db.target.channel)) is False
    assert hold(db, "w1")
    return db


def hold(db: StoreHarness, holder: str, *, taken_ms: int = 60_000) -> bool:
    return db.run(messages.hold_relay(holder, taken_ms=taken_ms, channel=db.target.channel))


def due(db: StoreHarness, *, portion: int = 250, window: int = 1_000) -> DueMessages:
    return db.run(messages.due_messages(portion=portion, window=window))


def publish(db: StoreHarness, *, first: int = 1) -> dict[int, int]:
    places = {row.id: first + n for n, row in enumerate(due(db).rows)}
    db.run(messages.mark_published(places))
    return places


def outbox(db: StoreHarness) -> list[tuple[UUID, int]]:
    query = db.plain("select task_id, fence from {schema}.message_outbox order by id")
    return [(row[0], row[1]) for row in db.connection.execute(query)]


def notified(db: StoreHarness, act: object) -> list[str]:
    with psycopg.connect(db.target.url, autocommit=True) as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(db.target.channel)))
        act()  # type: ignore[operator]
        listener.execute("select 1")
        return [each.payload for each in listener.notifies(timeout=0.2) if each.payload.startswith("o:")]


def test_the_relay_turn_of_a_dead_worker_is_free_after_the_clock_was_set_back(
    relayed: StoreHarness,
) -> None:  # I13
    """The holder is dead, and the end that it wrote is more than one turn away."""
    assert not hold(relayed, "w2")
    relayed.connection.execute(
        relayed.plain("update {schema}.relay set taken_until = taken_until + interval '1 hour'")
    )
    assert hold(relayed, "w2", taken_ms=60_000)
    assert not hold(relayed, "w1", taken_ms=60_000)


def test_the_outbox_is_written_only_while_a_relay_was_active_within_the_last_hour(db: StoreHarness) -> None:
    db.send()
    assert db.run(messages.relay_state()) is None
    db.run(messages.use_messages(channel=db.target.channel))
    db.send()
    assert outbox(db) == []  # no relay was active yet
    assert hold(db, "w1")
    task_id = db.send()
    assert outbox(db) == [(task_id, 0)]
    db.connection.execute(db.plain("update {schema}.relay set taken_until = now() - interval '59 minutes'"))
    db.send()
    assert len(outbox(db)) == 2
    db.connection.execute(db.plain("update {schema}.relay set taken_until = now() - interval '61 minutes'"))
    db.send()
    assert len(outbox(db)) == 2
    assert db.run(messages.use_messages(channel=db.target.channel)) is True


def test_a_task_and_its_outbox_row_are_committed_together_or_not_at_all(relayed: StoreHarness) -> None:  # N1
    new = tasks.NewTask(id=uuid4(), name="work", queue="mail", priority=0, args=b"{}")
    statement = tasks.insert_task(new, channel=relayed.target.channel)
    with relayed.connection.transaction(force_rollback=True):
        relayed.connection.execute(relayed.text(statement.name), statement.parameters)
    assert outbox(relayed) == []
    relayed.run(statement)
    relayed.run(statement)  # repeated after a lost reply
    assert outbox(relayed) == [(new.id, 0)]


def test_a_send_notifies_the_relay_unless_the_relay_polls(relayed: StoreHarness) -> None:
    sent: list[UUID] = []
    (word,) = notified(relayed, lambda: sent.append(relayed.send(queue="mail")))
    number, _, rest = word.removeprefix("o:").partition(":")
    assert rest == f"{sent[0]}:mail"
    assert due(relayed).rows[0].id == int(number)
    several = [tasks.NewTask(id=uuid4(), name="work", queue="mail", priority=0, args=b"{}") for _ in range(3)]
    assert notified(
        relayed, lambda: relayed.run(tasks.insert_tasks(several, channel=relayed.target.channel))
    ) == ["o:"]
    relayed.run(messages.relay_listens("w2", listens=False))  # this worker does not hold the turn
    assert len(notified(relayed, relayed.send)) == 1
    relayed.run(messages.relay_listens("w1", listens=False))
    assert notified(relayed, relayed.send) == []
    assert len(due(relayed).rows) == 6


def test_one_worker_holds_the_relay_turn_until_it_ends_or_is_released(relayed: StoreHarness) -> None:
    assert not hold(relayed, "w2")
    assert hold(relayed, "w1", taken_ms=0)
    assert hold(relayed, "w2")
    assert not hold(relayed, "w1")
    relayed.run(messages.let_relay_go("w1"))  # w1 does not hold the turn
    assert not hold(relayed, "w1")
    relayed.run(messages.let_relay_go("w2"))
    assert hold(relayed, "w1")


def test_a_new_holder_of_the_relay_turn_is_notified_again(relayed: StoreHarness) -> None:
    relayed.run(messages.relay_listens("w1", listens=False))
    hold(relayed, "w1", taken_ms=0)
    assert notified(relayed, relayed.send) == []
    hold(relayed, "w2")
    assert len(notified(relayed, relayed.send)) == 1


def test_due_messages_limits_each_queue_to_a_window_and_returns_its_first_rows(relayed: StoreHarness) -> None:
    first = [relayed.send(queue="mail") for _ in range(5)]
    other = relayed.send(queue="other")
    later = relayed.send(queue="other", delay_ms=60_000)
    found = due(relayed, window=3)
    assert [row.task_id for row in found.rows] == [*first[:3], other]
    assert 50_000 < (found.due_in_ms or 0) <= 60_000
    relayed.run(messages.mark_published({row.id: row.id for row in found.rows}))
    assert due(relayed, window=3).rows == ()
    assert [row.task_id for row in due(relayed, window=4).rows] == [first[3]]
    assert later not in {row.task_id for row in due(relayed).rows}


def test_messages_of_tasks_that_no_longer_wait_are_removed_published_or_not(relayed: StoreHarness) -> None:
    cancelled, running, waiting = (relayed.send() for _ in range(3))
    relayed.cancel(cancelled)
    found = due(relayed)
    assert (found.gone, [row.task_id for row in found.rows]) == (1, [running, waiting])
    publish(relayed)
    relayed.claim(limit=1)
    walked = relayed.run(messages.walk_published(messages.BEGINNING, older_ms=60_000, limit=100))
    assert (walked.seen, walked.gone, walked.doubtful, walked.next) == (2, 1, (), None)
    assert outbox(relayed) == [(waiting, 0)]


def test_walk_published_reaches_every_row_page_by_page(relayed: StoreHarness) -> None:
    sent = [relayed.send(queue=queue) for queue in ("a", "b") for _ in range(5)]
    publish(relayed)
    for task_id in (sent[4], sent[8], sent[9]):
        relayed.cancel(task_id)
    place, gone, doubtful = messages.BEGINNING, 0, set[UUID]()
    while True:
        walked = relayed.run(messages.walk_published(place, older_ms=0, limit=3))
        gone += walked.gone
        doubtful |= {each.task_id for each in walked.doubtful}
        if walked.next is None:
            break
        place = walked.next
    assert (gone, doubtful) == (3, set(sent) - {sent[4], sent[8], sent[9]})


def test_walk_later_removes_outbox_rows_of_ended_tasks(relayed: StoreHarness) -> None:
    sent = [relayed.send(delay_ms=72_000_000 + n) for n in range(7)]
    for task_id in sent[:3] + sent[5:]:
        relayed.cancel(task_id)
    place: messages.OutboxPlace | None = messages.BEGINNING
    while place is not None:
        place = relayed.run(messages.walk_later(place, limit=3))
    assert {task_id for task_id, _ in outbox(relayed)} == set(sent[3:5])


def test_senders_notify_workers_while_the_relay_fails(relayed: StoreHarness) -> None:
    relayed.run(messages.relay_failing("w2", failing=True))  # this worker does not hold the turn
    assert len(notified(relayed, relayed.send)) == 1
    relayed.run(messages.relay_failing("w1", failing=True))
    for worker in ("w1", "w2"):
        relayed.run(workers.listen(worker, listens=False))
    assert hint_topics(relayed, lambda: relayed.send(queue="mail")) == {"t:mail"}
    relayed.run(messages.relay_failing("w1", failing=False))
    assert all(word.startswith("o:") for word in hint_topics(relayed, lambda: relayed.send(queue="mail")))


def hint_topics(db: StoreHarness, act: object) -> set[str]:
    with psycopg.connect(db.target.url, autocommit=True) as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(db.target.channel)))
        act()  # type: ignore[operator]
        listener.execute("select 1")
        return {each.payload for each in listener.notifies(timeout=0.2)}


def test_a_sender_needs_no_rights_on_the_outbox(relayed: StoreHarness) -> None:
    role = f"sender_{relayed.target.schema}"
    names = {"role": sql.Identifier(role), "schema": sql.Identifier(relayed.target.schema)}
    for text in (
        "create role {role} login",
        "grant usage on schema {schema} to {role}",
        "grant usage on all sequences in schema {schema} to {role}",
        "grant select, insert, update on {schema}.tasks, {schema}.workers, {schema}.audit to {role}",
    ):
        relayed.connection.execute(sql.SQL(text).format(**names))  # type: ignore[arg-type]
    try:
        with psycopg.connect(relayed.target.url, user=role, autocommit=True) as poor:
            new = tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")
            statement = tasks.insert_task(new, channel=relayed.target.channel)
            poor.execute(relayed.text(statement.name), statement.parameters)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                poor.execute(relayed.plain("select * from {schema}.message_outbox"))
        assert outbox(relayed) == [(new.id, 0)]
    finally:
        relayed.connection.execute(sql.SQL("drop owned by {role}; drop role {role}").format(**names))


def test_enabling_messages_fails_at_once_while_a_long_transaction_writes_tasks(db: StoreHarness) -> None:
    """A long writer of tasks must not block all senders behind the trigger that waits for it."""
    with db.target.connect("everbeat test") as writer, writer.transaction():
        writer.execute(db.plain("update {schema}.tasks set queue = queue where false"))
        with psycopg.connect(db.target.url, autocommit=True) as starter:
            statement = messages.use_messages(channel=db.target.channel)
            with pytest.raises(psycopg.errors.LockNotAvailable):
                starter.execute(db.text(statement.name), statement.parameters)
        db.send()
    assert db.run(messages.relay_state()) is None
    assert db.run(messages.use_messages(channel=db.target.channel)) is False


def test_messages_of_a_paused_queue_wait_and_those_of_a_paused_task_are_removed(
    relayed: StoreHarness,
) -> None:
    queued, typed = relayed.send(queue="mail"), relayed.send(name="other")
    relayed.run(tasks.pause("queue", "mail", paused_by="me", reason=None, call=uuid4()))
    relayed.run(tasks.pause("task", "other", paused_by="me", reason=None, call=uuid4()))
    found = due(relayed)
    assert (found.rows, found.gone) == ((), 1)
    (queue,) = [each for each in relayed.run(tasks.pauses()) if each.kind == "queue"]
    relayed.run(tasks.resume(queue, channel=relayed.target.channel))
    assert [row.task_id for row in due(relayed).rows] == [queued]
    assert typed not in [task_id for task_id, _ in outbox(relayed)]


def test_a_recovered_task_gets_a_new_outbox_row_with_the_reason(relayed: StoreHarness) -> None:  # N3
    claimed = relayed.running()
    (lease,) = relayed.leases()
    relayed.recover(lease, "retry")
    (row,) = due(relayed).rows
    assert (row.task_id, row.fence, row.reason) == (claimed.id, 1, "Worker w1 stopped responding")
    assert relayed.recover(lease, "retry") == []  # another sweeper, for the same lease
    (row,) = due(relayed).rows
    (again,) = relayed.claim("w2")
    relayed.run(leases.release([(again.id, again.claim_id)], channel=relayed.target.channel))
    (row,) = due(relayed).rows
    assert (row.fence, row.reason) == (2, None)


def test_a_marked_task_has_no_message(
    relayed: StoreHarness,
) -> None:  # J2
    marked, other = relayed.running(), relayed.send()
    publish(relayed)
    relayed.connection.execute(
        relayed.plain(
            "update {schema}.tasks set state = 'PENDING', claim_id = null, attempt = 0, needs = '{{}}', needs_id = %s where id = %s"
        ),
        [uuid4(), marked.id],
    )
    assert (marked.id, 1) in outbox(relayed)
    assert not due(relayed).rows
    assert outbox(relayed) == [(other, 0)]


REASONS = {
    ("startup", "anything"): "Worker restarted",
    ("age", "its supervisor fell silent"): "Worker w1 stopped responding",
    ("session", "its database session ended"): "Worker w1 stopped responding",
    ("child_exit", "killed by SIGKILL"): "A process of worker w1 ended: killed by SIGKILL",
    ("progress", "no progress for 2s"): "The task stalled in worker w1: no progress for 2s",
    ("operator", "it was released by an operator"): "An operator released worker w1",
    ("sweep", "its worker is not registered"): "Worker w1 lost the task: its worker is not registered",
}


def test_the_reason_of_a_recovery_message_states_its_cause(relayed: StoreHarness) -> None:  # N3
    """A worker "stopped responding" only if it lived no longer and its supervisor did not see it end."""
    relayed.running()
    (lease,) = relayed.leases()
    relayed.recover(lease, "retry")
    for (noticed_by, cause), reason in REASONS.items():
        change = relayed.plain("update {schema}.recoveries set noticed_by = %s, cause = %s")
        relayed.connection.execute(change, (noticed_by, cause))
        assert [row.reason for row in due(relayed).rows] == [reason]


def test_messages_lying_counts_unfinished_messages_by_queue(relayed: StoreHarness) -> None:  # N11
    relayed.running()
    waiting = [relayed.send() for _ in range(3)]
    other = relayed.send(queue="other")
    publish(relayed)
    assert relayed.run(messages.messages_lying()) == {
        "default": OutstandingMessages(3, 1),
        "other": OutstandingMessages(1, 0),
    }
    relayed.cancel(waiting[0])
    relayed.cancel(other)
    relayed.run(messages.walk_published(messages.BEGINNING, older_ms=60_000, limit=10))
    places = [
        row[0] for row in relayed.connection.execute(relayed.plain("select id from {schema}.message_outbox"))
    ]
    assert relayed.run(messages.messages_lying()) == {"default": OutstandingMessages(2, 1)}
    change = relayed.plain("update {schema}.message_outbox set place = 0 where id = %s")
    relayed.connection.execute(change, (places[0],))  # a message that was not published
    assert relayed.run(messages.messages_lying()) == {"default": OutstandingMessages(1, 1)}


def test_queues_unserved_lists_queues_without_a_live_worker_connected_to_nats(
    relayed: StoreHarness,
) -> None:  # N11
    def unserved() -> list[str]:
        return relayed.run(messages.queues_unserved({"default", "mail"}))

    def report_messages(worker: str, notified: str | None) -> None:
        state = workers.WorkerState(
            worker_id=worker, running=0, claimed=0, slots=1, rss_bytes=0, cpu_percent=0, loop_lag_ms=0, messages=notified
        )  # fmt: skip
        relayed.run(workers.record_states([state]))

    set_queues = relayed.plain("update {schema}.workers set queues = %s where id = %s")
    relayed.connection.execute(set_queues, (["default"], "w2"))
    report_messages("w1", None)
    assert unserved() == ["mail"]  # w1 uses no NATS, and w2 has just started
    report_messages("w2", '{"up": false}')
    assert unserved() == ["default", "mail"]
    report_messages("w2", '{"up": true}')
    assert unserved() == ["mail"]
    report_messages("w1", '{"up": null}')  # it has not connected yet
    assert unserved() == []
    relayed.connection.execute(
        relayed.plain("update {schema}.workers set ended_at = now(), ended_how = 'left' where id = 'w1'")
    )
    assert unserved() == ["mail"]


def test_a_task_that_becomes_due_earlier_gets_an_outbox_row(relayed: StoreHarness) -> None:
    task_id = relayed.send(delay_ms=3_600_000)
    relayed.connection.execute(relayed.plain("update {schema}.tasks set enqueued_at = now()"))
    assert [row.task_id for row in due(relayed).rows] == [task_id]


def test_walk_published_doubts_only_waiting_tasks_that_are_not_paused(relayed: StoreHarness) -> None:  # N7
    kept, cancelled, paused = relayed.send(), relayed.send(), relayed.send(name="other")
    places = publish(relayed)
    relayed.cancel(cancelled)
    relayed.run(tasks.pause("task", "other", paused_by="me", reason=None, call=uuid4()))
    assert relayed.run(messages.walk_published(messages.BEGINNING, older_ms=60_000, limit=10)).doubtful == ()
    walked = relayed.run(messages.walk_published(messages.BEGINNING, older_ms=0, limit=10))
    assert [each.task_id for each in walked.doubtful] == [kept]
    assert relayed.run(messages.publish_again({each: place + 1 for each, place in places.items()})) == []
    assert set(relayed.run(messages.publish_again(places))) == {kept, paused}  # a paused task still waits
    (row,) = due(relayed).rows
    assert (row.task_id, row.times) == (kept, 1)


def test_a_holder_is_stale_exactly_from_its_threshold_on(relayed: StoreHarness) -> None:  # N9
    """The test moves beats back by 5 min + 1 s and by 4 min 59 s instead of moving the clock forward."""
    claimed = relayed.running()
    for silent_s, stale in ((299, False), (301, True)):
        relayed.connection.execute(
            relayed.plain(
                f"""with beats as (update {{schema}}.supervisors set last_beat_at = now() - interval '{silent_s} s'),
                    own as (update {{schema}}.workers set last_beat_at = null)
                    update {{schema}}.tasks set claimed_at = now() - interval '1 hour', started_at = now() - interval '1 hour'"""
            )
        )
        facts = relayed.run(messages.delivery_facts([claimed.id, uuid4()], stale_ms=300_000))
        assert set(facts) == {claimed.id}
        assert (facts[claimed.id].holder, facts[claimed.id].stale) == ("w1", stale)
    relayed.run(workers.bury_workers(supervisor_id="s1", how="test", cause="test"))
    assert relayed.run(messages.delivery_facts([claimed.id], stale_ms=3_600_000))[claimed.id].stale
    relayed.connection.execute(
        relayed.plain("update {schema}.tasks set claimed_at = now(), started_at = now()")
    )
    (lease,) = relayed.leases()
    relayed.recover(lease, "fail")


def test_look_at_reports_why_a_task_is_held_back(relayed: StoreHarness) -> None:
    first, second = relayed.send(serial="key:a"), relayed.send(serial="key:a")
    later, paused = relayed.send(delay_ms=60_000), relayed.send(name="other")
    relayed.run(tasks.pause("task", "other", paused_by="me", reason=None, call=uuid4()))
    facts = relayed.run(messages.delivery_facts([first, second, later, paused], stale_ms=1_000))
    assert [facts[one].kept_back for one in (first, second)] == [False, True]
    assert (facts[later].due, facts[paused].paused, facts[first].paused) == (False, True, False)
    relayed.claim(limit=1)
    assert relayed.run(messages.delivery_facts([second], stale_ms=1_000))[second].kept_back


def test_two_concurrent_claimers_win_each_task_once(relayed: StoreHarness) -> None:  # N9
    new = [
        tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}") for _ in range(1_000)
    ]
    relayed.run(tasks.insert_tasks(new, channel=relayed.target.channel))
    won: dict[str, list[UUID]] = {"w1": [], "w2": []}
    together = threading.Barrier(2)
    db = {worker: StoreHarness(relayed.target, relayed.connection) for worker in won}

    def claim_all(worker: str) -> None:
        db[worker].run(workers.watch_beats())  # connect first, so that both start together
        together.wait(20)
        while taken := db[worker].claim(worker, limit=7):
            won[worker] += [task.id for task in taken]

    with ThreadPoolExecutor() as threads:
        for _ in threads.map(claim_all, won):
            pass
    for each in db.values():
        each.database.close()
    both = won["w1"] + won["w2"]
    assert len(both) == len(set(both)) == 1_000
    assert all(won.values())


def test_queues_with_messages_are_listed_once(relayed: StoreHarness) -> None:
    for queue in ("b", "a", "c", "a"):
        relayed.send(queue=queue)
    assert relayed.run(messages.queues_told()) == ["a", "b", "c"]
    publish(relayed)
    relayed.send(queue="d")
    assert relayed.run(messages.queues_told()) == ["a", "b", "c", "d"]


def test_a_buried_worker_loses_the_relay_turn(relayed: StoreHarness) -> None:
    assert not hold(relayed, "w2")
    relayed.run(workers.bury_workers(supervisor_id="s1", how="test", cause="test"))
    assert hold(relayed, "w2")


def test_workers_are_notified_while_no_worker_holds_the_relay_turn(relayed: StoreHarness) -> None:
    for worker in ("w1", "w2"):
        relayed.run(workers.listen(worker, listens=False))
    claimed = relayed.running()
    hold(relayed, "w1", taken_ms=0)
    assert hint_topics(relayed, lambda: relayed.send(queue="mail")) == {"t:mail"}
    (lease,) = relayed.leases()
    assert "t:default" in hint_topics(relayed, lambda: relayed.recover(lease, "retry"))
    assert claimed.id in {row.task_id for row in due(relayed).rows}
    hold(relayed, "w1")
    assert not any(word.startswith("t:") for word in hint_topics(relayed, lambda: relayed.send(queue="mail")))
