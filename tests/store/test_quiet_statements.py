"""Quiet mode (orders to claim nothing): which trees an order reaches, and how a tree learns of it."""

from __future__ import annotations

from everbeat.domain.inspection import QuietTree
from everbeat.store import workers
from everbeat.store.workers import quiet
from tests.store.conftest import StoreHarness


def order(
    db: StoreHarness, *ids: str, host: str | None = None, everyone: bool = False, on: bool = True
) -> list[QuietTree]:
    return db.run(quiet(ids, host=host, everyone=everyone, quiet=on, channel=db.target.channel))


def is_quiet(db: StoreHarness, supervisor: str) -> bool:
    return db.run(workers.beat(supervisor, [], draining=False)).quiet


def test_set_quiet_reaches_the_chosen_live_trees(db: StoreHarness) -> None:  # J1
    db.supervisor("s2", "w3")
    db.supervisor("s3", "w4")
    db.run(workers.end_supervisor("s3", how="left"))
    (first,) = order(db, "w1")
    assert (first.supervisor_id, first.workers) == ("s1", ("w1", "w2"))
    assert first.quiet_since is not None
    assert [is_quiet(db, each) for each in ("s1", "s2")] == [True, False]
    both = order(db, host="host")
    assert [each.supervisor_id for each in both] == ["s1", "s2"]
    assert both[0].quiet_since == first.quiet_since  # the first order stays in effect
    assert order(db, host="elsewhere") == []
    assert [each.quiet_since for each in order(db, "s2", on=False)] == [None]
    assert [is_quiet(db, each) for each in ("s1", "s2")] == [True, False]
    assert [each.supervisor_id for each in order(db, everyone=True, on=False)] == ["s1", "s2"]
    assert not is_quiet(db, "s1")


def test_a_beat_returns_whether_its_tree_is_quiet(db: StoreHarness) -> None:  # J1
    assert not is_quiet(db, "s1")
    row = workers.SupervisorRow(
        id="s9", hostname="host", pid=1, boot_id=None, pid_namespace=None, process_started=None, lock_key=db.target.lock_key("s9"),
        session_name="everbeat-s9", quiet=True,
    )  # fmt: skip
    db.run(workers.register_supervisor(row))  # a quiet tree that restarts with a new id
    assert is_quiet(db, "s9")
    db.run(workers.end_supervisor("s9", how="age"))
    assert not is_quiet(db, "s9")
