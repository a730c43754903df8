"""The message outbox: written with the task and only while somebody relays, read by one relay at a time, emptied by what the tasks do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.store import leases, messages, pauses, tasks, workers
from everbeat.store.messages import Lying, Portion
from tests.store.conftest import Hands


@pytest.fixture
def relayed(hands: Hands) -> Hands:
    return in_use(hands)


def in_use(hands: Hands) -> Hands:
    """Messages are in use, and w1 has the turn."""
    assert hands.run(messages.use_messages(channel=hands.target.channel)) is False
    assert hold(hands, "w1")
    return hands


def hold(hands: Hands, holder: str, *, taken_ms: int = 60_000) -> bool:
    return hands.run(messages.hold_relay(holder, taken_ms=taken_ms, channel=hands.target.channel))


def due(hands: Hands, *, portion: int = 250, window: int = 1_000) -> Portion:
    return hands.run(messages.due_messages(portion=portion, window=window))


def publish(hands: Hands, *, first: int = 1) -> dict[int, int]:
    places = {row.id: first + n for n, row in enumerate(due(hands).rows)}
    hands.run(messages.mark_published(places))
    return places


def outbox(hands: Hands) -> list[tuple[UUID, int]]:
    query = hands.plain("select task_id, fence from {schema}.message_outbox order by id")
    return [(row[0], row[1]) for row in hands.connection.execute(query)]


def told(hands: Hands, act: object) -> list[str]:
    with psycopg.connect(hands.target.url, autocommit=True) as ear:
        ear.execute(sql.SQL("listen {}").format(sql.Identifier(hands.target.channel)))
        act()  # type: ignore[operator]
        ear.execute("select 1")
        return [each.payload for each in ear.notifies(timeout=0.2) if each.payload.startswith("o:")]


def test_the_turn_to_publish_is_free_after_the_clock_was_set_back(relayed: Hands) -> None:  # I13
    """Its holder is dead, and the end that it wrote is an hour and a turn away."""
    assert not hold(relayed, "w2")
    relayed.connection.execute(
        relayed.plain("update {schema}.relay set taken_until = taken_until + interval '1 hour'")
    )
    assert hold(relayed, "w2", taken_ms=60_000)
    assert not hold(relayed, "w1", taken_ms=60_000)


def test_nothing_is_written_before_messages_are_asked_for_nor_long_after(hands: Hands) -> None:
    hands.send()
    assert hands.run(messages.relay_state()) is None
    hands.run(messages.use_messages(channel=hands.target.channel))
    hands.send()
    assert outbox(hands) == []  # nobody has relayed yet
    assert hold(hands, "w1")
    task_id = hands.send()
    assert outbox(hands) == [(task_id, 0)]
    hands.connection.execute(
        hands.plain("update {schema}.relay set taken_until = now() - interval '59 minutes'")
    )
    hands.send()
    assert len(outbox(hands)) == 2
    hands.connection.execute(
        hands.plain("update {schema}.relay set taken_until = now() - interval '61 minutes'")
    )
    hands.send()
    assert len(outbox(hands)) == 2
    assert hands.run(messages.use_messages(channel=hands.target.channel)) is True


def test_a_task_and_its_row_are_committed_together_or_not_at_all(relayed: Hands) -> None:  # N1
    new = tasks.NewTask(id=uuid4(), name="work", queue="mail", priority=0, args=b"{}")
    statement = tasks.insert_task(new, channel=relayed.target.channel)
    with relayed.connection.transaction(force_rollback=True):
        relayed.connection.execute(relayed.text(statement.name), statement.parameters)
    assert outbox(relayed) == []
    relayed.run(statement)
    relayed.run(statement)  # the reply of the first was lost
    assert outbox(relayed) == [(new.id, 0)]


def test_the_relay_is_told_what_to_publish_unless_it_looks_all_the_time(relayed: Hands) -> None:
    sent: list[UUID] = []
    (word,) = told(relayed, lambda: sent.append(relayed.send(queue="mail")))
    number, _, rest = word.removeprefix("o:").partition(":")
    assert rest == f"{sent[0]}:mail"
    assert due(relayed).rows[0].id == int(number)
    several = [tasks.NewTask(id=uuid4(), name="work", queue="mail", priority=0, args=b"{}") for _ in range(3)]
    assert told(
        relayed, lambda: relayed.run(tasks.insert_tasks(several, channel=relayed.target.channel))
    ) == ["o:"]
    relayed.run(messages.relay_listens("w2", listens=False))  # no word of theirs
    assert len(told(relayed, relayed.send)) == 1
    relayed.run(messages.relay_listens("w1", listens=False))
    assert told(relayed, relayed.send) == []
    assert len(due(relayed).rows) == 6


def test_one_has_the_turn_until_it_is_over_or_let_go(relayed: Hands) -> None:
    assert not hold(relayed, "w2")
    assert hold(relayed, "w1", taken_ms=0)
    assert hold(relayed, "w2")
    assert not hold(relayed, "w1")
    relayed.run(messages.let_relay_go("w1"))  # not theirs to give
    assert not hold(relayed, "w1")
    relayed.run(messages.let_relay_go("w2"))
    assert hold(relayed, "w1")


def test_whoever_takes_the_turn_is_told_again(relayed: Hands) -> None:
    relayed.run(messages.relay_listens("w1", listens=False))
    hold(relayed, "w1", taken_ms=0)
    assert told(relayed, relayed.send) == []
    hold(relayed, "w2")
    assert len(told(relayed, relayed.send)) == 1


def test_each_queue_has_a_window_and_its_first_due_are_first(relayed: Hands) -> None:
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


def test_what_waits_no_more_is_taken_away_published_or_not(relayed: Hands) -> None:
    cancelled, running, waiting = (relayed.send() for _ in range(3))
    relayed.cancel(cancelled)
    found = due(relayed)
    assert (found.gone, [row.task_id for row in found.rows]) == (1, [running, waiting])
    publish(relayed)
    relayed.claim(limit=1)
    walked = relayed.run(messages.walk_published(messages.BEGINNING, older_ms=60_000, limit=100))
    assert (walked.seen, walked.gone, walked.doubtful, walked.next) == (2, 1, (), None)
    assert outbox(relayed) == [(waiting, 0)]


def test_a_walk_reaches_all_whatever_waits_before(relayed: Hands) -> None:
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


def test_rows_of_later_do_not_outlive_their_tasks(relayed: Hands) -> None:
    sent = [relayed.send(delay_ms=72_000_000 + n) for n in range(7)]
    for task_id in sent[:3] + sent[5:]:
        relayed.cancel(task_id)
    place: messages.Place | None = messages.BEGINNING
    while place is not None:
        place = relayed.run(messages.walk_later(place, limit=3))
    assert {task_id for task_id, _ in outbox(relayed)} == set(sent[3:5])


def test_where_nothing_arrives_senders_tell_the_workers(relayed: Hands) -> None:
    relayed.run(messages.relay_failing("w2", failing=True))  # no word of theirs
    assert len(told(relayed, relayed.send)) == 1
    relayed.run(messages.relay_failing("w1", failing=True))
    for worker in ("w1", "w2"):
        relayed.run(workers.listen(worker, listens=False))
    assert words(relayed, lambda: relayed.send(queue="mail")) == {"t:mail"}
    relayed.run(messages.relay_failing("w1", failing=False))
    assert all(word.startswith("o:") for word in words(relayed, lambda: relayed.send(queue="mail")))


def words(hands: Hands, act: object) -> set[str]:
    with psycopg.connect(hands.target.url, autocommit=True) as ear:
        ear.execute(sql.SQL("listen {}").format(sql.Identifier(hands.target.channel)))
        act()  # type: ignore[operator]
        ear.execute("select 1")
        return {each.payload for each in ear.notifies(timeout=0.2)}


def test_a_sender_needs_no_rights_on_the_outbox(relayed: Hands) -> None:
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


def test_messages_are_turned_on_in_a_moment_or_not_at_all(hands: Hands) -> None:
    """Whoever writes tasks for long must not hold up all senders behind the trigger that waits for it."""
    with hands.target.connect("everbeat test") as writer, writer.transaction():
        writer.execute(hands.plain("update {schema}.tasks set queue = queue where false"))
        with psycopg.connect(hands.target.url, autocommit=True) as starter:
            statement = messages.use_messages(channel=hands.target.channel)
            with pytest.raises(psycopg.errors.LockNotAvailable):
                starter.execute(hands.text(statement.name), statement.parameters)
        hands.send()
    assert hands.run(messages.relay_state()) is None
    assert hands.run(messages.use_messages(channel=hands.target.channel)) is False


def test_what_is_paused_waits_or_is_found_when_it_is_resumed(relayed: Hands) -> None:
    queued, typed = relayed.send(queue="mail"), relayed.send(name="other")
    relayed.run(pauses.pause("queue", "mail", paused_by="me", reason=None, call=uuid4()))
    relayed.run(pauses.pause("task", "other", paused_by="me", reason=None, call=uuid4()))
    found = due(relayed)
    assert (found.rows, found.gone) == ((), 1)
    (queue,) = [each for each in relayed.run(pauses.pauses()) if each.kind == "queue"]
    relayed.run(pauses.resume(queue, channel=relayed.target.channel))
    assert [row.task_id for row in due(relayed).rows] == [queued]
    assert typed not in [task_id for task_id, _ in outbox(relayed)]


def test_a_task_that_is_put_back_has_a_row_of_its_own_with_the_reason(relayed: Hands) -> None:  # N3
    claimed = relayed.running()
    (lease,) = relayed.leases()
    relayed.recover(lease, "retry")
    (row,) = due(relayed).rows
    assert (row.task_id, row.fence, row.reason) == (claimed.id, 1, "Worker w1 stopped responding")
    assert relayed.recover(lease, "retry") == []  # another sweeper, at the same lease
    (row,) = due(relayed).rows
    (again,) = relayed.claim("w2")
    relayed.run(leases.release([(again.id, again.claim_id)], channel=relayed.target.channel))
    (row,) = due(relayed).rows
    assert (row.fence, row.reason) == (2, None)


def test_a_marked_task_has_no_message_because_most_workers_would_pass_it_on(relayed: Hands) -> None:  # J2
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


def test_the_reason_of_a_recovery_says_what_happened(relayed: Hands) -> None:  # N3
    """No worker "stopped responding" that lives, or whose process ended before the eyes of its supervisor."""
    relayed.running()
    (lease,) = relayed.leases()
    relayed.recover(lease, "retry")
    for (noticed_by, cause), reason in REASONS.items():
        change = relayed.plain("update {schema}.recoveries set noticed_by = %s, cause = %s")
        relayed.connection.execute(change, (noticed_by, cause))
        assert [row.reason for row in due(relayed).rows] == [reason]


def test_what_lies_with_reason_is_counted_by_queue(relayed: Hands) -> None:  # N11
    relayed.running()
    waiting = [relayed.send() for _ in range(3)]
    other = relayed.send(queue="other")
    publish(relayed)
    assert relayed.run(messages.messages_lying()) == {"default": Lying(3, 1), "other": Lying(1, 0)}
    relayed.cancel(waiting[0])
    relayed.cancel(other)
    relayed.run(messages.walk_published(messages.BEGINNING, older_ms=60_000, limit=10))
    places = [
        row[0] for row in relayed.connection.execute(relayed.plain("select id from {schema}.message_outbox"))
    ]
    assert relayed.run(messages.messages_lying()) == {"default": Lying(2, 1)}
    change = relayed.plain("update {schema}.message_outbox set place = 0 where id = %s")
    relayed.connection.execute(change, (places[0],))  # not carried
    assert relayed.run(messages.messages_lying()) == {"default": Lying(1, 1)}


def test_a_task_that_becomes_due_earlier_has_a_row(relayed: Hands) -> None:
    task_id = relayed.send(delay_ms=3_600_000)
    relayed.connection.execute(relayed.plain("update {schema}.tasks set enqueued_at = now()"))
    assert [row.task_id for row in due(relayed).rows] == [task_id]


def test_only_what_waits_and_is_not_paused_is_doubted(relayed: Hands) -> None:  # N7
    kept, cancelled, paused = relayed.send(), relayed.send(), relayed.send(name="other")
    places = publish(relayed)
    relayed.cancel(cancelled)
    relayed.run(pauses.pause("task", "other", paused_by="me", reason=None, call=uuid4()))
    assert relayed.run(messages.walk_published(messages.BEGINNING, older_ms=60_000, limit=10)).doubtful == ()
    walked = relayed.run(messages.walk_published(messages.BEGINNING, older_ms=0, limit=10))
    assert [each.task_id for each in walked.doubtful] == [kept]
    assert relayed.run(messages.publish_again({each: place + 1 for each, place in places.items()})) == []
    assert set(relayed.run(messages.publish_again(places))) == {kept, paused}  # it waits all the same
    (row,) = due(relayed).rows
    assert (row.task_id, row.times) == (kept, 1)


def test_a_holder_is_stale_from_the_threshold_on(relayed: Hands) -> None:  # N9
    """5 min + 1 s and 4 min 59 s, by moving the beats back instead of the clock forward."""
    claimed = relayed.running()
    for silent_s, stale in ((299, False), (301, True)):
        relayed.connection.execute(
            relayed.plain(
                f"""with beats as (update {{schema}}.supervisors set last_beat_at = now() - interval '{silent_s} s'),
                    own as (update {{schema}}.workers set last_beat_at = null)
                    update {{schema}}.tasks set claimed_at = now() - interval '1 hour', started_at = now() - interval '1 hour'"""
            )
        )
        facts = relayed.run(messages.look_at([claimed.id, uuid4()], stale_ms=300_000))
        assert set(facts) == {claimed.id}
        assert (facts[claimed.id].holder, facts[claimed.id].stale) == ("w1", stale)
    relayed.run(workers.bury_workers(supervisor_id="s1", how="test", cause="test"))
    assert relayed.run(messages.look_at([claimed.id], stale_ms=3_600_000))[claimed.id].stale
    relayed.connection.execute(
        relayed.plain("update {schema}.tasks set claimed_at = now(), started_at = now()")
    )
    (lease,) = relayed.leases()
    relayed.recover(lease, "fail")


def test_the_rows_say_what_keeps_a_task_back(relayed: Hands) -> None:
    first, second = relayed.send(serial="key:a"), relayed.send(serial="key:a")
    later, paused = relayed.send(delay_ms=60_000), relayed.send(name="other")
    relayed.run(pauses.pause("task", "other", paused_by="me", reason=None, call=uuid4()))
    facts = relayed.run(messages.look_at([first, second, later, paused], stale_ms=1_000))
    assert [facts[one].kept_back for one in (first, second)] == [False, True]
    assert (facts[later].due, facts[paused].paused, facts[first].paused) == (False, True, False)
    relayed.claim(limit=1)
    assert relayed.run(messages.look_at([second], stale_ms=1_000))[second].kept_back


def test_two_claimers_win_each_task_once(relayed: Hands) -> None:  # N9
    new = [
        tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}") for _ in range(1_000)
    ]
    relayed.run(tasks.insert_tasks(new, channel=relayed.target.channel))
    won: dict[str, list[UUID]] = {"w1": [], "w2": []}
    together = threading.Barrier(2)
    hands = {worker: Hands(relayed.target, relayed.connection) for worker in won}

    def claim_all(worker: str) -> None:
        together.wait(20)
        while taken := hands[worker].claim(worker, limit=7):
            won[worker] += [task.id for task in taken]

    with ThreadPoolExecutor() as threads:
        for _ in threads.map(claim_all, won):
            pass
    for each in hands.values():
        each.database.close()
    both = won["w1"] + won["w2"]
    assert len(both) == len(set(both)) == 1_000
    assert all(won.values())


def test_the_queues_that_have_messages(relayed: Hands) -> None:
    for queue in ("b", "a", "c", "a"):
        relayed.send(queue=queue)
    assert relayed.run(messages.queues_told()) == ["a", "b", "c"]
    publish(relayed)
    relayed.send(queue="d")
    assert relayed.run(messages.queues_told()) == ["a", "b", "c", "d"]


def test_a_worker_that_is_found_dead_publishes_no_more(relayed: Hands) -> None:
    assert not hold(relayed, "w2")
    relayed.run(workers.bury_workers(supervisor_id="s1", how="test", cause="test"))
    assert hold(relayed, "w2")


def test_while_nobody_publishes_the_workers_are_told(relayed: Hands) -> None:
    for worker in ("w1", "w2"):
        relayed.run(workers.listen(worker, listens=False))
    claimed = relayed.running()
    hold(relayed, "w1", taken_ms=0)
    assert words(relayed, lambda: relayed.send(queue="mail")) == {"t:mail"}
    (lease,) = relayed.leases()
    assert "t:default" in words(relayed, lambda: relayed.recover(lease, "retry"))
    assert claimed.id in {row.task_id for row in due(relayed).rows}
    hold(relayed, "w1")
    assert not any(word.startswith("t:") for word in words(relayed, lambda: relayed.send(queue="mail")))
