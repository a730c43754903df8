"""How a later version keeps its tasks from older code: a trigger rejects the lease, and `needs` hides the task from claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from everbeat.store import leases, tasks
from tests.next_edition import NEXT, next_edition
from tests.store.conftest import StoreHarness

LIMIT = 5


@pytest.fixture
def ahead(db: StoreHarness, tmp_path: Path) -> StoreHarness:
    """The harness of this version on the schema of the next one."""
    subprocess.run(
        [sys.executable, "-m", "everbeat", "migrate", "--url", db.target.url, "--schema", db.target.schema],
        env=os.environ | {"PYTHONPATH": str(next_edition(tmp_path))}, check=True, capture_output=True,
    )  # fmt: skip
    return db


def change(db: StoreHarness, text: str, ids: list[UUID]) -> None:
    db.connection.execute(db.plain("update {schema}.tasks set " + text + " where id = any(%s)"), [ids])


def refused(db: StoreHarness) -> int:
    return len(db.table("refusals"))


def hide(db: StoreHarness, ids: list[UUID]) -> None:
    change(db, "needs = json_build_object('edition', 12), needs_id = md5('edition')::uuid", ids)


def test_older_claims_starve_behind_a_trigger_alone_but_never_see_hidden_tasks(  # J3
    ahead: StoreHarness,
) -> None:
    of_next = [ahead.send() for _ in range(LIMIT)]
    change(ahead, f"edition = {NEXT}", of_next)
    ordinary = ahead.send()
    for tries in (1, 2):
        assert ahead.claim(limit=LIMIT) == [], "the same first tasks again, and none behind them"
        assert refused(ahead) == tries * LIMIT
    hide(ahead, of_next)
    (claimed,) = ahead.claim(limit=LIMIT)
    assert claimed.id == ordinary
    assert refused(ahead) == 2 * LIMIT, "older code has not even tried to claim them"
    assert {ahead.row(each, "(state, fence, attempt)::text") for each in of_next} == {"(PENDING,0,0)"}


def test_hidden_tasks_are_not_claimed_from_a_serial_line_or_as_suspects(  # J3
    ahead: StoreHarness,
) -> None:
    in_line = [ahead.send(serial="line") for _ in range(2)]
    suspect, alone = ahead.send(), ahead.send()
    hidden = [in_line[0], suspect, alone]
    change(ahead, f"edition = {NEXT}", hidden)
    change(ahead, "suspect = true", [suspect])
    hide(ahead, hidden)
    for suspects in (None, True, False):
        assert ahead.claim(limit=LIMIT, suspects=suspects) == []
    assert refused(ahead) == 0


def test_the_database_rejects_a_lease_of_older_code_and_accepts_every_other_change(
    ahead: StoreHarness,
) -> None:  # J3
    task = ahead.send()
    change(ahead, f"edition = {NEXT}", [task])
    assert ahead.claim() == []
    ahead.cancel(task)
    assert ahead.row(task, "state") == "CANCELLED"
    done = ahead.running()
    assert ahead.settle(done) == "COMPLETED"
    assert ahead.run(leases.leases_of_supervisor("s1", limit=9)) == []


@pytest.mark.long
def test_a_recovery_by_older_code_leaves_a_task_of_the_next_version_hidden(
    ahead: StoreHarness,
) -> None:  # J3
    begun = ahead.running()
    change(ahead, f"edition = {NEXT}, leased_by = {NEXT}", [begun.id])
    hide(ahead, [begun.id])
    (lease,) = ahead.leases()
    (recovered,) = ahead.recover(lease, "retry")
    assert recovered.state == "PENDING"
    assert ahead.row(begun.id, "leased_by") is None
    assert ahead.claim() == []
    assert refused(ahead) == 0


@pytest.mark.long
def test_an_operator_retry_by_older_code_leaves_a_task_of_the_next_version_hidden(
    ahead: StoreHarness,
) -> None:  # J3
    task, known = ahead.send(), ahead.send()
    hide(ahead, [task])
    change(ahead, """needs = '{{"arguments": []}}', needs_id = md5('known')::uuid""", [known])
    change(ahead, f"edition = {NEXT}", [task])
    for each in (task, known):
        ahead.cancel(each)
        ahead.run(tasks.retry(each, channel=ahead.target.channel, call=uuid4()))
        assert ahead.row(each, "state") == "PENDING"
    (claimed,) = ahead.claim()
    assert claimed.id == known
    assert refused(ahead) == 0
