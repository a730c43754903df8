"""The server runs out of disk or connections for longer than the thresholds: work waits, and no live worker is declared dead."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from everbeat.errors import DatabaseError
from tests.conftest import NewServer
from tests.stories.scenario import BY_AGE, FAST, new_scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

SHORTAGE_S = 3 * FAST["running_stale_threshold_ms"] / 1_000
CONNECTIONS = 30


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 48 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "everbeat-test", str(place)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(
            f"LOUD: no small file system can be mounted here (it takes root): {mounted.stderr.strip()}"
        )
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


def fill(disk: Path) -> Path:
    """Use every free byte."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return filler


@pytest.mark.long
@pytest.mark.parametrize(
    "ways", [{}, pytest.param(BY_AGE, marks=pytest.mark.long)], ids=["all ways", "by age"]
)
def test_results_wait_while_the_disk_is_full_and_no_task_is_recovered(
    new_server: NewServer,
    small_disk: Path,
    tmp_path: Path,
    ways: dict[str, object],
) -> None:
    server = new_server()
    space = small_disk / "tables"
    space.mkdir(mode=0o700)
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(sql.SQL("create tablespace small location {}").format(sql.Literal(str(space))))
        admin.execute("alter database postgres set default_tablespace = 'small'")
    with (
        new_scenario(server.url, "story", tmp_path, check=False) as scenario,
        program_of(scenario) as sample_tasks,
    ):
        settings = {**FAST, **ways}
        for _ in range(2):
            scenario.ready_tree(recovery=settings)
        # The results are so large that settling them takes new pages.
        held = [sample_tasks.large_when_open.send("go", 400_000) for _ in range(20)]
        scenario.until(lambda: len(scenario.effects("start")) == len(held), within=30, what="all run")
        filler = fill(small_disk)
        scenario.open_gate("go")
        began = time.monotonic()
        refused: list[str] = []
        while time.monotonic() - began < SHORTAGE_S:
            try:
                held.append(sample_tasks.large.send(300_000))
            except DatabaseError as problem:
                refused.append(str(problem))
            time.sleep(0.2)  # a producer that keeps trying
        unsettled = scenario.states().get("RUNNING", 0)
        print(f"sends refused: {len(refused)}; attempts that could not be settled: {unsettled}")
        assert unsettled or refused, "the disk was not full"
        assert all("space" in each or "disk" in each for each in refused), refused
        filler.unlink()
        for task in held:
            task.result(timeout=60)
        assert scenario.recoveries() == []
        assert all(len(scenario.effects("start", task.id)) == 1 for task in held)
        sample_tasks.app.close()


@pytest.mark.long
def test_only_a_killed_worker_is_declared_dead_while_other_programs_take_every_connection(
    new_server: NewServer, tmp_path: Path
) -> None:
    server = new_server(settings={"max_connections": str(CONNECTIONS), "superuser_reserved_connections": "0"})
    with (
        new_scenario(server.url, "story", tmp_path, check=False) as scenario,
        program_of(scenario) as sample_tasks,
        ExitStack() as others,
    ):
        scenario.ready_tree(recovery=FAST, worker={"processes": 2})
        scenario.ready_tree(recovery=FAST)
        held = [sample_tasks.wait_for_on_crash.send("go") for _ in range(9)]
        scenario.until(lambda: len(scenario.effects("start")) == len(held), within=30, what="all run")
        sample_tasks.app.close()
        taken = 0
        while True:
            try:
                others.enter_context(psycopg.connect(server.url))
                taken += 1
            except psycopg.OperationalError:
                break
        victim = scenario.workers(scenario.trees[0])[0]
        os.kill(victim["pid"], 9)  # its replacement finds no free connection
        time.sleep(SHORTAGE_S)  # the shortage
        print(f"{taken} connections taken by strangers")
        dead = {row["worker_id"] for row in scenario.recoveries()}
        assert dead <= {victim["id"]}, "only the killed worker is declared dead"
        others.close()
        scenario.open_gate("go")
        for task in held:
            assert task.result(timeout=60) == "done"
        scenario.until(
            lambda: len(scenario.workers(scenario.trees[0])) == 2, within=40, what="the replacement works"
        )
        assert {row["worker_id"] for row in scenario.recoveries()} <= {victim["id"]}
        sample_tasks.app.close()
