"""Probes of real trees over real HTTP: an outage of PostgreSQL fails only readiness, and a blocked loop fails liveness."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from everbeat.embedded.server import EmbeddedServer
from tests.conftest import NewServer
from tests.stories.scenario import FAST, Scenario, Tree, new_scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

BLOCKABLE = Path(__file__).parent / "programs" / "blockable_tree.py"
BLOCK_S = 8.0  # the limit is five seconds
INTERVALS = 3.0
"""For how many heartbeats each outage lasts: more than liveness forgives a supervisor whose database responds."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Probed:
    """A tree that answers probes."""

    def __init__(self, scenario: Scenario, tree: Tree, port: int) -> None:
        self.scenario = scenario
        self.tree = tree
        self.port = port

    def ask(self, path: str) -> tuple[int, str]:
        """Return the status and the reason; 0 means that nothing listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as answer:
                return answer.status, json.loads(answer.read())["reason"]
        except urllib.error.HTTPError as problem:
            with problem:
                return problem.code, json.loads(problem.read())["reason"]
        except urllib.error.URLError:
            return 0, ""

    def until(self, path: str, status: int, reason: str = "", *, within: float = 30) -> None:
        def holds() -> bool:
            found, said = self.ask(path)
            return found == status and reason in said

        what = f"{path} answers {status} {reason}"
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < within, (
                f"{what}: {self.ask(path)}\n{self.tree.output()[-3000:]}"
            )
            time.sleep(0.05)  # a probe is asked again and again
        print(f"{what}: {time.monotonic() - began:.2f} s")

    def stays_alive(self, seconds: float) -> None:
        """Check that liveness holds all the time, and readiness does not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status, reason = self.ask("/livez")
            assert status == 200, reason
            assert self.ask("/readyz")[0] == 503
            time.sleep(0.1)  # the outage lasts


@pytest.fixture
def server(new_server: NewServer) -> EmbeddedServer:
    return new_server()


@pytest.fixture
def scenario(server: EmbeddedServer, tmp_path: Path) -> Iterator[Scenario]:
    with new_scenario(server.url, "story", tmp_path, check=False) as made:
        yield made


@pytest.fixture
def sample_tasks(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario) as program:
        yield program


@pytest.fixture
def probed(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> Probed:
    monkeypatch.setenv("STORY_BLOCK_S", str(BLOCK_S))
    port = free_port()
    tree = scenario.start_tree(
        prefix=(sys.executable, str(BLOCKABLE)),
        recovery=FAST,
        options=("--probe", f"127.0.0.1:{port}", "--probe-file", str(scenario.folder / "alive")),
    )
    return Probed(scenario, tree, port)


def send_to_server(server: EmbeddedServer, number: signal.Signals) -> None:
    """Send a signal to all processes of the server, the first one first. A backend can end meanwhile."""
    top = psutil.Process(int((server.folder / "data" / "postmaster.pid").read_text().split()[0]))
    top.send_signal(number)
    for each in top.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def test_an_outage_fails_readiness_and_never_liveness_and_a_drain_fails_readiness(
    probed: Probed, sample_tasks: ModuleType, server: EmbeddedServer
) -> None:  # O7
    alive = probed.scenario.folder / "alive"
    interval_s = FAST["runner_heartbeat_interval_ms"] / 1_000
    probed.until("/livez", 200)
    probed.until("/startupz", 200)
    probed.until("/readyz", 200, "1 of 1")
    before = alive.stat().st_mtime_ns

    server.stop("immediate")
    probed.until("/readyz", 503, "database")
    status, reason = probed.ask("/readyz")
    assert (status, "postgresql://" in reason, server.url.partition("@")[2] in reason) == (503, False, False)
    probed.stays_alive(INTERVALS * interval_s)
    assert probed.ask("/startupz")[0] == 200
    server.restart("immediate")
    probed.until("/readyz", 200)
    assert alive.stat().st_mtime_ns - before > INTERVALS * interval_s * 1e9, "the file was touched all along"

    sample_tasks.app.close()
    sample_tasks.wait_for.send("go")
    probed.scenario.until(lambda: probed.scenario.effects("start"), within=30, what="it runs")
    probed.tree.process.terminate()
    probed.until("/readyz", 503, "draining")
    assert probed.ask("/livez")[0] == 200
    probed.scenario.open_gate("go")
    assert probed.tree.process.wait(timeout=60) == 0
    assert probed.ask("/livez")[0] == 0
    assert not alive.exists()
    sample_tasks.app.close()


@pytest.mark.long
def test_a_database_that_is_frozen_fails_readiness_and_never_liveness(
    probed: Probed, server: EmbeddedServer
) -> None:  # O7
    probed.until("/readyz", 200, "1 of 1")
    send_to_server(server, signal.SIGSTOP)
    probed.until("/readyz", 503, "database")
    probed.stays_alive(INTERVALS * FAST["runner_heartbeat_interval_ms"] / 1_000)
    send_to_server(server, signal.SIGCONT)
    probed.until("/readyz", 200)
    assert probed.ask("/livez")[0] == 200


@pytest.mark.long
def test_a_supervisor_whose_loop_stands_still_is_not_alive_until_it_runs_again(probed: Probed) -> None:  # O7
    alive = probed.scenario.folder / "alive"
    probed.until("/readyz", 200)
    probed.tree.process.send_signal(signal.SIGUSR1)
    probed.until("/livez", 503, "event loop", within=BLOCK_S)
    assert probed.ask("/readyz")[0] == 503
    touched = alive.stat().st_mtime_ns
    assert time.time_ns() - touched > 1e9, "the file is not touched"
    probed.until("/livez", 200)
    probed.until("/readyz", 200)


def test_systemd_learns_that_a_tree_is_ready_alive_and_stopping(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:  # O7
    path = scenario.folder / "n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "1500000")
        tree = scenario.start_tree(recovery=FAST)
        while (said := receiver.recv(1_000).decode()) != "READY=1\nSTATUS=Worker processes are running.":
            assert said == "WATCHDOG=1"
        assert scenario.workers(tree)
        began = time.monotonic()
        assert [receiver.recv(1_000) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        assert time.monotonic() - began < 1.5 + 1.0, "at most half of the timeout between two"
        for child in psutil.Process(tree.pid).children():
            assert "NOTIFY_SOCKET" not in child.environ()
        tree.process.terminate()
        while (said := receiver.recv(1_000).decode()) != "STOPPING=1\nSTATUS=Draining.":
            assert said == "WATCHDOG=1"
        assert tree.process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--probe", "8090"), "--probe = '8090': must be HOST:PORT or :PORT"),
        (("--probe", "192.0.2.1:8090"), "cannot listen there"),
        (("--probe-file", "/nowhere/alive"), "--probe-file = '/nowhere/alive': must be a file"),
        (("--probe-file", "/tmp"), "--probe-file = '/tmp': must be a file"),
    ],
)
def test_a_probe_that_cannot_be_served_is_an_error_before_any_process_starts(
    options: tuple[str, str], message: str
) -> None:  # O7
    ended = subprocess.run(
        [sys.executable, "-m", "everbeat", "worker", "no_module:app", *options],
        env=os.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode != 0
    assert message in " ".join(ended.stderr.split())
    assert "no_module" not in ended.stderr
