"""A claim returns no more bytes than its reply can deliver, however the server stores them."""

from __future__ import annotations

import json
from random import Random
from uuid import UUID, uuid4

import pytest

from everbeat.store import claims, tasks
from everbeat.store.claims import Claimed
from tests.store.conftest import StoreHarness

MB = 1_000_000


def send(db: StoreHarness, *sizes: int, compressible: bool = True) -> list[UUID]:
    random = Random(1)
    sent = []
    for size in sizes:
        text = "y" * size if compressible else random.randbytes(size // 2).hex()
        task = tasks.NewTask(
            id=uuid4(), name="work", queue="default", priority=0, args=json.dumps({"text": text}).encode()
        )
        db.run(tasks.insert_task(task, channel=db.target.channel))
        sent.append(task.id)
    return sent


def claim(db: StoreHarness, most_bytes: int, *, limit: int = 100, call: UUID | None = None) -> list[Claimed]:
    statement = claims.claim(
        worker_id="w1", claim_call=call or uuid4(), names=["work"], limit=limit, queues=None, queue_priorities={},
        starts=1, most_bytes=most_bytes,
    )  # fmt: skip
    return db.run(statement)


@pytest.mark.parametrize("compressible", [True, False])
def test_a_claim_ends_before_the_total_size_of_arguments_exceeds_its_limit(
    db: StoreHarness, compressible: bool
) -> None:
    sent = send(db, *[MB] * 6, compressible=compressible)
    first = claim(db, 3 * MB + MB // 2)
    assert [one.id for one in first] == sent[:3]
    assert [(one.started_at is not None, one.is_cut) for one in first] == [(True, True), *[(False, True)] * 2]
    rest = claim(db, 3 * MB + MB // 2)
    assert [one.id for one in rest] == sent[3:]
    assert [one.is_cut for one in rest] == [None] * 3
    assert claim(db, 3 * MB) == []


def test_a_claim_returns_the_first_task_even_above_its_size_limit(db: StoreHarness) -> None:
    sent = send(db, 3 * MB, 10, 10, 3 * MB)
    taken = [[one.id for one in claim(db, MB)] for _ in range(3)]
    assert taken == [sent[:1], sent[1:3], sent[3:]]


def test_a_claim_of_small_tasks_ends_at_its_limit(db: StoreHarness) -> None:
    sent = send(db, *[10] * 60)
    taken = claim(db, MB, limit=50)
    assert [one.id for one in taken] == sent[:50]
    assert {one.is_cut for one in taken} == {None}


def test_a_claim_counts_checkpoints_like_arguments(db: StoreHarness) -> None:
    sent = send(db, *[10] * 4)
    update = f'update "{db.target.schema}".tasks set checkpoint = %s::json'
    db.connection.execute(update, [json.dumps({"text": "y" * MB})])  # type: ignore[arg-type]
    assert [one.id for one in claim(db, 2 * MB + MB // 2)] == sent[:2]


def test_a_repeated_claim_with_other_limits_returns_the_tasks_of_the_first(db: StoreHarness) -> None:
    sent, call = send(db, *[MB] * 4), uuid4()
    assert [one.id for one in claim(db, 2 * MB + MB // 2, call=call)] == sent[:2]
    assert {one.id for one in claim(db, MB, call=call, limit=1)} == set(sent[:2])
    assert {one.id for one in claim(db, 9 * MB, call=call)} == set(sent[:2])
