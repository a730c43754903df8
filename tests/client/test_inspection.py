"""Test the queries of operators: tasks, workers, supervisors, queues, heartbeats and recoveries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from everbeat import App, QueueConfig, TaskState
from everbeat.errors import ConfigurationError, TaskNotRetryable
from everbeat.inspection import CancelResult, CancelVerdict
from everbeat.store import workers
from tests.client.blocking import wait_until_blocked_by
from tests.store.conftest import StoreHarness


@pytest.fixture
def send(app: App) -> Callable[..., Any]:
    @app.task
    def work(n: int = 0) -> None: ...

    def send(n: int = 0, **options: Any) -> Any:
        return work.with_options(**options).send(n)

    return send


def test_tasks_are_listed_newest_first_and_page_by_page(
    app: App, db: StoreHarness, send: Callable[..., Any]
) -> None:
    handles = [send(n, queue="a" if n % 2 else "b") for n in range(6)]
    handles[0].cancel()
    ids = [handle.id for handle in reversed(handles)]
    assert [task.id for task in app.list_tasks()] == ids
    first = app.list_tasks(limit=4)
    assert [task.id for task in app.list_tasks(before=first[-1].id)] == ids[4:]
    assert [task.id for task in app.list_tasks(before=str(ids[2]), limit=1)] == [ids[3]]
    assert [task.id for task in app.list_tasks(state="CANCELLED")] == [handles[0].id]
    assert len(app.list_tasks(state=["CANCELLED", TaskState.PENDING])) == 6
    assert len(app.list_tasks(queue="a")) == 3
    assert app.list_tasks(name="other") == []


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"state": "FAILD"}, "use 'FAILED'"),
        ({"limit": 0}, "limit = 0"),
        ({"before": "first"}, "must be a UUID"),
    ],
)
def test_list_tasks_refuses_invalid_filters(app: App, question: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        app.list_tasks(**question)


def test_a_waiting_task_says_why_it_waits(
    app: App, db: StoreHarness, send: Callable[..., Any]
) -> None:  # B13
    assert send().info().waiting_because is None  # w1 and w2 serve all queues and registered no task names
    db.run(workers.bury_workers(worker_ids=["w1", "w2"], how="test"))
    assert send().info().waiting_because == "no live worker"
    mail = workers.WorkerRow(
        id="w3", supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=["mail"],
        metadata='{"tasks": ["welcome"]}',
    )  # fmt: skip
    db.run(workers.register_worker(mail))
    assert send().info().waiting_because == "no live worker serves queue 'default'"
    assert (
        send(queue="mail").info().waiting_because
        == "no live worker that serves queue 'mail' knows task 'work'"
    )
    assert app.send_by_name("welcome", {}, queue="mail").info().waiting_because is None
    db.connection.execute(
        f"update {db.target.schema}.supervisors set last_beat_at = last_beat_at - interval '1 hour'"
    )
    assert send().info().waiting_because == "no live worker"


def test_workers_are_listed_with_what_they_hold_newest_beat_first(  # F1
    app: App, db: StoreHarness, send: Callable[..., Any]
) -> None:
    db.supervisor("s2", "w9")
    for n in range(3):
        send(n)
    one, *_ = db.claim("w1", limit=3)
    db.start(one)
    db.run(workers.beat("s1", [], draining=False))
    listed = app.list_active_workers(stale_after="60s")
    assert [worker.worker_id for worker in listed] == ["w1", "w2", "w9"]
    first = listed[0]
    assert (first.hostname, first.pid, first.supervisor_id, first.queues) == ("host", 2, "s1", None)
    assert (first.running, first.claimed, first.is_stale, first.tasks) == (1, 2, False, None)
    assert first.last_heartbeat_at >= first.started_at
    db.connection.execute(
        f"update {db.target.schema}.workers set started_at = started_at - interval '1 hour' where id = 'w9'"
    )
    db.connection.execute(
        f"update {db.target.schema}.supervisors set last_beat_at = last_beat_at - interval '90 s' where id = 's2'"
    )
    assert [worker.is_stale for worker in app.list_active_workers(stale_after="60s")] == [False, False, True]
    assert not any(worker.is_stale for worker in app.list_active_workers(stale_after=timedelta(seconds=100)))
    db.run(workers.bury_workers(worker_ids=["w2"], how="child_exit", cause="killed by SIGKILL", signal=9))
    assert [worker.worker_id for worker in app.list_active_workers()] == ["w1", "w9"]
    ended = next(worker for worker in app.list_workers() if worker.worker_id == "w2")
    assert (ended.ended_how, ended.ended_cause, ended.signal) == ("child_exit", "killed by SIGKILL", 9)
    assert [supervisor.supervisor_id for supervisor in app.list_supervisors()] == ["s1", "s2"]
    assert [supervisor.workers for supervisor in app.list_supervisors()] == [1, 1]


def test_every_task_in_flight_shows_its_latest_beat(  # D2
    app: App, db: StoreHarness, send: Callable[..., Any]
) -> None:
    send(1), send(2)
    running, claimed = db.claim("w1")
    db.start(running)
    roles = {beat.task_id: beat.role for beat in app.heartbeats()}
    assert roles == {running.id: "runner", claimed.id: "claimer"}
    db.run(workers.beat("s1", [(running.id, running.claim_id)], draining=False))
    (latest, *older) = app.heartbeats(running.id)
    assert (latest.sender_id, latest.role, latest.hostname, latest.pid) == ("w1", "runner", "host", 2)
    assert [beat.role for beat in older] == ["runner", "claimer"]
    assert app.info(running.id).heartbeat == latest
    db.settle(running, result=b"null")
    assert app.heartbeats(running.id) == []
    db.cancel(claimed.id)


def test_a_recovery_has_the_worker_the_cause_and_the_action(
    app: App, db: StoreHarness, send: Callable[..., Any]
) -> None:  # E11
    handle = send()
    (claimed,) = db.claim("w1")
    db.start(claimed)
    (lease,) = db.leases()
    db.recover(lease, "retry", error=b'{"code": "WORKER_CRASHED", "data": {"worker_id": "w1"}}')
    (recovery,) = app.recoveries(handle.id)
    assert app.recoveries() == [recovery]
    assert (recovery.was, recovery.action, recovery.cause) == (TaskState.RUNNING, "retry", "vanished")
    assert (recovery.noticed_by, recovery.worker_id, recovery.recovered_by) == ("age", "w1", "s2")
    assert recovery.ran_again_at is None
    assert recovery.certificate is not None
    assert recovery.certificate["code"] == "WORKER_CRASHED"
    (again,) = db.claim("w2")
    db.start(again)
    (recovery,) = handle.info().recoveries
    assert recovery.ran_again_at == handle.info().started_at
    db.settle(again, result=b"null")
    assert app.recoveries(uuid4()) == []


def test_queues_are_counted_in_the_order_they_are_served(
    database_url: str, schema: str, app: App, db: StoreHarness, send: Callable[..., Any]
) -> None:
    looking = App(database_url, schema=schema, queues=[QueueConfig("slow"), QueueConfig("fast", priority=1)])
    send(queue="odd"), send(queue="fast"), send(queue="fast")
    app.send_by_name("later", {}, when=timedelta(hours=1), queue="fast")
    db.start(db.claim("w1", queues=["fast"], limit=1)[0])
    db.claim("w1", queues=["fast"], limit=1)
    fast, odd, slow = looking.queues()
    assert (fast.name, fast.priority, fast.pending, fast.scheduled) == ("fast", 1, 0, 1)
    assert (fast.claimed, fast.running, fast.oldest_due_s) == (1, 1, None)
    assert (odd.name, odd.priority, odd.pending) == ("odd", None, 1)
    assert odd.oldest_due_s is not None
    assert 0 <= odd.oldest_due_s < 60
    assert (slow.name, slow.priority, slow.pending) == ("slow", 100, 0)
    looking.close()


def test_worker_states_returns_the_recorded_snapshots(app: App, db: StoreHarness) -> None:  # D6
    state = workers.WorkerState(
        worker_id="w1", running=1, claimed=2, slots=3, rss_bytes=4, cpu_percent=5.5, loop_lag_ms=0.25
    )
    db.run(workers.record_states([state]))
    (shown,) = app.worker_states()
    assert (shown.worker_id, shown.running, shown.claimed, shown.slots) == ("w1", 1, 2, 3)
    assert (shown.rss_bytes, shown.cpu_percent, shown.loop_lag_ms) == (4, 5.5, 0.25)
    assert app.worker_states("w2") == []


def test_cancel_reports_its_verdict_and_the_state_of_the_task(
    app: App, db: StoreHarness, send: Callable[..., Any]
) -> None:  # B11
    pending, claimed, running = send(1), send(2), send(3)
    assert pending.cancel() == CancelResult(CancelVerdict.CANCELLED, TaskState.CANCELLED)
    first, second = db.claim("w1")
    assert (first.id, second.id) == (claimed.id, running.id)
    assert app.cancel(claimed.id).verdict is CancelVerdict.CANCELLED
    db.start(second)
    assert app.cancel(str(running.id)) == CancelResult(CancelVerdict.REQUESTED, TaskState.RUNNING)
    assert running.info().cancel_requested_at is not None
    assert db.settle(second, "CANCELLED") == "CANCELLED"
    for handle in (pending, claimed, running):
        assert handle.cancel() == CancelResult(CancelVerdict.ALREADY_ENDED, TaskState.CANCELLED)


def test_retry_runs_an_ended_task_again_with_new_retry_budgets(
    app: App, db: StoreHarness, send: Callable[..., Any]
) -> None:
    handle = send()
    with pytest.raises(TaskNotRetryable, match="is PENDING"):
        app.retry(handle.id)
    (claimed,) = db.claim("w1")
    db.start(claimed)
    db.settle(claimed, "FAILED", error=b'{"code": "X"}')
    assert handle.outcome(timeout=10).error.code == "X"
    handle.retry()
    info = handle.info()
    assert (info.state, info.retry_count, info.error, info.attempt) == (TaskState.PENDING, 0, None, 1)
    (again,) = db.claim("w2")
    db.start(again)
    db.settle(again, result=b"null")
    assert handle.result(timeout=10) is None
    with pytest.raises(TaskNotRetryable, match="COMPLETED"):
        handle.retry()


def test_a_task_is_not_retried_while_a_live_task_has_its_key(
    app: App, send: Callable[..., Any]
) -> None:  # B11
    ended = send(1, key="k")
    ended.cancel()
    live = send(2, key="k")
    assert live.id != ended.id
    with pytest.raises(TaskNotRetryable, match=f"live task {live.id} has the same name and key") as refused:
        ended.retry()
    assert (refused.value.state, refused.value.other) == ("CANCELLED", live.id)
    with pytest.raises(TaskNotRetryable, match=str(live.id)):
        asyncio.run(app.aretry(ended.id))
    assert ended.info().state is TaskState.CANCELLED
    live.cancel()
    ended.retry()
    with pytest.raises(TaskNotRetryable, match=str(ended.id)):
        live.retry()


def test_a_retry_names_the_task_that_takes_its_key_at_the_same_moment(
    app: App, send: Callable[..., Any], database_url: str
) -> None:  # B11
    ended = send(1, key="k")
    ended.cancel()
    with psycopg.connect(database_url) as sender, ThreadPoolExecutor(1) as threads:
        live = send(2, key="k", connection=sender)
        refused = threads.submit(ended.retry)
        wait_until_blocked_by(sender, database_url)
        sender.commit()
        with pytest.raises(TaskNotRetryable, match=str(live.id)):
            refused.result(timeout=30)


def test_every_query_of_the_app_has_an_async_twin_with_the_same_answer(
    app: App, db: StoreHarness, send: Callable[..., Any]
) -> None:
    handle = send()
    (claimed,) = db.claim("w1")
    db.start(claimed)

    async def program() -> list[Any]:
        answers = [
            await app.alist_tasks(), await app.ainfo(handle.id), await app.alist_workers(), await app.alist_supervisors(),
            await app.aheartbeats(), await app.arecoveries(), await app.aworker_states(),
        ]  # fmt: skip
        assert [queue.name for queue in await app.aqueues()] == ["default"]
        assert len(await app.alist_active_workers()) == 2
        await app.aclose()
        return answers

    assert asyncio.run(program()) == [
        app.list_tasks(), app.info(handle.id), app.list_workers(), app.list_supervisors(),
        app.heartbeats(), app.recoveries(), app.worker_states(),
    ]  # fmt: skip
    twins = {name for name in dir(App) if not name.startswith("_") and callable(getattr(App, name))}
    questions = twins - {"task", "handle", "door", "migrate", "schema_status", "blueprint", "stop_worker"}
    questions -= {
        "on_recovery", "on_interrupted", "on_recovered", "on_failure", "define_workflow", "schedule", "resource", "around_run", "around_send",
    }  # decorators  # fmt: skip
    questions -= {
        "workflow",
        "workflow_handle",
        "batch",
        "open_batch",
        "patience",
        "acting_as",
        "metrics_text",
    }  # make an object or a text and ask nothing
    assert {name for name in questions if f"a{name}" not in twins and name[1:] not in twins} == set()
    db.settle(claimed, result=b"null")
