"""A batch of recoveries that PostgreSQL refuses: which refusals end a task, which are tried again, and what becomes of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import psycopg
import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.errors import DatabaseError
from everbeat.services.division import recovered_divided
from everbeat.store.leases import Recovered, RecoveryOrder
from tests.services.conftest import Hands, Onlooker
from tests.services.test_reaper import FAST, look

AGAIN = StoredPolicy(on_crash="retry").to_json()
HELD = 40
BAD = (0, 17, 18, 39)
"""The first, the last and two neighbouring leases of the batch."""


def internal_error() -> DatabaseError:
    problem = DatabaseError("tuple concurrently updated")
    problem.__cause__ = psycopg.errors.InternalError_()
    return problem


async def test_an_internal_error_of_the_server_fails_no_task() -> None:
    tried: list[int] = []

    async def refuse(orders: Sequence[RecoveryOrder]) -> list[Recovered]:
        tried.append(len(orders))
        raise internal_error()

    with pytest.raises(DatabaseError, match="concurrently"):
        await recovered_divided(
            cast(list[RecoveryOrder], [SimpleNamespace(id=1), SimpleNamespace(id=2)]), refuse
        )
    assert tried == [2, 1]


async def test_bad_rows_among_the_tasks_of_a_dead_worker_stop_no_neighbour_in_the_same_pass(
    onlooker: Onlooker, hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:  # J17
    held = await recovered_with_bad_rows(onlooker, hands)
    states = {each: hands.row(each, "state") for each in held}
    neighbours = Counter(states[each] for place, each in enumerate(held) if place not in BAD)
    assert neighbours == {"PENDING": HELD - len(BAD)}
    assert {states[held[place]] for place in BAD} == {"FAILED"}, "an ended row is in no index of the waiting"
    recovered = Counter(row[0] for row in hands.table("recoveries", "task_id"))
    assert recovered == dict.fromkeys(held, 1)
    assert {
        place for place, each in enumerate(held) if f"recovery_refused task_id={each}" in caplog.text
    } == {*BAD}


async def test_without_the_division_one_bad_row_keeps_every_neighbour(
    onlooker: Onlooker, hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:  # J17
    """The mutant of the test above: it proves that the division, and nothing else, frees the neighbours."""

    async def undivided(
        orders: Sequence[RecoveryOrder],
        recover: Callable[[Sequence[RecoveryOrder]], Awaitable[list[Recovered]]],
    ) -> list[Recovered]:
        return await recover(orders)

    monkeypatch.setattr("everbeat.services.carrying.recovered_divided", undivided)
    with pytest.raises(DatabaseError, match="index row"):
        await recovered_with_bad_rows(onlooker, hands)
    assert {state for (state,) in hands.table("tasks", "state")} == {"RUNNING"}


async def recovered_with_bad_rows(onlooker: Onlooker, hands: Hands) -> list[UUID]:
    """Let the reaper recover the tasks of a silent worker in one pass; four of them cannot become PENDING again."""
    sent = [hands.send(policy=AGAIN) for _ in range(HELD)]
    held = sorted(hands.claim(limit=HELD), key=lambda each: sent.index(each.id))
    assert hands.start(*held) == ["started"] * HELD
    too_long_for_an_index = hands.plain(
        "update {schema}.tasks set queue = (select string_agg(md5(n::text), '') from generate_series(1, 300) n) where id = any(%s)"
    )
    hands.connection.execute(too_long_for_an_index, [[held[place].id for place in BAD]])
    reaper = onlooker.reaper(**FAST)
    for after_s in (1.0, 1.0, 0.9, 0.2):
        await look(onlooker, reaper, after_s=after_s)
    return sent
