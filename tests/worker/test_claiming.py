"""When a worker looks for work, what it takes, and that no lost reply loses or doubles anything."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import pytest
from psycopg import sql

from everbeat.store import leases
from everbeat.worker.protocol import Adopt, Phantoms
from tests.worker.deeds import gate
from tests.worker.proxy import Proxy
from tests.worker.stand import Stand

SLACK = 3.0


@pytest.mark.parametrize("wake", ["postgres", "silent"])
async def test_a_scheduled_task_starts_on_time_on_an_idle_worker(stand: Stand, wake: str) -> None:  # B7
    make = stand.postgres_wake if wake == "postgres" else stand.silent_wake
    async with stand.worker(wake=make) as running:
        await running.finished(stand.send("double", x=1))
        task_id = stand.send_with("double", {"x": 2}, delay_ms=2_500)
        row = await running.finished(task_id)
    late = (row["started_at"] - row["sent_at"]).total_seconds() - 2.5
    print(f"scheduled task started {late:.3f} s after it was due ({wake} wake)")
    assert 0 <= late < 0.3 * SLACK


async def test_a_worker_takes_what_it_can_run_and_a_few_ahead(stand: Stand) -> None:
    stand.send_many("wait_for_gate", [{"word": str(n)} for n in range(20)])
    async with stand.worker(thread_concurrency=3, prefetch=4) as running:
        await running.until(lambda: stand.states().get("RUNNING") == 3)
        await running.until(lambda: stand.states().get("CLAIMED") == 4)
        await asyncio.sleep(0.3)  # nothing more may be taken
        assert stand.states() == {"RUNNING": 3, "CLAIMED": 4, "PENDING": 13}
        gate.opened.set()
        await running.until(lambda: stand.states() == {"COMPLETED": 20})


async def test_unknown_names_and_queues_of_others_are_left_alone(stand: Stand) -> None:
    async with stand.worker(queues=["mine"]) as running:
        unknown, other = stand.send_with("nobody", {}, queue="mine"), stand.send_with("double", {"x": 1})
        await running.finished(stand.send_with("double", {"x": 1}, queue="mine"))
    assert {stand.task(each)["state"] for each in (unknown, other)} == {"PENDING"}


@pytest.mark.parametrize(
    "statement", ["-- Claims due", "-- Starts claimed", "-- Settles attempts", "-- Gives claimed"]
)
async def test_a_lost_reply_loses_nothing_and_doubles_nothing(stand: Stand, statement: str) -> None:
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker(wake=stand.silent_wake, thread_concurrency=2, prefetch=4) as running:
                stand.send_many("wait_for_gate", [{"word": "held"}] * 4)
                await running.until(lambda: len(gate.journal) == 2)
                proxy.lose_reply(statement.encode())
                if statement.startswith("-- Gives"):
                    running.stop()
                gate.opened.set()
                words = stand.send_many("note", [{"word": f"w{n}"} for n in range(50)])
                if statement.startswith("-- Gives"):
                    assert await running.left() == 0
                else:
                    await running.finished(*words)
        finally:
            stand.target = direct
        assert proxy.lost == 1
    if not statement.startswith("-- Gives"):
        assert sorted(w for w in gate.journal if isinstance(w, str)) == sorted(f"w{n}" for n in range(50))
        assert stand.states() == {"COMPLETED": 54}
    else:
        assert stand.states().get("CLAIMED") is None
        assert stand.states()["PENDING"] >= 2


async def test_an_outage_is_outlived_with_results_kept_in_memory(stand: Stand) -> None:
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker(thread_concurrency=2, prefetch=0) as running:
                during = stand.send_many("wait_for_gate", [{"word": str(n)} for n in range(2)])
                await running.until(lambda: len(gate.journal) == 2)
                proxy.cut()
                gate.opened.set()
                await running.until(lambda: len(gate.journal) == 4)
                await asyncio.sleep(1.5)  # the outage lasts
                assert running.finishes() == []
                assert stand.states() == {"RUNNING": 2}
                proxy.mend()
                mended_at = time.monotonic()
                await running.finished(*during)
                print(f"settled {time.monotonic() - mended_at:.2f} s after the database was back")
                await running.finished(stand.send("double", x=1))
        finally:
            stand.target = direct
    assert stand.states() == {"COMPLETED": 3}
    assert all(len(stand.attempts(each)) == 1 for each in during)


async def test_all_its_sessions_may_be_terminated_at_any_time(stand: Stand) -> None:
    async with stand.worker() as running:
        sent = stand.send_many("nap", [{"seconds": 0.05}] * 300)
        for _ in range(5):
            await asyncio.sleep(0.1)  # a moment of ordinary work between two blows
            stand.terminate_sessions(like="everbeat-%")
        await running.finished(*sent)
    assert stand.states() == {"COMPLETED": 300}
    assert all(len(stand.attempts(each)) == 1 for each in sent)


async def test_a_phantom_is_given_back_and_what_is_held_is_not(stand: Stand) -> None:
    async with stand.worker(async_concurrency=1, prefetch=0) as running:
        mine = stand.send("linger", word="mine")
        await running.until(lambda: ("begun", "mine") in gate.journal)
        # Claimed, and one of them started, in this worker's name by a call whose answer nobody has.
        ghosts = [stand.send("double", x=n) for n in range(2)]
        claim = leases.claim(
            worker_id=running.id,
            claim_call=uuid4(),
            names=["double"],
            limit=2,
            queues=None,
            queue_priorities={},
        )
        taken = [(task.id, task.claim_id) for task in stand.run(claim)]
        stand.run(leases.start(taken[:1], channel=stand.target.channel))
        assert {task_id for task_id, _ in taken} == set(ghosts)
        running.worker.obey(Phantoms([*taken, (mine, stand.task(mine)["claim_id"])]))
        await running.until(lambda: stand.states() == {"RUNNING": 1, "PENDING": 2})
        assert stand.task(mine)["state"] == "RUNNING"
        stand.cancel(mine)
        await running.finished(*ghosts)
    assert [a["outcome"] for a in stand.attempts(taken[0][0])] == ["RELEASED", "COMPLETED"]
    assert [a["outcome"] for a in stand.attempts(taken[1][0])] == ["COMPLETED"]


async def test_a_phantom_that_cannot_become_pending_does_not_hold_its_neighbours(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:  # J9
    async with stand.worker(async_concurrency=1, prefetch=0) as running:
        mine = stand.send("linger", word="mine")
        await running.until(lambda: ("begun", "mine") in gate.journal)
        ghosts = [stand.send("double", x=n) for n in range(4)]
        claim = leases.claim(
            worker_id=running.id, claim_call=uuid4(), names=["double"], limit=4, queues=None, queue_priorities={}
        )  # fmt: skip
        taken = [(task.id, task.claim_id) for task in stand.run(claim)]
        stand.run(leases.start(taken[:2], channel=stand.target.channel))
        # A started one and one that is only claimed get a name too long for the index of PENDING tasks.
        damaged = [taken[0][0], taken[2][0]]
        too_long = "update {schema}.tasks set name = (select string_agg(md5(n::text), '') from generate_series(1, 300) n) where id = any(%s)"
        stand.connection.execute(
            sql.SQL(too_long).format(schema=sql.Identifier(stand.target.schema)), [damaged]
        )
        running.worker.obey(Phantoms(taken))
        await running.until(lambda: stand.states() == {"RUNNING": 2, "CLAIMED": 1, "PENDING": 2})
        await running.until(lambda: all(f"release_refused task_id={each}" in caplog.text for each in damaged))
        stand.cancel(mine)
        neighbours = set(ghosts) - set(damaged)
        await running.finished(*neighbours)
        assert {stand.task(each)["state"] for each in neighbours} == {"COMPLETED"}
        stand.connection.execute(
            sql.SQL("delete from {schema}.tasks where id = any(%s)").format(
                schema=sql.Identifier(stand.target.schema)
            ),
            [damaged],
        )


async def test_a_leaving_worker_gives_back_the_neighbours_of_a_task_that_cannot_become_pending(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:  # J9
    async with stand.worker(async_concurrency=1, prefetch=4) as running:
        mine = stand.send("linger", word="mine")
        await running.until(lambda: ("begun", "mine") in gate.journal)
        waiting = [stand.send("linger", word=str(n)) for n in range(3)]
        await running.until(lambda: stand.states() == {"RUNNING": 1, "CLAIMED": 3})
        too_long = "update {schema}.tasks set name = (select string_agg(md5(n::text), '') from generate_series(1, 300) n) where id = %s"
        stand.connection.execute(
            sql.SQL(too_long).format(schema=sql.Identifier(stand.target.schema)), [waiting[1]]
        )
        stand.cancel(mine)
    assert [stand.task(each)["state"] for each in waiting] == ["PENDING", "CLAIMED", "PENDING"]
    assert f"release_refused task_id={waiting[1]}" in caplog.text


async def test_an_adopted_worker_stops_its_code_and_goes_on_under_its_new_name(stand: Stand) -> None:
    async with stand.worker() as running:
        old = stand.send("linger", word="old")
        await running.until(lambda: ("begun", "old") in gate.journal)
        stand.recover(old)
        first_id, welcome = running.id, stand.welcome()
        running.worker.obey(Adopt(welcome))
        await running.until(lambda: ("cancelled", "old") in gate.journal)
        row = await running.finished(stand.send("double", x=4))
        assert row["claimed_by_worker_id"] == welcome.worker_id != first_id
    assert stand.task(old)["state"] == "FAILED"


async def test_large_arguments_are_claimed_few_at_a_time(stand: Stand) -> None:
    # 40 MB of arguments in all, of which 16 MB may be claimed at once; what is watched is that all run.
    sent = [stand.send_with("note", {"word": "x" * 2_000_000}) for _ in range(20)]
    async with stand.worker() as running:
        await running.finished(*sent, timeout_s=60)
    assert stand.states() == {"COMPLETED": 20}
