"""Test the release of workers by name: they are ended and their tasks recovered at once by the ordinary policy."""

from __future__ import annotations

import pytest

from everbeat.client.registry import HookRegistry
from everbeat.domain.recovery.hooks import NoHooks, Skip
from everbeat.domain.task.policy import StoredPolicy
from everbeat.errors import UnknownName
from everbeat.recovering.hooks import LocalHooks
from everbeat.recovering.sweep import release
from everbeat.store import workers
from tests.recovering.conftest import ManualObserver, StoreHarness
from tests.recovering.test_sweep import everything

AGAIN = StoredPolicy(on_crash="retry").to_json()


async def test_tasks_of_released_workers_are_recovered_despite_their_heartbeats(
    observer: ManualObserver, db: StoreHarness
) -> None:
    plain, again = db.running(), db.running(policy=AGAIN)
    db.send()
    (claimed,) = db.claim(limit=1)
    neighbour = db.running("w2")
    observer.beat("s1")
    result = await release(observer.recoverer(), ["w1"])
    assert (result.worker_ids, result.recovered_count, result.missed) == (("w1",), 3, 0)
    assert {task.id: task.action for task in result.tasks} == {
        plain.id: "fail", again.id: "retry", claimed.id: "requeue",
    }  # fmt: skip
    assert db.row(neighbour.id, "state") == "RUNNING"
    assert db.row(again.id, "loss_count, suspect") == (1, False)
    assert set(db.table("recoveries", "noticed_by, cause")) == {
        ("operator", "it was released by an operator")
    }
    assert db.claim("w1") == [], "the released worker must not claim"
    assert set(db.table("workers", "id, ended_how")) == {("w1", "operator"), ("w2", None)}
    again_result = await release(observer.recoverer(), ["w1"])
    assert (again_result.recovered_count, again_result.worker_ids) == (0, ()), "it had ended already"
    db.settle(neighbour)


async def test_a_release_reports_tasks_that_a_hook_skipped(
    observer: ManualObserver, db: StoreHarness
) -> None:
    registry = HookRegistry()
    registry.deciding(lambda _: Skip())
    observer.hooks = LocalHooks(registry.hooks(), timeout_s=5.0, events=observer.events)
    running = db.running()
    result = await release(observer.recoverer(), ["w1"])
    assert (result.worker_ids, result.recovered_count) == (("w1",), 0)
    assert {task.id: task.action for task in result.tasks} == {running.id: "leave"}
    observer.hooks = NoHooks()
    result = await release(observer.recoverer(), ["w1"])
    assert (result.worker_ids, result.recovered_count) == ((), 1), "it had ended and still had a lease"


async def test_a_release_suggests_the_name_of_an_ended_worker(
    observer: ManualObserver, db: StoreHarness
) -> None:
    db.supervisor("s2", "web-1-4711-9f8e7d6c")
    await release(observer.recoverer(), ["web-1-4711-9f8e7d6c"])
    with pytest.raises(UnknownName) as refusal:
        await release(observer.recoverer(), ["web-1-4711-9f8e7d6b"])
    assert "did you mean 'web-1-4711-9f8e7d6c'?" in str(refusal.value)


async def test_a_release_works_with_automatic_recovery_off(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    off = observer.recoverer(auto_requeue_stale_claimed=False, auto_fail_stale_running=False)
    assert (await release(off, ["w1"])).recovered_count == 1
    assert db.row(running.id, "state") == "FAILED"


async def test_a_release_with_unknown_worker_names_is_refused_and_changes_nothing(
    observer: ManualObserver, db: StoreHarness
) -> None:  # bad input: names of workers that do not exist
    running = db.running()
    db.supervisor("s2", "web-1-4711-9f8e7d6c")
    before = everything(db)
    with pytest.raises(UnknownName) as refusal:
        await release(observer.recoverer(), ["w1", "web-1-4711-9f8e7d6b", "nobody"])
    text = str(refusal.value)
    assert "'web-1-4711-9f8e7d6b', 'nobody'" in text
    assert "did you mean 'web-1-4711-9f8e7d6c'?" in text
    assert everything(db) == before
    db.settle(running)


async def test_a_heartbeat_returns_the_workers_that_were_released(
    observer: ManualObserver, db: StoreHarness
) -> None:
    observer.beat("s1")
    await release(observer.recoverer(), ["w1"])
    answer = db.run(workers.beat("s1", [], draining=False, worker_ids=["w1", "w2"]))
    assert (answer.seq, answer.ended) == (2, ("w1",))


async def test_a_heartbeat_returns_the_workers_whose_rows_are_missing(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """A server can come back without its last commits: a standby that was behind, or without synchronous_commit."""
    observer.beat("s1")
    db.connection.execute(db.plain("delete from {schema}.workers where id = 'w2'"))
    assert db.run(workers.beat("s1", [], draining=False, worker_ids=["w1", "w2"])).ended == ("w2",)
    db.run(workers.end_supervisor("s1", how="age"))
    assert db.run(workers.beat("s1", [], draining=False, worker_ids=["w1", "w2"])).seq is None
