"""The log of each tree reports an outage of the database once, within seconds, and its end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.conftest import NewServer
from tests.stories.scenario import SLACK, Scenario, Tree

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]
TOLD_WITHIN_S = 5.0 * SLACK


def lines(tree: Tree, event: str) -> list[str]:
    return [line for line in tree.output().splitlines() if f" {event} " in line]


def set_read_only(url: str, value: str) -> None:
    with psycopg.connect(url, autocommit=True, options="-c default_transaction_read_only=off") as admin:
        admin.execute(f"alter system set default_transaction_read_only = {value}".encode())
        admin.execute("select pg_reload_conf()")


@pytest.mark.long
def test_each_tree_logs_each_outage_once_and_within_seconds(
    new_server: NewServer, tmp_path: Path
) -> None:  # J11
    server = new_server()
    with ExitStack() as end:
        scenario = Scenario(server.url, "story", tmp_path)
        end.callback(lambda: scenario.close(check=False))
        trees = [scenario.ready_tree() for _ in range(2)]

        def expect_event(event: str, times: int) -> None:
            for tree in trees:
                until(lambda tree=tree: len(lines(tree, event)) >= times, what=f"{event} {times}")  # type: ignore[misc]

        def until(truth, *, what: str) -> None:  # type: ignore[no-untyped-def]
            scenario.until(truth, within=TOLD_WITHIN_S, what=what)

        server.stop("immediate")
        expect_event("database_unreachable", 1)
        server.restart("immediate")
        expect_event("database_back", 1)
        set_read_only(server.url, "on")
        expect_event("database_unreachable", 2)
        set_read_only(server.url, "off")
        expect_event("database_back", 2)
        for tree in trees:
            unreachable = lines(tree, "database_unreachable")
            assert len(unreachable) == len(lines(tree, "database_back")) == 2
            assert "default_transaction_read_only" in unreachable[1]
            assert all(" WARNING " in line for line in unreachable)
            assert not [line for line in lines(tree, "service_failed") if " ERROR " in line]
