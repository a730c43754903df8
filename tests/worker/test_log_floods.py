"""A flood of captured logs neither delays the outcomes of other tasks nor fills the memory of a worker."""

from __future__ import annotations

import logging
import threading
import time
from statistics import median
from typing import Final

import pytest

from everbeat.worker import log_recorder
from tests.worker.harness import WorkerHarness
from tests.worker.sample_tasks import task
from tests.worker.test_captured_logs import messages, stored

ROUNDS: Final = 12
LONG_LINE: Final = "x" * 8_000
MOST_BYTES: Final = 300_000
log = logging.getLogger("shop.flood")
log.setLevel(logging.INFO)
flood_ended: Final = threading.Event()


def _flood() -> int:
    lines = 0
    while not flood_ended.is_set():
        log.info("line %d of the flood, which is as long as a usual line of a log", lines)
        lines += 1
    return lines


@task(capture_logs=True)
def captured_flood() -> int:
    return _flood()


@task(capture_logs=False)
def plain_flood() -> int:
    return _flood()


@task(capture_logs=False)
async def end_at_once() -> None: ...


@task(capture_logs=True)
async def log_long_lines(lines: int) -> None:
    for n in range(lines):
        log.info("%d %s", n, LONG_LINE)


async def round_trip_s(harness: WorkerHarness, flood: str) -> float:
    """Return the median time from a send until the outcome is stored, in seconds, while two threads flood the log."""
    flood_ended.clear()
    found = []
    async with harness.worker() as running:
        floods = [harness.send(flood) for _ in range(2)]
        await running.until(lambda: all(harness.task(each)["state"] == "RUNNING" for each in floods))
        for _ in range(ROUNDS):
            began = time.monotonic()
            await running.finished(harness.send("end_at_once"))
            found.append(time.monotonic() - began)
        flood_ended.set()
        row = await running.finished(*floods)
    print(f"{flood}: {row['result']:,} lines, median round trip {median(found) * 1_000:.0f} ms")
    return median(found)


@pytest.mark.long
async def test_capturing_a_flood_makes_the_outcomes_of_other_tasks_no_slower_than_logging_it(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])
    pairs = [
        [await round_trip_s(harness, each) for each in ("plain_flood", "captured_flood")] for _ in range(3)
    ]
    assert min(captured / plain for plain, captured in pairs) < 2, pairs


async def test_logs_that_cannot_be_written_fill_no_memory_and_later_lines_are_stored(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_recorder, "MOST_WAITING_BYTES", MOST_BYTES)
    async with harness.worker(async_concurrency=20) as running:
        memory = running.worker._logs.memory
        with harness.holding("lock table {schema}.attempt_logs in exclusive mode"):
            flooding = [harness.send("log_long_lines", lines=20) for _ in range(10)]
            await running.finished(*flooding)
            assert MOST_BYTES <= memory.used < MOST_BYTES + 2 * len(LONG_LINE)
        await running.until(lambda: memory.used == 0)
        kept = sum(len(messages(harness, each)) for each in flooding)
        assert 0 < kept * len(LONG_LINE) < MOST_BYTES + 2 * len(LONG_LINE)
        later = harness.send("log_long_lines", lines=2)
        await running.until(lambda: len(messages(harness, later)) == 2)
        assert memory.used == 0


async def test_more_logs_than_can_wait_give_their_memory_back(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_recorder, "MOST_WAITING", 2)
    async with harness.worker(async_concurrency=20) as running:
        with harness.holding("lock table {schema}.attempt_logs in exclusive mode"):
            some = [harness.send("log_long_lines", lines=1) for _ in range(6)]
            await running.finished(*some)
        await running.until(lambda: running.worker._logs.memory.used == 0)
        assert sum(bool(stored(harness, each)) for each in some) == 2
