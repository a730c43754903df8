"""Trees that live but have lost all their sessions, observed from the machine on which they run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from psycopg import conninfo

from everbeat.store.embedded import EmbeddedServer
from tests.conftest import NewServer
from tests.stories.stage import FAST, SLACK, Stage, program_of, staged
from tests.stories.test_everything_works_again import (
    ROLE,
    cut_sessions,
    server_with_a_password,
    set_password,
)

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

WAIT_S = 1.0
RECOVERY = {"session_grace_ms": 500, "mass_session_grace_ms": round(WAIT_S * 1_000)}


@contextmanager
def staged_with_a_password(server: EmbeddedServer, folder: Path) -> Iterator[tuple[Stage, ModuleType]]:
    """A stage whose trees log in with the first password, and its program."""
    set_password(server, "first")
    url = conninfo.make_conninfo(server.url, user=ROLE, password="first")
    with staged(url, "story", folder, check=False) as stage, program_of(stage) as deeds:
        yield stage, deeds


def lock_out(server: EmbeddedServer, stage: Stage) -> str:
    """End all sessions of the trees, which log in with the first password. Return the URL that works now."""
    set_password(server, "second")
    cut_sessions(server, but=stage.connection.info.backend_pid)
    return conninfo.make_conninfo(stage.url, password="second")


@pytest.mark.parametrize("number", [1, 2])
def test_living_trees_without_a_session_are_not_ended_on_their_own_machine(
    new_server: NewServer, tmp_path: Path, number: int
) -> None:  # E14, promise 4
    """One is a single loss, and two of three trees are a mass loss."""
    server = server_with_a_password(new_server)
    with staged_with_a_password(server, tmp_path) as (stage, deeds):
        trees = [stage.ready_tree(recovery=RECOVERY) for _ in range(number)]
        workers = {row["id"] for tree in trees for row in stage.workers(tree)}
        tasks = [deeds.wait_for.send("go") for _ in range(4)]
        stage.until(lambda: len(stage.effects("start")) == len(tasks), within=20, what="all run")
        observer = stage.ready_tree(recovery=RECOVERY, url=lock_out(server, stage))
        time.sleep(6)  # four looks more than the grace and the wait need, also those of a mass loss
        assert stage.recoveries() == []
        assert "living_trees_cut_off" in observer.output()
        set_password(server, "first")
        stage.open_gate("go")
        assert [task.result(timeout=20 * SLACK) for task in tasks] == ["done"] * len(tasks)
        assert len(stage.effects("start")) == len(tasks)
        assert {row["id"] for tree in trees for row in stage.workers(tree)} == workers
        assert stage.recoveries() == []


def test_a_frozen_tree_without_a_session_is_recovered_by_age_on_its_own_machine(
    new_server: NewServer, tmp_path: Path
) -> None:  # E4
    """It holds its lock file as a living one does."""
    server = server_with_a_password(new_server)
    with staged_with_a_password(server, tmp_path) as (stage, deeds):
        frozen = stage.ready_tree(recovery=FAST)
        task = deeds.wait_for_on_crash.send("go")
        stage.until(stage.started(task.id), within=20, what="it runs")
        stage.ready_tree(recovery=FAST)
        frozen.freeze()
        cut_sessions(server, but=stage.connection.info.backend_pid)
        stage.until(stage.started(task.id, 2), within=6 * SLACK, what="it runs elsewhere")
        assert [row["noticed_by"] for row in stage.recoveries()] == ["age"]
        stage.open_gate("go")
        assert task.result(timeout=20) == "done"
