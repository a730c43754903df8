"""Create a schema with long names, hosts and ids and many kinds of records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from msgspec import Struct

from everbeat import App
from everbeat.domain.schedule.model import Timing
from everbeat.domain.workflow.graph import GraphNode, TaskSpec
from everbeat.store import claims, workers
from tests.store.conftest import StoreHarness
from tests.store.scheduling import put
from tests.workflows.sent import mapped, sent

NAME = "shop.orders.fulfilment.send_order_confirmation_to_customer_x"
QUEUE = "notifications-for-customers-of-the-european-region-priority"
HOST = "everbeat-worker-7d9f8b6c5d-x2x4z.europe-west1.internal.example"
PID = 4_194_301
LONG_ERROR = json.dumps(
    {"code": "UNHANDLED_EXCEPTION", "type": "shop.errors.CardDeclinedByTheBank", "message": "the bank declined the card of the customer, twice"}
).encode()  # fmt: skip


class WideScene(Struct, frozen=True):
    """The ids of the records in the schema."""

    supervisor: str
    workers: tuple[str, ...]
    failed: UUID
    running: UUID
    retrying: UUID
    pending: UUID
    workflow: UUID
    node_task: UUID

    def pages(self) -> list[list[str]]:
        """Return every command that shows a table or a page."""
        tasks = [str(each) for each in (self.failed, self.running, self.retrying, self.pending)]
        return [
            ["tasks", "list"], ["tasks", "pauses"], ["workers"], ["workers", "--all"], ["workers", "--history", self.workers[0]], ["queues"],
            ["recoveries"], ["recoveries", "show", "1"], ["workflows"], ["workflows", "show", str(self.workflow)],
            ["workflows", "reconcile", "--dry-run"], ["sweep", "--dry-run"], ["prune", "--terminal-records", "1", "--dry-run"],
            ["migrate", "--status"], ["doctor"], ["explain", str(self.workflow)],
            ["schedules"], ["schedules", "show", NAME], ["schedules", "next", NAME], ["schedules", "ticks", NAME], ["explain", f"schedule:{NAME}"],
            *(["tasks", "show", each] for each in tasks), *(["explain", each] for each in tasks),
        ]  # fmt: skip


def tree(
    db: StoreHarness,
    supervisor: str,
    *names: str,
    pid: int = PID,
    queues: Sequence[str] | None = (QUEUE, "default"),
) -> None:
    """Insert a supervisor and its workers on a host with a long name."""
    db.run(
        workers.register_supervisor(
            workers.SupervisorRow(
                id=supervisor, hostname=HOST, pid=pid, boot_id=None, pid_namespace=None, process_started=None,
                lock_key=db.target.lock_key(supervisor), session_name=f"everbeat-{supervisor}",
            )
        )
    )  # fmt: skip
    for number, name in enumerate(names, start=1):
        row = workers.WorkerRow(
            id=name, supervisor_id=supervisor, hostname=HOST, pid=pid + number, process_started=None, queues=None if queues is None else [*queues]
        )  # fmt: skip
        db.run(workers.register_worker(row))


def node(name: str) -> GraphNode:
    """Return a node of a task with a long name."""
    return GraphNode(name=name, task=TaskSpec(name=NAME, queue=QUEUE), args="{}")


def played(app: App, db: StoreHarness) -> WideScene:
    """Create the records by hand."""
    host = HOST[:32]
    supervisor, *names = (
        f"{host}-{PID + number}-{digits}"
        for number, digits in enumerate(("9f8e7d6c", "0a1b2c3d", "4e5f6071"))
    )
    tree(db, supervisor, *names)

    def running() -> claims.Claimed:
        id_ = app.send_by_name(NAME, queue=QUEUE).id
        (claimed,) = db.claim(names[0], names=(NAME,), limit=1)
        assert claimed.id == id_
        assert db.start(claimed) == ["started"]
        return claimed

    failed = running()
    assert db.settle(failed, "FAILED", error=LONG_ERROR) == "FAILED"
    retrying = running()
    db.settle(retrying, "FAILED", error=LONG_ERROR, retry_in_ms=600_000)
    rescued = running()
    (lease,) = db.leases(supervisor)
    db.recover(lease, "fail", error=LONG_ERROR)
    busy = running()
    handle, _ = sent(
        app,
        db,
        [node("reserve_the_goods_in_the_warehouse_of_the_region"), *mapped("measure", 1, 3)],
        name="order-with-a-long-name-of-a-workflow",
    )
    db.connection.execute(
        db.plain(
            "insert into {schema}.worker_states (worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)"
            f" values ('{names[0]}', 1, 0, 10, 1234567890, 12, 3)"
        )
    )
    pending = app.send_by_name(NAME, when=timedelta(hours=1), queue=QUEUE).id
    app.pause_task(
        NAME, reason="the bank answers no calls since this morning, and retries only make it worse"
    )
    put(
        db,
        NAME,
        timing=Timing(cron=("30 2 * * *", "15 4 * * 1-5"), timezone="America/Argentina/Buenos_Aires"),
    )
    db.connection.execute(
        db.plain(
            "insert into {schema}.ticks (schedule, at, outcome, reason, last_at, missed, decided_by)"
            " values (%s, now() - interval '9 days', 'MISSED', 'CATCHUP_WINDOW', now() - interval '2 days', 12345, %s)"
        ),
        [NAME, supervisor],
    )
    app.pause_schedule(NAME, reason="the bank answers no calls since this morning")
    node_task = handle.nodes()[0].task_id
    assert node_task is not None
    assert rescued.id != failed.id
    return WideScene(supervisor, tuple(names), failed.id, busy.id, retrying.id, pending, handle.id, node_task)
