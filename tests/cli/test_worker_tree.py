"""Test that `everbeat worker` without the command-line parser understands a command line as the parser does, and loads little."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from everbeat.cli import worker_tree
from everbeat.cli.main import load_command
from everbeat.cli.main import main as parse
from everbeat.cli.worker_tree import NUMBERS, PROBES, TEXTS, WorkerCall, call_of

VARIABLES = ("EVERBEAT_SLOT", "EVERBEAT_LOG_LEVEL", "EVERBEAT_LOG_FORMAT")
UNDERSTOOD = [
    "shop:app",
    "shop:app --processes 2 --concurrency=7 --threads 3 --task-processes 1 --prefetch 20",
    "--queues mail,films --queue big shop:app --queues last",
    "shop:app --grace 5s --poll 2s --max-rss 512MB --max-tasks-per-process 9 --slot web-0",
    "shop:app --log-level DEBUG --log-format JSON",
    "shop:app --processes 2 --processes 3 --grace 1s --grace 2s",
    "shop:app --prefetch 0 --threads 0 --concurrency 007",
    "shop:app --probe :8090 --probe-file=/tmp/alive",
]
LEFT_TO_THE_PARSER = [
    "",
    "--help",
    "shop:app --help",
    "shop:app other:app",
    "shop:app --reload",
    "shop:app --processes",
    "shop:app --processes 0",
    "shop:app --processes two",
    "shop:app --processes -1",
    "shop:app --processes=",
    "shop:app --unknown 1",
    "shop:app --grace soon",
    "shop:app --log-level loud",
    "shop:app --log-format xml",
    "shop:app -- --processes",
    "-- shop:app",
]
WORKER_ONLY = (
    "everbeat.app",
    "everbeat.client",
    "everbeat.domain.task.context",
    "everbeat.in_process",
    "everbeat.worker",
)
SUPERVISOR_ONLY = ("everbeat.in_process", "everbeat.maintenance", "everbeat.supervisor")
PROBES_ONLY = ("everbeat.domain.probes", "everbeat.runtime.http_server", "everbeat.supervisor.probes")
TERMINAL = ("everbeat.cli.main", "everbeat.cli.selection", "pydantic", "rich", "typer")


@pytest.fixture
def run_calls(monkeypatch: pytest.MonkeyPatch) -> list[WorkerCall]:
    """Return the list of the calls that the command would run."""
    calls: list[WorkerCall] = []

    def run(call: WorkerCall) -> None:
        calls.append(call)

    monkeypatch.setattr(WorkerCall, "run", run)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return calls


def parsed(line: str, calls: list[WorkerCall]) -> WorkerCall:
    """Return the call that the command-line parser reads from a command line."""
    with pytest.raises(SystemExit) as done:
        parse(["worker", *line.split()])
    assert not done.value.code
    return calls.pop()


@pytest.mark.parametrize("line", UNDERSTOOD)
def test_a_command_line_means_the_same_without_the_parser(line: str, run_calls: list[WorkerCall]) -> None:
    assert call_of(line.split(), os.environ) == parsed(line, run_calls)


@pytest.mark.parametrize("slot", ["web-0", ""])
def test_the_environment_means_the_same_without_the_parser(
    slot: str, run_calls: list[WorkerCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(VARIABLES, (slot, slot and "warning", slot and "json"), strict=True):
        monkeypatch.setenv(name, value)
    for line in ("shop:app", "shop:app --slot web-1 --log-level error --log-format text"):
        assert call_of(line.split(), os.environ) == parsed(line, run_calls)


@pytest.mark.parametrize("line", LEFT_TO_THE_PARSER)
def test_other_command_lines_are_left_to_the_parser(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []
    monkeypatch.setattr("everbeat.cli.main.main", read.append)
    worker_tree.main(["worker", *line.split()])
    assert read == [["worker", *line.split()]]


def test_each_option_is_understood_without_the_parser_or_named_here() -> None:
    options = {name for each in load_command("worker").params for name in each.opts if name.startswith("--")}
    others = {"--queues", "--queue", "--log-level", "--log-format", "--reload", "--reload-dir"}
    assert options - {"--help"} == NUMBERS.keys() | TEXTS.keys() | PROBES.keys() | others


def loaded_by(*modules: str) -> set[str]:
    """Return the modules that a fresh Python has loaded after importing these modules."""
    program = f"import {', '.join(modules)}, json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(done.stdout))


def in_rooms(loaded: set[str], rooms: tuple[str, ...]) -> list[str]:
    return sorted(name for name in loaded if f"{name}.".startswith(tuple(f"{each}." for each in rooms)))


def test_a_supervisor_loads_no_parser_and_no_code_of_workers() -> None:
    loaded = loaded_by("everbeat.cli.entry", "everbeat.cli.worker_tree", "everbeat.assembly.supervision")
    assert in_rooms(loaded, TERMINAL + WORKER_ONLY) == []
    assert in_rooms(loaded, PROBES_ONLY) == []
    assert len(in_rooms(loaded, ("everbeat",))) <= 168


def test_a_worker_process_loads_no_parser_and_no_code_of_supervisors() -> None:
    loaded = loaded_by("everbeat.cli.worker_process", "everbeat._top_level")
    assert in_rooms(loaded, TERMINAL + SUPERVISOR_ONLY) == []
    assert len(in_rooms(loaded, ("everbeat",))) <= 263


def test_the_first_worker_process_starts_before_the_supervisor_loads_its_code() -> None:
    loaded = loaded_by("everbeat.cli.entry", "everbeat.cli.worker_tree")
    assert in_rooms(loaded, ("everbeat.recovering", "everbeat.store", "everbeat.supervisor", "psycopg")) == []
