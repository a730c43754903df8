"""Test that the code of a task can read the tick of its schedule in every mode."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.worker.harness import WorkerHarness

TICK = datetime(2030, 1, 7, 2, 30, tzinfo=UTC)


@pytest.mark.parametrize("name", ["tick_async", "tick_in_thread", "tick_in_process"])
async def test_the_code_of_a_scheduled_task_reads_its_tick(harness: WorkerHarness, name: str) -> None:
    sent, scheduled = harness.send(name), harness.send(name)
    harness.connection.execute(
        f"""with sent as (
                insert into "{harness.target.schema}".ticks (schedule, at, outcome, task_id) values ('nightly', %(tick)s, 'SENT', %(id)s)
            )
            update "{harness.target.schema}".tasks set schedule = 'nightly', tick = %(tick)s where id = %(id)s""",  # type: ignore[call-overload]
        {"tick": TICK, "id": scheduled},
    )
    async with harness.worker() as running:
        assert (await running.finished(sent))["result"] == "None"
        assert (await running.finished(scheduled))["result"] == str(TICK)
