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

from everbeat.cli.bench.contest import contest_figures
from everbeat.cli.bench.environments import PEERS, Peer, PeerFailed
from everbeat.cli.bench.environments import run as run_in
from everbeat.cli.bench.watch import until
from everbeat.cli.exit_codes import ExitCode
from everbeat.store.target import Target


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


def test_a_queue_of_which_no_part_is_to_be_measured_is_refused() -> None:
    done = bench("--peer", "pgqueuer", "--only", "plain")
    assert done.returncode == ExitCode.USAGE
    assert "add --only send" in done.stderr
    assert "installing" not in done.stderr


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (["plain", "send"], ["send, one at a time", "send of 7 at once"]),
        (["drain"], ["drain, 1 worker process"]),
    ],
)
def test_only_the_parts_that_are_asked_for_are_measured_of_others(
    database_url: str, tmp_path: Path, parts: list[str], shown: list[str]
) -> None:
    # An adapter that prints what it was asked for, and everything else, too.
    adapter = "import json, sys; open('asked', 'w').write(' '.join(sys.argv[1:])); print(json.dumps({name: 1.0 for name in names}))"
    names = "names = ['bulk_per_s', 'single_per_s', 'drain_per_s', 'latency_p50_ms', 'latency_p99_ms']; "
    command = (sys.executable, "-c", names + adapter)
    peer = Peer(name="other", version="1", folder=tmp_path, command=command)
    found = [*contest_figures([peer], Target(url=database_url), jobs=7, parts=parts)]
    assert (tmp_path / "asked").read_text() == " ".join(["7", *(part for part in parts if part != "plain")])
    assert [one.name for one in found] == [f"other: {name}" for name in shown]


@pytest.mark.story
@pytest.mark.usefixtures("nothing_is_left")
def test_a_queue_that_cannot_be_installed_is_left_out_and_named(database_url: str, tmp_path: Path) -> None:
    words = ("--tasks", "100", "--only", "send", "--not-durable", "--json", "--peer", "graphile-worker")
    done = bench(*words, "--url", database_url, PATH=str(tmp_path))
    told = json.loads(done.stdout)
    assert "warning: graphile-worker is left out" in done.stderr
    assert "node, which is not on PATH" in done.stderr
    assert (told["peers"], len(told["figures"])) == ({}, 4)
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
    assert len(theirs) == 3  # of the parts that were asked for
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
