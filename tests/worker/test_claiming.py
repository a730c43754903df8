"""Test when a worker claims tasks, which ones, and that lost replies neither lose nor repeat a task."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import pytest
from psycopg import sql

from everbeat.protocol import Adopt, Phantoms
from everbeat.store import claims, leases
from tests.worker.harness import WorkerHarness
from tests.worker.proxy import Proxy, statement_marker
from tests.worker.sample_tasks import gate

SLACK = 3.0


@pytest.mark.parametrize("source", ["postgres", "silent"])
async def test_a_scheduled_task_starts_on_time_on_an_idle_worker(
    harness: WorkerHarness, source: str
) -> None:  # B7
    make = harness.postgres_hints if source == "postgres" else harness.silent_hints
    async with harness.worker(hints=make) as running:
        await running.finished(harness.send("double", x=1))
        task_id = harness.send_with("double", {"x": 2}, delay_ms=2_500)
        row = await running.finished(task_id)
    late = (row["started_at"] - row["sent_at"]).total_seconds() - 2.5
    print(f"scheduled task started {late:.3f} s after it was due ({source} hints)")
    assert 0 <= late < 0.3 * SLACK


@pytest.mark.usefixtures("a_minute_ahead")
async def test_a_worker_claims_as_many_tasks_as_its_slots_and_its_prefetch(harness: WorkerHarness) -> None:
    async with harness.worker(thread_concurrency=3, prefetch=4) as running:
        running.measured("wait_for_gate")
        harness.send_many("wait_for_gate", [{"word": str(n)} for n in range(20)])
        await running.until(lambda: harness.states().get("RUNNING") == 3)
        await running.until(lambda: harness.states().get("CLAIMED") == 4)
        await asyncio.sleep(0.3)  # time in which the worker must claim no more
        assert harness.states() == {"RUNNING": 3, "CLAIMED": 4, "PENDING": 13}
        gate.opened.set()
        await running.until(lambda: harness.states() == {"COMPLETED": 20})


async def test_a_worker_does_not_claim_unknown_names_and_other_queues(harness: WorkerHarness) -> None:
    async with harness.worker(queues=["mine"]) as running:
        unknown, other = harness.send_with("nobody", {}, queue="mine"), harness.send_with("double", {"x": 1})
        await running.finished(harness.send_with("double", {"x": 1}, queue="mine"))
    assert {harness.task(each)["state"] for each in (unknown, other)} == {"PENDING"}


@pytest.mark.parametrize("statement", ["claim_tasks", "start_tasks", "complete_attempts", "release_leases"])
@pytest.mark.usefixtures("a_minute_ahead")
async def test_a_lost_reply_loses_no_task_and_runs_none_twice(harness: WorkerHarness, statement: str) -> None:
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker(
                hints=harness.silent_hints, thread_concurrency=2, prefetch=4
            ) as running:
                running.measured("wait_for_gate")
                running.measured("note")
                harness.send_many("wait_for_gate", [{"word": "held"}] * 4)
                await running.until(lambda: harness.states() == {"RUNNING": 2, "CLAIMED": 2})
                await running.until(lambda: len(gate.journal) == 2)
                proxy.lose_reply(statement_marker(f"task/{statement}"))
                if statement == "release_leases":
                    running.stop()
                gate.opened.set()
                words = harness.send_many("note", [{"word": f"w{n}"} for n in range(50)])
                if statement == "release_leases":
                    assert await running.left() == 0
                else:
                    await running.finished(*words)
        finally:
            harness.target = direct
        assert proxy.lost == 1
    if statement != "release_leases":
        assert sorted(w for w in gate.journal if isinstance(w, str)) == sorted(f"w{n}" for n in range(50))
        assert harness.states() == {"COMPLETED": 54}
    else:
        assert harness.states().get("CLAIMED") is None
        assert harness.states()["PENDING"] >= 2


async def test_a_worker_keeps_results_in_memory_during_an_outage(harness: WorkerHarness) -> None:
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker(thread_concurrency=2, prefetch=0) as running:
                during = harness.send_many("wait_for_gate", [{"word": str(n)} for n in range(2)])
                await running.until(lambda: len(gate.journal) == 2)
                proxy.cut()
                gate.opened.set()
                await running.until(lambda: len(gate.journal) == 4)
                await asyncio.sleep(1.5)  # the outage lasts
                assert running.finishes() == []
                assert harness.states() == {"RUNNING": 2}
                proxy.mend()
                mended_at = time.monotonic()
                await running.finished(*during)
                print(f"settled {time.monotonic() - mended_at:.2f} s after the database was back")
                await running.finished(harness.send("double", x=1))
        finally:
            harness.target = direct
    assert harness.states() == {"COMPLETED": 3}
    assert all(len(harness.attempts(each)) == 1 for each in during)


async def test_a_worker_survives_the_termination_of_all_its_sessions(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        sent = harness.send_many("nap", [{"seconds": 0.05}] * 300)
        for _ in range(5):
            await asyncio.sleep(0.1)  # a moment of ordinary work between two terminations
            harness.terminate_sessions(like="everbeat-%")
        await running.finished(*sent)
    assert harness.states() == {"COMPLETED": 300}
    assert all(len(harness.attempts(each)) == 1 for each in sent)


async def test_a_worker_releases_leases_that_it_does_not_know_and_keeps_its_own(
    harness: WorkerHarness,
) -> None:
    async with harness.worker(async_concurrency=1, prefetch=0) as running:
        mine = harness.send("linger", word="mine")
        await running.until(lambda: ("begun", "mine") in gate.journal)
        # A call whose answer was lost has claimed both for this worker and started one.
        ghosts = [harness.send("double", x=n) for n in range(2)]
        claim = claims.claim(
            worker_id=running.id,
            claim_call=uuid4(),
            names=["double"],
            limit=2,
            queues=None,
            queue_priorities={},
        )
        taken = [(task.id, task.claim_id) for task in harness.run(claim)]
        harness.run(leases.start(taken[:1], channel=harness.target.channel))
        assert {task_id for task_id, _ in taken} == set(ghosts)
        running.worker.obey(Phantoms([*taken, (mine, harness.task(mine)["claim_id"])]))
        await running.until(lambda: harness.states() == {"RUNNING": 1, "PENDING": 2})
        assert harness.task(mine)["state"] == "RUNNING"
        harness.cancel(mine)
        await running.finished(*ghosts)
    assert [a["outcome"] for a in harness.attempts(taken[0][0])] == ["RELEASED", "COMPLETED"]
    assert [a["outcome"] for a in harness.attempts(taken[1][0])] == ["COMPLETED"]


async def test_an_unknown_lease_that_cannot_be_released_does_not_block_the_others(
    harness: WorkerHarness, caplog: pytest.LogCaptureFixture
) -> None:  # J9
    async with harness.worker(async_concurrency=1, prefetch=0) as running:
        mine = harness.send("linger", word="mine")
        await running.until(lambda: ("begun", "mine") in gate.journal)
        ghosts = [harness.send("double", x=n) for n in range(4)]
        claim = claims.claim(
            worker_id=running.id, claim_call=uuid4(), names=["double"], limit=4, queues=None, queue_priorities={}
        )  # fmt: skip
        taken = [(task.id, task.claim_id) for task in harness.run(claim)]
        harness.run(leases.start(taken[:2], channel=harness.target.channel))
        # A started task and a claimed one get a name that is too long for the index of PENDING tasks.
        damaged = [taken[0][0], taken[2][0]]
        too_long = "update {schema}.tasks set name = (select string_agg(md5(n::text), '') from generate_series(1, 300) n) where id = any(%s)"
        harness.connection.execute(
            sql.SQL(too_long).format(schema=sql.Identifier(harness.target.schema)), [damaged]
        )
        running.worker.obey(Phantoms(taken))
        await running.until(lambda: harness.states() == {"RUNNING": 2, "CLAIMED": 1, "PENDING": 2})
        await running.until(lambda: all(f"release_refused task_id={each}" in caplog.text for each in damaged))
        harness.cancel(mine)
        neighbours = set(ghosts) - set(damaged)
        await running.finished(*neighbours)
        assert {harness.task(each)["state"] for each in neighbours} == {"COMPLETED"}
        harness.connection.execute(
            sql.SQL("delete from {schema}.tasks where id = any(%s)").format(
                schema=sql.Identifier(harness.target.schema)
            ),
            [damaged],
        )


@pytest.mark.usefixtures("a_minute_ahead")
async def test_a_draining_worker_releases_tasks_beside_one_that_cannot_become_pending(
    harness: WorkerHarness, caplog: pytest.LogCaptureFixture
) -> None:  # J9
    async with harness.worker(async_concurrency=1, prefetch=4) as running:
        running.measured("linger")
        mine = harness.send("linger", word="mine")
        await running.until(lambda: ("begun", "mine") in gate.journal)
        waiting = [harness.send("linger", word=str(n)) for n in range(3)]
        await running.until(lambda: harness.states() == {"RUNNING": 1, "CLAIMED": 3})
        too_long = "update {schema}.tasks set name = (select string_agg(md5(n::text), '') from generate_series(1, 300) n) where id = %s"
        harness.connection.execute(
            sql.SQL(too_long).format(schema=sql.Identifier(harness.target.schema)), [waiting[1]]
        )
        harness.cancel(mine)
    assert [harness.task(each)["state"] for each in waiting] == ["PENDING", "CLAIMED", "PENDING"]
    assert f"release_refused task_id={waiting[1]}" in caplog.text


async def test_an_adopted_worker_stops_its_code_and_continues_under_its_new_id(
    harness: WorkerHarness,
) -> None:
    async with harness.worker() as running:
        old = harness.send("linger", word="old")
        await running.until(lambda: ("begun", "old") in gate.journal)
        harness.recover(old)
        first_id, welcome = running.id, harness.welcome()
        running.worker.obey(Adopt(welcome))
        await running.until(lambda: ("cancelled", "old") in gate.journal)
        row = await running.finished(harness.send("double", x=4))
        assert row["claimed_by_worker_id"] == welcome.worker_id != first_id
    assert harness.task(old)["state"] == "FAILED"


async def test_a_worker_runs_all_tasks_with_large_arguments(harness: WorkerHarness) -> None:
    # The arguments have 40 MB in all and one claim takes at most 16 MB; the test checks that all tasks run.
    sent = [harness.send_with("note", {"word": "x" * 2_000_000}) for _ in range(20)]
    async with harness.worker() as running:
        await running.finished(*sent, timeout_s=60)
    assert harness.states() == {"COMPLETED": 20}
