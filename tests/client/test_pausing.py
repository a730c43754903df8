"""Pausing and resuming through the app: known names only, at once, and said clearly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import psycopg
import pytest
from msgspec import structs
from psycopg import sql

from everbeat import App, ConfigurationError, NotPaused, QueueConfig, UnknownName
from everbeat.store import leases, workers
from tests.store.conftest import Hands


def test_a_paused_task_function_is_not_claimed_until_it_is_resumed(app: App, hands: Hands) -> None:
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
        "the first one stands, and the answer says so"
    )
    assert app.list_pauses() == [pause]
    assert hands.claim() == []
    assert hands.run(leases.next_due(names=["work"], queues=None)).due_in_ms is None
    assert app.resume_task("work") == pause
    assert app.list_pauses() == []
    (claimed,) = hands.claim()
    hands.cancel(claimed.id)


def test_two_who_pause_at_once_are_told_of_the_same_pause(app: App, hands: Hands, database_url: str) -> None:
    hands.send()
    with psycopg.connect(database_url) as other, ThreadPoolExecutor(1) as threads:
        pauses = sql.Identifier(hands.target.schema, "pauses")
        insert = sql.SQL(
            "insert into {} (kind, name, paused_by, reason) values ('task', 'work', 'ann', 'mine')"
        )
        other.execute(insert.format(pauses))
        answer = threads.submit(app.pause_task, "work", reason="another")
        waiting = "select from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
        while not hands.connection.execute(waiting, [f"%{hands.target.schema}%.pauses%"]).rowcount:
            sleep(0.01)  # a lock that is waited for rings no bell
        other.commit()
        pause = answer.result(10)
    assert (pause.paused_by, pause.reason, pause.already_paused) == ("ann", "mine", True)


async def test_a_paused_queue_too(app: App, hands: Hands) -> None:
    hands.send(queue="mail")
    assert (await app.apause_queue("mail")).kind == "queue"
    hands.send(queue="other")
    (claimed,) = hands.claim()
    assert claimed.queue == "other"
    assert [pause.name for pause in await app.alist_pauses()] == ["mail"]
    await app.aresume_queue("mail")
    (mail,) = hands.claim()
    for each in (mail, claimed):
        hands.cancel(each.id)
    await app.aclose()


def test_a_resume_wakes_those_who_wait(app: App, hands: Hands) -> None:
    hands.connection.execute(f'listen "{app.door.channel}"')
    hands.send(queue="mail")
    app.pause_queue("mail")
    app.pause_task("work")
    app.resume_queue("mail")
    app.resume_task("work")
    payloads = [each.payload for each in hands.connection.notifies(timeout=5, stop_after=3)]
    assert payloads == ["t:mail", "t:mail", "*"]


def test_names_are_known_from_the_app_from_tasks_and_from_workers(
    database_url: str, schema: str, app: App, hands: Hands
) -> None:
    declared = App(database_url, schema=schema, queues=[QueueConfig("mail")])

    @declared.task
    def registered() -> None: ...

    row = workers.WorkerRow(
        id="w3", supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=["films"],
        metadata='{"tasks": ["render"]}',
    )  # fmt: skip
    hands.run(workers.register_worker(row))
    hands.send("sent", queue="seen")
    for name in ("registered", "render", "sent"):
        assert declared.pause_task(name).name == name
    for name in ("mail", "default", "films", "seen"):
        assert declared.pause_queue(name).name == name
    declared.close()


@pytest.mark.parametrize("kind", ["task", "queue"])
def test_an_unknown_name_is_refused_with_the_nearest_right_one(app: App, hands: Hands, kind: str) -> None:
    hands.send("render", queue="render")
    pause = app.pause_task if kind == "task" else app.pause_queue
    with pytest.raises(UnknownName, match=f"{kind.capitalize()} 'rendre' is not known here.*'render'"):
        pause("rendre")
    with pytest.raises(ConfigurationError, match="name"):
        pause("two words")
    assert app.list_pauses() == []


def test_a_reason_has_1_to_1000_printable_characters(app: App, hands: Hands) -> None:
    hands.send(queue="mail")
    for wrong in ("", " ", "x" * 1_001, "a\nb", 7):
        with pytest.raises(ConfigurationError, match=r"pause_task\.reason"):
            app.pause_task("work", reason=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"pause_queue\.reason"):
            app.pause_queue("mail", reason=wrong)  # type: ignore[arg-type]
    assert app.list_pauses() == []
    assert app.pause_task("work", reason="ü" * 1_000).reason == "ü" * 1_000
    assert app.pause_queue("mail").reason is None


def test_resuming_what_is_not_paused_says_so(app: App, hands: Hands) -> None:
    hands.send("render")
    app.pause_task("render")
    with pytest.raises(NotPaused, match=r"Task 'rendre' is not paused; paused tasks: render.*'render'"):
        app.resume_task("rendre")
    with pytest.raises(NotPaused, match="paused queues: none"):
        app.resume_queue("render")
