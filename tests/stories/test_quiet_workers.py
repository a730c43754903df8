"""An operator makes trees quiet: they claim nothing, finish what runs, and go on beating until they are resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.stories.stage import FAST, SLACK, Stage, Tree

pytestmark = pytest.mark.story

WITHIN_S = 1.0 * SLACK
"""How soon a hint that arrives is acted on."""


def command(stage: Stage, *arguments: str) -> dict[str, Any]:
    """Runs `everbeat workers quiet` as an operator does."""
    found = subprocess.run(
        [sys.executable, "-m", "everbeat", "workers", "quiet", *arguments, "--json", "--url", stage.url, "--schema", stage.schema],
        env=os.environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def supervisor_of(stage: Stage, tree: Tree) -> str:
    (row,) = stage.query("select id from {schema}.supervisors where pid = %s and ended_at is null", tree.pid)
    return str(row["id"])


def claimed_by(stage: Stage, tree: Tree) -> int:
    (row,) = stage.query(
        """select count(*) from {schema}.tasks t join {schema}.workers w on w.id = t.claimed_by_worker_id
           join {schema}.supervisors s on s.id = w.supervisor_id
           where s.pid = %s and t.state = 'CLAIMED'""",
        tree.pid,
    )
    return int(row["count"])


def test_a_quiet_tree_leaves_all_new_tasks_to_others_until_it_is_resumed_and_drains_well(
    stage: Stage, deeds: ModuleType
) -> None:  # J1
    quiet = stage.ready_tree(worker={"async_concurrency": 2, "prefetch": 2})
    held = [deeds.wait_for.send("running") for _ in range(4)]
    stage.until(lambda: len(stage.effects("start")) == 2, within=20, what="two run", tree=quiet)
    stage.until(lambda: claimed_by(stage, quiet) == 2, within=20, what="two wait", tree=quiet)
    document = command(stage, supervisor_of(stage, quiet))
    assert document["supervisors"][0]["quiet_since"] is not None
    stage.until(lambda: claimed_by(stage, quiet) == 0, within=WITHIN_S, what="what waits is given back")
    (waits,) = [each for each in held if stage.task(each.id)["state"] == "PENDING"][:1]
    explained = deeds.app.explain(waits.id)
    assert [reason.code for reason in explained.reasons] == ["WORKERS_QUIET"]
    assert all(each.quiet_since is not None for each in deeds.app.list_active_workers())
    busy = stage.ready_tree()
    pid = stage.workers(busy)[0]["pid"]
    for n in range(20):
        deeds.quick.send(n).result(timeout=20)
    assert {line["pid"] for line in stage.effects("start") if line["name"] == "quick"} == {pid}
    assert len(stage.effects("end")) == 0  # what ran in the quiet tree still runs
    stage.open_gate("running")
    for each in held:
        each.result(timeout=20)
    assert busy.stop() == 0, busy.output()
    late = deeds.quick.send(99)
    command(stage, "--all", "--resume")
    late.result(timeout=20)
    command(stage, "--host", document["supervisors"][0]["hostname"])
    gone = deeds.quick.send(100)
    assert quiet.stop() == 0, quiet.output()
    assert stage.task(gone.id)["state"] == "PENDING"
    stage.ready_tree()
    gone.result(timeout=20)


def test_an_order_whose_hint_is_lost_arrives_with_the_next_beat(
    stage: Stage, deeds: ModuleType
) -> None:  # J1
    tree = stage.ready_tree(recovery=FAST)
    deeds.quick.send(1).result(timeout=20)
    with psycopg.connect(stage.url, autocommit=True) as operator:
        operator.execute(f'update "{stage.schema}".supervisors set quiet_since = now()')
        (seq,) = operator.execute(f'select beat_seq from "{stage.schema}".supervisors').fetchone()  # type: ignore[misc]
        stage.until(
            lambda: stage.query("select beat_seq from {schema}.supervisors")[0]["beat_seq"] > seq + 1,
            within=3 * SLACK,
            what="the next beat has landed",
            tree=tree,
        )
        waits = deeds.quick.send(2)
        assert not stage.effects("start", waits.id)
        for _ in range(3):
            seq = stage.query("select beat_seq from {schema}.supervisors")[0]["beat_seq"]
            stage.until(
                lambda seq=seq: stage.query("select beat_seq from {schema}.supervisors")[0]["beat_seq"] > seq,
                within=3 * SLACK,
                what="it goes on beating",
                tree=tree,
            )
        assert stage.task(waits.id)["state"] == "PENDING"
        operator.execute(f'update "{stage.schema}".supervisors set quiet_since = null')
        waits.result(timeout=20)


def test_a_quiet_tree_stays_quiet_through_a_death_of_its_worker_and_a_declaration_of_its_own(
    stage: Stage, deeds: ModuleType
) -> None:  # J1
    tree = stage.ready_tree(recovery=FAST)
    command(stage, "--all")
    (worker,) = stage.workers(tree)
    os.kill(worker["pid"], 9)
    stage.until(
        lambda: [each["pid"] for each in stage.workers(tree)] not in ([], [worker["pid"]]),
        within=20,
        what="a new worker process",
        tree=tree,
    )
    stage.query("update {schema}.supervisors set ended_at = now(), ended_how = 'age' returning id")
    stage.until(lambda: len(stage.workers(tree)) == 1, within=20, what="it comes back", tree=tree)
    waits = deeds.quick.send(1)
    (row,) = stage.query("select quiet_since from {schema}.supervisors where ended_at is null")
    assert row["quiet_since"] is not None
    deeds.app.resume_workers([supervisor_of(stage, tree)])
    waits.result(timeout=20)
    assert len(stage.effects("start", waits.id)) == 1
    assert tree.stop() == 0, tree.output()
