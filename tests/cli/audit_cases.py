"""The changes that an operator can make, as a command and as a call, and the rows that they must leave in the audit log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from everbeat import App, Limit, Schedule, WorkflowHandle
from everbeat.client.batches import Batch
from everbeat.client.handle import Handle
from everbeat.errors import NotPaused
from everbeat.store.target import Target
from tests.maintenance.acting import rows
from tests.store.conftest import StoreHarness


class World:
    """An app and its database, with something of each kind to act on."""

    def __init__(self, target: Target) -> None:
        self.connection = target.connect("everbeat test")
        self.db = StoreHarness(target, self.connection)
        self.app = App(target.url, schema=target.schema, limits=[Limit("stripe", concurrency=5)])
        self.count = 0

        @self.app.task(name="work")
        async def work(n: int = 0) -> None: ...

        @self.app.task(name="limited", limits=["stripe"])
        async def limited() -> None: ...

        self.work = work
        limited.send()

    def close(self) -> None:
        self.app.close()
        self.db.database.close()
        self.connection.close()

    def number(self) -> int:
        self.count += 1
        return self.count

    def later(self) -> Handle[None]:
        return self.work.schedule(timedelta(hours=1))

    def ended(self) -> Handle[None]:
        """Send a task that was sent and cancelled some hours ago."""
        handle = self.later()
        rows(
            self.db,
            "update {schema}.tasks set state = 'CANCELLED', cancelled_at = now(), sent_at = now() - interval '3 hours' where id = %s returning id",
            handle.id,
        )
        return handle

    def asking(self) -> Handle[None]:
        handle = self.later()
        step = """with asked as (
                update {schema}.tasks set waits_for = 'answer/ask', wake_at = enqueued_at, attempt = 1 where id = %s returning id
            ) insert into {schema}.steps (task_id, kind, name, state, result, attempt)
            select id, 'event', 'answer/ask', 'OPEN', '{{"question": "Refund?"}}', 1 from asked returning task_id"""
        rows(self.db, step, handle.id)
        return handle

    def schedule(self, *, is_paused: bool = False) -> str:
        name = f"digest-{self.number()}"
        self.app.put_schedule(Schedule(name, self.work.call(1), every="1h"))
        if is_paused:
            self.app.pause_schedule(name)
        return name

    def workflow(self) -> WorkflowHandle[Any]:
        wf = self.app.workflow("order")
        wf.add(self.work.with_options(queue="unserved"), 1)
        return wf.start()

    def failed_workflow(self) -> WorkflowHandle[Any]:
        handle = self.workflow()
        handle.cancel()
        return handle

    def batch(self) -> Batch:
        return self.app.batch("import").open()

    def supervisor(self) -> str:
        name = f"s{self.number()}"
        self.db.supervisor(name, f"{name}-w")
        return f"{name}-w"


@dataclass(frozen=True)
class Act:
    """One change: the command (empty: there is none), the call, and the row that it must leave."""

    command: tuple[object, ...]
    call: Callable[[], object]
    action: str
    target: object = None
    affected: int | None = None
    note: str | None = None
    outcome: str = "done"


def cancel(w: World) -> Act:
    handle = w.later()
    return Act(("tasks", "cancel", handle.id), handle.cancel, "cancel", handle.id, 1)


def cancel_by_id(w: World) -> Act:
    handle = w.later()
    return Act(("tasks", "cancel", handle.id), lambda: w.app.cancel(handle.id), "cancel", handle.id, 1)


def retry(w: World) -> Act:
    handle = w.ended()
    return Act(("tasks", "retry", handle.id), handle.retry, "retry", handle.id, 1)


def redrive(w: World) -> Act:
    handle = w.ended()
    return Act(("dead", "redrive", handle.id), lambda: w.app.retry(handle.id), "retry", handle.id, 1)


def run_now(w: World) -> Act:
    task = w.later().id
    return Act(("tasks", "run-now", task), lambda: w.app.run_now(task), "run_now", task, 1)


def move(w: World) -> Act:
    task = w.later().id
    return Act(
        ("tasks", "move", task, "--to", "big"),
        lambda: w.app.move(task, queue="big"),
        "move",
        task,
        1,
        "to_queue=big",
    )


def reprioritise(w: World) -> Act:
    task = w.later().id
    return Act(
        ("tasks", "reprioritise", task, "--to", 5), lambda: w.app.reprioritise(task, priority=5), "reprioritise", task, 1, "to_priority=5",
    )  # fmt: skip


def delete(w: World) -> Act:
    task = w.ended().id
    return Act(("tasks", "delete", task), lambda: w.app.delete(task), "delete", task, 1)


def signal(w: World) -> Act:
    task = w.later().id
    return Act(
        ("tasks", "signal", task, "approved", "1"),
        lambda: w.app.signal(task, "approved", 1),
        "signal",
        task,
        note="approved",
    )


def answer(w: World) -> Act:
    handle = w.asking()
    return Act(
        ("inbox", "answer", handle.id, "yes"),
        lambda: handle.answer("yes"),
        "answer",
        handle.id,
        note="answer/ask",
    )


def answer_by_id(w: World) -> Act:
    task = w.asking().id
    return Act(
        ("inbox", "answer", task, "yes"), lambda: w.app.answer(task, "yes"), "answer", task, note="answer/ask"
    )


def pause_task(w: World) -> Act:
    with suppress(NotPaused):
        w.app.resume_task("work")
    return Act(
        ("tasks", "pause", "work", "--reason", "why"),
        lambda: w.app.pause_task("work", reason="why"),
        "pause",
        "task work",
        note="why",
    )


def resume_task(w: World) -> Act:
    w.app.pause_task("work")
    return Act(("tasks", "resume", "work"), lambda: w.app.resume_task("work"), "resume", "task work")


def pause_queue(w: World) -> Act:
    with suppress(NotPaused):
        w.app.resume_queue("default")
    return Act(
        ("queues", "pause", "default", "--reason", "why"), lambda: w.app.pause_queue("default", reason="why"), "pause", "queue default", note="why",
    )  # fmt: skip


def resume_queue(w: World) -> Act:
    w.app.pause_queue("default")
    return Act(
        ("queues", "resume", "default"), lambda: w.app.resume_queue("default"), "resume", "queue default"
    )


def pause_all(w: World) -> Act:
    with suppress(NotPaused):
        w.app.resume_all()
    return Act(
        ("pause", "--all", "--reason", "why"),
        lambda: w.app.pause_all(reason="why"),
        "pause",
        "everything",
        note="why",
    )


def resume_all(w: World) -> Act:
    w.app.pause_all()
    return Act(("resume", "--all"), w.app.resume_all, "resume", "everything")


def set_limit(w: World) -> Act:
    return Act(
        ("limits", "set", "stripe", "--concurrency", 3), lambda: w.app.set_limit("stripe", concurrency=3),
        "set_limit", "stripe", note="concurrency=3",
    )  # fmt: skip


def clear_limit(w: World) -> Act:
    w.app.set_limit("stripe", concurrency=3)
    return Act(("limits", "clear", "stripe"), lambda: w.app.clear_limit("stripe"), "clear_limit", "stripe")


def put_schedule(w: World) -> Act:
    name = f"digest-{w.number()}"
    new = Schedule(name, w.work.call(1), every="1h")
    return Act((), lambda: w.app.put_schedule(new), "put_schedule", name)


def pause_schedule(w: World) -> Act:
    name = w.schedule()
    return Act(
        ("schedules", "pause", name, "--reason", "why"), lambda: w.app.pause_schedule(name, reason="why"), "pause_schedule", name, note="why",
    )  # fmt: skip


def resume_schedule(w: World) -> Act:
    name = w.schedule(is_paused=True)
    return Act(("schedules", "resume", name), lambda: w.app.resume_schedule(name), "resume_schedule", name)


def run_schedule(w: World) -> Act:
    name = w.schedule()
    return Act(("schedules", "run", name), lambda: w.app.run_schedule(name), "run_schedule", name)


def delete_schedule(w: World) -> Act:
    name = w.schedule()
    return Act(("schedules", "delete", name), lambda: w.app.delete_schedule(name), "delete_schedule", name)


def backfill(w: World) -> Act:
    name = w.schedule()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    since, until = hour - timedelta(hours=3, minutes=1), hour - timedelta(minutes=30)  # three whole hours
    return Act(
        ("schedules", "backfill", name, "--since", since.isoformat(), "--until", until.isoformat()),
        lambda: w.app.backfill(name, since=since, until=until), "backfill_schedule", name, 3,
    )  # fmt: skip


def workflow_pause(w: World) -> Act:
    handle = w.workflow()
    return Act(("workflows", "pause", handle.id), handle.pause, "pause_workflow", handle.id)


def workflow_resume(w: World) -> Act:
    handle = w.workflow()
    handle.pause()
    return Act(("workflows", "resume", handle.id), handle.resume, "resume_workflow", handle.id)


def workflow_cancel(w: World) -> Act:
    handle = w.workflow()
    return Act(("workflows", "cancel", handle.id), handle.cancel, "cancel_workflow", handle.id)


def workflow_retry(w: World) -> Act:
    handle = w.failed_workflow()
    return Act(("workflows", "retry", handle.id), handle.retry, "retry_workflow", handle.id)


def seal(w: World) -> Act:
    batch = w.batch()
    return Act(("batches", "seal", batch.id), batch.seal, "seal_batch", batch.id)


def cancel_batch(w: World) -> Act:
    batch = w.batch()
    return Act(("batches", "cancel", batch.id), batch.cancel, "cancel_batch", batch.id)


def quiet(w: World) -> Act:
    worker = w.supervisor()
    return Act(("workers", "quiet", worker), lambda: w.app.quiet_workers([worker]), "quiet_workers", worker)


def unquiet(w: World) -> Act:
    worker = w.supervisor()
    w.app.quiet_workers([worker])
    return Act(
        ("workers", "quiet", worker, "--resume"),
        lambda: w.app.resume_workers([worker]),
        "resume_workers",
        worker,
    )


def release(w: World) -> Act:
    worker = w.supervisor()
    return Act(
        ("workers", "release", worker),
        lambda: w.app.release_workers([worker]),
        "bury_workers",
        worker,
    )


def sweep(w: World) -> Act:
    worker = w.supervisor()
    for resume in (
        w.app.resume_all,
        partial(w.app.resume_queue, "default"),
        partial(w.app.resume_task, "work"),
    ):
        with suppress(NotPaused):
            resume()
    claimed = w.db.running(worker)
    for table in ("workers", "supervisors"):  # those of other cases are not silent, however long these took
        rows(w.db, f"update {{schema}}.{table} set last_beat_at = statement_timestamp() returning id")
    past = "statement_timestamp() - interval '5 minutes'"
    for table, columns, row in (
        ("workers", "last_beat_at, started_at", worker),
        ("supervisors", "last_beat_at, started_at", worker.removesuffix("-w")),
        ("tasks", "claimed_at, started_at", claimed.id),
    ):
        rows(
            w.db,
            f"update {{schema}}.{table} set ({columns}) = ({past}, {past}) where id = %s returning id",
            row,
        )
    return Act(("sweep",), w.app.sweep_stale_workers, "recover", claimed.id, 1)


def bulk_cancel(w: World) -> Act:
    action = w.app.retry_all(name=f"none-{w.number()}")
    return Act(
        ("bulk", "cancel", action.id), action.cancel, "cancel_bulk_action", action.id, 0, outcome="requested"
    )


def bulk(method: str, *command: object, **given: Any) -> Callable[[World], Act]:
    def act(w: World) -> Act:
        name = f"many-{w.number()}"
        return Act(
            ("tasks", command[0], "--all", "--name", name, *command[1:], "--yes", "--reason", "why"),
            lambda: getattr(w.app, method)(name=name, reason="why", **given),
            f"{str(command[0]).replace('-', '_')}_all",
            note="why",
            outcome="requested",
        )  # fmt: skip

    act.__name__ = method
    return act


def prune(w: World) -> Act:
    return Act(("prune", "--terminal-records", 720), lambda: None, "prune", None, 0, "deleted", "completed")


CASES: tuple[Callable[[World], Act], ...] = (
    cancel, cancel_by_id, retry, redrive, run_now, move, reprioritise, delete, signal, answer, answer_by_id, pause_task, resume_task,
    pause_queue, resume_queue, pause_all, resume_all, set_limit, clear_limit, put_schedule, pause_schedule, resume_schedule, run_schedule,
    delete_schedule, backfill, workflow_pause, workflow_resume, workflow_cancel, workflow_retry, seal, cancel_batch, quiet, unquiet, release,
    sweep, bulk_cancel, prune,
    bulk("retry_all", "retry"), bulk("cancel_all", "cancel"), bulk("run_all_now", "run-now"), bulk("move_all", "move", "--to", "big", to="big"),
    bulk("reprioritise_all", "reprioritise", "--to", 5, to=5), bulk("delete_all", "delete"),
)  # fmt: skip
