"""The schema is renamed in SQL while a tree and clients use it: an outage with a name and a fix, until it is renamed back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType

import psutil
import pytest
from psycopg import sql

from everbeat import App
from everbeat.errors import SchemaGone, SchemaMissing
from tests.stories.stage import FAST, Stage, Tree

pytestmark = pytest.mark.story


def rename(stage: Stage, old: str, new: str) -> None:
    statement = sql.SQL("alter schema {} rename to {}").format(sql.Identifier(old), sql.Identifier(new))
    stage.connection.execute(statement)


def named(stage: Stage, tree: Tree) -> bool:
    """Whether the log tells of an outage by the name of the schema."""
    return any("database_unreachable" in line and stage.schema in line for line in tree.output().splitlines())


@pytest.fixture
def away(stage: Stage) -> Iterator[str]:
    """Another name of the schema; the story's own is back afterwards."""
    name = f"{stage.schema}_away"
    yield name
    if stage.connection.execute("select 1 from pg_namespace where nspname = %s", [name]).fetchone():
        rename(stage, name, stage.schema)


def test_workers_wait_for_a_renamed_schema_and_lose_nothing(
    stage: Stage, deeds: ModuleType, away: str
) -> None:  # J11
    tree = stage.ready_tree(recovery=FAST, worker={"processes": 2})
    other = stage.ready_tree(recovery=FAST)
    held = deeds.wait_for.send("door")
    stage.until(stage.started(held.id), within=20, what="the task runs", tree=tree)
    before = {worker["pid"] for each in (tree, other) for worker in stage.workers(each)}
    rename(stage, stage.schema, away)
    for each in (tree, other):
        stage.until(
            lambda each=each: named(stage, each), within=20, what="the log names the schema", tree=each
        )
        assert "rename it back: alter schema <new name> rename to" in each.output()
    with pytest.raises(SchemaMissing, match=stage.schema) as caught:
        deeds.quick.send(1)
    assert "rename it back" in str(caught.value.fix)
    stage.open_gate("door")
    stage.until(lambda: stage.effects("end", held.id), within=20, what="its code ends", tree=tree)
    time.sleep(5)  # two thresholds and a look: nobody may be declared dead meanwhile
    assert (tree.process.poll(), other.process.poll()) == (None, None)
    rename(stage, away, stage.schema)
    assert held.result(timeout=30) is not None
    assert deeds.quick.send(9).result(timeout=30) == 9
    assert {worker["pid"] for each in (tree, other) for worker in stage.workers(each)} == before
    assert stage.recoveries() == []
    assert [attempt["outcome"] for attempt in stage.attempts(held.id)] == ["COMPLETED"]


@pytest.mark.long  # a refused process is tried again every half minute
def test_a_worker_process_that_dies_meanwhile_is_replaced_afterwards(
    stage: Stage, deeds: ModuleType, away: str
) -> None:  # J11
    tree = stage.ready_tree(recovery=FAST)
    (worker,) = stage.workers(tree)
    rename(stage, stage.schema, away)
    psutil.Process(worker["pid"]).kill()
    stage.until(
        lambda: "SCHEMA_GONE" in tree.output() or "was renamed to" in tree.output(),
        within=30,
        what="it is told",
        tree=tree,
    )
    rename(stage, away, stage.schema)
    assert deeds.quick.send(1).result(timeout=60) == 1
    assert stage.workers(tree)[0]["pid"] != worker["pid"]


def test_no_program_works_in_two_schemas_at_once(stage: Stage, away: str) -> None:  # J11
    rename(stage, stage.schema, away)
    for schema, migrates in ((stage.schema, True), (stage.schema, False), (away, True), (away, False)):
        app = App(stage.url, schema=schema, auto_migrate=migrates, patience="500ms")
        with pytest.raises(SchemaGone) as caught:
            app.send_by_name("work")
        assert f"{stage.schema!r} in" in caught.value.message
        assert f"was renamed to {away!r}" in caught.value.message
        assert f'alter schema "{away}" rename to "{stage.schema}"' in str(caught.value.fix)
        with pytest.raises(SchemaGone):
            app.migrate()
        app.close()
    names = stage.connection.execute(
        "select count(*) from pg_namespace where nspname = %s", [stage.schema]
    ).fetchone()
    assert names == {"count": 0}
    rename(stage, away, stage.schema)
    app = App(stage.url, schema=stage.schema)
    assert app.send_by_name("work").info().state == "PENDING"
    app.close()
