"""Create one of each record that a command shows, and list the commands that only read."""

from __future__ import annotations

from uuid import UUID

from msgspec import Struct

from everbeat import App
from everbeat.store import leases
from tests.store.conftest import StoreHarness
from tests.store.flows import task
from tests.store.scheduling import put
from tests.workflows.sent import sent

FAILURE = b'{"code": "BROKEN", "message": "m", "type": "T", "traceback": "a\\nb", "data": {"a": "b"}}'


class Scene(Struct, frozen=True):
    """One of each record that a command shows."""

    failed: UUID
    running: UUID
    pending: UUID
    workflow: UUID

    def pages(self, worker: str) -> list[list[str]]:
        """Return every read command except drawings."""
        failed, running, pending, workflow = map(
            str, (self.failed, self.running, self.pending, self.workflow)
        )
        return [
            ["tasks", "list"], ["tasks", "show", failed], ["tasks", "show", running], ["tasks", "show", pending],
            ["tasks", "pauses"], ["explain", failed], ["explain", running], ["explain", pending], ["explain", workflow],
            ["workers"], ["workers", "list", "--all"], ["workers", "--history", worker], ["queues"], ["recoveries"],
            ["recoveries", "show", "1"], ["workflows"], ["workflows", "show", workflow], ["doctor"], ["sweep", "--dry-run"],
            ["prune", "--terminal-records", "1", "--dry-run"], ["workflows", "reconcile", "--dry-run"], ["migrate", "--status"],
            ["schedules"], ["schedules", "show", "hourly"], ["schedules", "next", "hourly"], ["schedules", "ticks", "hourly"],
            ["schedules", "backfill", "hourly", "--since", "3h", "--dry-run"], ["explain", "schedule:hourly"],
        ]  # fmt: skip

    def drawings(self) -> list[list[str]]:
        """Return the commands that draw the workflow."""
        return [
            ["workflows", "show", str(self.workflow), *way]
            for way in (["--graph"], ["--mermaid"], ["--svg", "-"])
        ]


def played(app: App, db: StoreHarness) -> Scene:
    """Create the records, with the workers w1 and w2."""
    failed = db.running("w1", key="k1")
    assert db.settle(failed, "FAILED", error=FAILURE) == "FAILED"
    rescued = db.running("w2", policy=b'{"on_crash": "retry"}')
    (lease,) = db.leases()
    db.recover(lease, "fail", error=FAILURE)
    running = db.running("w1", flags=b'{"a": "b"}')
    db.run(
        leases.record_progress(
            running.id, running.claim_id, b'{"stage": "s", "message": "m", "fraction": 0.5}'
        )
    )
    db.connection.execute(
        db.plain(
            "insert into {schema}.worker_states (worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)"
            " values ('w1', 1, 0, 10, 1, 1, 1)"
        )
    )
    handle, _ = sent(app, db, [task("a"), task("b")], key="k2")
    pending = db.send("unknown")
    app.pause_task("unknown", reason="because")
    assert rescued.id
    put(db)
    db.connection.execute(
        db.plain("update {schema}.schedules set next_at = statement_timestamp() + interval '1 hour'")
    )
    app.run_schedule("hourly")
    return Scene(failed.id, running.id, pending, handle.id)
