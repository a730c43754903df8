"""`everbeat bench --peer` measures other queues in the same run, or says why it cannot; nothing of them stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from everbeat.cli.bench.environments import PEERS, PeerFailed
from everbeat.cli.bench.environments import run as run_in
from everbeat.cli.bench.watch import until
from everbeat.cli.exit_codes import ExitCode


def bench(*words: str, timeout_s: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everbeat", "bench", *words]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.fixture
def nothing_is_left(database_url: str) -> Iterator[None]:
    yield
    with psycopg.connect(database_url) as connection:
        left = connection.execute(
            "select nspname from pg_namespace where nspname like 'everbeat_bench_%'"
            " union all select datname from pg_database where datname like 'everbeat_bench_%'"
        )
        assert left.fetchall() == []


def has_ended(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def test_an_unknown_queue_is_refused_before_anything_is_done() -> None:
    done = bench("--peer", "pgqueue")
    assert done.returncode == ExitCode.USAGE
    assert "--peer" in done.stderr
    assert "pgqueuer" in done.stderr
    assert "installing" not in done.stderr


@pytest.mark.story
@pytest.mark.usefixtures("nothing_is_left")
def test_a_queue_that_cannot_be_installed_is_left_out_and_named(database_url: str, tmp_path: Path) -> None:
    words = ("--tasks", "100", "--only", "plain", "--not-durable", "--json", "--peer", "graphile-worker")
    done = bench(*words, "--url", database_url, PATH=str(tmp_path))
    told = json.loads(done.stdout)
    assert "warning: graphile-worker is left out" in done.stderr
    assert "node, which is not on PATH" in done.stderr
    assert (told["peers"], len(told["figures"])) == ({}, 3)
    assert done.returncode == ExitCode.FAILED  # all that was named is missing


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.usefixtures("nothing_is_left")
def test_a_queue_is_measured_beside_ours(database_url: str, peer: str) -> None:
    words = ("--tasks", "200", "--only", "send", "--only", "drain", "--not-durable", "--json", "--peer", peer)
    done = bench(*words, "--url", database_url, timeout_s=800)
    if f"measuring: {peer}" not in done.stderr:
        pytest.skip(f"{peer} CANNOT BE INSTALLED HERE, NOTHING OF IT WAS TESTED: {done.stderr}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["peers"][peer]
    theirs: dict[str, Any] = {
        one["name"]: one for one in told["figures"] if one["name"].startswith(f"{peer}: ")
    }
    print({name: one["value"] for name, one in theirs.items()})
    assert len(theirs) == 5
    assert all(one["value"] > 0 for one in theirs.values())
    drain = theirs[f"{peer}: drain, 1 worker process"]
    ours = next(one for one in told["figures"] if one["name"] == drain["beside"])
    assert drain["ratio"] == pytest.approx(drain["value"] / ours["value"])


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"ended with code 3(.|\n)*no such package"):
        run_in(
            [sys.executable, "-c", "import sys; print('no such package', file=sys.stderr); sys.exit(3)"],
            folder=tmp_path,
            within_s=30,
        )


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    # It sleeps for longer than anybody waits: it is to be killed.
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); os.replace('pid', 'child'); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(PeerFailed, match="did not end within 5 s"):
        run_in([sys.executable, "-c", code], folder=tmp_path, within_s=5)
    pid = int((tmp_path / "child").read_text())
    assert until(lambda: has_ended(pid), within_s=10, what="the child's end")


def test_a_program_sees_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    monkeypatch.setenv("EVERBEAT_DATABASE_URL", "ours")
    code = "import os; print([os.environ.get(name) for name in ('PYTHONPATH', 'EVERBEAT_DATABASE_URL', 'GIVEN')])"
    written = run_in(
        [sys.executable, "-c", code], folder=tmp_path, within_s=30, variables={"GIVEN": "theirs"}
    )
    assert written.strip() == "[None, None, 'theirs']"
