"""How much a lane claims and starts."""

from __future__ import annotations

import pytest

from everbeat.worker.async_executor import AsyncExecutor
from everbeat.worker.invocation import Invoker
from everbeat.worker.lane import Lane


@pytest.mark.parametrize(("unsettled", "wanted"), [(0, 2 + 3), (2, 2 + 3), (3, 1), (4, 0), (9, 0)], ids=str)
def test_nothing_is_claimed_ahead_while_outcomes_lag_behind(unsettled: int, wanted: int) -> None:
    executor = AsyncExecutor(slots=2, invoker=Invoker({}), worker_id=lambda: "w", on_ended=lambda *_: None)
    lane = Lane(
        name="async", names=("work",), executor=executor, prefetch=3, queue_priorities={}, unsettled=lambda: unsettled,
    )  # fmt: skip
    assert lane.wanted == wanted
