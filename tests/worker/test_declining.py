"""Test that a worker marks a task with unknown arguments for other code, and claims marked tasks that it can run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any
from uuid import UUID

import pytest

from everbeat.domain.task.definition import CallCodec, TaskDefinition
from everbeat.domain.task.policy import TaskOptions
from everbeat.worker.claim import query
from everbeat.worker.declines import TaskDeclined
from tests.variants import long_except
from tests.worker.harness import Running, WorkerHarness
from tests.worker.sample_tasks import gate


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


def needs(harness: WorkerHarness, task_id: UUID) -> Any:
    row = harness.task(task_id)
    return row["needs"] if row["state"] == "PENDING" else row["state"]


async def declined(harness: WorkerHarness, running: Running, *sent: UUID) -> None:
    await running.until(lambda: all(isinstance(needs(harness, each), dict) for each in sent))


@pytest.mark.parametrize(
    ("name", "prefetched"),
    long_except(
        product(["double", "thread_nap", "process_async", "wait_for_gate"], [False, True]),
        ("double", False),
        ("thread_nap", True),
        ("process_async", False),
        ("wait_for_gate", True),
    ),
)
async def test_tasks_with_unknown_argument_names_are_declined_in_every_lane(  # J2
    harness: WorkerHarness, name: str, prefetched: bool
) -> None:
    async with harness.worker() as running:
        sent = [harness.send(name, y=n) for n in range(1 if not prefetched else 20)]
        await declined(harness, running, *sent)
        await running.finished(*sent)
        assert {one.state for one in running.finishes()} == {"PENDING"}
        told = [event for event in running.events if isinstance(event, TaskDeclined)]
        assert [(one.name, one.unknown, one.count) for one in told] == [(name, ("y",), 1)]
    told = [event for event in running.events if isinstance(event, TaskDeclined)]
    assert sum(one.count for one in told) == len(sent), "the worker reports the rest when it ends"
    for each in sent:
        row = harness.task(each)
        assert (row["needs"], row["attempt"], row["policy"]) == ({"arguments": ["y"]}, 0, None)
        assert harness.attempts(each) == []
    assert gate.journal == []


async def test_a_suspect_with_unknown_arguments_is_declined_in_the_solo_lane(
    harness: WorkerHarness,
) -> None:  # J2
    task_id = harness.send("double", y=1)
    harness.query("update {schema}.tasks set suspect = true returning id")
    async with harness.worker() as running:
        await declined(harness, running, task_id)
    assert harness.task(task_id)["suspect"]


async def test_argument_names_that_postgresql_refuses_fail_only_their_own_task(
    harness: WorkerHarness,
) -> None:  # J2
    odd = ['{"\\u0000": 1}', '{"y": 1, "y": 2}', json.dumps({"y" * 5_000: 1})]
    sent = [harness.send_with("double", text.encode()) for text in odd]
    others = [harness.send("double", y=n) for n in range(20)]
    async with harness.worker(async_concurrency=50) as running:
        await running.finished(*sent)
        await declined(harness, running, *others)
    for each in sent:
        row = harness.task(each)
        assert (row["state"], row["error"]["code"]) == ("FAILED", "ARGUMENTS_INVALID")
        assert [one["outcome"] for one in harness.attempts(each)] == ["FAILED"]


async def test_a_declined_task_runs_on_a_worker_whose_code_takes_its_arguments(
    harness: WorkerHarness,
) -> None:  # J2
    async with harness.worker() as old:
        sent = [harness.send("double", x=n, times=3) for n in range(3)]
        await declined(harness, old, *sent)
        async with harness.worker(definitions=NEW_CODE) as new:
            late = harness.send("double", x=9, times=3)
            row = await new.finished(late, *sent)
            assert (row["state"], row["result"], row["attempt"]) == ("COMPLETED", 27, 1)
            assert row["policy"]["timeout_ms"] == 70_000
            assert [harness.task(each)["result"] for each in sent] == [0, 3, 6]


async def test_polling_finds_a_declined_task_whose_notification_was_lost(
    harness: WorkerHarness,
) -> None:  # J2
    async with harness.worker(
        definitions=NEW_CODE, hints=WorkerHarness.silent_hints, poll_interval="1s"
    ) as new:
        quick = harness.send("double", x=1)
        await new.finished(quick)
        async with harness.worker(hints=WorkerHarness.silent_hints, poll_interval="1s") as old:
            sent = harness.send("double", x=2, times=5)
            await new.finished(sent)
            assert [one.state for one in old.finishes() if one.task_id == sent] in ([], ["PENDING"])


async def test_a_worker_finds_marked_tasks_of_more_groups_than_one_page(  # J2
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "PAGE", 3)
    monkeypatch.setattr(query, "PAGES_APART_S", 0.05)
    monkeypatch.setattr(query, "MOST_KEPT", 2)
    sent = [harness.send_with("double", json.dumps({"x": n, f"other_{n}": 1}).encode()) for n in range(20)]
    mine = [
        harness.send_with("double", json.dumps({"x": n, "times": 2}).encode(), queue=f"queue_{n}", **more)
        for n, more in enumerate(({}, {}, {}, {"serial": "line"}, {"priority": 3}))
    ]
    async with harness.worker(async_concurrency=50) as old:
        await declined(harness, old, *sent, *mine)
    async with harness.worker(definitions=NEW_CODE) as new:
        await new.finished(*mine)
    assert [harness.task(each)["state"] for each in mine] == ["COMPLETED"] * 5
    assert [harness.task(each)["fence"] for each in sent] == [1] * 20


async def test_a_worker_does_not_claim_tasks_with_needs_that_it_does_not_know(
    harness: WorkerHarness,
) -> None:  # J2
    later = harness.send("double", x=1)
    damaged = harness.send("double", x=2)
    for task_id, written in ((later, '{"arguments": ["x"], "resources": ["gpu"]}'), (damaged, "[]")):
        harness.query(
            "update {schema}.tasks set needs = %s, needs_id = gen_random_uuid() where id = %s returning id",
            written,
            task_id,
        )
    async with harness.worker() as running:
        await running.finished(harness.send("double", x=3))
        await running.until(lambda: running.worker._claimer._marks._asked_at > 0)
        await running.finished(harness.send("double", x=4))
    assert [harness.task(each)["fence"] for each in (later, damaged)] == [0, 0]
