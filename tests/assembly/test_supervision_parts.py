"""Test a supervisor assembled as in production: its lock file and its slot, through a false death and to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg import Connection, sql
from psycopg.rows import dict_row

from everbeat.config import RecoveryConfig
from everbeat.runtime.environment import logging_environment
from everbeat.runtime.identity import TreeLock, TreeVerdict, take_tree_lock, verdict_on
from everbeat.store import migrating
from everbeat.store.target import Target
from everbeat.supervisor.registration import Supervision

FAST = RecoveryConfig(
    claimer_heartbeat_interval_ms=1_000,
    runner_heartbeat_interval_ms=1_000,
    claimed_stale_threshold_ms=2_000,
    running_stale_threshold_ms=2_000,
    check_interval_ms=1_000,
)


@pytest.fixture
def line(database_url: str, schema: str) -> Any:
    target = Target.parse(database_url, schema=schema)
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    yield target, connection
    connection.close()


def living(line: tuple[Target, Connection[Any]]) -> list[dict[str, Any]]:
    target, connection = line
    query = sql.SQL("select * from {}.supervisors where ended_at is null").format(
        sql.Identifier(target.schema)
    )
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query).fetchall()


async def until(truth: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not truth():
            await asyncio.sleep(0.02)  # PostgreSQL sends no event when a row changes


async def test_a_supervisor_keeps_its_lock_file_and_slot_through_a_false_death(
    line: tuple[Target, Connection[Any]], tmp_path: Path
) -> None:  # E10
    target, connection = line
    lock = TreeLock.take(tmp_path)
    supervision = Supervision(target, FAST, environment=logging_environment(), lock=lock, slot="web-0")
    await supervision.open()
    await until(lambda: [row["slot"] for row in living(line)] == ["web-0"])
    (row,) = living(line)
    assert (row["session_name"], row["lock_file"]) == (lock.name, str(lock.path))
    assert row["machine_id"] == supervision.identity.machine_id

    end = sql.SQL("update {}.supervisors set ended_at = now(), ended_how = 'age'")
    connection.execute(end.format(sql.Identifier(target.schema)))
    await until(lambda: [each["slot"] for each in living(line)] == ["web-0"])
    (again,) = living(line)
    assert again["id"] != row["id"]
    assert (again["session_name"], again["lock_file"]) == (lock.name, str(lock.path)), (
        "it is still the same tree"
    )
    assert verdict_on(str(lock.path), name=lock.name) is TreeVerdict.HELD

    await supervision.close()
    assert living(line) == []
    assert list(tmp_path.iterdir()) == []


async def test_a_failed_deregistration_keeps_the_lock_file_as_proof_of_death(
    line: tuple[Target, Connection[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everbeat.supervisor.registration._END_PATIENCE_S", 0.2)
    target, connection = line
    lock = TreeLock.take(tmp_path)
    supervision = Supervision(target, FAST, environment=logging_environment(), lock=lock)
    await supervision.open()
    name = sql.Identifier(target.schema)
    connection.execute(sql.SQL("alter table {}.supervisors rename to hidden").format(name))
    await supervision.close()
    connection.execute(sql.SQL("alter table {}.hidden rename to supervisors").format(name))
    assert len(living(line)) == 1
    assert verdict_on(str(lock.path), name=lock.name) is TreeVerdict.GONE


def test_a_missing_lock_file_folder_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "everbeat").write_text("in the way")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert take_tree_lock() is None
    assert "no_lock_file" in caplog.text
