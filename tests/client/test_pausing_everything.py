"""Test the pause of everything: no worker claims, not even with older code, and every listing shows the pause."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec import structs
from psycopg import sql

from everbeat import App, TaskState
from everbeat.cli.main import main
from everbeat.client.database_access import database_of
from everbeat.domain.doctor.work import judge_pauses
from everbeat.errors import ConfigurationError, NotPaused
from everbeat.store import statement
from tests.client.working import working
from tests.store.conftest import StoreHarness

NEW = "where not exists (select from {schema}.pauses p where p.kind = 'all')"
"""The condition that the claims of older code do not have."""


def register(db: StoreHarness, worker: str, *names: str) -> None:
    """Store the names of task functions that a worker registers when it starts."""
    query = sql.SQL("update {}.workers set metadata = %s where id = %s").format(
        sql.Identifier(db.target.schema)
    )
    db.connection.execute(query, [json.dumps({"tasks": names}), worker])


def rows(db: StoreHarness) -> list[tuple[Any, ...]]:
    query = sql.SQL("select kind, name from {}.pauses order by 1, 2").format(sql.Identifier(db.target.schema))
    return db.connection.execute(query).fetchall()


def test_no_task_is_claimed_while_everything_is_paused(app: App, db: StoreHarness) -> None:
    pause = app.pause_all(reason="the bank is down")
    assert (pause.kind, pause.name, pause.paused_by, pause.reason) == (
        "all",
        "*",
        "operator",
        "the bank is down",
    )
    for options in ({}, {"queue": "mail"}, {"serial": "line"}, {"name": "another"}):
        db.send(**options)  # type: ignore[arg-type]
    assert db.claim(names=("work", "another")) == []
    assert app.list_pauses() == [pause]
    assert app.pause_all(reason="again") == structs.replace(pause, already_paused=True)
    assert app.resume_all() == pause
    assert app.list_pauses() == []
    claimed = db.claim(names=("work", "another"))
    assert len(claimed) == 4
    with pytest.raises(NotPaused, match="There is no pause of everything"):
        app.resume_all()
    for each in claimed:
        db.cancel(each.id)


def test_claims_of_older_code_stop_for_the_names_of_live_workers(
    app: App, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = statement.source.__wrapped__

    def source(name: str) -> str:
        text: str = original(name)
        if name == "task/claim_tasks":
            assert NEW in text
            text = text.replace(NEW, "")
        return text

    monkeypatch.setattr(statement, "source", source)
    statement.compose.cache_clear()
    try:
        register(db, "w1", "work", "bill")
        db.send()
        pause = app.pause_all(reason="the bank is down")
        assert rows(db) == [("all", "*"), ("task", "bill"), ("task", "work")]
        assert app.list_pauses() == [pause]
        assert db.claim() == []
        app.resume_all()
        assert rows(db) == []
        (claimed,) = db.claim()
        db.cancel(claimed.id)
    finally:
        monkeypatch.undo()
        statement.compose.cache_clear()


def test_other_pauses_outlast_the_pause_of_everything(app: App, db: StoreHarness) -> None:
    register(db, "w1", "work", "bill", "pack")
    app.pause_task("work", reason="before")
    app.pause_queue("default", reason="a queue")
    app.pause_all()
    during = app.pause_task("bill", reason="during")
    assert (during.already_paused, during.reason) == (False, "during")
    assert {(each.kind, each.name) for each in app.list_pauses()} == {
        ("task", "work"), ("queue", "default"), ("all", "*"), ("task", "bill")
    }  # fmt: skip
    with pytest.raises(NotPaused):
        app.resume_task("pack")  # paused only together with everything
    app.resume_all()
    assert rows(db) == [("queue", "default"), ("task", "bill"), ("task", "work")]


async def test_a_resume_of_everything_wakes_waiting_workers(app: App, db: StoreHarness) -> None:
    @app.task
    async def work() -> int:
        return 1

    await app.apause_all()
    async with working(app):
        handle = await work.asend()
        db.connection.execute(f'listen "{database_of(app).channel}"')
        assert (await handle.ainfo()).state is TaskState.PENDING
        await app.aresume_all()
        assert await handle.aresult(timeout=30) == 1
    assert any(each.payload == "*" for each in db.connection.notifies(timeout=1))


async def test_running_code_continues_while_everything_is_paused(app: App, db: StoreHarness) -> None:
    began, finish = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> str:
        began.set()
        await finish.wait()
        return "done"

    async with working(app):
        handle = await work.asend()
        await began.wait()
        await app.apause_all()
        later = await work.asend()
        finish.set()
        assert await handle.aresult(timeout=30) == "done"
        assert (await later.ainfo()).state is TaskState.PENDING
        await app.aresume_all()
        assert await later.aresult(timeout=30) == "done"


def test_explain_doctor_and_queues_show_the_pause_of_everything(
    app: App, db: StoreHarness, database_url: str, schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    register(db, "w1", "work")
    task_id = db.send()
    pause = app.pause_all(reason="the bank is down")
    reasons = {each.code: each for each in app.explain(task_id).reasons}
    assert "TASK_PAUSED" not in reasons
    found = reasons["ALL_PAUSED"]  # type: ignore[index]
    assert found.text == "everything was paused by operator: the bank is down"
    assert (found.since, found.command) == (pause.paused_at, "everbeat resume --all")
    check = judge_pauses(app.list_pauses())
    assert "everything by operator (the bank is down)" in str(check)
    assert "everbeat resume --all" in str(check)

    def run(*arguments: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--url", database_url, "--schema", schema])
        assert ended.value.code in (0, None), arguments
        shown = capsys.readouterr()
        return shown.out, shown.err

    assert "Everything is paused since" in run("queues")[1]
    assert "the bank is down" in run("tasks", "pauses")[0]
    assert run("resume", "--all")[0].startswith("everything is resumed; it was paused since")
    assert run("pause", "--all", "--reason", "a deploy")[0].rstrip().endswith("by operator: a deploy")
    assert "is not stored" in run("pause", "--all", "--reason", "another")[1]
    assert json.loads(run("resume", "--all", "--json")[0])["pauses"][0]["kind"] == "all"
    with pytest.raises(SystemExit) as refused:
        main(["pause", "--url", database_url, "--schema", schema])
    assert refused.value.code == 2
    assert "give --all to pause everything" in capsys.readouterr().err


def test_a_reason_that_cannot_be_shown_is_rejected(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"pause_all\.reason"):
        app.pause_all(reason="\x00")
