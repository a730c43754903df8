"""Releasing workers by name: ended for good, their tasks recovered at once by the ordinary policy."""

from __future__ import annotations

import pytest

from everbeat.client.hooks import HookRegistry
from everbeat.domain.hooks import NoHooks, Skip
from everbeat.domain.policy import StoredPolicy
from everbeat.errors import UnknownName
from everbeat.services.hooks import LocalHooks
from everbeat.services.release import release
from everbeat.store import workers
from tests.services.conftest import Hands, Onlooker
from tests.services.test_sweep import everything

AGAIN = StoredPolicy(on_crash="retry").to_json()


async def test_what_released_workers_hold_is_recovered_though_they_beat(
    onlooker: Onlooker, hands: Hands
) -> None:
    plain, again = hands.running(), hands.running(policy=AGAIN)
    hands.send()
    (claimed,) = hands.claim(limit=1)
    neighbour = hands.running("w2")
    onlooker.beat("s1")
    result = await release(onlooker.session, ["w1"], recoverer=onlooker.recoverer())
    assert (result.worker_ids, result.recovered_count, result.missed) == (("w1",), 3, 0)
    assert {task.id: task.action for task in result.tasks} == {
        plain.id: "fail", again.id: "retry", claimed.id: "requeue",
    }  # fmt: skip
    assert hands.row(neighbour.id, "state") == "RUNNING"
    assert hands.row(again.id, "loss_count, suspect") == (1, False)
    assert set(hands.table("recoveries", "noticed_by, cause")) == {
        ("operator", "it was released by an operator")
    }
    assert hands.claim("w1") == [], "it claims nothing more"
    assert set(hands.table("workers", "id, ended_how")) == {("w1", "operator"), ("w2", None)}
    again_result = await release(onlooker.session, ["w1"], recoverer=onlooker.recoverer())
    assert (again_result.recovered_count, again_result.worker_ids) == (0, ()), "it had ended already"
    hands.settle(neighbour)


async def test_what_a_hook_leaves_is_told(onlooker: Onlooker, hands: Hands) -> None:
    registry = HookRegistry()
    registry.deciding(lambda _: Skip())
    onlooker.hooks = LocalHooks(registry.hooks(), timeout_s=5.0, events=onlooker.events)
    running = hands.running()
    result = await release(onlooker.session, ["w1"], recoverer=onlooker.recoverer())
    assert (result.worker_ids, result.recovered_count) == (("w1",), 0)
    assert {task.id: task.action for task in result.tasks} == {running.id: "leave"}
    onlooker.hooks = NoHooks()
    result = await release(onlooker.session, ["w1"], recoverer=onlooker.recoverer())
    assert (result.worker_ids, result.recovered_count) == ((), 1), "it had ended, and held something still"


async def test_the_nearest_name_may_be_that_of_a_worker_that_ended(onlooker: Onlooker, hands: Hands) -> None:
    hands.supervisor("s2", "web-1-4711-9f8e7d6c")
    await release(onlooker.session, ["web-1-4711-9f8e7d6c"], recoverer=onlooker.recoverer())
    with pytest.raises(UnknownName) as refusal:
        await release(onlooker.session, ["web-1-4711-9f8e7d6b"], recoverer=onlooker.recoverer())
    assert "did you mean 'web-1-4711-9f8e7d6c'?" in str(refusal.value)


async def test_it_works_with_automatic_recovery_off(onlooker: Onlooker, hands: Hands) -> None:
    running = hands.running()
    off = onlooker.recoverer(auto_requeue_stale_claimed=False, auto_fail_stale_running=False)
    assert (await release(onlooker.session, ["w1"], recoverer=off)).recovered_count == 1
    assert hands.row(running.id, "state") == "FAILED"


async def test_names_of_workers_that_do_not_exist_are_refused_and_nothing_is_done(
    onlooker: Onlooker, hands: Hands
) -> None:  # bad input: names of workers that do not exist
    running = hands.running()
    hands.supervisor("s2", "web-1-4711-9f8e7d6c")
    before = everything(hands)
    with pytest.raises(UnknownName) as refusal:
        await release(
            onlooker.session, ["w1", "web-1-4711-9f8e7d6b", "nobody"], recoverer=onlooker.recoverer()
        )
    text = str(refusal.value)
    assert "'web-1-4711-9f8e7d6b', 'nobody'" in text
    assert "did you mean 'web-1-4711-9f8e7d6c'?" in text
    assert everything(hands) == before
    hands.settle(running)


async def test_a_beat_tells_which_of_its_workers_were_ended(onlooker: Onlooker, hands: Hands) -> None:
    onlooker.beat("s1")
    await release(onlooker.session, ["w1"], recoverer=onlooker.recoverer())
    answer = hands.run(workers.beat("s1", [], draining=False, worker_ids=["w1", "w2"]))
    assert (answer.seq, answer.ended) == (2, ("w1",))
