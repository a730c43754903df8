"""A claim brings no more bytes than its answer can be delivered with, however the server stores them."""

from __future__ import annotations

import json
from random import Random
from uuid import UUID, uuid4

import pytest

from everbeat.store import leases, tasks
from everbeat.store.leases import Claimed
from tests.store.conftest import Hands

MB = 1_000_000


def send(hands: Hands, *sizes: int, compressible: bool = True) -> list[UUID]:
    random = Random(1)
    sent = []
    for size in sizes:
        text = "y" * size if compressible else random.randbytes(size // 2).hex()
        task = tasks.NewTask(
            id=uuid4(), name="work", queue="default", priority=0, args=json.dumps({"text": text}).encode()
        )
        hands.run(tasks.insert_task(task, channel=hands.target.channel))
        sent.append(task.id)
    return sent


def claim(hands: Hands, most_bytes: int, *, limit: int = 100, call: UUID | None = None) -> list[Claimed]:
    statement = leases.claim(
        worker_id="w1", claim_call=call or uuid4(), names=["work"], limit=limit, queues=None, queue_priorities={},
        starts=1, most_bytes=most_bytes,
    )  # fmt: skip
    return hands.run(statement)


@pytest.mark.parametrize("compressible", [True, False])
def test_it_ends_before_the_arguments_are_too_large_together(hands: Hands, compressible: bool) -> None:
    sent = send(hands, *[MB] * 6, compressible=compressible)
    first = claim(hands, 3 * MB + MB // 2)
    assert [one.id for one in first] == sent[:3]
    assert [(one.started_at is not None, one.is_cut) for one in first] == [(True, True), *[(False, True)] * 2]
    rest = claim(hands, 3 * MB + MB // 2)
    assert [one.id for one in rest] == sent[3:]
    assert [one.is_cut for one in rest] == [None] * 3
    assert claim(hands, 3 * MB) == []


def test_the_first_task_is_taken_however_large_it_is(hands: Hands) -> None:
    sent = send(hands, 3 * MB, 10, 10, 3 * MB)
    taken = [[one.id for one in claim(hands, MB)] for _ in range(3)]
    assert taken == [sent[:1], sent[1:3], sent[3:]]


def test_what_is_small_is_taken_up_to_the_limit(hands: Hands) -> None:
    sent = send(hands, *[10] * 60)
    taken = claim(hands, MB, limit=50)
    assert [one.id for one in taken] == sent[:50]
    assert {one.is_cut for one in taken} == {None}


def test_checkpoints_count_as_arguments_do(hands: Hands) -> None:
    sent = send(hands, *[10] * 4)
    update = f'update "{hands.target.schema}".tasks set checkpoint = %s::json'
    hands.connection.execute(update, [json.dumps({"text": "y" * MB})])  # type: ignore[arg-type]
    assert [one.id for one in claim(hands, 2 * MB + MB // 2)] == sent[:2]


def test_a_repeated_claim_answers_what_the_first_one_took_whatever_its_bounds(hands: Hands) -> None:
    sent, call = send(hands, *[MB] * 4), uuid4()
    assert [one.id for one in claim(hands, 2 * MB + MB // 2, call=call)] == sent[:2]
    assert {one.id for one in claim(hands, MB, call=call, limit=1)} == set(sent[:2])
    assert {one.id for one in claim(hands, 9 * MB, call=call)} == set(sent[:2])
