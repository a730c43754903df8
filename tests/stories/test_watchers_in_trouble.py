"""Watchers that cannot judge the death of a tree leave this to other supervisors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg import conninfo

from everbeat.store.workers import WATCH_TURNS
from tests.conftest import NewServer
from tests.stories.scenario import SLACK, Scenario, Tree, new_scenario
from tests.stories.test_outages import ROLE, server_with_a_password, set_password

pytestmark = [pytest.mark.story, pytest.mark.timeout(120)]

NOTICED_S = 15.0
STOPPED_S, RUNNING_S = 8.0, 0.8


def watching(scenario: Scenario) -> set[int]:
    """Return the process ids of the supervisors that have turns to watch."""
    holders = """
        select s.pid from {schema}.turns t join {schema}.supervisors s on s.id = t.taken_by
        where starts_with(t.service, 'watch:') and t.taken_until > clock_timestamp()"""
    return {row["pid"] for row in scenario.query(holders)}


def watchers(scenario: Scenario) -> list[Tree]:
    """Start trees that have all turns to watch."""
    trees = [scenario.ready_tree() for _ in range(WATCH_TURNS)]
    scenario.until(lambda: watching(scenario) == {tree.pid for tree in trees}, within=30, what="all watch")
    return trees


def is_noticed(scenario: Scenario, tree: Tree) -> bool:
    return bool(
        scenario.query("select 1 from {schema}.supervisors where pid = %s and ended_at is not null", tree.pid)
    )


def test_watchers_with_an_old_password_leave_the_death_of_a_tree_to_others(
    new_server: NewServer, tmp_path: Path
) -> None:  # E4
    server = server_with_a_password(new_server)
    set_password(server, "first")
    url = conninfo.make_conninfo(server.url, user=ROLE, password="first")
    with new_scenario(url, "story", tmp_path, check=False) as scenario:
        watchers(scenario)
        set_password(server, "second")
        others = [scenario.ready_tree(url=conninfo.make_conninfo(url, password="second")) for _ in range(2)]
        others[0].kill()
        killed_at = time.monotonic()
        scenario.until(lambda: is_noticed(scenario, others[0]), within=60, what="the death is noticed")
        assert time.monotonic() - killed_at < NOTICED_S * SLACK


@pytest.mark.long
def test_watchers_that_stop_again_and_again_leave_the_death_of_a_tree_to_others(
    new_server: NewServer, tmp_path: Path
) -> None:  # E4
    with new_scenario(new_server().url, "story", tmp_path, check=False) as scenario:
        slow = watchers(scenario)
        others = [scenario.ready_tree() for _ in range(2)]
        with stopping(slow):
            others[0].kill()
            killed_at = time.monotonic()
            scenario.until(lambda: is_noticed(scenario, others[0]), within=90, what="the death is noticed")
        assert time.monotonic() - killed_at < (2 * STOPPED_S + NOTICED_S) * SLACK


@contextmanager
def stopping(trees: list[Tree]) -> Iterator[None]:
    """Suspend the supervisors for most of the time until the block ends."""
    over = threading.Event()

    def send(number: signal.Signals) -> None:
        for tree in trees:
            os.kill(tree.pid, number)

    def stop() -> None:
        while not over.is_set():
            send(signal.SIGSTOP)
            over.wait(STOPPED_S)
            send(signal.SIGCONT)
            over.wait(RUNNING_S)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
        send(signal.SIGCONT)
