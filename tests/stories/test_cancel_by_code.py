"""A worker is killed while it stores the end of a task whose code raised Cancel."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import psycopg
import pytest
from psycopg import sql

from tests.stories.scenario import Scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(120)]

ENDS_WAIT = """
create function {schema}.wait_to_end() returns trigger language plpgsql as $$
begin
    perform pg_advisory_xact_lock(hashtext({name}));
    return new;
end $$;
create trigger wait_to_end before update on {schema}.tasks
    for each row when (old.state = 'RUNNING' and new.state = 'CANCELLED') execute function {schema}.wait_to_end()
"""


@pytest.fixture
def durable(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "durable") as program:
        yield program


def test_the_children_of_a_task_that_raised_cancel_are_cancelled_if_its_tree_is_killed(
    scenario: Scenario, durable: ModuleType
) -> None:
    """The end of the parent waits for a lock while the whole tree is killed."""
    parts = {"schema": sql.Identifier(scenario.schema), "name": sql.Literal(scenario.schema)}
    scenario.connection.execute(sql.SQL(ENDS_WAIT).format(**parts))
    with psycopg.connect(scenario.url, autocommit=True) as keeper:
        keeper.execute("select pg_advisory_lock(hashtext(%s))", [scenario.schema])
        tree = scenario.ready_tree(program="durable", worker={"processes": 1, "process_concurrency": 1})
        durable.app.pause_task(durable.pay_all.name)
        task = durable.withdraw_with_child.send()
        waits = "select from pg_locks where locktype = 'advisory' and not granted"
        scenario.until(lambda: scenario.query(waits), within=30, what="the end is being stored", tree=tree)
        tree.kill()
        assert children_of(scenario, task.id) == ["CANCELLED"]
        assert scenario.task(task.id)["state"] == "RUNNING"
    scenario.ready_tree(program="durable", worker={"processes": 1, "process_concurrency": 1})
    scenario.until(scenario.state_is(task.id, "CANCELLED"), within=30, what="the parent has ended")
    assert children_of(scenario, task.id) in (["CANCELLED"], ["CANCELLED"] * 2)


def children_of(scenario: Scenario, parent: object) -> list[str]:
    found = scenario.query("select state from {schema}.tasks where parent_id = %s", parent)
    return [row["state"] for row in found]
