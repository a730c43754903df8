"""`everbeat bench` measures the real thing beside the bare server, verifies it, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from everbeat.cli.bench.figures import Sample, gathered
from everbeat.cli.exit_codes import ExitCode

pytestmark = pytest.mark.story


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everbeat", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.fixture
def nothing_is_left(database_url: str) -> Iterator[None]:
    yield
    with psycopg.connect(database_url) as connection:
        left = connection.execute("select nspname from pg_namespace where nspname like 'everbeat_bench_%'")
        assert left.fetchall() == []


def figures_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return {one["name"]: one for one in json.loads(done.stdout)["figures"]}


@pytest.mark.usefixtures("nothing_is_left")
def test_the_figures_are_of_tasks_that_ran_once(database_url: str) -> None:
    parts = [word for part in ("plain", "send", "drain") for word in ("--only", part)]
    done = run("--tasks", "300", "--json", "--not-durable", "--url", database_url, *parts)
    figures = figures_of(done)
    told = json.loads(done.stdout)
    assert (told["tasks"], told["repeats"], told["durable"], told["verified"]) == (300, 1, False, True)
    assert len(figures) == 9
    assert all(one["value"] > 0 for one in figures.values())
    drain = figures["drain, 1 worker process"]
    assert drain["ratio"] == pytest.approx(drain["value"] / figures[drain["beside"]]["value"])


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("nothing_is_left")
def test_waiting_and_dying_are_measured_too(database_url: str) -> None:
    parts = [word for part in ("growth", "idle", "deaths") for word in ("--only", part)]
    small = ("--tasks", "300", "--rows", "5000", "--watch", "1")
    figures = figures_of(run(*small, "--json", "--not-durable", "--url", database_url, *parts))
    print({name: one["value"] for name, one in figures.items()})
    assert figures["idle, send to code: p50"]["value"] < 1_000
    assert figures["idle: memory of both"]["value"] > 10
    assert 0 < figures["kill -9 of a worker process, to the next start"]["value"] < 60


@pytest.mark.usefixtures("nothing_is_left")
def test_a_server_that_may_lose_what_it_acknowledged_is_not_measured_unasked(database_url: str) -> None:
    done = run("--tasks", "100", "--url", database_url)
    assert done.returncode == ExitCode.USAGE
    assert "fsync = off" in done.stderr
    assert "--not-durable" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [(("--tasks", "1"), "tasks"), (("--only", "drian"), "drain"), (("--repeats", "0"), "repeats")],
)
def test_what_cannot_be_measured_is_refused(words: tuple[str, ...], told: str) -> None:
    done = run(*words)
    assert done.returncode == ExitCode.USAGE
    assert told in done.stderr


def test_a_ratio_is_of_medians_and_a_spread_of_all_repeats() -> None:
    repeats = [
        [
            Sample(name="wall", value=wall, unit="rows/s"),
            Sample(name="ours", value=ours, unit="tasks/s", beside="wall"),
        ]
        for wall, ours in ((100.0, 50.0), (200.0, 60.0), (110.0, 10.0))
    ]
    wall, ours = gathered(repeats)
    assert (wall.value, wall.ratio, wall.values) == (110.0, None, (100.0, 200.0, 110.0))
    assert ours.ratio == pytest.approx(50 / 110)
    assert ours.spread == pytest.approx(50 / 50)
