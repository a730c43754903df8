"""`everbeat bench` measures the real thing beside the bare server, verifies it, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from everbeat.cli.bench.figures import Figure, Sample, Target, gathered
from everbeat.cli.bench.report import figure_document, show_figures
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
    assert "PostgreSQL" in told["server"]
    assert "warning: with fewer than 5,000 tasks" in done.stderr
    drain = figures["drain, 1 worker process"]
    assert (drain["target"]["of"], drain["target"]["at_least"]) == ("ratio", 0.55)
    assert drain["target"]["met"] is (drain["ratio"] >= 0.55)
    assert drain["ratio"] == pytest.approx(drain["value"] / figures[drain["beside"]]["value"])


@pytest.mark.usefixtures("nothing_is_left")
def test_people_are_told_which_server_it_is(database_url: str) -> None:
    done = run("--tasks", "5000", "--not-durable", "--url", database_url, "--only", "plain")
    assert done.returncode == 0, done.stderr
    assert "server: PostgreSQL" in done.stderr
    assert "warning" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("nothing_is_left")
def test_waiting_and_dying_are_measured_too(database_url: str) -> None:
    parts = [word for part in ("growth", "idle", "workflows", "deaths") for word in ("--only", part)]
    small = ("--tasks", "300", "--rows", "5000", "--watch", "1")
    figures = figures_of(run(*small, "--json", "--not-durable", "--url", database_url, *parts))
    print({name: one["value"] for name, one in figures.items()})
    assert figures["10 workflows of 100 nodes and a join"]["value"] > 0
    assert figures["chain of 100 nodes: from one to the next"]["value"] > 0
    assert figures["idle, send to code: p50"]["value"] < 1_000
    assert figures["idle: memory of both"]["value"] > 10
    assert 0 < figures["kill -9 of a worker process, to the next start"]["value"] < 60


@pytest.mark.usefixtures("nothing_is_left")
def test_a_server_that_may_lose_what_it_acknowledged_is_not_measured_unasked(database_url: str) -> None:
    done = run("--tasks", "100", "--url", database_url)
    assert done.returncode == ExitCode.USAGE
    assert "fsync off" in done.stderr
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


def judged(**values: float) -> dict[str, Figure]:
    """Two figures beside a wall of 100, either of whose targets is enough, and one without a wall."""
    targets = {
        "one": Target(at_least=1.3, unless="other"),
        "other": Target(at_least=0.75, unless="one"),
        "wait": Target(at_most=2),
    }
    beside = {"one": "wall", "other": "wall"}
    samples = [
        Sample(name=name, value=value, unit="ms", beside=beside.get(name), target=targets.get(name))
        for name, value in values.items()
    ]
    return {one.name: one for one in gathered([samples])}


def test_a_target_is_of_the_ratio_or_of_the_value_where_nothing_is_beside() -> None:
    found = judged(wall=100, one=140, other=80, wait=2.5)
    assert [found[name].is_met for name in ("wall", "one", "other", "wait")] == [None, True, True, False]
    assert judged(wait=2.0)["wait"].is_met is True
    assert judged(one=140)["one"].is_met is None  # the wall was not measured
    assert judged(one=140)["one"].ratio is None


def test_of_two_targets_one_is_enough() -> None:
    assert judged(wall=100, one=100, other=80)["one"].is_met is True
    assert judged(wall=100, one=140, other=70)["other"].is_met is True
    found = judged(wall=100, one=100, other=70)
    assert (found["one"].is_met, found["other"].is_met) == (False, False)


def test_the_report_says_what_is_missed_and_what_its_columns_mean(capsys: pytest.CaptureFixture[str]) -> None:
    figures = judged(wall=100, one=100, other=70, wait=1)
    show_figures([*figures.values()])
    table, legend = capsys.readouterr()
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert "MISSED" in rows["one"]
    assert "ratio >= 1.3 *" in rows["one"]
    assert "<= 2 ms" in rows["wait"]
    assert rows["wait"].endswith("yes")
    for word in ("RATIO", "BESIDE", "TARGET", "* one of these two is enough"):
        assert word in legend
    assert "SPREAD" not in legend  # there was one repeat
    assert figure_document(figures["other"])["target"] == {
        "of": "ratio",
        "at_least": 0.75,
        "at_most": None,
        "unless": "one",
        "met": False,
    }
