"""Two installations for the tests in a browser: one without any row, and one full of long and hostile names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from everbeat import App, Limit, Schedule
from everbeat.store import workers as worker_statements
from everbeat.store.target import Target
from tests.migrated import MigratedSchemas
from tests.store.conftest import StoreHarness
from tests.web.acting_workers import Workers
from tests.web.browser import dashboard_process

HOSTILE = ("<b>'\"&" + "n" * 200)[:200]
"""A name of 200 characters without a place to break, which is markup if a page does not escape it."""
LONG = "w" * 200
PLAIN = "q" * 120
LISTS = (
    "/pulse", "/workers", "/recoveries", "/tasks", "/tasks?state=FAILED", "/tasks/new", "/queues", "/workflows", "/workflows/reconcile", "/schedules",
    "/inbox", "/system", "/audit", "/nothing-here",
)  # fmt: skip
FORMS = ("/schedule-form",)


@dataclass
class Installation:
    """A served dashboard, and the addresses of the pages about one thing."""

    address: str
    target: Target
    app: App
    workers: Workers
    ones: dict[str, str] = field(default_factory=dict)
    failed: list[UUID] = field(default_factory=list)

    @property
    def pages(self) -> dict[str, str]:
        """Return the addresses of all pages, with names for the report of a test."""
        return {**{path: path for path in (*LISTS, *FORMS)}, **self.ones}


@contextmanager
def served_installation(
    database_url: str, schemas: MigratedSchemas, folder: Path, *, is_full: bool
) -> Iterator[Installation]:
    """Serve the dashboard of a schema, which is empty or full of hostile rows."""
    schema = schemas.take()
    target = Target.parse(database_url, schema=schema)
    app = App(database_url, schema=schema, auto_migrate=False, limits=[Limit("l" * 60, concurrency=3)])
    try:
        with target.connect("everbeat test") as connection:
            harness = StoreHarness(target, connection)
            locator = _app_file(target, folder) if is_full else None
            with dashboard_process(
                target, log=folder / "web.log", options=("--name", "shop"), locator=locator
            ) as process:
                made = Installation(process.address, target, app, Workers(harness))
                if is_full:
                    _fill(made)
                yield made
            harness.database.close()
    finally:
        app.close()
        schemas.give_back(schema)


def _app_file(target: Target, folder: Path) -> str:
    """Write an app whose function has long names, so that the dashboard can send its tasks. Return its locator."""
    path = folder / "shop_app.py"
    path.write_text(
        f"""
from typing import Literal
from everbeat import App, QueueConfig

app = App({target.url!r}, schema={target.schema!r}, name="shop", auto_migrate=False, queues=[QueueConfig("q" * 63)])

@app.task(name={LONG!r}, queue="q" * 63)
def pack(order: str, {"p" * 100}: Literal[{"c" * 150!r}] | None = None, note: str = {HOSTILE!r}) -> str:
    return order

@app.task(name="nothing")
def nothing() -> None: ...
"""
    )
    return f"{path}:app"


def _fill(made: Installation) -> None:
    workers, app = made.workers, made.app
    db = workers.db
    db.supervisor("s1", "w1", "w2")
    db.supervisor("supervisor-" + "s" * 90, "worker-" + "w" * 90)
    labels = json.dumps({"tenant": "t" * 60})
    running = workers.start(
        HOSTILE, key="k" * 200, queue=PLAIN, labels=labels, arguments={"card": "x" * 3_000}
    )
    error = {
        "code": "C" * 60,
        "message": "m" * 900,
        "type": "shop." + "E" * 120,
        "traceback": "  at line\n" * 60,
    }
    failed = workers.fail(HOSTILE, error=error, queue=PLAIN, arguments={"text": "<script>alert(1)</script>"})
    made.failed = [failed, *(workers.fail() for _ in range(3))]
    asking = workers.ask("Refund <b>" + "?" * 300, kind="str", choices=["refund", "c" * 80], note="o" * 200)
    workers.send(HOSTILE, delay_ms=3_600_000, queue="mail")
    lost = db.running("worker-" + "w" * 90)
    db.run(worker_statements.bury_workers(worker_ids=["w2"], how="child_exit", cause="SIGKILL " + "k" * 200))
    (lease,) = [each for each in db.leases("supervisor-" + "s" * 90) if each.id == lost.id]
    db.recover(lease, "retry", noticed_by="session")
    workflow = _definitions(app)
    _act(app)
    made.ones = {
        "running task": f"/tasks/{running.id}", "failed task": f"/tasks/{failed}", "asking task": f"/tasks/{asking}",
        "recovered task": f"/tasks/{lost.id}", "workflow": f"/workflows/{workflow}", "worker": "/workers/worker-" + "w" * 90,
        "tree": "/workers/supervisor-" + "s" * 90,
        "schedule": "/schedules/" + "s" * 60, "new task": f"/tasks/new?name={LONG}", "new task without parameters": "/tasks/new?name=nothing",
    }  # fmt: skip


def _definitions(app: App) -> UUID:
    """Store a workflow, a schedule, and tasks that wait for a limit. Return the id of the workflow."""

    @app.task(name=LONG)
    def pack(order: str) -> str:
        return order

    @app.task(name="limited", limits=["l" * 60])
    def limited() -> None: ...

    flow = app.workflow(LONG, labels={"tenant": "t" * 60})
    first = flow.add(pack, "o" * 400).named("a" * 60)
    flow.add(pack, first.result).named("b" * 60)
    handle = flow.start()
    app.put_schedule(Schedule("s" * 60, pack.call("x" * 200), every="1h", note="n" * 200))
    for _ in range(5):
        limited.send()
    return handle.id


def _act(app: App) -> None:
    with app.acting_as("a" * 120):
        app.pause_queue("mail", reason="r" * 300)
        app.pause_schedule("s" * 60, reason="r" * 300)
        app.set_limit("l" * 60, concurrency=2, reason="r" * 200)
    app.retry_all(name="nothing-" + "n" * 150, by="b" * 100, reason="r" * 200)
