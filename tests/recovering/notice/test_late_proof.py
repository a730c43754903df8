"""Test a proof of death that was taken before a server restart and is written after it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from psycopg import Connection

from everbeat.embedded.server import EmbeddedServer
from everbeat.runtime.identity import ProcessIdentity
from everbeat.store import migrating, workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.recovering.conftest import ManualObserver
from tests.recovering.notice.test_age import FAST, Noting, look
from tests.store.conftest import StoreHarness


class Restarting:
    """A server with three trees of this machine; the processes of two have ended."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.target = Target.parse(server.url)
        connection = self.target.connect("everbeat test")
        migrating.migrate(connection, self.target)
        self.db = StoreHarness(self.target, connection)
        self.restarts = 0
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        me = ProcessIdentity.current()
        for name in ("s1", "s2"):
            self.db.supervisor(name, f"{name}-w")
        connection.execute(
            self.db.plain("update {schema}.supervisors set boot_id = %s, pid_namespace = %s, pid = %s"),
            [me.boot_id, str(me.pid_namespace), ended.pid],
        )
        self.db.supervisor("me")

    def restart(self) -> None:
        """Restart the server once."""
        if not self.restarts:
            self.restarts += 1
            self.server.restart("immediate")
            self.db.connection = self.target.connect("everbeat test")


@pytest.fixture
async def restarting(new_server: NewServer) -> AsyncIterator[Restarting]:
    made = Restarting(new_server(settings={"synchronous_commit": "on"}))
    first: Connection[object] = made.db.connection
    yield made
    made.db.database.close()
    first.close()
    made.db.connection.close()


@pytest.mark.parametrize("beats_again", [False, True], ids=["a dead tree", "a tree that beats again"])
async def test_a_proof_from_before_a_server_restart_takes_effect_unless_the_tree_beats(
    beats_again: bool, restarting: Restarting
) -> None:  # I14
    db = restarting.db
    running = db.running("s1-w")
    session = Session(restarting.target, "everbeat test caretakers")
    observer = ManualObserver(db, session)

    def between() -> None:
        restarting.restart()
        if beats_again:
            observer.beat("s1")

    # The proof is complete when the recovery is about to be written.
    reaper = observer.reaper(witness=Noting(session, "worker/end_supervisor", between), **FAST)
    for _ in range(3):
        await look(observer, reaper)
    assert restarting.restarts == 1, "two of three are silent, so this machine is asked for proofs"
    assert observer.living() == ({"me", "s1"} if beats_again else {"me"})
    assert db.row(running.id, "state") == ("RUNNING" if beats_again else "FAILED")
    row = db.connection.execute(
        db.plain(
            "select ended_how, ended_at > pg_postmaster_start_time() from {schema}.supervisors where id = 's2'"
        )
    ).fetchone()
    assert row == ("age", True), "it was ended by age, after the restart"
    assert db.run(workers.watch_beats())
    await session.drop()
