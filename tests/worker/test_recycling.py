"""Processes that have done enough make room for fresh ones: no pause, no task lost, none run twice."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.store import workers
from everbeat.worker.attempt import Attempt
from everbeat.worker.protocol import Drain, Leaving, Retiring
from everbeat.worker.recycling import Limits, ProcessRecycled, RecyclingOff
from tests.worker.stand import TASK_PROCESS, Stand
from tests.worker.supervising import Tree, tree, until

AGAIN = StoredPolicy(on_crash="retry").to_json()


@pytest.fixture
def log(stand: Stand, tmp_path: Path) -> Path:
    # The row of the stand itself would be one more that has died.
    stand.run(workers.end_supervisor(stand.supervisor_id, how="left"))
    return tmp_path / "tree.log"


def completed(stand: Stand, tasks: list[UUID]) -> bool:
    return all(stand.task(task)["state"] == "COMPLETED" for task in tasks)


def leave(party: Tree) -> None:
    party.process.send_signal(signal.SIGTERM)
    assert party.process.wait(60) == 0


def test_three_generations_share_the_work_and_lose_none_of_it(stand: Stand, log: Path) -> None:
    with tree(stand.target, log, max_tasks_per_process=10, async_concurrency=2, prefetch=2) as party:
        tasks = [stand.send("whereabouts", seconds=0.05) for _ in range(25)]
        until(partial(completed, stand, tasks), what="all are done")
        leave(party)
    pids = [stand.task(task)["result"] for task in tasks]
    assert len(set(pids)) >= 3
    assert max(pids.count(pid) for pid in pids) <= 10 + 1, (
        "a limit may be passed by what starts with the last one"
    )
    assert {len(stand.attempts(task)) for task in tasks} == {1}
    assert stand.query("select * from {schema}.recoveries") == []
    assert {row["ended_how"] for row in stand.query("select ended_how from {schema}.workers")} == {"left"}
    text = log.read_text()
    assert len(re.findall(r"process_recycled pid=\d+ reason=max_tasks_per_process", text)) >= 2
    assert "worker_exited" in text
    assert "in_order=False" not in text


def test_a_retired_process_finishes_what_runs_beside_its_successor(stand: Stand, log: Path) -> None:
    with tree(stand.target, log, max_tasks_per_process=2, async_concurrency=4, prefetch=0) as party:
        long = stand.send("whereabouts", seconds=12)
        until(lambda: stand.task(long)["state"] == "RUNNING", what="the long one runs")
        (old,) = party.workers()
        first = stand.send("whereabouts", seconds=0)
        until(lambda: stand.task(first)["result"] == old, what="the limit is reached")
        rest = [stand.send("whereabouts", seconds=0) for _ in range(2)]
        until(partial(completed, stand, rest), what="a fresh process works")
        assert stand.task(long)["state"] == "RUNNING"
        assert old not in {stand.task(task)["result"] for task in rest}
        until(lambda: stand.task(long)["state"] == "COMPLETED", what="the long one is done")
        assert stand.task(long)["result"] == old
        until(lambda: old not in party.workers(), what="and its process gone")
        leave(party)
    assert stand.query("select * from {schema}.recoveries") == []


def most_at_once(stand: Stand, tasks: list[UUID]) -> int:
    """How many of these ran at one moment, by what the database knows."""
    rows = [stand.task(task) for task in tasks]
    return max(
        sum(other["started_at"] <= row["started_at"] < other["completed_at"] for other in rows)
        for row in rows
    )


@pytest.mark.long
def test_long_tasks_do_not_add_process_to_process(stand: Stand, log: Path) -> None:
    with tree(stand.target, log, max_tasks_per_process=1, async_concurrency=1, prefetch=0) as party:
        tasks = [stand.send("whereabouts", seconds=4) for _ in range(5)]
        crowds = set[int]()

        def done() -> bool:
            crowds.add(len(party.workers()))
            return completed(stand, tasks)

        until(done, what="all are done")
        leave(party)
    assert most_at_once(stand, tasks) <= 2, "one beside its successor"
    assert max(crowds) <= 2
    assert len({stand.task(task)["result"] for task in tasks}) == 5
    assert {len(stand.attempts(task)) for task in tasks} == {1}


def test_a_post_that_waits_for_its_retired_processes_can_be_stopped(stand: Stand, log: Path) -> None:
    with tree(
        stand.target, log, max_tasks_per_process=1, async_concurrency=1, prefetch=0, grace=0.5
    ) as party:
        tasks = [stand.send_with("whereabouts", {"seconds": 60}, policy=AGAIN) for _ in range(3)]
        until(lambda: stand.states().get("RUNNING") == 2, what="two run")
        until(lambda: log.read_text().count("process_recycled") == 2, what="both have retired")
        began = time.monotonic()
        leave(party)
        assert time.monotonic() - began < 10
    assert {stand.task(task)["state"] for task in tasks} == {"PENDING"}
    assert sorted(len(stand.attempts(task)) for task in tasks) == [0, 1, 1]


def test_a_process_that_grew_is_replaced(stand: Stand, log: Path) -> None:
    with tree(stand.target, log, max_rss="300MB", prefetch=0) as party:
        first = stand.send("hoard", megabytes=300)
        until(partial(completed, stand, [first]), what="it has grown")
        old = stand.task(first)["result"]
        until(lambda: old not in party.workers(), what="it is replaced")
        second = stand.send("whereabouts", seconds=0)
        until(partial(completed, stand, [second]), what="the fresh one works")
        leave(party)
    assert re.search(rf"process_recycled pid={old} reason=max_rss tasks=1 rss_bytes=\d{{9}}", log.read_text())


async def test_what_waits_is_given_back_and_what_runs_is_finished(stand: Stand) -> None:
    async with stand.worker(max_tasks_per_process=1, async_concurrency=1, prefetch=3) as running:
        tasks = [stand.send("nap", seconds=0.5) for _ in range(3)]
        assert await running.left() == 0
        (retiring,) = [one for one in running.told if isinstance(one, Retiring)]
        assert (retiring.reason, retiring.tasks) == ("max_tasks_per_process", 1)
        assert isinstance(running.told[-1], Leaving)
    assert sorted(stand.task(task)["state"] for task in tasks) == ["COMPLETED", "PENDING", "PENDING"]


async def test_the_count_is_of_all_that_ran_in_the_process(stand: Stand) -> None:
    tasks = [stand.send("nap", seconds=0.1) for _ in range(5)]
    async with stand.worker(max_tasks_per_process=2, async_concurrency=3, prefetch=0) as running:
        assert await running.left() == 0
        (retiring,) = [one for one in running.told if isinstance(one, Retiring)]
    began = [task for task in tasks if stand.attempts(task)]
    assert len(began) == 3, "three start in the same moment"
    assert retiring.tasks == len(began)


async def test_what_could_not_begin_does_not_count(stand: Stand) -> None:
    async with stand.worker(max_tasks_per_process=2, async_concurrency=1, prefetch=0) as running:
        executor = running.worker._executors["async"]
        begin, refusals = executor.begin, [RuntimeError("no room")]

        def begin_at_last(attempt: Attempt) -> None:
            if refusals:
                raise refusals.pop()
            begin(attempt)

        executor.begin = begin_at_last  # type: ignore[method-assign]
        tasks = [stand.send("double", x=number) for number in range(2)]
        assert await running.left() == 0
        (retiring,) = [one for one in running.told if isinstance(one, Retiring)]
    assert [stand.task(task)["state"] for task in tasks] == ["COMPLETED", "COMPLETED"]
    assert retiring.tasks == 2


async def test_a_stop_shortens_what_a_retired_worker_may_take(stand: Stand) -> None:
    async with stand.worker(max_tasks_per_process=1, async_concurrency=1) as running:
        task_id = stand.send_with("nap", {"seconds": 60}, policy=AGAIN)
        await running.until(lambda: any(isinstance(one, Retiring) for one in running.told))
        running.worker.obey(Drain(100))
        assert await running.left() == 0
    assert stand.task(task_id)["state"] == "PENDING"


async def test_task_processes_are_recycled_between_tasks(stand: Stand) -> None:
    async with stand.worker(max_tasks_per_process=2, process_concurrency=1) as running:
        tasks = [stand.send("process_pid") for _ in range(6)]
        await running.finished(*tasks)
        recycled = running.of(ProcessRecycled)
    pids = [stand.task(task)["result"][0] for task in tasks]
    assert {pids.count(pid) for pid in pids} == {2}
    assert [one.tasks for one in recycled] == [2] * len(recycled)
    assert {one.pid for one in recycled} == set(pids)
    assert running.crashes == []
    assert {len(stand.attempts(task)) for task in tasks} == {1}


KILLED_AT_FIRST = 'if mkdir "$0" 2> /dev/null; then kill -9 $$; fi; exec "$@"'


@pytest.mark.parametrize(
    ("argv", "levels"),
    [
        (lambda folder: ["sh", "-c", KILLED_AT_FIRST, str(folder / "killed"), *TASK_PROCESS], ["WARNING"]),
        (lambda _: [*TASK_PROCESS, "--refuse"], ["WARNING", "ERROR"]),
    ],
    ids=["killed once", "never starts"],
)
async def test_a_task_process_that_does_not_start_is_an_error_only_if_the_next_one_does_not_start_either(
    stand: Stand,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    argv: Callable[[Path], list[str]],
    levels: list[str],
) -> None:  # E8
    def logged() -> list[str]:
        return [each.levelname for each in caplog.records if each.message.startswith("cannot_run_tasks")]

    async with stand.worker(task_process_argv=argv(tmp_path), process_concurrency=1) as running:
        task = stand.send("process_pid")
        await running.until(lambda: logged()[: len(levels)] == levels)
        if levels == ["WARNING"]:
            await running.finished(task)
            assert logged() == levels


async def test_a_limit_below_the_size_of_a_fresh_process_is_ignored(stand: Stand) -> None:
    async with stand.worker(max_rss="16MB") as running:
        await running.finished(*[stand.send("double", x=1) for _ in range(3)])
        assert running.code is None
        (off,) = running.of(RecyclingOff)
        assert off.rss_bytes > off.max_rss_bytes == 16 << 20


def test_either_limit_is_enough() -> None:
    limits = Limits(tasks=10, rss_bytes=100)
    assert limits.reached(tasks=9, rss_bytes=99) is None
    assert limits.reached(tasks=10, rss_bytes=99) == "max_tasks_per_process"
    assert limits.reached(tasks=9, rss_bytes=100) == "max_rss"
    assert Limits().reached(tasks=10**9, rss_bytes=10**15) is None
