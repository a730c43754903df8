"""Test recycling of worker processes at their limits: no pause, no lost task and no second run."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.protocol import Drain, Leaving, Retiring
from everbeat.runtime.events import ProcessRecycled
from everbeat.store import workers
from everbeat.worker.attempt import Attempt
from everbeat.worker.shutdown import RecyclingLimits, RecyclingOff
from tests.supervisor.supervising import Tree, tree, until
from tests.worker.harness import TASK_PROCESS, WorkerHarness

AGAIN = StoredPolicy(on_crash="retry").to_json()


@pytest.fixture
def log(harness: WorkerHarness, tmp_path: Path) -> Path:
    # The row of the harness itself would count as one more dead worker.
    harness.run(workers.end_supervisor(harness.supervisor_id, how="left"))
    return tmp_path / "tree.log"


def completed(harness: WorkerHarness, tasks: list[UUID]) -> bool:
    return all(harness.task(task)["state"] == "COMPLETED" for task in tasks)


def leave(running_tree: Tree) -> None:
    running_tree.process.send_signal(signal.SIGTERM)
    assert running_tree.process.wait(60) == 0


def test_recycled_worker_processes_lose_no_task(harness: WorkerHarness, log: Path) -> None:
    with tree(harness.target, log, max_tasks_per_process=10, async_concurrency=2, prefetch=2) as running_tree:
        tasks = [harness.send("whereabouts", seconds=0.05) for _ in range(25)]
        until(partial(completed, harness, tasks), what="all are done")
        leave(running_tree)
    pids = [harness.task(task)["result"] for task in tasks]
    assert len(set(pids)) >= 3
    assert max(pids.count(pid) for pid in pids) <= 10 + 1, (
        "tasks that start together with the last one can exceed the limit"
    )
    assert {len(harness.attempts(task)) for task in tasks} == {1}
    assert harness.query("select * from {schema}.recoveries") == []
    assert {row["ended_how"] for row in harness.query("select ended_how from {schema}.workers")} == {"left"}
    text = log.read_text()
    assert len(re.findall(r"process_recycled pid=\d+ reason=max_tasks_per_process", text)) >= 2
    assert "worker_exited" in text
    assert "in_order=False" not in text


@pytest.mark.long
def test_a_retired_process_finishes_its_tasks_beside_its_successor(harness: WorkerHarness, log: Path) -> None:
    with tree(harness.target, log, max_tasks_per_process=2, async_concurrency=4, prefetch=0) as running_tree:
        long = harness.send("whereabouts", seconds=12)
        until(lambda: harness.task(long)["state"] == "RUNNING", what="the long one runs")
        (old,) = running_tree.workers()
        first = harness.send("whereabouts", seconds=0)
        until(lambda: harness.task(first)["result"] == old, what="the limit is reached")
        rest = [harness.send("whereabouts", seconds=0) for _ in range(2)]
        until(partial(completed, harness, rest), what="a fresh process works")
        assert harness.task(long)["state"] == "RUNNING"
        assert old not in {harness.task(task)["result"] for task in rest}
        until(lambda: harness.task(long)["state"] == "COMPLETED", what="the long one is done")
        assert harness.task(long)["result"] == old
        until(lambda: old not in running_tree.workers(), what="and its process gone")
        leave(running_tree)
    assert harness.query("select * from {schema}.recoveries") == []


def most_at_once(harness: WorkerHarness, tasks: list[UUID]) -> int:
    """Return how many of these tasks ran at the same time, according to the database."""
    rows = [harness.task(task) for task in tasks]
    return max(
        sum(other["started_at"] <= row["started_at"] < other["completed_at"] for other in rows)
        for row in rows
    )


@pytest.mark.long
def test_long_tasks_do_not_accumulate_retired_processes(harness: WorkerHarness, log: Path) -> None:
    with tree(harness.target, log, max_tasks_per_process=1, async_concurrency=1, prefetch=0) as running_tree:
        tasks = [harness.send("whereabouts", seconds=4) for _ in range(5)]
        crowds = set[int]()

        def done() -> bool:
            crowds.add(len(running_tree.workers()))
            return completed(harness, tasks)

        until(done, what="all are done")
        leave(running_tree)
    assert most_at_once(harness, tasks) <= 2, "one retired process beside its successor"
    assert max(crowds) <= 2
    assert len({harness.task(task)["result"] for task in tasks}) == 5
    assert {len(harness.attempts(task)) for task in tasks} == {1}


def test_a_supervisor_that_waits_for_retired_processes_can_be_stopped(
    harness: WorkerHarness, log: Path
) -> None:
    with tree(
        harness.target, log, max_tasks_per_process=1, async_concurrency=1, prefetch=0, grace=0.5
    ) as running_tree:
        tasks = [harness.send_with("whereabouts", {"seconds": 60}, policy=AGAIN) for _ in range(3)]
        until(lambda: harness.states().get("RUNNING") == 2, what="two run")
        until(lambda: log.read_text().count("process_recycled") == 2, what="both have retired")
        began = time.monotonic()
        leave(running_tree)
        assert time.monotonic() - began < 10
    assert {harness.task(task)["state"] for task in tasks} == {"PENDING"}
    assert sorted(len(harness.attempts(task)) for task in tasks) == [0, 1, 1]


def test_a_process_above_max_rss_is_replaced(harness: WorkerHarness, log: Path) -> None:
    with tree(harness.target, log, max_rss="300MB", prefetch=0) as running_tree:
        first = harness.send("hoard", megabytes=300)
        until(partial(completed, harness, [first]), what="it has grown")
        old = harness.task(first)["result"]
        until(lambda: old not in running_tree.workers(), what="it is replaced")
        second = harness.send("whereabouts", seconds=0)
        until(partial(completed, harness, [second]), what="the fresh one works")
        leave(running_tree)
    assert re.search(rf"process_recycled pid={old} reason=max_rss tasks=1 rss_bytes=\d{{9}}", log.read_text())


@pytest.mark.usefixtures("a_minute_ahead")
async def test_a_retiring_worker_finishes_running_tasks_and_releases_waiting_ones(
    harness: WorkerHarness,
) -> None:
    async with harness.worker(max_tasks_per_process=1, async_concurrency=1, prefetch=3) as running:
        running.measured("nap")
        tasks = [harness.send("nap", seconds=0.5) for _ in range(3)]
        assert await running.left() == 0
        (retiring,) = [one for one in running.told if isinstance(one, Retiring)]
        assert (retiring.reason, retiring.tasks) == ("max_tasks_per_process", 1)
        assert isinstance(running.told[-1], Leaving)
    assert sorted(harness.task(task)["state"] for task in tasks) == ["COMPLETED", "PENDING", "PENDING"]


async def test_max_tasks_per_process_counts_every_task_that_ran(harness: WorkerHarness) -> None:
    tasks = [harness.send("nap", seconds=0.1) for _ in range(5)]
    async with harness.worker(max_tasks_per_process=2, async_concurrency=3, prefetch=0) as running:
        assert await running.left() == 0
        (retiring,) = [one for one in running.told if isinstance(one, Retiring)]
    began = [task for task in tasks if harness.attempts(task)]
    assert len(began) == 3, "three start in the same moment"
    assert retiring.tasks == len(began)


async def test_max_tasks_per_process_does_not_count_tasks_that_could_not_start(
    harness: WorkerHarness,
) -> None:
    async with harness.worker(max_tasks_per_process=2, async_concurrency=1, prefetch=0) as running:
        executor = running.worker._executors["async"]
        begin, refusals = executor.begin, [RuntimeError("no room")]

        def begin_at_last(attempt: Attempt) -> None:
            if refusals:
                raise refusals.pop()
            begin(attempt)

        executor.begin = begin_at_last  # type: ignore[method-assign]
        tasks = [harness.send("double", x=number) for number in range(2)]
        assert await running.left() == 0
        (retiring,) = [one for one in running.told if isinstance(one, Retiring)]
    assert [harness.task(task)["state"] for task in tasks] == ["COMPLETED", "COMPLETED"]
    assert retiring.tasks == 2


async def test_a_stop_shortens_the_time_of_a_retiring_worker(harness: WorkerHarness) -> None:
    async with harness.worker(max_tasks_per_process=1, async_concurrency=1) as running:
        task_id = harness.send_with("nap", {"seconds": 60}, policy=AGAIN)
        await running.until(lambda: any(isinstance(one, Retiring) for one in running.told))
        running.worker.obey(Drain(100))
        assert await running.left() == 0
    assert harness.task(task_id)["state"] == "PENDING"


async def test_task_processes_are_recycled_after_max_tasks_per_process(harness: WorkerHarness) -> None:
    async with harness.worker(max_tasks_per_process=2, process_concurrency=1) as running:
        tasks = [harness.send("process_pid") for _ in range(6)]
        await running.finished(*tasks)
        recycled = running.of(ProcessRecycled)
    pids = [harness.task(task)["result"][0] for task in tasks]
    assert {pids.count(pid) for pid in pids} == {2}
    assert [one.tasks for one in recycled] == [2] * len(recycled)
    assert {one.pid for one in recycled} == set(pids)
    assert running.crashes == []
    assert {len(harness.attempts(task)) for task in tasks} == {1}


KILLED_AT_FIRST = 'if mkdir "$0" 2> /dev/null; then kill -9 $$; fi; exec "$@"'


@pytest.mark.parametrize(
    ("argv", "levels"),
    [
        (lambda folder: ["sh", "-c", KILLED_AT_FIRST, str(folder / "killed"), *TASK_PROCESS], ["WARNING"]),
        (lambda _: [*TASK_PROCESS, "--refuse"], ["WARNING", "ERROR"]),
    ],
    ids=["killed once", "never starts"],
)
async def test_a_task_process_that_cannot_start_is_logged_as_an_error_at_the_second_failure(
    harness: WorkerHarness,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    argv: Callable[[Path], list[str]],
    levels: list[str],
) -> None:  # E8
    def logged() -> list[str]:
        return [each.levelname for each in caplog.records if each.message.startswith("cannot_run_tasks")]

    async with harness.worker(task_process_argv=argv(tmp_path), process_concurrency=1) as running:
        task = harness.send("process_pid")
        await running.until(lambda: logged()[: len(levels)] == levels)
        if levels == ["WARNING"]:
            await running.finished(task)
            assert logged() == levels


async def test_a_max_rss_below_the_size_of_a_fresh_process_is_ignored(harness: WorkerHarness) -> None:
    async with harness.worker(max_rss="16MB") as running:
        await running.finished(*[harness.send("double", x=1) for _ in range(3)])
        assert running.code is None
        (off,) = running.of(RecyclingOff)
        assert off.rss_bytes > off.max_rss_bytes == 16 << 20


def test_a_worker_is_recycled_at_either_limit() -> None:
    limits = RecyclingLimits(tasks=10, rss_bytes=100)
    assert limits.reached(tasks=9, rss_bytes=99) is None
    assert limits.reached(tasks=10, rss_bytes=99) == "max_tasks_per_process"
    assert limits.reached(tasks=9, rss_bytes=100) == "max_rss"
    assert RecyclingLimits().reached(tasks=10**9, rss_bytes=10**15) is None
