"""Life behind PgBouncer in session mode, which the URL says: hints arrive, and a dead tree is noticed by its sessions."""

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
from tests.stories.stage import FAST, SLACK, Stage

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def urls(new_server: NewServer) -> Iterator[tuple[str, str]]:
    """The URLs of a server and of a pooler in session mode before it."""
    server = new_server(tcp_port=free_port())
    with pooled(server.tcp_url, mode="session") as url:
        yield server.tcp_url, url


@pytest.fixture
def stage(urls: tuple[str, str], tmp_path: Path) -> Iterator[Stage]:
    made = Stage(urls[0], "story", tmp_path)
    made.url = f"{urls[1]}?pooler=session"
    yield made
    made.url = urls[0]
    made.close()


def test_only_the_url_makes_a_pooler_one_of_sessions(urls: tuple[str, str]) -> None:
    """An idle pooler in transaction mode answers every question as one in session mode does."""
    unsaid, said = Target.parse(urls[1]), Target.parse(f"{urls[1]}?pooler=session")
    with unsaid.connect("everbeat test") as first, said.connect("everbeat test") as second:
        assert is_pooled(first)
        assert not is_pooled(second)
        row = second.execute("select pg_backend_pid(), current_setting('TimeZone')").fetchone()
        assert row == (second.server_pid, "UTC")
    heard_after_s = diagnosis.hear(said, within_s=SLACK)
    assert heard_after_s is not None


def test_a_task_is_taken_by_hint_and_a_dead_tree_is_noticed_by_its_session(
    stage: Stage, urls: tuple[str, str]
) -> None:
    app = App(f"{urls[1]}?pooler=session", schema="story")
    first = stage.ready_tree(recovery=FAST | {"running_stale_threshold_ms": 60_000})
    took: list[float] = []
    for n in range(10):
        began_at = time.monotonic()
        assert app.send_by_name("quick", {"n": n}).result(timeout=30) == n
        took.append(time.monotonic() - began_at)
    assert sorted(took)[len(took) // 2] < 0.3, "polls would take a second"
    assert "session_lock_off" not in first.output()
    running = app.send_by_name("wait_for_on_crash", {"gate_name": "go"})
    stage.until(stage.started(running.id), within=20, what="it runs")
    second = stage.ready_tree(recovery=FAST | {"running_stale_threshold_ms": 60_000})
    first.kill()
    stage.until(lambda: len(stage.recoveries()) == 1, within=4 * SLACK, what="the task is recovered")
    # Whichever looks first; not by age, whose threshold is a minute.
    assert {row["noticed_by"] for row in stage.recoveries()} <= {"session", "host", "startup"}
    stage.open_gate("go")
    assert running.result(timeout=30) == "done"
    app.close()
    assert second.stop() == 0
