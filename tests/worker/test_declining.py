"""A worker leaves a task whose arguments it does not understand to other code, and takes those that it was left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

import pytest

from everbeat.domain.codec import CallCodec
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.policy import TaskOptions
from everbeat.worker import marks
from everbeat.worker.declined import TaskDeclined
from tests.worker.deeds import gate
from tests.worker.stand import Running, Stand


@pytest.fixture(autouse=True)
def fresh_gate() -> Iterator[None]:
    gate.reset()
    yield
    gate.opened.set()


async def doubled(x: int, times: int = 2) -> int:
    return x * times


NEW_CODE: Mapping[str, TaskDefinition] = {
    "double": TaskDefinition(
        name="double", function=doubled, is_async=True, codec=CallCodec.from_function(doubled, task_name="double"),
        options=TaskOptions(timeout=70), where="here:1",
    ),
}  # fmt: skip


def needs(stand: Stand, task_id: UUID) -> Any:
    row = stand.task(task_id)
    return row["needs"] if row["state"] == "PENDING" else row["state"]


async def declined(stand: Stand, running: Running, *sent: UUID) -> None:
    await running.until(lambda: all(isinstance(needs(stand, each), dict) for each in sent))


@pytest.mark.parametrize("name", ["double", "thread_nap", "process_async", "wait_for_gate"])
@pytest.mark.parametrize("prefetched", [False, True])
async def test_arguments_with_other_names_are_declined_in_every_lane(  # J2
    stand: Stand, name: str, prefetched: bool
) -> None:
    async with stand.worker() as running:
        sent = [stand.send(name, y=n) for n in range(1 if not prefetched else 20)]
        await declined(stand, running, *sent)
        await running.finished(*sent)
        assert {one.state for one in running.finishes()} == {"PENDING"}
        told = [event for event in running.events if isinstance(event, TaskDeclined)]
        assert [(one.name, one.unknown, one.count) for one in told] == [(name, ("y",), 1)]
    told = [event for event in running.events if isinstance(event, TaskDeclined)]
    assert sum(one.count for one in told) == len(sent), "the end of the worker reports the rest"
    for each in sent:
        row = stand.task(each)
        assert (row["needs"], row["attempt"], row["policy"]) == ({"arguments": ["y"]}, 0, None)
        assert stand.attempts(each) == []
    assert gate.journal == []


async def test_a_suspect_is_declined_in_the_lane_where_suspects_run_alone(stand: Stand) -> None:  # J2
    task_id = stand.send("double", y=1)
    stand.query("update {schema}.tasks set suspect = true returning id")
    async with stand.worker() as running:
        await declined(stand, running, task_id)
    assert stand.task(task_id)["suspect"]


async def test_names_that_postgresql_refuses_fail_their_own_task_and_no_other(stand: Stand) -> None:  # J2
    odd = ['{"\\u0000": 1}', '{"y": 1, "y": 2}', json.dumps({"y" * 5_000: 1})]
    sent = [stand.send_with("double", text.encode()) for text in odd]
    others = [stand.send("double", y=n) for n in range(20)]
    async with stand.worker(async_concurrency=50) as running:
        await running.finished(*sent)
        await declined(stand, running, *others)
    for each in sent:
        row = stand.task(each)
        assert (row["state"], row["error"]["code"]) == ("FAILED", "ARGUMENTS_INVALID")
        assert [one["outcome"] for one in stand.attempts(each)] == ["FAILED"]


async def test_a_task_that_was_declined_runs_in_code_that_understands_it(stand: Stand) -> None:  # J2
    async with stand.worker() as old:
        sent = [stand.send("double", x=n, times=3) for n in range(3)]
        await declined(stand, old, *sent)
        async with stand.worker(definitions=NEW_CODE) as new:
            late = stand.send("double", x=9, times=3)
            row = await new.finished(late, *sent)
            assert (row["state"], row["result"], row["attempt"]) == ("COMPLETED", 27, 1)
            assert row["policy"]["timeout_ms"] == 70_000
            assert [stand.task(each)["result"] for each in sent] == [0, 3, 6]


async def test_a_lost_hint_is_made_good_by_the_poll(stand: Stand) -> None:  # J2
    async with stand.worker(definitions=NEW_CODE, wake=Stand.silent_wake, poll_interval="1s") as new:
        quick = stand.send("double", x=1)
        await new.finished(quick)
        async with stand.worker(wake=Stand.silent_wake, poll_interval="1s") as old:
            sent = stand.send("double", x=2, times=5)
            await new.finished(sent)
            assert [one.state for one in old.finishes() if one.task_id == sent] in ([], ["PENDING"])


async def test_marked_tasks_of_more_groups_than_one_page_are_all_found(  # J2
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "PAGE", 3)
    monkeypatch.setattr(marks, "PAGES_APART_S", 0.05)
    monkeypatch.setattr(marks, "MOST_KEPT", 2)
    sent = [stand.send_with("double", json.dumps({"x": n, f"other_{n}": 1}).encode()) for n in range(20)]
    mine = [
        stand.send_with("double", json.dumps({"x": n, "times": 2}).encode(), queue=f"queue_{n}", **more)
        for n, more in enumerate(({}, {}, {}, {"serial": "line"}, {"priority": 3}))
    ]
    async with stand.worker(async_concurrency=50) as old:
        await declined(stand, old, *sent, *mine)
    async with stand.worker(definitions=NEW_CODE) as new:
        await new.finished(*mine)
    assert [stand.task(each)["state"] for each in mine] == ["COMPLETED"] * 5
    assert [stand.task(each)["fence"] for each in sent] == [1] * 20


async def test_a_worker_leaves_needs_that_it_does_not_know_alone(stand: Stand) -> None:  # J2
    later = stand.send("double", x=1)
    damaged = stand.send("double", x=2)
    for task_id, written in ((later, '{"arguments": ["x"], "resources": ["gpu"]}'), (damaged, "[]")):
        stand.query(
            "update {schema}.tasks set needs = %s, needs_id = gen_random_uuid() where id = %s returning id",
            written,
            task_id,
        )
    async with stand.worker() as running:
        await running.finished(stand.send("double", x=3))
        await running.until(lambda: running.worker._claimer._marks._asked_at > 0)
        await running.finished(stand.send("double", x=4))
    assert [stand.task(each)["fence"] for each in (later, damaged)] == [0, 0]
