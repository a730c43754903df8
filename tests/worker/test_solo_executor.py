"""Test that suspects of every mode run alone in separate processes and otherwise behave like other tasks."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

from everbeat.config import RecoveryConfig, WorkerConfig, processors
from everbeat.domain.task.policy import StoredPolicy
from everbeat.protocol import DropLeases, Tick
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import ProcessRecycled
from everbeat.store.claims import suspects_wait
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.worker.claim.slots import make_pools
from everbeat.worker.environment import WorkerPlan
from everbeat.worker.worker import make_executors
from tests.variants import long_except
from tests.worker.environments import environment_of
from tests.worker.harness import TASK_PROCESS, Running, WorkerHarness
from tests.worker.sample_tasks import DEFINITIONS

SHORT = StoredPolicy(timeout_ms=300).to_json()


def suspect(harness: WorkerHarness, name: str, args: dict[str, Any] | None = None, **options: Any) -> UUID:
    """Send a task that is a suspect before any worker runs."""
    task_id = harness.send_with(name, args or {}, priority=-1, **options)
    harness.query("update {schema}.tasks set suspect = true where id = %s returning id", task_id)
    return task_id


def born_suspect(harness: WorkerHarness, name: str) -> UUID:
    """Insert a task that is a suspect from the start, while workers run."""
    (row,) = harness.query(
        """insert into {schema}.tasks (id, name, queue, args, suspect)
           values (gen_random_uuid(), %s, 'default', '{{}}', true) returning id""",
        name,
    )
    harness.query("select pg_notify(%s, 't:default')", harness.target.channel)
    found: UUID = row["id"]
    return found


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def until_begun(running: Running, folder: Path, name: str = "it") -> int:
    """Wait until the code reports its pid."""
    await running.until(lambda: (folder / name).exists() and (folder / name).read_text() != "")
    return int((folder / name).read_text())


@pytest.mark.parametrize("name", long_except(["pid_of_async", "pid_of_thread"], "pid_of_async"))
async def test_a_suspect_runs_in_another_process_and_is_cleared_when_it_survives(
    harness: WorkerHarness, name: str
) -> None:  # E13
    suspected, other = suspect(harness, name), harness.send(name)
    async with harness.worker() as running:
        row = await running.finished(suspected, other)
    assert (row["state"], row["suspect"], row["alone"]) == ("COMPLETED", False, True)
    pid, attempt = row["result"]
    assert pid != os.getpid()
    assert attempt == 1
    assert harness.task(other)["result"] == [os.getpid(), 1]
    assert harness.task(other)["alone"] is False


async def test_a_suspect_in_process_mode_runs_in_the_process_lane(harness: WorkerHarness) -> None:
    suspected, other = suspect(harness, "process_pid"), harness.send("process_pid")
    async with harness.worker() as running:
        await running.finished(suspected, other)
    assert [harness.task(each)["alone"] for each in (suspected, other)] == [True, True]


async def test_a_suspect_that_fails_without_killing_its_process_is_cleared(harness: WorkerHarness) -> None:
    task_id = suspect(harness, "raise_kind", {"kind": "task error"})
    async with harness.worker() as running:
        row = await running.finished(task_id)
    assert (row["state"], row["error"]["code"], row["suspect"]) == ("FAILED", "SMTP_DOWN", False)


@pytest.mark.parametrize("name", long_except(["die_async", "die_in_thread"], "die_in_thread"))
async def test_a_suspect_that_kills_its_process_is_recovered_and_harms_no_other_task(
    harness: WorkerHarness, name: str
) -> None:  # E13
    task_id = suspect(harness, name, {"how": "segv"})
    async with harness.worker() as running:
        neighbour = harness.send("nap", seconds=1.0)
        await running.until(lambda: bool(running.crashes))
        ((died, _, report),) = running.crashes
        assert died == task_id
        assert report.signal_number == 11
        assert (await running.finished(neighbour))["state"] == "COMPLETED"


async def test_a_worker_claims_no_more_suspects_than_it_has_processors_for(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    slots = max(1, processors() // 2)
    suspects = [
        suspect(harness, "linger_async", {"folder": str(tmp_path), "name": str(n)}) for n in range(slots + 2)
    ]
    async with harness.worker(processes=2) as running:
        for n in range(slots):
            await until_begun(running, tmp_path, str(n))
        done = harness.send("double", x=1)
        await running.finished(done)
        states = [harness.task(each)["state"] for each in suspects]
        assert states == ["RUNNING"] * slots + ["PENDING"] * 2
        for each in suspects:
            harness.cancel(each)
        await running.finished(*suspects[:slots])


async def test_an_idle_worker_finds_a_suspect_without_polling(harness: WorkerHarness) -> None:
    async with harness.worker(poll_interval="60s") as running:
        await running.finished(harness.send("double", x=1))
        task_id = born_suspect(harness, "pid_of_thread")
        row = await running.finished(task_id, timeout_s=20)
        assert row["result"][0] != os.getpid()


async def test_each_suspect_gets_a_fresh_process(harness: WorkerHarness) -> None:  # E13
    """A thread that one suspect left behind would otherwise be charged to the next."""
    async with harness.worker() as running:
        pids = []
        for _ in range(4):
            task_id = born_suspect(harness, "pid_of_thread")
            pids.append((await running.finished(task_id))["result"][0])
        assert running.of(ProcessRecycled) == [], "the recycling of solo processes is not an event"
    assert len({*pids, os.getpid()}) == 5


async def test_an_idle_solo_process_ends_and_a_later_suspect_gets_another(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everbeat.worker.executors.process_executor.SOLO_LINGER_S", 0.5)
    before = children()
    first = suspect(harness, "pid_of_async")
    kept = harness.send("process_pid")
    async with harness.worker() as running:
        row = await running.finished(first, kept)
        pid = row["result"][0]
        # The process that waits for the next suspect ends too; an ordinary task process stays.
        await running.until(lambda: children() - before == {harness.task(kept)["result"][0]})
        row = await running.finished(born_suspect(harness, "pid_of_thread"))
        assert row["state"] == "COMPLETED"
        assert row["result"][0] not in (pid, os.getpid())


async def test_progress_of_a_suspect_is_stored(harness: WorkerHarness) -> None:
    task_id = suspect(harness, "report_once")
    async with harness.worker() as running:
        row = await running.finished(task_id)
    assert row["progress"] == {"stage": "half way", "fraction": 0.5, "message": "from a process of its own"}


@pytest.mark.parametrize("name", long_except(["linger_async", "linger_in_thread"], "linger_async"))
class TestStops:
    def linger(self, harness: WorkerHarness, folder: Path, name: str, **options: Any) -> UUID:
        return suspect(harness, name, {"folder": str(folder), "name": "it"}, **options)

    async def test_a_timeout_ends_the_process_of_a_suspect(
        self, harness: WorkerHarness, tmp_path: Path, name: str
    ) -> None:  # B10
        task_id = self.linger(harness, tmp_path, name, policy=SHORT)
        async with harness.worker() as running:
            pid = await until_begun(running, tmp_path)
            row = await running.finished(task_id)
            assert (row["state"], row["error"]["code"], row["suspect"]) == ("FAILED", "TASK_TIMEOUT", False)
            await running.until(lambda: not psutil.pid_exists(pid))
            assert (tmp_path / "it interrupted").exists()

    async def test_a_cancel_ends_a_suspect(self, harness: WorkerHarness, tmp_path: Path, name: str) -> None:
        task_id = self.linger(harness, tmp_path, name)
        async with harness.worker() as running:
            await until_begun(running, tmp_path)
            harness.cancel(task_id)
            row = await running.finished(task_id)
            assert (row["state"], row["suspect"]) == ("CANCELLED", False)
            assert (tmp_path / "it interrupted").exists()

    async def test_a_lost_lease_ends_the_process_of_a_suspect_and_writes_nothing(
        self, harness: WorkerHarness, tmp_path: Path, name: str
    ) -> None:
        task_id = self.linger(harness, tmp_path, name)
        async with harness.worker() as running:
            pid = await until_begun(running, tmp_path)
            lease = running.attempt(task_id).lease
            harness.recover(task_id)
            running.worker.obey(DropLeases([lease]))
            await running.until(lambda: not psutil.pid_exists(pid))
        assert harness.task(task_id)["error"]["code"] == "WORKER_CRASHED"

    async def test_a_stopped_worker_releases_a_suspect_that_stays_suspect(
        self, harness: WorkerHarness, tmp_path: Path, name: str
    ) -> None:
        task_id = self.linger(harness, tmp_path, name, policy=StoredPolicy(on_crash="retry").to_json())
        async with harness.worker() as running:
            pid = await until_begun(running, tmp_path)
            running.stop()
            assert await running.left() == 0
            assert not psutil.pid_exists(pid)
        row = harness.task(task_id)
        assert (row["state"], row["suspect"]) == ("PENDING", True)


async def test_a_worker_that_cannot_start_processes_leaves_suspects_to_other_workers(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    task_id = suspect(harness, "pid_of_async")
    refusing = [*TASK_PROCESS, "--refuse"]
    async with harness.worker(task_process_argv=refusing) as running:
        done = harness.send("double", x=1)
        await running.finished(done)
        await running.until(
            lambda: harness.task(task_id)["state"] == "PENDING" and harness.task(task_id)["fence"] > 0
        )
        async with harness.worker() as other:
            assert (await other.finished(task_id))["state"] == "COMPLETED"


async def test_solo_slots_do_not_count_as_slots_of_the_worker(harness: WorkerHarness) -> None:
    async with harness.worker(async_concurrency=3, thread_concurrency=2, process_concurrency=1) as running:
        await running.until(lambda: any(isinstance(each, Tick) for each in running.told))
        tick = next(each for each in running.told if isinstance(each, Tick))
        assert tick.slots == 6


def test_suspects_run_in_ordinary_lanes_if_no_process_can_be_started() -> None:
    plan = a_plan(argv=())
    pools = make_pools(plan, executors(plan), unsettled=Counter(), clock=SystemClock())
    assert {name: pool.suspects for name, pool in pools.items()} == {
        "async": None,
        "thread": None,
        "process": None,
    }


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"thread_concurrency": 0}, ["async", "process", "solo"]),
        ({"async_concurrency": 0}, ["thread", "process", "solo"]),
        ({"process_concurrency": 0}, ["async", "thread", "solo"]),
        ({"async_concurrency": 0, "thread_concurrency": 0}, ["process"]),
    ],
)
def test_the_solo_lane_serves_the_modes_that_have_slots(config: dict[str, int], names: list[str]) -> None:
    plan = a_plan(argv=("program",), **config)
    pools = make_pools(plan, executors(plan), unsettled=Counter(), clock=SystemClock())
    assert list(pools) == names
    if (solo := pools.get("solo")) is not None:
        served = {name for mode in ("async", "thread") if mode in pools for name in pools[mode].names}
        assert set(solo.names) == served
        assert (solo.suspects, solo.prefetch) == (True, 0)


def a_plan(*, argv: tuple[str, ...], **config: int) -> WorkerPlan:
    return WorkerPlan(
        target=Target.parse("postgresql:///nowhere"), definitions=DEFINITIONS, config=WorkerConfig(**config),
        recovery=RecoveryConfig(), task_process_argv=argv,
    )  # fmt: skip


def executors(plan: WorkerPlan) -> Any:
    return make_executors(environment_of(Session(plan.target, "everbeat test"), plan=plan))


def test_suspects_wait_reports_suspects_of_the_given_names_and_queues(harness: WorkerHarness) -> None:
    harness.send("double", x=1)
    names = ["double"]
    assert harness.run(suspects_wait(names=names, queues=None)) is False
    suspect(harness, "double", {"x": 1})
    assert harness.run(suspects_wait(names=names, queues=None)) is True
    assert harness.run(suspects_wait(names=["echo"], queues=None)) is False
    assert harness.run(suspects_wait(names=names, queues=["other"])) is False
