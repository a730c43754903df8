"""`python -m benchmarks queues` measures other queues in the same run, or reports why it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.programs import Program
from benchmarks.queues import QUEUES, queue_samples
from everbeat.cli.failures import ExitCode
from tests.benchmarks.conftest import ONE_PAIR, compare


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("pgqueue",), "pgqueuer"),
        (("pgqueuer", "--only", "deaths"), "latency"),
        (("pgqueuer", "--nats", "nats://x"), "--nats"),
        ((), "QUEUE"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_installed(words: tuple[str, ...], told: str) -> None:
    done = compare("queues", *words)
    assert done.returncode == ExitCode.USAGE
    assert told in done.stderr
    assert "installing" not in done.stderr


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ("send", ["send, one at a time", "send of 7 at once"]),
        ("drain", ["drain, 1 worker process", "drain, 1 worker process, beside the best settings"]),
        ("latency", ["idle, send to code: p50", "idle, send to code: p99"]),
    ],
)
def test_only_figures_of_the_requested_part_are_reported(
    database_url: str, tmp_path: Path, part: str, shown: list[str]
) -> None:
    # An adapter that records what it was asked for, and prints every figure.
    adapter = "import json, sys; open('asked', 'w').write(' '.join(sys.argv[1:])); print(json.dumps({name: 1.0 for name in names}))"
    names = "names = ['bulk_per_s', 'single_per_s', 'drain_per_s', 'latency_p50_ms', 'latency_p99_ms']; "
    queue = Program(
        name="other", version="1", folder=tmp_path, command=(sys.executable, "-c", names + adapter)
    )
    found = [*queue_samples(queue, database_url, jobs=7, part=part)]
    assert (tmp_path / "asked").read_text() == f"7 {part}"
    assert [sample.name for sample in found] == [f"other: {name}" for name in shown]


@pytest.mark.long
@pytest.mark.story
@pytest.mark.usefixtures("leaves_nothing")
def test_a_queue_that_cannot_be_installed_is_left_out_and_named(database_url: str, tmp_path: Path) -> None:
    words = ("graphile-worker", "--tasks", "100", "--only", "send", *ONE_PAIR, "--json")
    done = compare("queues", *words, "--url", database_url, PATH=str(tmp_path))
    document = json.loads(done.stdout)
    assert "warning: graphile-worker is left out" in done.stderr
    assert "node, which is not on PATH" in done.stderr
    assert (document["peers"], len(document["figures"])) == ({}, 5)
    assert done.returncode == ExitCode.FAILED  # none of the named queues was measured


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.usefixtures("leaves_nothing")
def test_a_queue_is_measured_beside_everbeat(database_url: str, queue: str) -> None:
    words = (queue, "--tasks", "200", "--only", "send", "--only", "drain", *ONE_PAIR, "--json")
    done = compare("queues", *words, "--url", database_url, timeout_s=800)
    if f"measuring: {queue}" not in done.stderr:
        pytest.skip(f"{queue} CANNOT BE INSTALLED HERE, NOTHING OF IT WAS TESTED: {done.stderr}")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["peers"][queue]
    figures = {one["name"]: one for one in document["figures"]}
    theirs = {name: one for name, one in figures.items() if name.startswith(f"{queue}: ")}
    print({name: one["value"] for name, one in theirs.items()})
    assert len(theirs) == 4  # of the requested parts
    assert all(one["value"] > 0 for one in theirs.values())
    drain = theirs[f"{queue}: drain, 1 worker process"]
    assert drain["ratio"] == pytest.approx(drain["value"] / figures[drain["beside"]]["value"])
