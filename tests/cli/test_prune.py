"""Test `everbeat prune`, which counts or deletes old rows by the settings of the app or the options of the operator."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from everbeat.cli.failures import ExitCode
from tests.cli.conftest import Command
from tests.store.aged import Aged
from tests.store.test_history_plans import FILL

pytestmark = pytest.mark.usefixtures("migrated")


@pytest.fixture
def aged(everbeat: Command, database_url: str, schema: str) -> Iterator[Aged]:
    everbeat("migrate").assert_code(0)
    connection = psycopg.connect(database_url, autocommit=True)
    rows = Aged(connection, schema)
    rows.ended(50, days=31)
    rows.ended(20, days=29)
    rows.beats(30, days=2)
    rows.states(40, days=8)
    rows.holders(3, days=8)
    yield rows
    connection.close()


def rows_of(document: Any) -> dict[str, int]:
    return {table: entry["rows"] for table, entry in document["tables"].items()}


def tasks_left(database_url: str, schema: str) -> int:
    with psycopg.connect(database_url) as connection:
        query = sql.SQL("select count(*) from {}.tasks").format(sql.Identifier(schema))
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def test_prune_deletes_by_the_settings_of_an_app(
    everbeat: Command, aged: Aged, database_url: str, schema: str
) -> None:
    old = {
        "tasks": 50, "attempts": 50, "recoveries": 10, "steps": 25, "signals": 10, "beats": 30, "worker_states": 40, "workers": 3, "supervisors": 3,
        "workflows": 0, "nodes": 0, "edges": 0, "ticks": 0, "schedule_versions": 0, "results": 0, "history_parts": 0,
    }  # fmt: skip
    counted = everbeat("prune", "--dry-run", "--app", "shop:app", "--json").assert_code(0).document
    assert (counted["dry_run"], counted["total"], rows_of(counted)) == (True, sum(old.values()), old)
    assert counted["tables"]["tasks"]["kept_hours"] == 720
    assert tasks_left(database_url, schema) == 70

    done = everbeat("prune", "--app", "shop:app").assert_code(0)
    assert done.err.endswith("Deleted 221 rows.\n")
    assert [line.split()[0] for line in done.out.splitlines()] == ["TABLE", *old]
    assert tasks_left(database_url, schema) == 20

    again = everbeat("prune", "--app", "shop:app", "--json").assert_code(0).document
    assert (again["dry_run"], again["total"]) == (False, 0)


def test_prune_deletes_only_the_records_that_the_operator_names(everbeat: Command, aged: Aged) -> None:
    done = everbeat("prune", "--heartbeats", "24", "--json").assert_code(0).document
    assert {table: rows for table, rows in rows_of(done).items() if rows} == {"beats": 30}
    assert done["tables"]["tasks"]["kept_hours"] is None
    done = everbeat("prune", "--app", "shop:app", "--terminal-records", "1", "--json").assert_code(0).document
    assert rows_of(done)["tasks"] == 70, "options go before the app"
    assert rows_of(done)["worker_states"] == 40


def test_prune_without_an_app_or_a_retention_is_refused(everbeat: Command, aged: Aged) -> None:
    refused = everbeat("prune").assert_code(ExitCode.USAGE)
    assert "--app" in refused.err
    assert "--terminal-records" in refused.err
    refused = everbeat("prune", "--terminal-records", "0").assert_code(ExitCode.USAGE)
    assert refused.err.startswith("error: --terminal-records = 0:"), refused.err
    counted = everbeat("prune", "--dry-run", "--terminal-records", "720").assert_code(0)
    assert "forever" in counted.out
    assert "Dry run: 145 rows would be deleted." in counted.err


def test_prune_marks_the_count_of_a_big_partition_as_incomplete(
    everbeat: Command, aged: Aged, database_url: str, schema: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        since = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=4)
        names = {"schema": sql.Identifier(schema)}
        connection.execute(sql.SQL("select {schema}.add_history_part(%s, 'day')").format(**names), [since])
        connection.execute(sql.SQL(FILL).format(**names), {"rows": 10_500, "since": since})
    options = ("--terminal-records", "48")
    counted = everbeat("prune", "--dry-run", *options, "--json").assert_code(0).document
    assert rows_of(counted)["tasks"] == 70 + 10_000
    assert "tasks" in counted["at_least"]
    shown = everbeat("prune", "--dry-run", *options).assert_code(0)
    assert "10,070+" in shown.out
    assert "Dry run: at least 20,204 rows would be deleted." in shown.err
    done = everbeat("prune", *options, "--json").assert_code(0).document
    assert (done["total"], done["tables"], done["at_least"]) == (
        counted["total"],
        counted["tables"],
        counted["at_least"],
    )
