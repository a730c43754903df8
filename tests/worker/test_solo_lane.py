"""Suspects run alone in a process of their own, whatever their mode is, and everything else holds for them as well."""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

from everbeat.config import RecoveryConfig, WorkerConfig, processors
from everbeat.domain.policy import StoredPolicy
from everbeat.store.suspects import suspects_wait
from everbeat.store.target import Target
from everbeat.worker.equipment import make_executors, make_lanes
from everbeat.worker.plan import WorkerPlan
from everbeat.worker.protocol import Lost, Tick
from everbeat.worker.recycling import ProcessRecycled
from tests.worker.deeds import DEFINITIONS
from tests.worker.stand import TASK_PROCESS, Running, Stand

SHORT = StoredPolicy(timeout_ms=300).to_json()


def suspect(stand: Stand, name: str, args: dict[str, Any] | None = None, **options: Any) -> UUID:
    """A task that is under suspicion before any worker sees it."""
    task_id = stand.send_with(name, args or {}, priority=-1, **options)
    stand.query("update {schema}.tasks set suspect = true where id = %s returning id", task_id)
    return task_id


def born_suspect(stand: Stand, name: str) -> UUID:
    """A task that is under suspicion from the start, while workers look on."""
    (row,) = stand.query(
        """insert into {schema}.tasks (id, name, queue, args, suspect)
           values (gen_random_uuid(), %s, 'default', '{{}}', true) returning id""",
        name,
    )
    stand.query("select pg_notify(%s, 't:default')", stand.target.channel)
    found: UUID = row["id"]
    return found


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def until_begun(running: Running, folder: Path, name: str = "it") -> int:
    """Wait for the code to say in which process it runs."""
    await running.until(lambda: (folder / name).exists() and (folder / name).read_text() != "")
    return int((folder / name).read_text())


@pytest.mark.parametrize("name", ["pid_of_async", "pid_of_thread"])
async def test_a_suspect_runs_in_another_process_and_is_cleared_when_it_survives(
    stand: Stand, name: str
) -> None:  # E13
    suspected, other = suspect(stand, name), stand.send(name)
    async with stand.worker() as running:
        row = await running.finished(suspected, other)
    assert (row["state"], row["suspect"], row["alone"]) == ("COMPLETED", False, True)
    pid, attempt = row["result"]
    assert pid != os.getpid()
    assert attempt == 1
    assert stand.task(other)["result"] == [os.getpid(), 1]
    assert stand.task(other)["alone"] is False


async def test_a_process_task_needs_no_other_lane(stand: Stand) -> None:
    suspected, other = suspect(stand, "process_pid"), stand.send("process_pid")
    async with stand.worker() as running:
        await running.finished(suspected, other)
    assert [stand.task(each)["alone"] for each in (suspected, other)] == [True, True]


async def test_a_suspect_that_fails_of_itself_is_cleared_too(stand: Stand) -> None:
    task_id = suspect(stand, "raise_kind", {"kind": "task error"})
    async with stand.worker() as running:
        row = await running.finished(task_id)
    assert (row["state"], row["error"]["code"], row["suspect"]) == ("FAILED", "SMTP_DOWN", False)


@pytest.mark.parametrize("name", ["die_async", "die_in_thread"])
async def test_who_dies_alone_is_recovered_as_a_process_that_died_and_nobody_else_is_harmed(
    stand: Stand, name: str
) -> None:  # E13
    task_id = suspect(stand, name, {"how": "segv"})
    async with stand.worker() as running:
        neighbour = stand.send("nap", seconds=1.0)
        await running.until(lambda: bool(running.crashes))
        ((died, _, report),) = running.crashes
        assert died == task_id
        assert report.signal_number == 11
        assert (await running.finished(neighbour))["state"] == "COMPLETED"


async def test_no_more_suspects_at_once_than_processors_and_none_beyond_that_is_claimed(
    stand: Stand, tmp_path: Path
) -> None:
    slots = max(1, processors() // 2)
    suspects = [
        suspect(stand, "linger_async", {"folder": str(tmp_path), "name": str(n)}) for n in range(slots + 2)
    ]
    async with stand.worker(processes=2) as running:
        for n in range(slots):
            await until_begun(running, tmp_path, str(n))
        done = stand.send("double", x=1)
        await running.finished(done)
        states = [stand.task(each)["state"] for each in suspects]
        assert states == ["RUNNING"] * slots + ["PENDING"] * 2
        for each in suspects:
            stand.cancel(each)
        await running.finished(*suspects[:slots])


async def test_a_suspect_that_comes_later_is_found(stand: Stand) -> None:
    async with stand.worker(poll_interval="60s") as running:
        await running.finished(stand.send("double", x=1))
        task_id = born_suspect(stand, "pid_of_thread")
        row = await running.finished(task_id, timeout_s=20)
        assert row["result"][0] != os.getpid()


async def test_no_two_suspects_share_a_process_one_after_the_other(stand: Stand) -> None:  # E13
    """What one left behind, a thread say, would be charged to the next."""
    async with stand.worker() as running:
        pids = []
        for _ in range(4):
            task_id = born_suspect(stand, "pid_of_thread")
            pids.append((await running.finished(task_id))["result"][0])
        assert running.of(ProcessRecycled) == [], "that is no news"
    assert len({*pids, os.getpid()}) == 5


async def test_an_idle_process_of_theirs_ends_and_a_later_suspect_gets_another(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everbeat.worker.equipment.SOLO_LINGER_S", 0.5)
    before = children()
    first = suspect(stand, "pid_of_async")
    kept = stand.send("process_pid")
    async with stand.worker() as running:
        row = await running.finished(first, kept)
        pid = row["result"][0]
        # The one that waits for the next suspect ends too; a task process of the other kind stays.
        await running.until(lambda: children() - before == {stand.task(kept)["result"][0]})
        row = await running.finished(born_suspect(stand, "pid_of_thread"))
        assert row["state"] == "COMPLETED"
        assert row["result"][0] not in (pid, os.getpid())


async def test_progress_is_stored(stand: Stand) -> None:
    task_id = suspect(stand, "report_once")
    async with stand.worker() as running:
        row = await running.finished(task_id)
    assert row["progress"] == {"stage": "half way", "fraction": 0.5, "message": "from a process of its own"}


@pytest.mark.parametrize("name", ["linger_async", "linger_in_thread"])
class TestStops:
    def linger(self, stand: Stand, folder: Path, name: str, **options: Any) -> UUID:
        return suspect(stand, name, {"folder": str(folder), "name": "it"}, **options)

    async def test_a_timeout_ends_the_process_of_a_thread_task_too(
        self, stand: Stand, tmp_path: Path, name: str
    ) -> None:  # B10
        task_id = self.linger(stand, tmp_path, name, policy=SHORT)
        async with stand.worker() as running:
            pid = await until_begun(running, tmp_path)
            row = await running.finished(task_id)
            assert (row["state"], row["error"]["code"], row["suspect"]) == ("FAILED", "TASK_TIMEOUT", False)
            await running.until(lambda: not psutil.pid_exists(pid))
            assert (tmp_path / "it interrupted").exists()

    async def test_a_cancel_ends_it(self, stand: Stand, tmp_path: Path, name: str) -> None:
        task_id = self.linger(stand, tmp_path, name)
        async with stand.worker() as running:
            await until_begun(running, tmp_path)
            stand.cancel(task_id)
            row = await running.finished(task_id)
            assert (row["state"], row["suspect"]) == ("CANCELLED", False)
            assert (tmp_path / "it interrupted").exists()

    async def test_a_lost_lease_ends_its_process_and_writes_nothing(
        self, stand: Stand, tmp_path: Path, name: str
    ) -> None:
        task_id = self.linger(stand, tmp_path, name)
        async with stand.worker() as running:
            pid = await until_begun(running, tmp_path)
            lease = running.attempt(task_id).lease
            stand.recover(task_id)
            running.worker.obey(Lost([lease]))
            await running.until(lambda: not psutil.pid_exists(pid))
        assert stand.task(task_id)["error"]["code"] == "WORKER_CRASHED"

    async def test_a_worker_that_leaves_hands_it_back_under_suspicion_still(
        self, stand: Stand, tmp_path: Path, name: str
    ) -> None:
        task_id = self.linger(stand, tmp_path, name, policy=StoredPolicy(on_crash="retry").to_json())
        async with stand.worker() as running:
            pid = await until_begun(running, tmp_path)
            running.stop()
            assert await running.left() == 0
            assert not psutil.pid_exists(pid)
        row = stand.task(task_id)
        assert (row["state"], row["suspect"]) == ("PENDING", True)


async def test_where_no_process_comes_up_others_get_the_suspects(stand: Stand, tmp_path: Path) -> None:
    task_id = suspect(stand, "pid_of_async")
    refusing = [*TASK_PROCESS, "--refuse"]
    async with stand.worker(task_process_argv=refusing) as running:
        done = stand.send("double", x=1)
        await running.finished(done)
        await running.until(
            lambda: stand.task(task_id)["state"] == "PENDING" and stand.task(task_id)["fence"] > 0
        )
        async with stand.worker() as other:
            assert (await other.finished(task_id))["state"] == "COMPLETED"


async def test_solo_slots_are_no_slots_of_the_worker(stand: Stand) -> None:
    async with stand.worker(async_concurrency=3, thread_concurrency=2, process_concurrency=1) as running:
        await running.until(lambda: any(isinstance(each, Tick) for each in running.told))
        tick = next(each for each in running.told if isinstance(each, Tick))
        assert tick.slots == 6


def test_without_a_way_to_start_processes_suspects_run_among_others() -> None:
    plan = a_plan(argv=())
    lanes = make_lanes(plan, executors(plan), unsettled=lambda _: 0)
    assert {name: lane.suspects for name, lane in lanes.items()} == {
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
def test_it_serves_the_modes_that_have_slots(config: dict[str, int], names: list[str]) -> None:
    plan = a_plan(argv=("program",), **config)
    lanes = make_lanes(plan, executors(plan), unsettled=lambda _: 0)
    assert list(lanes) == names
    if (solo := lanes.get("solo")) is not None:
        served = {name for mode in ("async", "thread") if mode in lanes for name in lanes[mode].names}
        assert set(solo.names) == served
        assert (solo.suspects, solo.prefetch) == (True, 0)


def a_plan(*, argv: tuple[str, ...], **config: int) -> WorkerPlan:
    return WorkerPlan(
        target=Target.parse("postgresql:///nowhere"), definitions=DEFINITIONS, config=WorkerConfig(**config),
        recovery=RecoveryConfig(), task_process_argv=argv,
    )  # fmt: skip


def executors(plan: WorkerPlan) -> Any:
    def nothing(*_: Any) -> None:
        pass

    told = {name: nothing for name in signature(make_executors).parameters if name.startswith("on_")}
    return make_executors(plan, worker_id=lambda: "w", **told)


def test_whether_a_suspect_waits(stand: Stand) -> None:
    stand.send("double", x=1)
    names = ["double"]
    assert stand.run(suspects_wait(names=names, queues=None)) is False
    suspect(stand, "double", {"x": 1})
    assert stand.run(suspects_wait(names=names, queues=None)) is True
    assert stand.run(suspects_wait(names=["echo"], queues=None)) is False
    assert stand.run(suspects_wait(names=names, queues=["other"])) is False
