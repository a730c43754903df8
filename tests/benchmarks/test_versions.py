"""`python -m benchmarks versions` compares two installations of everbeat by the same program, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import everbeat
from everbeat.cli.failures import ExitCode
from tests.benchmarks.conftest import ONE_PAIR, compare

pytestmark = pytest.mark.story


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    ("part", "names"),
    [
        pytest.param("latency", ["idle, send to code: p50, defaults", "idle, send to code: p99, defaults"]),
        pytest.param(
            "drain",
            ["drain, 1 worker process, defaults", "drain, 1 worker process, best settings"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_installations_are_measured_in_turns(
    database_url: str, tmp_path: Path, part: str, names: list[str]
) -> None:
    # A module of the working folder must not be imported instead of an installation.
    (tmp_path / "everbeat.py").write_text("raise ImportError")
    small = ("--tasks", "100", "--only", part, *ONE_PAIR)
    done = compare("versions", sys.executable, *small, "--json", "--url", database_url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    figures = {one["name"]: one for one in document["figures"]}
    assert {*figures} == {f"{side}: {name}" for side in ("here", "there") for name in names}
    for name in names:
        here, there = figures[f"here: {name}"], figures[f"there: {name}"]
        assert here["beside"] == there["name"]
        assert here["ratio"] == pytest.approx(here["value"] / there["value"])
    for side in document["against"].values():
        assert side["place"] == everbeat.__file__
        assert side["defaults"]["async_concurrency"] == everbeat.WorkerConfig().async_concurrency


def test_an_interpreter_without_everbeat_is_refused(database_url: str, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = compare("versions", str(bare), "--tasks", "100", "--not-durable", "--url", database_url)
    assert done.returncode == ExitCode.FAILED
    assert "PYTHON must be an interpreter that can import everbeat" in done.stderr
    assert "No module named 'everbeat'" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("words", [("--peer", "pgqueuer"), ("--only", "deaths"), ("--nats", "nats://x")])
def test_only_options_that_compare_versions_are_accepted(words: tuple[str, str]) -> None:
    done = compare("versions", sys.executable, *words)
    assert done.returncode == ExitCode.USAGE
    assert words[0] in done.stderr
