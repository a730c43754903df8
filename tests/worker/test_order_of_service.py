"""Test that one worker starts tasks in the order of service, including those that it claimed ahead of a slot."""

from __future__ import annotations

import pytest

from tests.variants import long_except
from tests.worker.harness import PATIENCE_S, WorkerHarness
from tests.worker.sample_tasks import gate


@pytest.mark.parametrize(
    ("slots", "prefetch"),
    long_except([(500, 4), (100, 500), (60, 200), (7, 500), (7, 3), (1, 500), (7, 0)], (100, 500), (7, 3)),
)
async def test_a_worker_starts_tasks_in_the_order_of_service(
    harness: WorkerHarness, slots: int, prefetch: int
) -> None:
    for start in range(0, 3_000, 200):  # each statement has its own timestamp
        harness.send_many("note", [{"word": str(n)} for n in range(start, start + 200)])
    harness.connection.execute(
        f"update \"{harness.target.schema}\".tasks set priority = (args ->> 'word')::integer %% 3 - 1",  # type: ignore[arg-type]
        [],
    )
    ordered = harness.query(
        "select args ->> 'word' as word from {schema}.tasks order by priority, enqueued_at, id"
    )
    async with harness.worker(async_concurrency=slots, prefetch=prefetch) as running:
        await running.until(lambda: len(gate.journal) == 3_000, timeout_s=3 * PATIENCE_S)
    # On a busy machine, a task started for a slot that did not become free is released and begins later than its turn.
    released = {
        row["word"]
        for row in harness.query(
            "select t.args ->> 'word' as word from {schema}.tasks t join {schema}.attempts a on a.task_id = t.id where a.outcome = 'RELEASED'"
        )
    }
    assert len(released) < 1_000
    assert [word for word in gate.journal if word not in released] == [
        row["word"] for row in ordered if row["word"] not in released
    ]
