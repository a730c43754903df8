"""Workers behind PgBouncer in session mode, as stated in the URL: hints arrive, and a dead tree is noticed by its sessions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everbeat import App
from everbeat.store import diagnosis
from everbeat.store.target import Target, is_pooled
from tests.conftest import NewServer
from tests.nats_server import free_port
from tests.stories.pooler import pooled
from tests.stories.scenario import FAST, SLACK, Scenario
from tests.stories.test_mass_session_loss import held_sessions

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def urls(new_server: NewServer) -> Iterator[tuple[str, str]]:
    """The URLs of a server and of a pooler in session mode in front of it."""
    server = new_server(tcp_port=free_port())
    with pooled(server.tcp_url, mode="session") as url:
        yield server.tcp_url, url


@pytest.fixture
def scenario(urls: tuple[str, str], tmp_path: Path) -> Iterator[Scenario]:
    made = Scenario(urls[0], "story", tmp_path)
    made.url = f"{urls[1]}?pooler=session"
    yield made
    made.url = urls[0]
    made.close()


def test_only_the_url_declares_a_pooler_to_be_in_session_mode(urls: tuple[str, str]) -> None:
    """An idle pooler in transaction mode is indistinguishable from one in session mode."""
    unsaid, said = Target.parse(urls[1]), Target.parse(f"{urls[1]}?pooler=session")
    with unsaid.connect("everbeat test") as first, said.connect("everbeat test") as second:
        assert is_pooled(first)
        assert not is_pooled(second)
        row = second.execute("select pg_backend_pid(), current_setting('TimeZone')").fetchone()
        assert row == (second.server_pid, "UTC")
    heard_after_s = diagnosis.hear(said, within_s=SLACK)
    assert heard_after_s is not None


def test_hints_and_session_detection_work_behind_a_session_pooler(
    scenario: Scenario, urls: tuple[str, str]
) -> None:
    app = App(f"{urls[1]}?pooler=session", schema="story")
    first = scenario.ready_tree(recovery=FAST | {"running_stale_threshold_ms": 60_000})
    took: list[float] = []
    for n in range(10):
        began_at = time.monotonic()
        assert app.send_by_name("quick", {"n": n}).result(timeout=30) == n
        took.append(time.monotonic() - began_at)
    assert sorted(took)[len(took) // 2] < 0.3, "polls would take a second"
    scenario.until(lambda: held_sessions(scenario) == 1, within=20, what="the tree holds its session lock")
    assert "session_lock_off" not in first.output()
    running = app.send_by_name("wait_for_on_crash", {"gate_name": "go"})
    scenario.until(scenario.started(running.id), within=20, what="it runs")
    second = scenario.ready_tree(recovery=FAST | {"running_stale_threshold_ms": 60_000})
    first.kill()
    scenario.until(lambda: len(scenario.recoveries()) == 1, within=4 * SLACK, what="the task is recovered")
    # Any supervisor can notice it first; not by age, whose threshold is a minute.
    assert {row["noticed_by"] for row in scenario.recoveries()} <= {"session", "host", "startup"}
    scenario.open_gate("go")
    assert running.result(timeout=30) == "done"
    app.close()
    assert second.stop() == 0
