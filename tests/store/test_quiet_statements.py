"""Orders to claim nothing: which trees they reach, and how a tree learns of them."""

from __future__ import annotations

from everbeat.domain.inspection import QuietTree
from everbeat.store import workers
from everbeat.store.quiet import quiet
from tests.store.conftest import Hands


def order(
    hands: Hands, *ids: str, host: str | None = None, everyone: bool = False, on: bool = True
) -> list[QuietTree]:
    return hands.run(quiet(ids, host=host, everyone=everyone, quiet=on, channel=hands.target.channel))


def is_told(hands: Hands, supervisor: str) -> bool:
    return hands.run(workers.beat(supervisor, [], draining=False)).quiet


def test_an_order_reaches_the_chosen_trees_that_live(hands: Hands) -> None:  # J1
    hands.supervisor("s2", "w3")
    hands.supervisor("s3", "w4")
    hands.run(workers.end_supervisor("s3", how="left"))
    (first,) = order(hands, "w1")
    assert (first.supervisor_id, first.workers) == ("s1", ("w1", "w2"))
    assert first.quiet_since is not None
    assert [is_told(hands, each) for each in ("s1", "s2")] == [True, False]
    both = order(hands, host="host")
    assert [each.supervisor_id for each in both] == ["s1", "s2"]
    assert both[0].quiet_since == first.quiet_since  # the first order stands
    assert order(hands, host="elsewhere") == []
    assert [each.quiet_since for each in order(hands, "s2", on=False)] == [None]
    assert [is_told(hands, each) for each in ("s1", "s2")] == [True, False]
    assert [each.supervisor_id for each in order(hands, everyone=True, on=False)] == ["s1", "s2"]
    assert not is_told(hands, "s1")


def test_a_beat_tells_whether_its_tree_is_quiet(hands: Hands) -> None:  # J1
    assert not is_told(hands, "s1")
    row = workers.SupervisorRow(
        id="s9", hostname="host", pid=1, boot_id=None, pid_namespace=None, process_started=None, lock_key=hands.target.lock_key("s9"),
        session_name="everbeat-s9", quiet=True,
    )  # fmt: skip
    hands.run(workers.register_supervisor(row))  # a quiet tree that comes back under a new id
    assert is_told(hands, "s9")
    hands.run(workers.end_supervisor("s9", how="age"))
    assert not is_told(hands, "s9")
