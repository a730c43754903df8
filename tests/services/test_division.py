"""A batch of recoveries that PostgreSQL refuses: which refusals end a task, which are left, and what becomes of the others."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.errors import DatabaseError
from everbeat.runtime.exit_report import ExitReport
from everbeat.services.division import Division
from everbeat.store import workers
from everbeat.store.leases import Recovered, RecoveryOrder
from tests.services.conftest import Hands, Onlooker
from tests.services.test_reaper import FAST, look

AGAIN = StoredPolicy(on_crash="retry").to_json()
KILLED = ExitReport(pid=2, signal_number=signal.SIGKILL, signal_name="SIGKILL")
HELD = 40
BAD = (0, 17, 18, 39)
"""The first, the last and two neighbouring leases of the batch."""
VALUE, INTERNAL, OWN_RULE = "22023", "XX001", "P0001"


@contextmanager
def refused(hands: Hands, task_id: object, sqlstate: str) -> Iterator[None]:
    """PostgreSQL refuses every change of this row."""
    schema = hands.target.schema
    hands.connection.execute(
        hands.plain(
            f"""create function {{schema}}.refuse() returns trigger language plpgsql as $$
                begin raise exception 'refused' using errcode = '{sqlstate}'; end $$"""
        )
    )
    hands.connection.execute(
        hands.plain(
            f"""create trigger refuse before update on {{schema}}.tasks for each row
                when (old.id = '{task_id}') execute function {{schema}}.refuse()"""
        )
    )
    yield
    hands.connection.execute(f"drop function {schema}.refuse() cascade".encode())


@pytest.mark.parametrize("sqlstate", [VALUE, INTERNAL, OWN_RULE])
async def test_the_burial_of_a_process_ends_although_one_of_its_rows_is_refused(
    sqlstate: str, onlooker: Onlooker, hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:  # J17
    others = [hands.running(policy=AGAIN)]
    bad = hands.running(policy=AGAIN)
    others += [hands.running(policy=AGAIN) for _ in range(4)]
    hands.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause=KILLED.cause))
    recoverer = onlooker.recoverer()
    with refused(hands, bad.id, sqlstate):
        async with asyncio.timeout(30):
            burial = asyncio.ensure_future(recoverer.recover_worker("w1", KILLED, died_at=0.0))
            while not burial.done():
                await onlooker.clock.advance(1.0)
                await asyncio.sleep(0.01)  # real statements run meanwhile
        assert burial.result() == 5
        assert {hands.row(task.id, "state") for task in others} == {"PENDING"}
        assert hands.row(bad.id, "state") == "RUNNING"
        for _ in range(3):
            await onlooker.clock.advance(60.0)
            await recoverer.recover_ended()  # sweeps offer it again, and again it is refused
    said = [record for record in caplog.records if "recovery_left" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.ERROR
    assert str(bad.id) in said[0].getMessage()
    assert "BAD_ROWS" in said[0].getMessage()
    hands.connection.execute(
        hands.plain("update {schema}.workers set ended_at = now() - interval '1 hour' where id = 'w1'")
    )
    await onlooker.clock.advance(60.0)
    assert await recoverer.recover_ended() == 1, "it is recovered once its row is mended"
    assert hands.row(bad.id, "state") == "PENDING"


@pytest.mark.parametrize("sqlstate", [VALUE, INTERNAL])
async def test_a_dead_supervisor_is_ended_although_one_of_its_rows_is_refused(
    sqlstate: str, onlooker: Onlooker, hands: Hands
) -> None:  # J17
    other, bad = hands.running(policy=AGAIN), hands.running("w2", policy=AGAIN)
    hands.supervisor("s2", "w3")
    neighbour = hands.running("w3", policy=AGAIN)
    hands.supervisor("s3")
    hands.supervisor("s4")
    reaper = onlooker.reaper(**FAST)
    with refused(hands, bad.id, sqlstate):
        for _ in range(8):
            await onlooker.clock.advance(1.0)
            onlooker.beat("me", "s3", "s4")
            await reaper.tick()
        assert onlooker.living() == {"me", "s3", "s4"}
        assert [hands.row(task.id, "state") for task in (other, bad, neighbour)] == [
            "PENDING",
            "RUNNING",
            "PENDING",
        ]
    onlooker.beat("me")
    await onlooker.clock.advance(2.0)
    await reaper.tick()
    assert hands.row(bad.id, "state") == "PENDING", "the row is mended"


async def test_an_internal_error_that_passes_fails_no_task(onlooker: Onlooker, hands: Hands) -> None:
    task = hands.running(policy=AGAIN)
    hands.run(workers.bury_workers(worker_ids=["w1"], how="age", cause="vanished"))
    recoverer = onlooker.recoverer()
    with refused(hands, task.id, INTERNAL):
        assert await recoverer.recover_ended() == 0
    assert await recoverer.recover_ended() == 1
    assert hands.row(task.id, "state") == "PENDING"


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
        _: Division,
        orders: Sequence[RecoveryOrder],
        recover: Callable[[Sequence[RecoveryOrder]], Awaitable[list[Recovered]]],
    ) -> list[Recovered]:
        return await recover(orders)

    monkeypatch.setattr(Division, "recover", undivided)
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
