"""The pages Pulse, Workers and Recoveries as programs and operators use them: records, one worker, actions, and the export of an incident."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everbeat.store import leases
from everbeat.store.target import Target
from everbeat.web import live
from tests.store.conftest import StoreHarness
from tests.web.conftest import NewVisitor


@pytest.fixture
def db(migrated: Target) -> Iterator[StoreHarness]:
    connection = migrated.connect("everbeat test")
    harness = StoreHarness(migrated, connection)
    harness.supervisor("s1", "w1", "w2")
    yield harness
    harness.database.close()
    connection.close()


async def test_pulse_and_workers_answer_the_same_trees_as_records(
    db: StoreHarness, new_visitor: NewVisitor
) -> None:
    db.running("w1")
    visitor = new_visitor("see")
    pulse, workers = await visitor.json("/pulse"), await visitor.json("/workers")
    assert pulse["overdue_leases"] == 0
    assert pulse["says"].startswith("The only tree beats")
    assert [tree["supervisor_id"] for tree in pulse["trees"]] == ["s1"]
    (tree,) = workers["trees"]
    assert {worker["id"]: worker["running"] for worker in tree["workers"]} == {"w1": 1, "w2": 0}


async def test_one_worker_shows_what_it_holds(db: StoreHarness, new_visitor: NewVisitor) -> None:
    held = db.running("w1")
    visitor = new_visitor("see")
    assert [task["id"] for task in (await visitor.json("/workers/w1"))["tasks"]] == [str(held.id)]
    page = await visitor.get("/workers/w1")
    assert f"/tasks/{held.id}" in page.text
    unknown = (await visitor.json("/workers/nobody", status=404))["error"]
    assert (unknown["code"], "known: s1, w1, w2." in unknown["message"]) == ("UNKNOWN_NAME", True)


async def test_an_operator_quiets_and_resumes_a_tree(db: StoreHarness, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("operate")
    assert "claims nothing" in await visitor.act("/workers/s1/quiet")
    assert db.table("supervisors", "quiet_since is not null") == [(True,)]
    assert "claims tasks again" in await visitor.act("/workers/s1/resume")
    assert db.table("supervisors", "quiet_since is null") == [(True,)]


def fall_silent(db: StoreHarness) -> None:
    """Let the last heartbeat of all trees be old."""
    silent = "update {schema}.supervisors set last_beat_at = now() - interval '2 minutes'"
    db.connection.execute(db.plain(silent))


async def test_an_admin_releases_a_tree_and_its_task_is_recovered(
    db: StoreHarness, new_visitor: NewVisitor
) -> None:
    held = db.running("w1")
    visitor = new_visitor("admin")
    refused = await visitor.post("/workers/s1/release")
    assert (refused.status_code, "The tree beats, so nothing was released" in refused.text) == (409, True)
    assert db.row(held.id, "state") == "RUNNING"
    fall_silent(db)
    assert "1 task recovered" in await new_visitor("admin").act("/workers/s1/release")
    assert db.row(held.id, "state") in ("PENDING", "FAILED")
    found = await new_visitor("read").json("/recoveries")
    assert [each["kind"] for each in found["incidents"]] == ["release"]


async def test_an_incident_is_exported_as_markdown_and_json_to_readers_only(
    db: StoreHarness, new_visitor: NewVisitor
) -> None:
    held = db.running("w1")
    (lease,) = db.leases()
    db.recover(lease, "retry", noticed_by="session")
    reader = new_visitor("read")
    incident = (await reader.json("/recoveries"))["incident"]
    assert [task["task_id"] for task in incident["tasks"]] == [str(held.id)]
    text = await reader.get("/recoveries/export", incident=incident["id"])
    assert text.headers["content-disposition"].startswith("attachment")
    assert text.text.startswith("# host died")
    assert (await reader.json("/recoveries/export", incident=incident["id"], **{"as": "json"}))[
        "id"
    ] == incident["id"]
    refused = await new_visitor("see").get("/recoveries/export", incident=incident["id"])
    assert refused.status_code == 403


async def test_figures_that_leave_out_older_recoveries_say_so(
    db: StoreHarness, new_visitor: NewVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_INCIDENTS", 2)
    for _ in range(3):
        db.running("w1")
    for lease in db.leases():
        db.recover(lease, "retry", noticed_by="session")
    reader = new_visitor("read")
    found = await reader.json("/recoveries")
    assert (found["figures"]["recovered_24h"], found["figures"]["is_complete"]) == (2, False)
    assert found["incident"]["is_complete"] is False
    assert "At least 2 tasks recovered" in (await reader.get("/recoveries")).text
    assert "<small>at least</small> 2" in (await reader.get("/pulse")).text


async def test_a_death_certificate_shows_the_last_progress_in_words(
    db: StoreHarness, new_visitor: NewVisitor
) -> None:
    held = db.running("w1")
    progress = b'{"stage": "pages", "fraction": 0.085, "message": "page 34"}'
    assert db.run(leases.record_progress(held.id, held.claim_id, progress))
    fall_silent(db)
    await new_visitor("admin").act("/workers/s1/release")
    page = (await new_visitor("read").get("/recoveries")).text
    assert "<dt>Last progress</dt><dd>pages 8% page 34</dd>" in page


async def test_an_incident_that_is_not_listed_is_named_with_the_way_to_see_an_earlier_one(
    db: StoreHarness, new_visitor: NewVisitor
) -> None:
    db.running("w1")
    (lease,) = db.leases()
    db.recover(lease, "retry", noticed_by="session")
    reader = new_visitor("read")
    assert (await reader.json("/recoveries", incident="gone"))["incident"] is None
    page = (await reader.get("/recoveries", incident="gone")).text
    assert "Incident &#39;gone&#39; is not one of the last 24 hours." in page
    refused = await reader.get("/recoveries/export", incident="gone")
    assert (refused.status_code, "add at= with a moment" in refused.text) == (404, True)
    by_worker = await reader.json("/recoveries/export", incident="w1", **{"as": "json"})
    assert by_worker["recovered"] == 1
