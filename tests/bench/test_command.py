"""`everbeat bench` measures everbeat beside the bare server, verifies each task, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from everbeat import WorkerConfig
from everbeat.cli.failures import ExitCode
from tests.bench.conftest import ONE_PAIR, bench_schemas, figures_of, run_bench
from tests.cli.conftest import Command
from tests.cli.outside import processes_of, until

pytestmark = pytest.mark.story
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports what other processes use")

STARTING_S = 60.0
ENDING_S = 15.0


@pytest.mark.long
@pytest.mark.usefixtures("leaves_no_schema")
def test_each_task_of_a_bench_runs_once(database_url: str) -> None:
    parts = ("--only", "send", "--only", "drain")
    done = run_bench("--tasks", "300", *ONE_PAIR, "--json", "--not-durable", "--url", database_url, *parts)
    figures = figures_of(done)
    document = json.loads(done.stdout)
    assert (document["tasks"], document["pairs"], document["durable"], document["verified"]) == (
        300,
        1,
        False,
        True,
    )
    assert len(figures) == 14
    assert all(one["value"] > 0 for one in figures.values())
    assert "PostgreSQL" in document["server"]
    assert "warning: with fewer than 5,000 tasks" in done.stderr
    drain = figures["drain, 1 worker process, defaults"]
    assert (drain["target"]["of"], drain["target"]["at_least"]) == ("ratio", 0.55)
    assert drain["target"]["met"] is (drain["ratio"] >= 0.55)
    assert drain["ratio"] == pytest.approx(drain["value"] / figures[drain["beside"]]["value"])
    best = figures["drain, 1 worker process, best settings, beside the defaults"]
    assert best["beside"] == drain["name"]
    assert document["settings"]["defaults"]["async_concurrency"] == WorkerConfig().async_concurrency
    assert document["settings"]["best settings"]["async_concurrency"] == 2_000


@pytest.mark.long
@pytest.mark.usefixtures("leaves_no_schema")
def test_the_output_of_a_bench_names_the_server(database_url: str) -> None:
    done = run_bench("--tasks", "5000", *ONE_PAIR, "--not-durable", "--url", database_url, "--only", "send")
    assert done.returncode == 0, done.stderr
    assert "server: PostgreSQL" in done.stderr
    assert "warning" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("leaves_no_schema")
def test_a_bench_measures_idle_cost_growth_limits_and_recovery(database_url: str) -> None:
    chosen = ("growth", "limits", "workers", "idle", "latency", "load", "workflows", "deaths")
    parts = [word for part in chosen for word in ("--only", part)]
    small = ("--tasks", "300", "--rows", "5000", "--watch", "1", *ONE_PAIR)
    figures = figures_of(run_bench(*small, "--json", "--not-durable", "--url", database_url, *parts))
    print({name: one["value"] for name, one in figures.items()})
    assert figures["drain, one limit with room"]["ratio"] > 0
    assert figures["16 worker processes, beside the best"]["ratio"] > 0
    assert figures["drain, 1,000 serial keys, beside 500 waiting keys"]["value"] > 0
    assert figures["10 workflows of 100 nodes and a join"]["value"] > 0
    assert figures["chain of 100 nodes: time per node"]["value"] > 0
    assert figures["idle, send to code: p50"]["value"] < 1_000
    assert (
        figures["at half load, send to code: p50"]["value"]
        <= figures["at half load, send to code: p99"]["value"]
    )
    assert figures["at half load: tasks sent"]["value"] > 1
    assert figures["idle: memory of both"]["value"] > 10
    assert 0 < figures["kill -9 of a worker process, to the next start"]["value"] < 60


@pytest.mark.usefixtures("leaves_no_schema")
def test_a_bench_measures_a_server_that_can_lose_commits_only_on_request(database_url: str) -> None:
    done = run_bench("--tasks", "100", "--url", database_url)
    assert done.returncode == ExitCode.USAGE
    assert "fsync off" in done.stderr
    assert "--not-durable" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [(("--tasks", "1"), "tasks"), (("--only", "drian"), "drain"), (("--pairs", "0"), "pairs")],
)
def test_a_bench_refuses_invalid_options(words: tuple[str, ...], told: str) -> None:
    done = run_bench(*words)
    assert done.returncode == ExitCode.USAGE
    assert told in done.stderr


@contextmanager
def running_bench(everbeat: Command, database_url: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a bench in its own process group, as a terminal does, until its workers have started."""
    log = everbeat.folder / "bench.log"
    with log.open("wb") as output:
        bench = subprocess.Popen(
            everbeat.argv(
                "bench", "--tasks", "300", "--allow-busy", "--not-durable", "--url", database_url, *words
            ),
            cwd=everbeat.folder,
            env=everbeat.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    try:
        until(lambda: len(processes_of(everbeat.folder)) >= 3, within_s=STARTING_S)
        yield bench
    finally:
        bench.kill()
        bench.wait()
        print(log.read_text())
        for left in processes_of(everbeat.folder):
            left.kill()


def recovered(everbeat: Command) -> bool:
    return "task_recovered" in (everbeat.folder / "bench.log").read_text()


PARTS = ("drain", "idle", "deaths")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.story
@pytest.mark.parametrize(
    ("part", "number"),
    [
        pytest.param(
            part, number, marks=() if (part, number) == ("deaths", signal.SIGTERM) else pytest.mark.long
        )
        for part in PARTS
        for number in SIGNALS
    ],
)
def test_an_interrupted_bench_leaves_nothing_behind(
    everbeat: Command, database_url: str, part: str, number: signal.Signals
) -> None:
    with running_bench(everbeat, database_url, "--only", part, "--watch", "60") as bench:
        if part == "deaths":
            until(lambda: recovered(everbeat), within_s=STARTING_S)  # a tree runs a task of ten minutes
        os.killpg(bench.pid, number)  # as a terminal does; its trees are in other sessions
        assert bench.wait(timeout=ENDING_S) == 130
        assert "Interrupted. All workers have ended" in (everbeat.folder / "bench.log").read_text()
        assert bench_schemas(database_url) == []
        until(lambda: processes_of(everbeat.folder) == [], within_s=2.0)


@pytest.mark.long
@pytest.mark.story
def test_further_signals_do_not_stop_the_cleanup_of_a_bench(everbeat: Command, database_url: str) -> None:
    with running_bench(everbeat, database_url, "--only", "idle", "--watch", "60") as bench:
        for _ in range(1_000):
            bench.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                bench.wait(timeout=0.02)
                break
        assert bench.returncode == 130
        assert bench_schemas(database_url) == []
        until(lambda: processes_of(everbeat.folder) == [], within_s=2.0)


@pytest.mark.long
@pytest.mark.story
def test_the_next_bench_removes_the_schema_of_a_killed_one(everbeat: Command, database_url: str) -> None:
    with running_bench(everbeat, database_url, "--only", "deaths") as bench:
        bench.kill()
        until(lambda: processes_of(everbeat.folder) == [], within_s=2.0)
    (left,) = bench_schemas(database_url)
    small = ("--tasks", "100", "--only", "send", "--pairs", "1", "--allow-busy")
    done = everbeat("bench", *small, "--not-durable", "--url", database_url)
    assert f"removed: {left}" in done.assert_code(0).err
    assert bench_schemas(database_url) == []


BURN = "import time\nends_at = time.monotonic() + 100\nwhile time.monotonic() < ends_at: pass"
SMALL = ("--tasks", "100", "--only", "latency", "--not-durable")


@contextmanager
def burners(folder: Path, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes that belong to another session, under a name that the system shows."""
    program = folder / "eb-burner"
    program.symlink_to(sys.executable)
    running = [
        subprocess.Popen([program, "-I", "-S", "-c", BURN, "a secret argument"], start_new_session=True)
        for _ in range(count)
    ]
    try:
        yield running
    finally:
        for burner in running:
            burner.kill()
            burner.wait()


def argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "everbeat", "bench", *words]


def is_quiet_within(seconds: int) -> bool:
    """Whether all processes together leave a core free for a second."""
    return any(
        psutil.cpu_percent(interval=1) * psutil.cpu_count() < 40 for _ in range(seconds)
    )  # of one core


@linux_only
@pytest.mark.alone  # it names only the three busiest processes, which must be the burners
def test_a_bench_on_a_busy_machine_reports_the_reason_and_no_figure(
    database_url: str, tmp_path: Path
) -> None:
    with burners(tmp_path, 3):
        command = argv(*SMALL, "--pairs", "1", "--patience", "1s", "--url", database_url)
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == ExitCode.TIMEOUT, done.stderr
    assert done.stdout == ""
    assert "discarded: latency. Other processes used" in done.stderr
    assert "error: The machine is busy: other processes use" in done.stderr
    assert "eb-burner (pid" in done.stderr
    assert "secret" not in done.stderr
    assert "fix: end those processes, or wait longer with --patience" in done.stderr
    assert bench_schemas(database_url) == []


@pytest.mark.long
@linux_only
def test_a_bench_on_a_busy_machine_reports_the_reason_as_json(database_url: str, tmp_path: Path) -> None:
    with burners(tmp_path, 3):
        command = argv(*SMALL, "--pairs", "1", "--patience", "0s", "--json", "--url", database_url)
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (ExitCode.TIMEOUT, "")
    error = json.loads(done.stderr[done.stderr.index('{\n  "error"') :])["error"]
    assert error["code"] == "MACHINE_BUSY"
    assert "other processes use" in error["message"]


@pytest.mark.long
@linux_only
@pytest.mark.alone
def test_a_bench_repeats_a_measurement_that_other_processes_disturbed(
    database_url: str, tmp_path: Path
) -> None:
    if not is_quiet_within(10):
        pytest.skip("THE MACHINE IS BUSY, SO NO END OF THAT CAN BE SEEN; make test runs this test alone")
    words = ("--pairs", "1", "--foreign-limit", "0.7", "--patience", "80s", "--json", "--url", database_url)
    with (
        burners(tmp_path, 2) as running,
        subprocess.Popen(
            argv(*SMALL, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as bench,
    ):
        assert bench.stderr is not None
        said = next(line for line in bench.stderr if line.startswith("discarded:"))
        for burner in running:
            burner.kill()
        out, err = bench.communicate(timeout=100)
    assert bench.returncode == 0, err
    assert "eb-burner" in said
    document = json.loads(out)
    first, *_, last = document["samples"]
    assert (first["discarded"], last["discarded"]) == (True, False)
    assert last["foreign_cores"] <= 0.7 < first["foreign_cores"]
    assert document["foreign"]["discarded"] == len(document["samples"]) - 1
    assert document["foreign"]["busy"] is False
    latency = document["figures"][0]
    assert latency["values"] == [last["values"][latency["name"]]]  # the discarded one does not count


@linux_only
@pytest.mark.timeout(200)
@pytest.mark.long
def test_the_json_document_of_a_bench_has_all_keys_and_measurements(database_url: str) -> None:
    """Also a busy machine is measured where that is asked for, and where the limit is high."""
    words = ("--tasks", "100", "--only", "send", "--pairs", "5", "--not-durable", "--json")
    command = argv(*words, "--foreign-limit", "100", "--url", database_url)
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {*document} == {
        "machine", "server", "server_settings", "durable", "tasks", "pairs", "verified", "settings", "foreign", "confidence", "figures", "samples",
    }  # fmt: skip
    assert {"cores", "python", "everbeat", "processor", "system"} <= {*document["machine"]}
    assert {"fsync", "synchronous_commit", "shared_buffers"} <= {*document["server_settings"]}
    assert document["foreign"]["busy"] is False
    assert [one["pair"] for one in document["samples"]] == [pair for pair in range(5) for _ in range(3)]
    names = [one["measurement"] for one in document["samples"]]
    assert names[:3] == names[3:6][::-1] == names[6:9]  # every second round goes backwards
    assert {*document["samples"][0]} == {
        "section", "measurement", "pair", "discarded", "foreign_cores", "own_cores", "seconds", "busiest", "values",
    }  # fmt: skip
    figure = next(one for one in document["figures"] if one["name"] == "send, one at a time")
    assert {*figure} == {
        "name", "value", "unit", "values", "spread", "ratio", "ratios", "interval", "beside", "verdict", "target",
        "foreign_cores", "busy",
    }  # fmt: skip
    assert len(figure["ratios"]) == 5
    interval = figure["interval"]
    assert (interval["low"], interval["high"]) == (min(figure["ratios"]), max(figure["ratios"]))
    assert interval["low"] <= figure["ratio"] <= interval["high"]
    assert interval["coverage"] == 0.9375
