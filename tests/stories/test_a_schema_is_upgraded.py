"""A newer everbeat upgrades the schema while trees and senders of this one work and a report reads the table of tasks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from psycopg import sql

from everbeat.store.migrations import LOCK_TIMEOUT_MS
from tests.stories.scenario import FAST, Scenario
from tests.synthetic_version import next_version

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

STATEMENTS = {
    "10_tasks_column": "-- A column.\nalter table {schema}.tasks add column synthetic integer",
    "20_tasks_before": "-- Out of the way.\nalter index {schema}.tasks_pending rename to tasks_pending_before",
    "21_tasks_pending": "-- Replaced.\ncreate index {concurrently} tasks_pending"
    " on {schema}.tasks (queue, priority, enqueued_at, id, name, synthetic) where state = 'PENDING' and serial is null and needs_id is null",
    "22_drop_before": "-- Dropped.\ndrop index {concurrently} {schema}.tasks_pending_before",
    "30_workers_column": "-- A column.\nalter table {schema}.workers add column synthetic integer",
    "31_supervisors_column": "-- A column.\nalter table {schema}.supervisors add column synthetic integer",
}
OLD_ROWS = (
    "insert into {}.tasks (id, name, queue, args, state, completed_at, result)"
    " select gen_random_uuid(), 'old', 'default', '{{}}', 'COMPLETED', now(), '1' from generate_series(1, 50000)"
)


def test_trees_and_senders_continue_while_a_newer_everbeat_upgrades_the_schema(
    scenario: Scenario, sample_tasks: ModuleType, tmp_path: Path
) -> None:  # J3
    later = next_version(tmp_path / "later", STATEMENTS)
    scenario.connection.execute(sql.SQL(OLD_ROWS).format(sql.Identifier(scenario.schema)))
    scenario.ready_tree(recovery=FAST)
    sent: list[Any] = []
    took: list[float] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            began_at = time.monotonic()
            sent.append(sample_tasks.quick.send(len(sent)))
            took.append(time.monotonic() - began_at)
            time.sleep(0.01)  # a hundred a second

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with psycopg.connect(scenario.url, application_name="report of sales") as reader:
            reader.execute(sql.SQL("select count(*) from {}.tasks").format(sql.Identifier(scenario.schema)))
            migration = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "everbeat",
                    "migrate",
                    "--url",
                    scenario.url,
                    "--schema",
                    scenario.schema,
                ],
                env=os.environ | {"PYTHONPATH": str(later)},
            )
            time.sleep(3)  # the report runs this long, and the upgrade keeps trying
            assert migration.poll() is None
            reader.commit()
        assert migration.wait(timeout=60) == 0
    finally:
        ended.set()
        sender.join(timeout=30)
    assert [handle.result(timeout=30) for handle in sent] == list(range(len(sent)))
    print(f"{len(sent)} sends, the longest took {max(took):.2f} s")
    assert max(took) < LOCK_TIMEOUT_MS / 1_000 + 1
    assert scenario.recoveries() == []
    assert set(scenario.states()) == {"COMPLETED"}
    assert scenario.query(
        "select count(*) as failed from {schema}.attempts where outcome <> 'COMPLETED'"
    ) == [{"failed": 0}]
    (row,) = scenario.query("select count(*) as done from {schema}.schema_steps")
    assert row["done"] == len(STATEMENTS)
    scenario.query(
        "delete from {schema}.tasks where name = 'old' returning id"
    )  # the invariants are those of tasks that ran
    scenario.query(
        "delete from {schema}.audit a where not exists (select from {schema}.tasks t where t.id = a.task_id) returning seq"
    )
