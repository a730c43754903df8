"""Any role can fill PostgreSQL's queue of notifications, which then refuses each commit that notifies. Everything must work without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import NewServer
from tests.notify_queue import SETTINGS, full_queue, require_small_queue
from tests.stories.stage import FAST, SLACK, program_of, staged

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

DEATH_S = 3.0


def test_a_role_without_rights_fills_the_queue_of_notifications(
    new_server: NewServer, tmp_path: Path, database_url: str
) -> None:  # J12
    require_small_queue(database_url)
    server = new_server(settings=dict(SETTINGS))
    with staged(server.url, "story", tmp_path, check=False) as stage, program_of(stage) as deeds:
        doomed, other = stage.ready_tree(recovery=FAST), stage.ready_tree(recovery=FAST)
        done = [deeds.wait_for.send("during") for _ in range(8)]
        again = [deeds.wait_for_on_crash.send("after") for _ in range(8)]
        asked = deeds.wait_for.send("never")
        stage.until(lambda: len(stage.effects("start")) == 17, within=30, what="all run")
        with full_queue(server.url):
            stage.open_gate("during")
            assert [task.result(timeout=30) for task in done] == ["done"] * 8
            assert deeds.swift.send(1).result(timeout=30) == 1
            work = deeds.app.workflow("while-it-is-full")
            work.add(deeds.quick, work.add(deeds.swift, 2).result)
            work.start().outcome(timeout=60)
            deeds.app.cancel(asked.id)
            stage.until(stage.state_is(asked.id, "CANCELLED"), within=10, what="the cancel of a running task")
            doomed.kill()
            stage.until(lambda: stage.recoveries() != [], within=DEATH_S * SLACK, what="the recovery")
            stage.until(
                lambda: len(stage.effects("start")) == 18 + len(stage.recoveries()),
                within=30,
                what="the second attempts",
            )
            stage.until(lambda: "hints_not_heard" in other.output(), within=60, what="the event")
        stage.until(lambda: "hints_heard_again" in other.output(), within=10, what="the other event")
        stage.open_gate("after")
        assert [task.result(timeout=30) for task in again] == ["done"] * 8
        assert set(stage.states()) == {"COMPLETED", "CANCELLED"}
        assert {each["action"] for each in stage.recoveries()} == {"retry"}
        assert "Traceback" not in other.output()
        deeds.app.close()
    sys.modules.pop("deeds", None)
