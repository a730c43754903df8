"""One worker begins what waits in the order of service: what it took ahead of a slot is overtaken by nothing that stands behind it."""

from __future__ import annotations

import pytest

from tests.worker.deeds import gate
from tests.worker.stand import Stand


@pytest.mark.parametrize(("slots", "prefetch"), [(500, 4), (100, 100), (60, 200), (7, 3)])
async def test_code_begins_in_the_order_of_service(stand: Stand, slots: int, prefetch: int) -> None:
    for start in range(0, 3_000, 200):  # each statement has a moment of its own
        stand.send_many("note", [{"word": str(n)} for n in range(start, start + 200)])
    stand.connection.execute(
        f"update \"{stand.target.schema}\".tasks set priority = (args ->> 'word')::integer %% 3 - 1",  # type: ignore[arg-type]
        [],
    )
    ordered = stand.query(
        "select args ->> 'word' as word from {schema}.tasks order by priority, enqueued_at, id"
    )
    async with stand.worker(async_concurrency=slots, prefetch=prefetch) as running:
        await running.until(lambda: len(gate.journal) == 3_000)
    assert gate.journal == [row["word"] for row in ordered]
