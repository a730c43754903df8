"""Test how long a key stays taken (`unique_for`), and what a send does if it is taken (`on_duplicate`)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from everbeat import App, Schedule, Task, TaskState
from everbeat.errors import ConfigurationError, DuplicateTask, TaskNotRetryable
from everbeat.store import expiry
from everbeat.store.claims import Claimed
from everbeat.store.leases import decline, release
from tests.store.conftest import StoreHarness
from tests.variants import every_nth_quick

ANSWERS = ("existing", "replace", "debounce")
SCOPES = ("live", "waiting", "1h", "kept")


@pytest.fixture
def work(app: App) -> Any:
    @app.task
    async def work(n: int = 0) -> int:
        return n

    return work


def of(work: Any, unique_for: Any, on_duplicate: Any = "existing", **more: Any) -> Any:
    return work.with_options(key="k", unique_for=unique_for, on_duplicate=on_duplicate, **more)


def started(db: StoreHarness) -> Claimed:
    (claimed,) = db.claim()
    assert db.start(claimed) == ["started"]
    return claimed


def end_the_period(db: StoreHarness) -> None:
    """Let the ends of all tasks, and the moments at which their keys become free, be two hours ago."""
    db.connection.execute(
        db.plain(
            "with k as (update {schema}.unique_keys set until = until - interval '2 hours' where until > now())"
            " update {schema}.tasks set completed_at = completed_at - interval '2 hours', sent_at = sent_at - interval '2 hours'"
        )
    )


@pytest.mark.parametrize(
    ("scope", "answer"),
    every_nth_quick(2, [(scope, answer) for answer in (*ANSWERS, "reject") for scope in SCOPES]),
)
def test_a_key_of_a_waiting_task_is_taken_in_every_scope(
    db: StoreHarness, work: Any, scope: str, answer: str
) -> None:  # K8
    task = of(work, scope, answer)
    first = task.send(1)
    if answer == "reject":
        with pytest.raises(DuplicateTask, match=rf"'work' with key 'k' was not sent: task {first.id}"):
            task.send(2)
    else:
        second = task.send(2)
        assert (second.id, first.existed, second.existed) == (first.id, False, True)
    assert db.table("tasks", "id, args->>'n'") == [(first.id, "2" if answer == "replace" else "1")]


@pytest.mark.parametrize(
    ("scope", "moments"),
    [
        ("live", ["waiting", "claimed", "running"]),
        ("waiting", ["waiting"]),
        ("1h", ["waiting", "claimed", "running", "ended"]),
        ("kept", ["waiting", "claimed", "running", "ended", "later"]),
    ],
)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_scope_decides_when_a_key_becomes_free(
    db: StoreHarness, work: Any, scope: str, answer: str, moments: list[str]
) -> None:  # K8
    task = of(work, scope, answer)
    taken = []
    for moment in ("waiting", "claimed", "running", "ended", "later"):
        _clear(db)
        first = task.send(1)
        if moment != "waiting":
            (claimed,) = db.claim()
        if moment in ("running", "ended", "later"):
            db.start(claimed)
        if moment in ("ended", "later"):
            db.complete(claimed)
        if moment == "later":
            end_the_period(db)
        found = task.send(2)
        assert (found.id == first.id) == found.existed
        if found.existed:
            taken.append(moment)
        if found.existed and moment != "waiting":
            assert first.info().arguments == {"n": 1}, "only a task that waits is changed"
    assert taken == moments


def _clear(db: StoreHarness) -> None:
    db.connection.execute(db.plain("delete from {schema}.attempts"))
    db.connection.execute(db.plain("delete from {schema}.tasks"))
    assert db.table("unique_keys") == [], "the key is deleted together with its task"


@pytest.mark.parametrize("end", ["FAILED", "CANCELLED", "EXPIRED", "cancel", "handed back"])
@pytest.mark.parametrize("scope", ["waiting", "1h", "kept"])
def test_each_end_of_a_task_frees_its_key_as_its_scope_demands(
    db: StoreHarness, work: Any, scope: str, end: str
) -> None:  # K8
    task = of(work, scope)
    first = task.send(1)
    match end:
        case "FAILED" | "CANCELLED":
            db.settle(started(db), outcome=end, error=b'{"code": "X", "message": "x"}')  # type: ignore[arg-type]
        case "EXPIRED":
            db.connection.execute(
                db.plain(
                    "update {schema}.tasks set good_until = now() - interval '1 s', sent_at = now() - interval '1 m'"
                )
            )
            db.run(_expire(db))
        case "cancel":
            first.cancel()
        case _:
            db.settle(started(db), outcome="RELEASED")
    state = first.info().state
    assert state == ("PENDING" if end == "handed back" else "CANCELLED" if end == "cancel" else end)
    assert task.send(2).existed == (scope != "waiting")


def _expire(db: StoreHarness) -> Any:

    return expiry.expire(channel=db.target.channel)


def test_a_claimed_task_that_is_released_takes_its_waiting_key_back(
    db: StoreHarness, work: Any
) -> None:  # K8
    task = of(work, "waiting")
    first = task.send(1)
    (claimed,) = db.claim()
    db.run(release([(claimed.id, claimed.claim_id)], channel=db.target.channel))
    assert task.send(2).id == first.id
    (claimed,) = db.claim()
    db.start(claimed)
    db.run(decline([(claimed.id, claimed.claim_id)], channel=db.target.channel))
    assert task.send(3).id == first.id


def test_a_released_task_leaves_its_waiting_key_to_a_newer_task(db: StoreHarness, work: Any) -> None:  # K8
    task = of(work, "waiting")
    first = task.send(1)
    (claimed,) = db.claim()
    second = task.send(2)
    assert not second.existed
    db.run(release([(claimed.id, claimed.claim_id)], channel=db.target.channel))
    assert task.send(3).id == second.id
    assert {each.id for each in db.claim()} == {first.id, second.id}


def test_a_task_that_ends_leaves_the_waiting_key_to_a_newer_task(db: StoreHarness, work: Any) -> None:  # K8
    task = of(work, "waiting")
    task.send(1)
    claimed = started(db)
    second = task.send(2)
    db.complete(claimed)
    assert task.send(3).id == second.id


@pytest.mark.parametrize("scope", ["waiting", "1h", "kept"])
def test_a_key_of_a_dead_holder_stays_taken_while_the_task_will_run_again(
    db: StoreHarness, work: Any, scope: str
) -> None:  # K8
    """A claimed task has not started, so its recovery takes a waiting key back."""
    task = of(work, scope)
    first = task.send(1)
    db.claim()
    (lease,) = db.leases()
    db.recover(lease, "requeue")
    assert task.send(2).id == first.id
    started(db)
    (lease,) = db.leases()
    db.recover(lease, "retry")
    again = task.send(3)
    assert again.existed == (scope != "waiting")


@pytest.mark.parametrize("scope", ["waiting", "1h", "kept"])
def test_a_key_of_a_dead_holder_is_freed_by_the_recovery_that_ends_the_task(
    db: StoreHarness, work: Any, scope: str
) -> None:  # K8
    task = of(work, scope)
    first = task.send(1)
    started(db)
    (lease,) = db.leases()
    db.recover(lease, "fail")
    assert first.info().state == "FAILED"
    assert task.send(2).existed == (scope != "waiting")
    if scope == "1h":
        db.connection.execute(
            db.plain(
                "update {schema}.tasks set failed_at = failed_at - interval '2 h', sent_at = sent_at - interval '3 h'"
            )
        )
        end_the_period(db)
        assert not task.send(3).existed


@pytest.mark.parametrize("scope", ["waiting", "1h", "kept"])
def test_an_operators_retry_takes_the_key_again_unless_another_task_has_it(
    db: StoreHarness, work: Any, scope: str
) -> None:  # K8
    task = of(work, scope)
    first = task.send(1)
    db.settle(started(db), outcome="FAILED", error=b'{"code": "X", "message": "x"}')
    first.retry()
    assert task.send(2).id == first.id
    db.settle(started(db), outcome="FAILED", error=b'{"code": "X", "message": "x"}')
    end_the_period(db)
    db.connection.execute(db.plain("update {schema}.tasks set failed_at = failed_at - interval '2 h'"))
    second = task.send(3)
    if scope == "kept":
        assert second.id == first.id
        return
    with pytest.raises(TaskNotRetryable, match=str(second.id)):
        first.retry()
    second.cancel()
    if scope == "1h":
        with pytest.raises(TaskNotRetryable, match=str(second.id)):
            first.retry()
        return
    first.retry()
    assert first.info().state == "PENDING"


def test_a_retry_by_older_code_is_refused_while_another_task_has_the_key(
    db: StoreHarness, work: Any
) -> None:  # K8
    """Older code does not know the table of keys, so the trigger must refuse the change of the state."""
    task = of(work, "1h")
    first = task.send(1)
    db.settle(started(db), outcome="FAILED", error=b'{"code": "X", "message": "x"}')
    db.connection.execute(
        db.plain(
            "update {schema}.tasks set failed_at = failed_at - interval '2 h', sent_at = sent_at - interval '3 h'"
        )
    )
    end_the_period(db)
    assert task.send(2).id != first.id
    again = db.plain("update {schema}.tasks set state = 'PENDING', failed_at = null where id = %s")
    with pytest.raises(psycopg.errors.UniqueViolation, match="key k of task work is taken"):
        db.connection.execute(again, [first.id])


def test_retention_frees_a_kept_key_together_with_the_record(db: StoreHarness, work: Any) -> None:  # K8
    task = of(work, "kept")
    first = task.send(1)
    db.complete(started(db))
    db.connection.execute(
        db.plain(
            "update {schema}.tasks set completed_at = now() - interval '2 days', sent_at = now() - interval '3 days'"
        )
    )
    assert task.send(2).id == first.id
    db.connection.execute(db.plain("delete from {schema}.attempts"))
    db.connection.execute(db.plain("delete from {schema}.tasks"))
    assert not task.send(3).existed


def test_a_replaced_task_gets_the_new_arguments_and_options_and_keeps_its_place(
    db: StoreHarness, work: Any
) -> None:  # K8
    first = of(work, "live").send(1)
    before = db.row(first.id, "enqueued_at, sent_at")
    until = datetime.now(UTC) + timedelta(hours=5)
    of(work, "live", "replace", queue="mail", priority=-3, serial="s", timeout=7, good_until=until).send(2)
    found = first.info()
    assert (found.arguments, found.queue, found.priority, found.serial) == ({"n": 2}, "mail", -3, "key:s")
    assert (found.good_until, found.policy.timeout_ms) == (until, 7_000)
    assert db.row(first.id, "enqueued_at, sent_at") == before
    of(work, "live", "replace").schedule(timedelta(hours=1), 3)
    found = first.info()
    assert (found.arguments, found.queue, found.serial, found.good_until) == ({"n": 3}, "default", None, None)
    assert found.enqueued_at - found.sent_at >= timedelta(hours=1)
    of(work, "live", "replace").send(4)
    assert [one.id for one in db.claim()] == [first.id], "the new send is due now"


def test_a_replaced_task_loses_the_mark_of_its_old_arguments(db: StoreHarness, work: Any) -> None:  # K8
    first = of(work, "waiting").send(1)
    (claimed,) = db.claim()
    db.run(decline([(claimed.id, claimed.claim_id)], channel=db.target.channel))
    assert db.claim() == [], "the task is marked"
    of(work, "waiting", "debounce").send(2)
    assert db.claim() == [], "a debounce keeps the arguments and their mark"
    of(work, "waiting", "replace").send(3)
    assert [one.id for one in db.claim()] == [first.id]


def test_a_task_whose_code_has_started_is_not_replaced_while_it_waits_for_its_retry(
    db: StoreHarness, work: Any
) -> None:  # K8
    first = of(work, "1h").send(1)
    db.settle(started(db), outcome="FAILED", retry_in_ms=0, error=b'{"code": "X", "message": "x"}')
    assert first.info().state == "PENDING"
    second = of(work, "1h", "replace").send(2)
    assert (second.id, second.existed, first.info().arguments) == (first.id, True, {"n": 1})


def test_a_debounce_moves_the_due_time_and_not_beyond_at_latest(db: StoreHarness, work: Any) -> None:  # K8
    task = of(work, "waiting", "debounce", at_latest="10m")
    first = task.schedule(timedelta(minutes=4), 1)

    def due() -> timedelta:
        found = first.info()
        return found.enqueued_at - found.sent_at

    assert timedelta(minutes=4) <= due() < timedelta(minutes=5)
    assert task.schedule(timedelta(minutes=6), 2).id == first.id
    assert timedelta(minutes=6) <= due() < timedelta(minutes=7)
    task.schedule(timedelta(minutes=30), 3)
    assert due() == timedelta(minutes=10)
    of(work, "waiting", "debounce").schedule(timedelta(minutes=30), 4)
    assert timedelta(minutes=30) <= due() < timedelta(minutes=31)
    assert first.info().arguments == {"n": 1}, "a debounce keeps the arguments"
    task.send(5)
    assert [one.id for one in db.claim()] == [first.id]


def test_find_returns_the_task_that_has_the_key(db: StoreHarness, app: App, work: Any) -> None:  # K8
    assert app.find(work, key="k") is None
    plain = work.with_options(key="p").send(1)
    first = of(work, "1h").send(1)
    for name in (work, "work"):
        found = app.find(name, key="k")
        assert found is not None
        assert (found.id, found.name, found.existed) == (first.id, "work", True)
    assert getattr(app.find("work", key="p"), "id", None) == plain.id
    for claimed in db.claim():
        db.start(claimed)
        db.complete(claimed)
    assert app.find("work", key="p") is None
    again = app.find(work, key="k")
    assert again is not None
    assert again.result() == 1
    end_the_period(db)
    assert app.find(work, key="k") is None
    with pytest.raises(ConfigurationError, match=r"find\.key = ''"):
        app.find(work, key="")


async def test_afind_and_asend_work_on_an_event_loop(db: StoreHarness, app: App, work: Any) -> None:
    task = of(work, "kept", "replace")
    first = await task.asend(1)
    second = await task.asend(2)
    found = await app.afind(work, key="k")
    assert found is not None
    assert (found.id, second.id, second.existed) == (first.id, first.id, True)
    many = await app.asend_many([task.call(3), work.with_options(key="p").call(4)])
    assert [each.existed for each in many] == [True, False]


def test_the_handle_of_a_plain_send_shows_whether_the_task_existed(work: Any) -> None:
    task = work.with_options(key="k")
    assert [each.existed for each in (work.send(), task.send(), task.send())] == [False, False, True]
    many = work.send_many([task.call(), work.call(), work.with_options(key="m").call()])
    assert [each.existed for each in many] == [True, False, False]


def test_send_many_with_all_scopes_and_answers_returns_handles_in_order(
    db: StoreHarness, work: Any
) -> None:  # K8
    calls = [
        work.with_options(key=f"{scope}-{answer}", unique_for=scope, on_duplicate=answer).call(n)
        for n, (scope, answer) in enumerate((s, a) for s in SCOPES for a in ANSWERS)
    ]
    plain = [work.call(99), work.with_options(key="x").call(98)]
    first = work.send_many([*calls, *plain])
    assert not any(each.existed for each in first)
    again = work.send_many([plain[0], *reversed(calls), plain[1]])
    assert [each.id for each in again[1:-1]] == [each.id for each in reversed(first[:-2])]
    assert [each.existed for each in again] == [False, *[True] * (len(calls) + 1)]
    assert len(db.table("tasks")) == len(calls) + 3


def test_send_many_stores_nothing_if_one_call_is_rejected(db: StoreHarness, work: Any) -> None:  # K8
    held = of(work, "1h").send(1)
    calls = [
        work.with_options(key="new", unique_for="kept").call(2),
        of(work, "1h", "reject").call(3),
        work.call(4),
    ]
    with pytest.raises(DuplicateTask) as caught:
        work.send_many(calls)
    assert (caught.value.task_id, caught.value.key, caught.value.name) == (held.id, "k", "work")
    assert [row[0] for row in db.table("tasks", "id")] == [held.id]
    assert len(db.table("unique_keys")) == 1


def test_calls_with_one_key_in_a_send_many_become_one_task(db: StoreHarness, work: Any) -> None:  # K8
    for answer, kept in (("existing", 1), ("debounce", 1), ("replace", 3)):
        task = work.with_options(key=answer, unique_for="waiting", on_duplicate=answer)
        handles = work.send_many([task.call(n) for n in (1, 2, 3)])
        assert len({each.id for each in handles}) == 1
        assert sorted(each.existed for each in handles) == [False, True, True]
        assert handles[0].info().arguments == {"n": kept}
    rejecting = work.with_options(key="r", unique_for="waiting", on_duplicate="reject")
    with pytest.raises(DuplicateTask, match="another call of this send_many has this key") as duplicate:
        work.send_many([rejecting.call(1), rejecting.call(2)])
    assert (duplicate.value.key, duplicate.value.task_id) == ("r", None)
    assert len(db.table("tasks")) == 3


def test_options_of_a_send_take_precedence_over_those_of_the_registration(app: App, db: StoreHarness) -> None:
    @app.task(name="work", unique_for="kept", on_duplicate="debounce", at_latest="5m")
    async def work(n: int = 0) -> int:
        return n

    first = work.with_options(key="k").send(1)
    assert (first.existed, db.row(first.id, "key, unique_key, unique_for")) == (False, (None, "k", "kept"))
    assert work.with_options(key="k", on_duplicate="replace").send(2).existed
    assert first.info().arguments == {"n": 2}
    plain = work.with_options(key="k", unique_for="live", on_duplicate="existing").send(3)
    assert db.row(plain.id, "key, unique_key, unique_for") == ("k", None, None)
    hour = work.with_options(key="h", unique_for=timedelta(hours=1)).send(3)
    assert db.row(hour.id, "unique_for::interval") == timedelta(hours=1)


def test_wrong_options_are_refused_all_at_once(app: App, work: Any) -> None:  # K8
    with pytest.raises(ConfigurationError) as caught:
        work.with_options(key="k", unique_for="alive", on_duplicate="replaced", at_latest="soon")
    assert [each.subject for each in caught.value.problems] == [
        "SendSettings.unique_for", "SendSettings.on_duplicate", "SendSettings.at_latest", "SendSettings.at_latest",
    ]  # fmt: skip
    with pytest.raises(
        ConfigurationError,
        match=r"at_latest.*limits how far a debounce moves a task, but on_duplicate is 'reject'",
    ):
        work.with_options(on_duplicate="reject", at_latest="5m")
    with pytest.raises(ConfigurationError, match=r"at_latest.*limits how far a debounce"):
        app.task(at_latest="5m")
    with pytest.raises(
        ConfigurationError,
        match=r"unique_for of task 'work' = '1h': is about tasks with the same key, but the send has no key",
    ):
        work.with_options(unique_for="1h").send(1)
    with pytest.raises(
        ConfigurationError, match="on_duplicate of task 'work' = 'reject': is about tasks with the same key"
    ):
        work.with_options(on_duplicate="reject").send(1)
    with pytest.raises(ConfigurationError, match="on_duplicate of task 'work'"):
        work.send_many([work.with_options(on_duplicate="reject").call(1)])


def test_schedules_nodes_and_children_refuse_the_options(app: App, db: StoreHarness, work: Any) -> None:

    task: Task[..., Any] = of(work, "1h")
    with pytest.raises(
        ConfigurationError, match="a schedule supports only the defaults of unique_for and on_duplicate"
    ):
        app.put_schedule(Schedule("s", task.call(1), every="1h"))
    with pytest.raises(ConfigurationError, match="a child task supports only the defaults"):
        task.call(1)._as_child()
    with pytest.raises(ConfigurationError, match="a workflow node supports only the defaults"):
        app._sender.spec(work.with_options(unique_for="kept"))


def test_a_joined_send_takes_its_key_with_the_callers_transaction(
    app: App, db: StoreHarness, work: Any, database_url: str
) -> None:  # K8
    with psycopg.connect(database_url) as connection:
        joined = of(work, "waiting", "replace", connection=connection)
        first = joined.send(1)
        assert joined.send(2).id == first.id
        assert app.find(work, key="k") is None
        connection.rollback()
        assert not (second := joined.send(3)).existed
        connection.commit()
        assert first.id != second.id
        assert joined.send(4).id == second.id
        assert db.claim() == [], "a claim passes over a task that an open transaction replaces"
        connection.commit()
    (claimed,) = db.claim()
    assert (claimed.id, second.info().arguments, second.info().state) == (
        second.id,
        {"n": 4},
        TaskState.CLAIMED,
    )


def test_keys_of_a_plain_scope_and_of_other_scopes_are_separate(db: StoreHarness, work: Any) -> None:
    plain = work.with_options(key="k").send(1)
    first = of(work, "waiting").send(1)
    assert plain.id != first.id
    assert (plain.info().key, first.info().key) == ("k", "k")


def stored_keys(db: StoreHarness) -> list[tuple[UUID, Any]]:
    return db.table("unique_keys", "task_id, until")


def test_a_waiting_key_that_was_freed_stays_free_if_the_clock_is_set_back(
    db: StoreHarness, work: Any
) -> None:  # K8
    first = of(work, "waiting").send(1)
    started(db)
    ((holder, is_free),) = db.table("unique_keys", "task_id, until = '-infinity'")
    assert (holder, is_free) == (first.id, True)


def test_the_row_of_a_freed_key_contains_no_value_that_doctor_reports(db: StoreHarness, work: Any) -> None:
    of(work, "waiting").send(1)
    started(db)
    assert db.connection.execute(db.plain("select * from {schema}.bad_rows(10)")).fetchall() == []
