"""A worker counts the writes that the database refused because their attempt had lost its lease, and reports them."""

from __future__ import annotations

from collections import Counter

import pytest

from everbeat.protocol import Tick
from tests.worker.harness import Running, WorkerHarness
from tests.worker.sample_tasks import gate


def refused(running: Running) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in running.told:
        if isinstance(each, Tick) and each.events is not None:
            found.update(each.events.refused)
    return found


@pytest.mark.parametrize(
    ("name", "args", "verb"),
    [("wait_for_gate", {"word": "x"}, "settle"), ("keep_a_checkpoint", {}, "store")],
)
async def test_a_late_write_is_counted_by_what_it_wanted_to_write(
    harness: WorkerHarness, name: str, args: dict[str, str], verb: str
) -> None:
    async with harness.worker(hints=WorkerHarness.silent_hints, poll_interval="60s") as running:
        task_id = harness.send(name, **args)
        await running.until(lambda: harness.task(task_id)["state"] == "RUNNING")
        harness.recover(task_id)
        gate.opened.set()
        await running.until(lambda: bool(refused(running)))
    assert refused(running) == {verb: 1}
    assert harness.task(task_id)["state"] == "FAILED"
