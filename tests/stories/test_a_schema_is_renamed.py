"""The schema is renamed in SQL while a tree and clients use it: an outage with a name and a fix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType

import psutil
import pytest
from psycopg import sql

from everbeat import App
from everbeat.errors import SchemaGone, SchemaMissing
from tests.stories.scenario import FAST, Scenario, Tree

pytestmark = pytest.mark.story


def rename(scenario: Scenario, old: str, new: str) -> None:
    statement = sql.SQL("alter schema {} rename to {}").format(sql.Identifier(old), sql.Identifier(new))
    scenario.connection.execute(statement)


def named(scenario: Scenario, tree: Tree) -> bool:
    """Whether the log reports an outage with the name of the schema."""
    return any(
        "database_unreachable" in line and scenario.schema in line for line in tree.output().splitlines()
    )


@pytest.fixture
def away(scenario: Scenario) -> Iterator[str]:
    """Yield another name for the schema; restore the original name afterwards."""
    name = f"{scenario.schema}_away"
    yield name
    if scenario.connection.execute("select 1 from pg_namespace where nspname = %s", [name]).fetchone():
        rename(scenario, name, scenario.schema)


@pytest.mark.long
def test_workers_wait_for_a_renamed_schema_and_lose_nothing(
    scenario: Scenario, sample_tasks: ModuleType, away: str
) -> None:  # J11
    tree = scenario.ready_tree(recovery=FAST, worker={"processes": 2})
    other = scenario.ready_tree(recovery=FAST)
    held = sample_tasks.wait_for.send("door")
    scenario.until(scenario.started(held.id), within=20, what="the task runs", tree=tree)
    before = {worker["pid"] for each in (tree, other) for worker in scenario.workers(each)}
    rename(scenario, scenario.schema, away)
    for each in (tree, other):
        scenario.until(
            lambda each=each: named(scenario, each), within=20, what="the log names the schema", tree=each
        )
        assert "rename it back: alter schema <new name> rename to" in each.output()
    with pytest.raises(SchemaMissing, match=scenario.schema) as caught:
        sample_tasks.quick.send(1)
    assert "rename it back" in str(caught.value.fix)
    scenario.open_gate("door")
    scenario.until(lambda: scenario.effects("end", held.id), within=20, what="its code ends", tree=tree)
    time.sleep(5)  # two thresholds and a check: no tree may be declared dead meanwhile
    assert (tree.process.poll(), other.process.poll()) == (None, None)
    rename(scenario, away, scenario.schema)
    assert held.result(timeout=30) is not None
    assert sample_tasks.quick.send(9).result(timeout=30) == 9
    assert {worker["pid"] for each in (tree, other) for worker in scenario.workers(each)} == before
    assert scenario.recoveries() == []
    assert [attempt["outcome"] for attempt in scenario.attempts(held.id)] == ["COMPLETED"]


@pytest.mark.long  # a failed start of a process is repeated every half minute
def test_a_worker_process_that_dies_while_the_schema_is_renamed_is_replaced_afterwards(
    scenario: Scenario, sample_tasks: ModuleType, away: str
) -> None:  # J11
    tree = scenario.ready_tree(recovery=FAST)
    (worker,) = scenario.workers(tree)
    rename(scenario, scenario.schema, away)
    psutil.Process(worker["pid"]).kill()
    scenario.until(
        lambda: "SCHEMA_GONE" in tree.output() or "was renamed to" in tree.output(),
        within=30,
        what="it is told",
        tree=tree,
    )
    rename(scenario, away, scenario.schema)
    assert sample_tasks.quick.send(1).result(timeout=60) == 1
    assert scenario.workers(tree)[0]["pid"] != worker["pid"]


def test_no_program_works_in_two_schemas_at_once(scenario: Scenario, away: str) -> None:  # J11
    rename(scenario, scenario.schema, away)
    for schema, migrates in ((scenario.schema, True), (scenario.schema, False), (away, True), (away, False)):
        app = App(scenario.url, schema=schema, auto_migrate=migrates, patience="500ms")
        with pytest.raises(SchemaGone) as caught:
            app.send_by_name("work")
        assert f"{scenario.schema!r} in" in caught.value.message
        assert f"was renamed to {away!r}" in caught.value.message
        assert f'alter schema "{away}" rename to "{scenario.schema}"' in str(caught.value.fix)
        with pytest.raises(SchemaGone):
            app.migrate()
        app.close()
    names = scenario.connection.execute(
        "select count(*) from pg_namespace where nspname = %s", [scenario.schema]
    ).fetchone()
    assert names == {"count": 0}
    rename(scenario, away, scenario.schema)
    app = App(scenario.url, schema=scenario.schema)
    assert app.send_by_name("work").info().state == "PENDING"
    app.close()
