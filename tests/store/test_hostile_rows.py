"""One row with an extreme or broken value harms no other row: work goes on, lists show the others, and `doctor` names the row.

The columns come from the catalogue. Every hostile value is stored in a copy of its own, and all copies of a table at once. A
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
from tests.services.conftest import Onlooker
from tests.store.conftest import Hands
from tests.store.hostile import change, columns, refusals, tables
from tests.store.hostile_stage import Stage, Step

__all__ = ["everbeat", "forks"]

NOT_READ = {"schema_versions", "schema_steps", "installation"}
"""Nothing that claims, beats, sweeps or lists reads these."""
HOLDS = {"id", "claim_id", "state"}
"""Whoever changes these takes the lease."""
QUOTES = "'"
ONE_ROW = {"relay", "turns"}
"""Their rows are not copied: there is one for each purpose."""
CLOSED = {"23503", "23514", "428C9"}
"""Refusals that can hold for each value of a column: a foreign key, a check of its words, or an identity."""
READ = (
    "attempts", "beats", "edges", "message_outbox", "nodes", "outbox", "pauses", "recoveries", "signals", "steps", "supervisors", "tasks",
    "worker_states", "workers", "workflows",
)  # fmt: skip


@pytest.fixture
async def stage(database_url: str, schema: str, everbeat: Command) -> AsyncIterator[Stage]:
    target = Target.parse(database_url, schema=schema)
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    hands = Hands(target, connection)
    session = Session(target, "everbeat test caretakers")
    app = App(database_url, schema=schema)
    yield Stage(hands, Onlooker(hands, session), everbeat, app)
    await session.drop()
    await app.aclose()
    hands.database.close()
    connection.close()


def test_every_table_of_the_catalogue_is_tried(stage: Stage) -> None:  # J17
    found = tables(stage.hands.connection, stage.hands.target.schema)
    assert found == {*READ, *ONE_ROW, *NOT_READ}


async def test_usual_rows_alone_pass_every_step_however_soon_it_comes(stage: Stage) -> None:  # J17
    """Without it, a step can fail by the stage's own timing: the long variants of small tables claimed rows before they were late."""
    stage.populate()
    assert all(stage.hands.row(one, "good_until < sent_at") for one in stage.late)
    said = await failures(stage.work())
    assert not said, "\n".join(said)


async def test_hostile_rows_of_all_tables_harm_no_neighbour(stage: Stage) -> None:  # J17
    stage.populate()
    for table in READ:
        stage.plant(table, share=True)
    said = unexplained(stage, READ) + await failures(stage.steps())
    assert not said, "\n".join(said)


@pytest.mark.long
@pytest.mark.parametrize("table", READ)
async def test_a_hostile_row_of_one_table_harms_no_neighbour(stage: Stage, table: str) -> None:  # J17
    stage.populate()
    stage.plant(table, share=False)
    said = unexplained(stage, [table]) + await failures(stage.steps())
    assert not said, "\n".join(said)


async def test_rows_that_turn_hostile_while_their_code_runs_keep_no_other_from_settling(
    stage: Stage,
) -> None:  # J17
    stage.hands.supervisor("s1", "w1")
    go = asyncio.Event()

    @stage.app.task(name="hold", retry=RetryPolicy(max_retries=3, intervals=["1h"], auto_retry_for=["AGAIN"]))
    async def hold(fails: bool = False) -> None:
        await go.wait()
        if fails:
            raise TaskError("AGAIN", "again")

    neighbours = [await hold.asend(fails=False) for _ in range(5)]
    changes = [
        (column, value)
        for column in columns(stage.hands.connection, stage.hands.target.schema, "tasks")
        for value in column.values
        if column.name not in HOLDS
    ]
    victims = await stage.app.asend_many([hold.call(fails=place % 2 == 1) for place in range(len(changes))])
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.app.arun_worker(async_concurrency=1_000))
        await until(lambda: stage.count("hold", "RUNNING") == len(victims) + len(neighbours))
        stored = [
            change(stage.hands.connection, stage.hands.target.schema, "tasks", f"id = '{victim.id}'", *what)
            for victim, what in zip(victims, changes, strict=True)
        ]
        assert sum(stored) > len(stored) // 2
        go.set()
        outcomes = await asyncio.gather(
            *(each.aoutcome(timeout=20) for each in neighbours), return_exceptions=True
        )
        stage.app.stop_worker()
        stage.app.stop_worker()
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
async def test_doctor_names_the_row_the_column_and_the_value(
    stage: Stage, column: str, value: str
) -> None:  # J17
    task_id = stage.hands.send()
    (kind,) = (
        each
        for each in columns(stage.hands.connection, stage.hands.target.schema, "tasks")
        if each.name == column
    )
    assert change(
        stage.hands.connection, stage.hands.target.schema, "tasks", f"id = '{task_id}'", kind, value
    )
    found = {each["code"]: each for each in stage.everbeat("doctor", "--json").document["checks"]}["BAD_ROWS"]
    assert found["verdict"] == "WARN"
    assert f"tasks {task_id}: {column} = {value.strip(QUOTES)!r}" in found["text"]
    assert "delete the rows" in found["fix"]


def test_a_row_whose_counter_has_no_next_value_is_passed_over_by_claims(hands: Hands) -> None:  # J17
    for column, most in (("fence", 2**63 - 1), ("attempt", 2**31 - 1)):
        (head, second), (plain, other) = (
            (hands.send(serial=column), hands.send(serial=column)),
            (hands.send(), hands.send()),
        )
        for task_id in (head, plain):
            question = hands.plain(f"update {{schema}}.tasks set {column} = %s where id = %s")
            hands.connection.execute(question, [most, task_id])
        assert {each.id for each in hands.claim("w1")} == {second, other}
        forget(hands, head, plain)


def test_an_attempt_that_its_history_cannot_hold_keeps_no_neighbour_from_settling(
    hands: Hands,
) -> None:  # J17
    numbered, torn, sound = (hands.running() for _ in range(3))
    for text, task_id in (
        ("update {schema}.tasks set claimed_at = null, started_at = null where id = %s", torn.id),
        ("update {schema}.tasks set retry_count = 2147483647 where id = %s", numbered.id),
    ):
        hands.connection.execute(hands.plain(text), [task_id])
    settlements = [
        leases.Settlement(
            id=each.id, claim_id=each.claim_id, outcome="FAILED", error=b'{"code": "X"}', retry_in_ms=0
        )
        for each in (numbered, torn, sound)
    ]
    verdicts = hands.run(leases.settle(settlements, channel=hands.target.channel))
    assert [*verdicts.values()] == ["PENDING"] * 3
    forget(hands, numbered.id, torn.id)


def test_a_turn_that_never_ends_is_free(hands: Hands) -> None:  # J17
    question = (
        "insert into {schema}.turns (service, taken_until, taken_by) values ('expirer', 'infinity', 'nobody')"
    )
    hands.connection.execute(hands.plain(question))
    assert hands.run(workers.take_turn("expirer", interval_ms=1_000, taken_by="s1"))
    assert not hands.run(workers.take_turn("expirer", interval_ms=1_000, taken_by="s2"))


def forget(hands: Hands, *ids: UUID) -> None:
    """Hostile rows breach the invariants that are checked after a test."""
    for table, key in (("attempts", "task_id"), ("tasks", "id")):
        hands.connection.execute(
            hands.plain(f"delete from {{schema}}.{table} where {key} = any(%s)"), [list(ids)]
        )


async def until(truth: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not truth():
            await asyncio.sleep(0.05)  # the rows are watched from outside


def unexplained(stage: Stage, tables: Sequence[str]) -> list[str]:
    """Return what is wrong with the plan itself: values neither stored nor refused, odd refusals, columns without a stored value."""
    connection, schema = stage.hands.connection, stage.hands.target.schema
    wanted = {
        (table, column.name, value)
        for table in tables
        for column in columns(connection, schema, table)
        for value in column.values
    }
    stored = {(row.table, row.column, row.value) for row in stage.planted}
    refused = {(row.table, row.column, row.value) for row in stage.refused}
    expected = refusals(connection, schema)
    may_refuse_all = {(table, column) for table, column, state in expected if state in CLOSED}
    return [
        *(f"neither stored nor refused: {each}" for each in wanted - stored - refused),
        *(f"refused for an odd reason: {row}" for row in stage.refused if not row.is_expected(expected)),
        *(
            f"no value of this column was stored: {each}"
            for each in {row[:2] for row in wanted} - {row[:2] for row in stored} - may_refuse_all
        ),
    ]


async def failures(steps: Sequence[Step]) -> list[str]:
    """What each step that failed says: all of them are tried."""
    said: list[str] = []
    for step in steps:
        since = monotonic()
        try:
            await step()
        except Exception as problem:  # noqa: BLE001 - every step is tried
            said.append(f"{step.__name__}: {type(problem).__name__}: {str(problem)[:6000]}")
        print(step.__name__, round(monotonic() - since, 2))
    return said
