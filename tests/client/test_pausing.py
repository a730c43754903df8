"""Test pausing and resuming task names and queues through the app."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import psycopg
import pytest
from msgspec import structs
from psycopg import sql

from everbeat import App, QueueConfig
from everbeat.client.database_access import database_of
from everbeat.errors import ConfigurationError, NotPaused, UnknownName
from everbeat.store import tasks, workers
from tests.store.conftest import StoreHarness


def test_a_paused_task_function_is_not_claimed_until_it_is_resumed(app: App, db: StoreHarness) -> None:
    @app.task
    def work() -> None: ...

    work.send()
    pause = app.pause_task("work", reason="the printer is on fire")
    assert (pause.kind, pause.name, pause.paused_by, pause.reason) == (
        "task",
        "work",
        "operator",
        "the printer is on fire",
    )
    assert app.list_pauses() == [pause]
    again = app.pause_task("work", reason="another")
    assert again == structs.replace(pause, already_paused=True), (
        "the first pause stays, and the answer says so"
    )
    assert app.list_pauses() == [pause]
    assert db.claim() == []
    assert db.run(tasks.next_due(names=["work"], queues=None)).due_in_ms is None
    assert app.resume_task("work") == pause
    assert app.list_pauses() == []
    (claimed,) = db.claim()
    db.cancel(claimed.id)


def test_two_operators_who_pause_at_the_same_time_get_the_same_pause(
    app: App, db: StoreHarness, database_url: str
) -> None:
    db.send()
    with psycopg.connect(database_url) as other, ThreadPoolExecutor(1) as threads:
        pauses = sql.Identifier(db.target.schema, "pauses")
        insert = sql.SQL(
            "insert into {} (kind, name, paused_by, reason) values ('task', 'work', 'ann', 'mine')"
        )
        other.execute(insert.format(pauses))
        answer = threads.submit(app.pause_task, "work", reason="another")
        waiting = "select from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
        while not db.connection.execute(waiting, [f"%{db.target.schema}%.pauses%"]).rowcount:
            sleep(0.01)  # PostgreSQL sends no notice of a session that waits for a lock
        other.commit()
        pause = answer.result(10)
    assert (pause.paused_by, pause.reason, pause.already_paused) == ("ann", "mine", True)


async def test_a_paused_queue_is_not_claimed_until_it_is_resumed(app: App, db: StoreHarness) -> None:
    db.send(queue="mail")
    assert (await app.apause_queue("mail")).kind == "queue"
    db.send(queue="other")
    (claimed,) = db.claim()
    assert claimed.queue == "other"
    assert [pause.name for pause in await app.alist_pauses()] == ["mail"]
    await app.aresume_queue("mail")
    (mail,) = db.claim()
    for each in (mail, claimed):
        db.cancel(each.id)
    await app.aclose()


def test_a_resume_notifies_waiting_workers(app: App, db: StoreHarness) -> None:
    db.connection.execute(f'listen "{database_of(app).channel}"')
    db.send(queue="mail")
    app.pause_queue("mail")
    app.pause_task("work")
    app.resume_queue("mail")
    app.resume_task("work")
    payloads = [each.payload for each in db.connection.notifies(timeout=5, stop_after=3)]
    assert payloads == ["t:mail", "t:mail", "*"]


def test_a_pause_accepts_names_of_the_app_of_tasks_and_of_workers(
    database_url: str, schema: str, app: App, db: StoreHarness
) -> None:
    declared = App(database_url, schema=schema, queues=[QueueConfig("mail")])

    @declared.task
    def registered() -> None: ...

    row = workers.WorkerRow(
        id="w3", supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=["films"],
        metadata='{"tasks": ["render"]}',
    )  # fmt: skip
    db.run(workers.register_worker(row))
    db.send("sent", queue="seen")
    db.connection.execute(
        db.plain(
            "insert into {schema}.rates (seconds, at, queue, name, supervisor, completed)"
            " values (60, date_trunc('minute', now()), 'ran', 'done', 's1', 1)"
        )
    )
    for name in ("registered", "render", "sent", "done"):
        assert declared.pause_task(name).name == name
    for name in ("mail", "default", "films", "seen", "ran"):
        assert declared.pause_queue(name).name == name
    declared.close()


def test_the_queue_of_a_task_function_is_listed_and_can_be_paused_while_it_is_empty(
    database_url: str, schema: str, db: StoreHarness
) -> None:
    app = App(database_url, schema=schema)

    @app.task(queue="drained")
    def ship() -> None: ...

    assert [each.name for each in app.queues()] == ["drained"]
    assert app.pause_queue("drained").name == "drained"
    app.close()


@pytest.mark.parametrize("kind", ["task", "queue"])
def test_a_pause_refuses_an_unknown_name_and_suggests_the_nearest_one(
    app: App, db: StoreHarness, kind: str
) -> None:
    db.send("render", queue="render")
    pause = app.pause_task if kind == "task" else app.pause_queue
    with pytest.raises(UnknownName, match=f"{kind.capitalize()} 'rendre' is not known here.*'render'"):
        pause("rendre")
    with pytest.raises(ConfigurationError, match="name"):
        pause("two words")
    assert app.list_pauses() == []


def test_the_reason_of_a_pause_has_1_to_1000_printable_characters(app: App, db: StoreHarness) -> None:
    db.send(queue="mail")
    for wrong in ("", " ", "x" * 1_001, "a\nb", 7):
        with pytest.raises(ConfigurationError, match=r"pause_task\.reason"):
            app.pause_task("work", reason=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"pause_queue\.reason"):
            app.pause_queue("mail", reason=wrong)  # type: ignore[arg-type]
    assert app.list_pauses() == []
    assert app.pause_task("work", reason="ü" * 1_000).reason == "ü" * 1_000
    assert app.pause_queue("mail").reason is None


def test_a_resume_of_a_name_that_is_not_paused_is_refused(app: App, db: StoreHarness) -> None:
    db.send("render")
    app.pause_task("render")
    with pytest.raises(NotPaused, match=r"Task 'rendre' is not paused; paused tasks: render.*'render'"):
        app.resume_task("rendre")
    with pytest.raises(NotPaused, match="paused queues: none"):
        app.resume_queue("render")
