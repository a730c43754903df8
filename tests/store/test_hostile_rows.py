"""One row with an extreme or broken value harms no other row: work continues, lists show the others, and `doctor` names the row.

The columns come from the catalogue. Every hostile value is stored in a separate copy, and all copies of a table at once. A
failure names the step that failed; the long variant narrows it to one table.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from uuid import UUID

import pytest

from everbeat import App, Completed, RetryPolicy, TaskError
from everbeat.store import leases, migrating, workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from tests.cli.conftest import Command, everbeat, forks
from tests.recovering.conftest import ManualObserver
from tests.store.conftest import StoreHarness
from tests.store.hostile import change, columns, refusals, tables
from tests.store.hostile_scenario import Scenario, Step

__all__ = ["everbeat", "forks"]

NOT_READ = {
    "schema_versions", "schema_steps", "installation", "history_parts", "labels", "batches", "batch_events", "stream_items",
    "bulk_actions", "audit_log", "rates", "rate_sums", "depths", "depth_peaks", "attempt_logs",
}  # fmt: skip
"""Tables without hostile rows: no claim, beat, sweep or plain list of tasks reads them, or the scenario has no rows of them."""
HOLDS = {"id", "claim_id", "state"}
"""A change of these columns takes the lease."""
QUOTES = "'"
ONE_ROW = {"relay", "turns"}
"""Tables whose rows are not copied: each has one row for each purpose."""
CLOSED = {"23503", "23514", "428C9"}
"""Rejections that can apply to any value of a column: a foreign key, a check of its words, or an identity."""
READ = (
    "attempts", "beats", "edges", "gates", "limits", "line_changes", "lines", "message_outbox", "nodes", "outbox", "pauses", "recoveries",
    "schedule_versions", "schedules", "signals", "steps", "supervisors", "tasks", "ticks", "unique_keys", "worker_states", "workers",
    "workflows",
)  # fmt: skip


@pytest.fixture
async def scenario(database_url: str, schema: str, everbeat: Command) -> AsyncIterator[Scenario]:
    target = Target.parse(database_url, schema=schema)
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    db = StoreHarness(target, connection)
    session = Session(target, "everbeat test caretakers")
    app = App(database_url, schema=schema)
    yield Scenario(db, ManualObserver(db, session), everbeat, app)
    await session.drop()
    await app.aclose()
    db.database.close()
    connection.close()


def test_the_hostile_rows_cover_every_table_of_the_catalogue(scenario: Scenario) -> None:  # J17
    found = tables(scenario.db.connection, scenario.db.target.schema)
    assert found == {*READ, *ONE_ROW, *NOT_READ}


async def test_ordinary_rows_alone_pass_every_step_at_any_speed(scenario: Scenario) -> None:  # J17
    """Without it, a step can fail because of the scenario's own timing: small tables were claimed before their rows were late."""
    scenario.populate()
    assert all(scenario.db.row(one, "good_until < sent_at") for one in scenario.late)
    said = await failures(scenario.work())
    assert not said, "\n".join(said)


@pytest.mark.timeout(360)
async def test_hostile_rows_of_all_tables_harm_no_other_row(scenario: Scenario) -> None:  # J17
    scenario.populate()
    for table in READ:
        scenario.plant(table, share=True)
    said = unexplained(scenario, READ) + await failures(scenario.steps())
    assert not said, "\n".join(said)


@pytest.mark.long
@pytest.mark.parametrize("table", READ)
async def test_hostile_rows_of_one_table_harm_no_other_row(scenario: Scenario, table: str) -> None:  # J17
    scenario.populate()
    scenario.plant(table, share=False)
    said = unexplained(scenario, [table]) + await failures(scenario.steps())
    assert not said, "\n".join(said)


async def test_rows_that_become_hostile_while_their_code_runs_do_not_prevent_other_tasks_from_settling(
    scenario: Scenario,
) -> None:  # J17
    scenario.db.supervisor("s1", "w1")
    go = asyncio.Event()

    @scenario.app.task(
        name="hold", retry=RetryPolicy(max_retries=3, intervals=["1h"], auto_retry_for=["AGAIN"])
    )
    async def hold(fails: bool = False) -> None:
        await go.wait()
        if fails:
            raise TaskError("AGAIN", "again")

    neighbours = [await hold.asend(fails=False) for _ in range(5)]
    changes = [
        (column, value)
        for column in columns(scenario.db.connection, scenario.db.target.schema, "tasks")
        for value in column.values
        if column.name not in HOLDS
    ]
    victims = await scenario.app.asend_many(
        [hold.call(fails=place % 2 == 1) for place in range(len(changes))]
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(scenario.app.arun_worker(async_concurrency=1_000))
        await until(lambda: scenario.count("hold", "RUNNING") == len(victims) + len(neighbours))
        stored = [
            change(scenario.db.connection, scenario.db.target.schema, "tasks", f"id = '{victim.id}'", *what)
            for victim, what in zip(victims, changes, strict=True)
        ]
        assert sum(stored) > len(stored) // 2
        go.set()
        outcomes = await asyncio.gather(
            *(each.aoutcome(timeout=20) for each in neighbours), return_exceptions=True
        )
        scenario.app.stop_worker()
        scenario.app.stop_worker()
    assert outcomes == [Completed(None)] * len(neighbours)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("fence", "9223372036854775807"),
        ("attempt", "2147483647"),
        ("enqueued_at", "'-infinity'"),
        ("progress", "'7'"),
    ],
)
async def test_the_doctor_names_the_row_the_column_and_the_value(
    scenario: Scenario, column: str, value: str
) -> None:  # J17
    task_id = scenario.db.send()
    (kind,) = (
        each
        for each in columns(scenario.db.connection, scenario.db.target.schema, "tasks")
        if each.name == column
    )
    assert change(
        scenario.db.connection, scenario.db.target.schema, "tasks", f"id = '{task_id}'", kind, value
    )
    found = {each["code"]: each for each in scenario.everbeat("doctor", "--json").document["checks"]}[
        "BAD_ROWS"
    ]
    assert found["verdict"] == "WARN"
    assert f"tasks {task_id}: {column} = {value.strip(QUOTES)!r}" in found["text"]
    assert "delete the rows" in found["fix"]


def test_a_claim_skips_a_row_whose_counter_has_no_next_value(db: StoreHarness) -> None:  # J17
    for column, most in (("fence", 2**63 - 1), ("attempt", 2**31 - 1)):
        (head, second), (plain, other) = (
            (db.send(serial=column), db.send(serial=column)),
            (db.send(), db.send()),
        )
        for task_id in (head, plain):
            question = db.plain(f"update {{schema}}.tasks set {column} = %s where id = %s")
            db.connection.execute(question, [most, task_id])
        assert {each.id for each in db.claim("w1")} == {second, other}
        forget(db, head, plain)


def test_an_attempt_that_the_history_cannot_store_does_not_prevent_others_from_settling(
    db: StoreHarness,
) -> None:  # J17
    numbered, torn, sound = (db.running() for _ in range(3))
    for text, task_id in (
        ("update {schema}.tasks set claimed_at = null, started_at = null where id = %s", torn.id),
        ("update {schema}.tasks set retry_count = 2147483647 where id = %s", numbered.id),
    ):
        db.connection.execute(db.plain(text), [task_id])
    settlements = [
        leases.Settlement(
            id=each.id, claim_id=each.claim_id, outcome="FAILED", error=b'{"code": "X"}', retry_in_ms=0
        )
        for each in (numbered, torn, sound)
    ]
    verdicts = db.run(leases.settle(settlements, channel=db.target.channel))
    assert [*verdicts.values()] == ["PENDING"] * 3
    forget(db, numbered.id, torn.id)


def test_a_turn_that_ends_at_infinity_is_free(db: StoreHarness) -> None:  # J17
    question = (
        "insert into {schema}.turns (service, taken_until, taken_by) values ('expirer', 'infinity', 'nobody')"
    )
    db.connection.execute(db.plain(question))
    assert db.run(workers.take_turn("expirer", interval_ms=1_000, taken_by="s1"))
    assert not db.run(workers.take_turn("expirer", interval_ms=1_000, taken_by="s2"))


def forget(db: StoreHarness, *ids: UUID) -> None:
    """Delete hostile rows, which would breach the invariants that are checked after a test."""
    for table, key in (("attempts", "task_id"), ("tasks", "id")):
        db.connection.execute(db.plain(f"delete from {{schema}}.{table} where {key} = any(%s)"), [list(ids)])


async def until(truth: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not truth():
            await asyncio.sleep(0.05)  # the rows are polled from outside


def unexplained(scenario: Scenario, tables: Sequence[str]) -> list[str]:
    """Return the gaps of the plan itself: values neither stored nor rejected, unexpected rejections, columns without a stored value."""
    connection, schema = scenario.db.connection, scenario.db.target.schema
    wanted = {
        (table, column.name, value)
        for table in tables
        for column in columns(connection, schema, table)
        for value in column.values
    }
    stored = {(row.table, row.column, row.value) for row in scenario.planted}
    refused = {(row.table, row.column, row.value) for row in scenario.refused}
    expected = refusals(connection, schema)
    may_refuse_all = {(table, column) for table, column, state in expected if state in CLOSED}
    return [
        *(f"neither stored nor refused: {each}" for each in wanted - stored - refused),
        *(f"refused for an odd reason: {row}" for row in scenario.refused if not row.is_expected(expected)),
        *(
            f"no value of this column was stored: {each}"
            for each in {row[:2] for row in wanted} - {row[:2] for row in stored} - may_refuse_all
        ),
    ]


async def failures(steps: Sequence[Step]) -> list[str]:
    """Run every step and return the error of each step that failed."""
    said: list[str] = []
    for step in steps:
        since = monotonic()
        try:
            await step()
        except Exception as problem:  # noqa: BLE001 - every step is tried
            said.append(f"{step.__name__}: {type(problem).__name__}: {str(problem)[:6000]}")
        print(step.__name__, round(monotonic() - since, 2))
    return said
