"""Test that a bulk action changes each matching task exactly once, also if supervisors die, compete, or find locked and broken tasks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Literal
from uuid import uuid4

import psycopg
import pytest

from everbeat import App
from everbeat.domain.bulk_actions import BulkState
from everbeat.domain.limit.model import LimitDefinition
from everbeat.domain.task.context_backend import FailedTry
from everbeat.errors import ActionRefused, BulkActionNotFound, ConfigurationError, TaskNotFound, WaitTimeout
from everbeat.maintenance import bulk as maintenance_bulk
from everbeat.maintenance.bulk import BulkActionEnded, BulkActor, BulkPortionFailed
from everbeat.store import audit, messages, steps
from everbeat.store.limits import declare_limits
from tests.maintenance.acting import ENDED, Carrier, app_of, rows, store
from tests.maintenance.moving import move
from tests.store.conftest import StoreHarness, db
from tests.store.flows import Flow, task
from tests.store.test_messages import hold
from tests.store.test_schedule_races import until_one_waits_for
from tests.store.test_workflow_branches import failing

__all__ = ["db"]

STATES = "select state, count(*) from {schema}.all_tasks group by 1 order by 1"


@pytest.fixture
def app(db: StoreHarness) -> Iterator[App]:
    own = app_of(db)
    yield own
    own.close()


def test_a_bulk_retry_retries_each_matching_task_once_and_notes_its_start_and_end(
    app: App, db: StoreHarness
) -> None:
    store(db, 120)
    store(db, 30, name="other")
    expected = app.retry_all(name="work", dry_run=True)
    assert (expected.info.done, expected.info.state, expected.info.is_exact) == (120, BulkState.DRY_RUN, True)
    assert rows(db, STATES) == [("EXPIRED", 150)]

    action = app.retry_all(name="work", state="EXPIRED", by="ann", reason="the server is back")
    carrier = Carrier(db)
    carrier.run()
    info = action.refresh()
    assert (info.state, info.matched, info.done, info.skipped) == (BulkState.COMPLETED, 120, 120, 0)
    assert rows(db, STATES) == [("EXPIRED", 30), ("PENDING", 120)]
    assert rows(db, "select distinct retry_call from {schema}.tasks where state = 'PENDING'") == [
        (action.id,)
    ]
    noted = app.audit_log()
    assert [(each.action, each.outcome, each.actor, each.affected, each.note) for each in noted] == [
        ("retry_all", "completed", "ann", 120, None),
        ("retry_all", "requested", "ann", None, "the server is back"),
    ]
    assert noted[0].filters is not None
    assert {"name": "work", "states": ["EXPIRED"]}.items() <= noted[0].filters.items()
    (ended,) = [each for each in carrier.seen if isinstance(each, BulkActionEnded)]
    assert ended.done == 120


def test_tasks_in_history_are_retried_and_deleted(app: App, db: StoreHarness) -> None:
    store(db, 30)
    assert move(db) == 30
    store(db, 10)
    app.retry_all(name="work")
    Carrier(db, portion=7).run()
    assert rows(db, STATES) == [("PENDING", 40)]
    db.connection.execute(db.plain(f"update {{schema}}.tasks set state = 'EXPIRED', {ENDED}"))
    assert move(db) == 40
    store(db, 5)
    assert app.delete_all(everything=True, dry_run=True).info.done == 45
    action = app.delete_all(everything=True)
    Carrier(db, portion=7).run()
    assert action.refresh().done == 45
    assert rows(db, STATES) == []


def test_a_task_that_a_retry_takes_out_of_the_history_is_neither_deleted_nor_counted(
    app: App, db: StoreHarness
) -> None:
    """The delete waits for the retry. The task then keeps its labels, which the harness checks."""
    with psycopg.connect(db.target.url, autocommit=True) as sender:
        sender.execute(
            db.plain(
                "insert into {schema}.tasks (id, name, queue, args, sent_at, enqueued_at, labels)"
                " values (gen_random_uuid(), 'work', 'default', '{{}}', now() - interval '3 hours', now(), '{{\"tenant\": \"1\"}}')"
            )
        )
    ((retried,),) = rows(db, "select id from {schema}.tasks")
    store(db, 2)
    assert move(db) == 3
    action = app.delete_all(everything=True)
    with psycopg.connect(db.target.url) as other, ThreadPoolExecutor(1) as pool:
        other.execute(db.text("bulk/recall_tasks"), {"ids": f"{{{retried}}}"})
        other.execute(db.plain("update {schema}.tasks set state = 'PENDING', expired_at = null"))
        carried = pool.submit(Carrier(db).run)
        until_one_waits_for(db, other.info.backend_pid)
        other.commit()
        carried.result(60)
    info = action.refresh()
    assert (info.matched, info.done, info.reasons) == (3, 2, {"CHANGED": 1})
    assert rows(db, "select id, state from {schema}.all_tasks") == [(retried, "PENDING")]
    assert rows(db, "select key, value, id from {schema}.labels") == [("tenant", "1", retried)]


def test_children_of_a_node_are_not_deleted_before_its_workflow_has_ended(app: App, db: StoreHarness) -> None:
    """The node's next task continues with the children of the earlier one, for example after a gather."""
    flow = Flow.start(db, [task("node")], on_error="pause")
    flow.settle_down()
    ((parent,),) = rows(db, "select id from {schema}.tasks")
    flow.play(failing("node"))
    store(db, 2, name="child", values=ENDED + f", parent_id = '{parent}'")
    assert flow.state == "PAUSED"
    assert app.delete_all(parent=parent, dry_run=True).info.reasons == {"PARENT": 2}
    flow.cancel()
    assert app.delete_all(parent=parent, dry_run=True).info.done == 2


def test_a_task_that_fails_after_the_request_is_not_retried(app: App, db: StoreHarness) -> None:
    store(db, 10)
    action = app.retry_all(name="work")
    late = db.running()
    db.settle(late, "FAILED", error=b'{"code": "LATE"}')
    Carrier(db).run()
    assert action.refresh().matched == 10
    assert db.row(late.id, "state") == "FAILED"


@pytest.mark.parametrize("ended", ["statement_timestamp()", "statement_timestamp() - interval '2 hours'"])
def test_a_task_that_ends_again_after_its_retry_is_not_retried_again(
    app: App, db: StoreHarness, ended: str
) -> None:
    """The walk is set back, as no portion does, and the clock with it: the id of the action still prevents a second retry."""
    store(db, 40)
    action = app.retry_all(state="EXPIRED")
    Carrier(db, portion=10).run(portions=2)
    db.connection.execute(
        db.plain(
            f"update {{schema}}.tasks set state = 'EXPIRED', expired_at = {ended} where state = 'PENDING'"
        )
    )
    db.connection.execute(
        db.plain("update {schema}.bulk_actions set position = '00000000-0000-0000-0000-000000000000'")
    )
    Carrier(db, portion=10).run()
    assert action.refresh().done == 40
    assert rows(db, STATES) == [("EXPIRED", 20), ("PENDING", 20)]


def test_two_supervisors_that_compete_carry_out_each_portion_once(app: App, db: StoreHarness) -> None:
    store(db, 600)
    action = app.retry_all(state="EXPIRED")

    def carry_out(number: int) -> int:
        with db.target.connect("everbeat test") as own:
            return Carrier(StoreHarness(db.target, own), supervisor_id=f"me{number}", portion=10).run()

    with ThreadPoolExecutor(3) as pool:
        carried = list(pool.map(carry_out, range(3)))
    info = action.refresh()
    assert (info.matched, info.done, info.skipped) == (600, 600, 0)
    assert sum(carried) == 61, "each portion of ten tasks, and the one that finds the end"


@pytest.mark.parametrize("lose", ["before the commit", "after the commit"])
def test_a_lost_portion_is_neither_left_out_nor_repeated(
    app: App, db: StoreHarness, lose: Literal["before the commit", "after the commit"]
) -> None:
    store(db, 60)
    action = app.retry_all(state="EXPIRED")
    carrier = Carrier(db, portion=5, lose=lose)
    carrier.run()
    assert carrier.lost >= 4
    info = action.refresh()
    assert (info.matched, info.done, info.skipped) == (60, 60, 0)
    assert rows(db, STATES) == [("PENDING", 60)]


def test_a_locked_task_is_changed_once_it_is_free(app: App, db: StoreHarness) -> None:
    store(db, 30)
    action = app.retry_all(state="EXPIRED")
    with psycopg.connect(db.target.url) as other:
        locked = other.execute(
            db.plain("select id from {schema}.tasks order by id limit 3 for update")
        ).fetchall()
        Carrier(db, portion=10).run(portions=5)
        info = action.refresh()
        assert (info.state, info.done, info.matched) == (BulkState.RUNNING, 27, 30)
        other.rollback()
    Carrier(db, portion=10).run()
    assert action.refresh().done == 30
    assert {db.row(task_id, "state") for (task_id,) in locked} == {"PENDING"}


def test_a_task_that_stays_locked_is_skipped_in_the_end(
    app: App, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance_bulk, "MOST_WAITS", 3)
    monkeypatch.setattr(maintenance_bulk, "LOCKED_REST_MS", 1)
    store(db, 10)
    action = app.retry_all(state="EXPIRED")
    with psycopg.connect(db.target.url) as other:
        (locked,) = other.execute(
            db.plain("select id from {schema}.tasks order by id limit 1 for update")
        ).fetchall()
        Carrier(db).run()
    info = action.refresh()
    assert (info.state, info.done, info.reasons) == (BulkState.COMPLETED, 9, {"LOCKED": 1})
    assert [each.id for each in info.examples] == [locked[0]]


def test_a_task_that_the_database_refuses_to_change_is_skipped_with_the_reason(
    app: App, db: StoreHarness
) -> None:
    store(db, 100)
    (bad,) = rows(db, "select id from {schema}.tasks order by id offset 41 limit 1")[0]
    db.connection.execute(
        db.plain(
            f"alter table {{schema}}.tasks add constraint own_rule check (id <> '{bad}' or state <> 'PENDING') not valid"
        )
    )
    action = app.retry_all(state="EXPIRED")
    carrier = Carrier(db, portion=500)
    carrier.run()
    info = action.refresh()
    assert (info.state, info.done, info.reasons) == (BulkState.COMPLETED, 99, {"REFUSED": 1})
    assert info.examples[0].id == bad
    assert "own_rule" in (info.examples[0].detail or "")
    assert any(isinstance(each, BulkPortionFailed) for each in carrier.seen)


def test_an_action_whose_portions_always_fail_ends_as_failed(
    app: App, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance_bulk, "MOST_FAILURES", 5)
    store(db, 3)
    action = app.retry_all(state="EXPIRED")
    db.connection.execute(
        db.plain("alter table {schema}.bulk_actions add constraint never check (examined = 0)")
    )
    Carrier(db).run()
    info = action.refresh()
    assert info.state is BulkState.FAILED
    assert "never" in (info.problem or "")
    assert [each.outcome for each in app.audit_log()] == ["failed", "requested"]
    assert rows(db, STATES) == [("EXPIRED", 3)]


def test_of_several_tasks_with_one_key_only_one_is_retried(app: App, db: StoreHarness) -> None:
    store(db, 4, values=ENDED + ", key = 'k'")
    action = app.retry_all(state="EXPIRED")
    Carrier(db).run()
    info = action.refresh()
    assert (info.done, info.reasons) == (1, {"KEY_TAKEN": 3})


def test_a_second_identical_request_joins_the_first_until_it_has_ended(app: App, db: StoreHarness) -> None:
    store(db, 5)
    first, second = app.retry_all(name="work"), app.retry_all(name="work")
    assert (second.id, first.info.joined, second.info.joined) == (first.id, False, True)
    assert app.retry_all(name="other").id != first.id
    aged = app.retry_all(name="work", since=timedelta(hours=5))
    assert app.retry_all(name="work", since=timedelta(hours=5)).id == aged.id
    assert app.retry_all(name="work", since=timedelta(hours=6)).id not in (first.id, aged.id)
    Carrier(db).run()
    assert app.retry_all(name="work").id != first.id


def test_a_cancelled_action_stops_after_its_portion(app: App, db: StoreHarness) -> None:
    store(db, 50)
    action = app.retry_all(state="EXPIRED")
    Carrier(db, portion=10).run(portions=2)
    action.cancel(by="ben")
    Carrier(db, portion=10).run()
    info = action.refresh()
    assert (info.state, info.done, info.cancelled_by) == (BulkState.CANCELLED, 20, "ben")
    assert [(each.action, each.outcome, each.actor) for each in app.audit_log(limit=2)] == [
        ("retry_all", "cancelled", "ben"),
        ("cancel_bulk_action", "requested", "ben"),
    ]


def test_a_bulk_cancel_ends_waiting_tasks_and_stops_running_ones_with_their_children(
    app: App, db: StoreHarness
) -> None:
    parent = db.running()
    child = db.send("child")
    db.connection.execute(
        db.plain("update {schema}.tasks set parent_id = %s where id = %s"), [parent.id, child]
    )
    waiting = [db.send() for _ in range(20)]
    assert app.cancel_all(name="work", dry_run=True).info.done == 21
    action = app.cancel_all(name="work")
    after = db.send()
    Carrier(db, portion=6).run()
    assert action.refresh().done == 21
    assert {db.row(each, "state") for each in [*waiting, child]} == {"CANCELLED"}
    assert db.row(parent.id, "cancel_requested_at") is not None
    assert db.row(after, "state") == "PENDING"


def test_a_supervisor_that_dies_before_it_cancels_the_children_leaves_them_to_another(
    app: App, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The portion is committed, and names the tasks whose children are still to be cancelled."""
    parents = [db.running() for _ in range(2)]
    children = [db.send("child") for _ in parents]
    for parent, child in zip(parents, children, strict=True):
        db.connection.execute(
            db.plain("update {schema}.tasks set parent_id = %s where id = %s"), [parent.id, child]
        )
    action = app.cancel_all(name="work")
    died = 0

    async def die(*_: object) -> None:
        nonlocal died
        died += 1
        if died == 2:
            raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(BulkActor, "_cancel_family", die)
        with pytest.raises(SystemExit):
            Carrier(db).run()
    assert {db.row(child, "state") for child in children} == {"PENDING"}
    assert sorted(rows(db, "select families from {schema}.bulk_actions")[0][0]) == sorted(
        each.id for each in parents
    )
    Carrier(db, supervisor_id="other").run()
    assert {db.row(child, "state") for child in children} == {"CANCELLED"}
    info = action.refresh()
    assert (info.state, info.done, info.skipped) == (BulkState.COMPLETED, 2, 0)
    assert [each.outcome for each in app.audit_log()] == ["completed", "requested"]


def test_scheduled_tasks_run_now_move_and_get_another_priority(app: App, db: StoreHarness) -> None:
    due = db.send()
    later = [db.send(delay_ms=3_600_000) for _ in range(5)]
    assert app.run_all_now(everything=True, dry_run=True).info.reasons == {"DUE": 1}
    actions = [
        app.run_all_now(queue="default"),
        app.move_all(to="big", everything=True),
        app.reprioritise_all(to=7, everything=True),
    ]
    Carrier(db).run()
    assert [each.refresh().done for each in actions] == [5, 6, 6]
    for each in [due, *later]:
        assert db.row(each, "queue, priority, enqueued_at <= now()") == ("big", 7, True)
    assert len(db.claim(queues=["big"])) == 6


def test_filters_by_worker_error_and_age_select_the_tasks(app: App, db: StoreHarness) -> None:
    store(db, 6)
    store(db, 4, name="recent", values=ENDED.replace("2 hours", "10 minutes"))
    assert app.retry_all(error="SMTP_DOWN", since=timedelta(hours=1), dry_run=True).info.done == 4
    for nothing in (
        app.cancel_all(workflow=uuid4()),
        app.cancel_all(parent=uuid4(), worker="w1"),
        app.retry_all(key="k"),
    ):
        Carrier(db).run()
        assert (nothing.refresh().state, nothing.info.matched) == (BulkState.COMPLETED, 0)
    action = app.retry_all(error="SMTP_DOWN", since=timedelta(hours=1))
    Carrier(db).run()
    assert action.refresh().done == 4


def test_tasks_with_limits_change_their_lines_and_messages_are_written_again(
    app: App, db: StoreHarness
) -> None:
    db.run(declare_limits([LimitDefinition(name="stripe", concurrency=5)]))
    db.run(messages.use_messages(channel=db.target.channel))
    assert hold(db, "w1")
    limited = [db.send(gates='{"stripe"}', delay_ms=3_600_000) for _ in range(3)]
    serial = [db.send(serial="key:a", delay_ms=3_600_000) for _ in range(2)]
    for action in (
        app.move_all(to="big", name="work"),
        app.run_all_now(name="work"),
        app.reprioritise_all(to=4, name="work"),
    ):
        Carrier(db).run()
        assert action.refresh().done == 5
    written = rows(db, "select distinct task_id from {schema}.message_outbox where queue = 'big'")
    assert {row[0] for row in written} == {*limited, *serial}
    assert {each.id for each in db.claim(queues=["big"], starts=5)} == {*limited, serial[0]}


def test_a_wait_between_two_tries_of_a_step_ends_and_a_durable_sleep_does_not(
    app: App, db: StoreHarness
) -> None:
    failed = FailedTry("charge", 1, 3, "BUSY", "try later", "shop.Busy")
    retrying, sleeping = db.running(), db.running()
    for held, why in ((retrying, failed), (sleeping, None)):
        db.run(steps.begin_sleep(held.id, held.claim_id, name="charge", duration_ms=3_600_000, failed=why))
        db.settle(held, "SUSPENDED")
    action = app.run_all_now(name="work")
    Carrier(db).run()
    assert (action.refresh().done, action.info.reasons) == (1, {"SLEEPS": 1})
    (claimed,) = db.claim()
    assert claimed.id == retrying.id
    assert db.start(claimed) == ["started"]
    again = steps.begin_sleep(
        claimed.id, claimed.claim_id, name="charge", duration_ms=3_600_000, failed=failed
    )
    assert db.run(again) == 0


def test_old_rows_of_the_audit_log_and_old_actions_are_deleted(app: App, db: StoreHarness) -> None:
    action = app.retry_all(name="work")
    Carrier(db).run()
    assert db.run(audit.prune(limit=10)) == 0
    db.connection.execute(
        db.plain("update {schema}.audit_log set at = now() - interval '91 days' where outcome = 'requested'")
    )
    assert db.run(audit.prune(limit=10)) == 1
    assert [each.outcome for each in app.audit_log()] == ["completed"]
    db.connection.execute(db.plain("update {schema}.bulk_actions set ended_at = now() - interval '91 days'"))
    assert db.run(audit.prune(limit=10)) == 1
    with pytest.raises(BulkActionNotFound):
        action.refresh()


def test_a_clock_that_is_set_back_does_not_delay_an_action(app: App, db: StoreHarness) -> None:
    store(db, 5)
    action = app.retry_all(name="work")
    db.connection.execute(
        db.plain(
            "update {schema}.bulk_actions set next_at = now() + interval '1 hour', changed_at = now() + interval '1 hour'"
        )
    )
    Carrier(db).run(within_s=10)
    assert action.refresh().done == 5


def test_an_action_with_a_filter_that_this_version_does_not_know_is_left_to_newer_code(
    app: App, db: StoreHarness
) -> None:
    store(db, 3)
    app.retry_all(name="work")
    db.connection.execute(db.plain('update {schema}.bulk_actions set filters = \'{{"colour": "red"}}\''))
    assert Carrier(db).run(portions=0) == 0
    with pytest.raises(TimeoutError):
        Carrier(db).run(within_s=0.3)
    assert rows(db, STATES) == [("EXPIRED", 3)]


def test_single_tasks_are_changed_or_refused_with_the_reason(app: App, db: StoreHarness) -> None:
    later = db.send(delay_ms=3_600_000)
    with app.acting_as("ann"):
        app.run_now(later)
        app.move(later, queue="big")
        app.reprioritise(later, priority=3)
    assert db.row(later, "queue, priority, enqueued_at <= now()") == ("big", 3, True)
    assert [(each.action, each.actor, each.target) for each in app.audit_log()] == [
        (name, "ann", str(later)) for name in ("reprioritise", "move", "run_now")
    ]
    for act, reason in ((app.run_now, "DUE"), (app.delete, "STATE")):
        with pytest.raises(ActionRefused) as refusal:
            act(later)
        assert refusal.value.reason == reason
    with pytest.raises(TaskNotFound):
        app.run_now(uuid4())
    recent = db.send()
    assert db.cancel(recent) == "CANCELLED"
    with pytest.raises(ActionRefused) as refusal:
        app.delete(recent)
    assert refusal.value.reason == "RECENT"
    store(db, 2)
    first, second = (row[0] for row in rows(db, "select id from {schema}.tasks where state = 'EXPIRED'"))
    app.delete(first)
    move(db)
    app.delete(second)
    assert rows(db, STATES) == [("CANCELLED", 1), ("PENDING", 1)]


def test_mistakes_are_reported(app: App) -> None:
    for wrong in ({}, {"name": "x", "everything": "yes"}, {"colour": "red"}, {"name": "x", "by": ""}):
        with pytest.raises(ConfigurationError):
            app.retry_all(**wrong)  # type: ignore[arg-type]
    with pytest.raises(BulkActionNotFound):
        app.bulk_action(uuid4())
    with pytest.raises(WaitTimeout):
        app.retry_all(name="nobody").outcome(timeout=0.1)
