"""The log of each tree reports an outage of the database once, within seconds, and its end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.conftest import NewServer
from tests.stories.stage import SLACK, Stage, Tree

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]
TOLD_WITHIN_S = 5.0 * SLACK


def lines(tree: Tree, event: str) -> list[str]:
    return [line for line in tree.output().splitlines() if f" {event} " in line]


def set_read_only(url: str, value: str) -> None:
    with psycopg.connect(url, autocommit=True, options="-c default_transaction_read_only=off") as admin:
        admin.execute(f"alter system set default_transaction_read_only = {value}".encode())
        admin.execute("select pg_reload_conf()")


def test_each_tree_reports_each_outage_once_and_soon_at_default_beats(
    new_server: NewServer, tmp_path: Path
) -> None:  # J11
    server = new_server()
    with ExitStack() as end:
        stage = Stage(server.url, "story", tmp_path)
        end.callback(lambda: stage.close(check=False))
        trees = [stage.ready_tree() for _ in range(2)]

        def told(event: str, times: int) -> None:
            for tree in trees:
                stage_until(lambda tree=tree: len(lines(tree, event)) >= times, what=f"{event} {times}")  # type: ignore[misc]

        def stage_until(truth, *, what: str) -> None:  # type: ignore[no-untyped-def]
            stage.until(truth, within=TOLD_WITHIN_S, what=what)

        server.stop("immediate")
        told("database_unreachable", 1)
        server.restart("immediate")
        told("database_back", 1)
        set_read_only(server.url, "on")
        told("database_unreachable", 2)
        set_read_only(server.url, "off")
        told("database_back", 2)
        for tree in trees:
            unreachable = lines(tree, "database_unreachable")
            assert len(unreachable) == len(lines(tree, "database_back")) == 2
            assert "default_transaction_read_only" in unreachable[1]
            assert all(" WARNING " in line for line in unreachable)
            assert not [line for line in lines(tree, "service_failed") if " ERROR " in line]
