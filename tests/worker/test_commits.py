"""The user's rows and the completion in one transaction, in every mode: both, or neither; what comes after changes nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import psycopg
import pytest

from everbeat.errors import CommitRefused
from everbeat.runtime.events import LeasesLost, ZombieRefused, event_text
from everbeat.store import migrating
from everbeat.store.target import Target
from everbeat.worker import code_side
from everbeat.worker.protocol import Lost
from everbeat.worker.settlement import CodeFailedAfterItsCommit
from tests.worker import partial_deeds
from tests.worker.deeds import DEFINITIONS, gate
from tests.worker.proxy import Proxy
from tests.worker.stand import Running, Stand

PROGRAM = [sys.executable, str(Path(__file__).parent / "programs" / "partial_task_process.py")]
assert partial_deeds.commit_async.__name__ in DEFINITIONS
MODES = ["commit_async", "commit_in_thread", "commit_in_process", "commit_async_in_process"]


class Shop:
    """The stand with a table of the user's in the same database."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        stand.connection.execute(f'create table "{stand.target.schema}".user_rows (word text)')  # type: ignore[call-overload]

    @property
    def rows(self) -> list[str]:
        return [row["word"] for row in self.stand.query("select word from {schema}.user_rows order by word")]

    def send(self, name: str, how: str = "", *, url: str | None = None) -> UUID:
        target = self.stand.target
        return self.stand.send(name, url=url or target.url, schema=target.schema, how=how)

    def linger(self, word: str, *, seconds: float) -> None:
        """A check at the end of the transaction waits where a test can interfere: in the midst of COMMIT."""
        schema = self.stand.target.schema
        self.stand.connection.execute(
            f"""create function "{schema}".linger() returns trigger language plpgsql as $$
                begin if new.word = '{word}' then perform pg_sleep({seconds}); end if; return null; end $$"""  # type: ignore[call-overload]
        )
        self.stand.connection.execute(
            f"""create constraint trigger linger after insert on "{schema}".user_rows deferrable initially deferred
                for each row execute function "{schema}".linger()"""  # type: ignore[call-overload]
        )

    def is_committing(self) -> bool:
        """Whether a COMMIT of somebody is under way."""
        return (
            self.stand.query("select 1 from pg_stat_activity where query = 'COMMIT' and state = 'active'")
            != []
        )

    async def ended(self, running: Running, task_id: UUID) -> dict[str, Any]:
        await running.until(lambda: self.stand.task(task_id)["state"] in ("COMPLETED", "FAILED", "CANCELLED"))
        return self.stand.task(task_id)


@pytest.fixture
def shop(stand: Stand) -> Shop:
    return Shop(stand)


@pytest.fixture
def other_database(database_url: str) -> Iterator[str]:
    """The URL of another database on the same server."""
    name = f"other_{uuid4().hex[:12]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f'create database "{name}"')  # type: ignore[call-overload]
        yield urlsplit(database_url)._replace(path=f"/{name}").geturl()
        connection.execute(f'drop database "{name}" with (force)')  # type: ignore[call-overload]


@pytest.mark.parametrize("name", MODES)
async def test_rows_and_completion_are_one(shop: Shop, name: str) -> None:  # G4
    stand = shop.stand
    async with stand.worker(task_process_argv=PROGRAM) as running:
        task_id = shop.send(name, "raise after")
        row = await shop.ended(running, task_id)
        await running.until(lambda: running.worker._executors["async"].occupied == 0)
    assert (row["state"], row["result"], row["error"]) == ("COMPLETED", "raise after", None)
    assert shop.rows == ["1"]
    assert [(one["attempt"], one["outcome"]) for one in stand.attempts(task_id)] == [(1, "COMPLETED")]
    assert [event.state for event in running.finishes()] == ["COMPLETED"]
    assert running.of(LeasesLost) + running.of(ZombieRefused) == []  # type: ignore[operator]
    failures = running.of(CodeFailedAfterItsCommit)
    if name == "commit_async_in_process":
        assert failures == []
    else:
        (failure,) = failures
        assert event_text(failure) == (
            f"code_failed_after_its_commit task_id={task_id} name={name} code=UNHANDLED_EXCEPTION "
            'type=RuntimeError message="after the block"'
        )


@pytest.mark.parametrize("name", MODES[:3])
async def test_an_exception_in_the_block_rolls_back_and_is_the_tasks_own(shop: Shop, name: str) -> None:  # G4
    async with shop.stand.worker(task_process_argv=PROGRAM) as running:
        task_id = shop.send(name, "raise once")
        row = await shop.ended(running, task_id)
    assert (row["state"], row["retry_count"]) == ("COMPLETED", 1)
    assert shop.rows == ["2"]
    first, second = shop.stand.attempts(task_id)
    assert (first["outcome"], first["error"]["message"]) == ("FAILED", "in the block")
    assert second["outcome"] == "COMPLETED"


async def test_a_process_killed_in_the_block_leaves_nothing(shop: Shop) -> None:  # G4
    async with shop.stand.worker(task_process_argv=PROGRAM) as running:
        task_id = shop.send("commit_in_process", "die once")
        await running.until(lambda: bool(running.crashes))
        row = await shop.ended(running, task_id)
    assert (row["state"], row["error"]["code"]) == (
        "FAILED",
        "WORKER_CRASHED",
    )  # the stand recovers without a retry
    assert shop.rows == []


@pytest.mark.parametrize("own_limit_ms", [0, 60_000, 300])
async def test_code_that_stands_still_before_its_commit_does_not_hold_the_task_for_ever(
    shop: Shop, own_limit_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # G4
    monkeypatch.setattr(code_side, "COMMIT_WITHIN_MS", 1_000)
    async with shop.stand.worker() as running:
        task_id = shop.send("commit_with_hesitation", str(own_limit_ms or ""))
        await running.until(lambda: gate.journal == ["about to commit"])
        began = time.monotonic()

        def is_free() -> bool:
            query = "select 1 from {schema}.tasks where id = %s for no key update skip locked"
            return shop.stand.query(query, task_id) != []

        assert own_limit_ms == 300 or not is_free()
        await running.until(is_free)
        assert own_limit_ms == 300 or time.monotonic() - began > 0.5
        assert shop.rows == []
        gate.opened.set()
        ended = await shop.ended(running, task_id)
    assert ended["state"] == "FAILED"
    assert shop.rows == []


@pytest.mark.parametrize("name", ["commit_async", "commit_in_thread"])
async def test_a_lease_that_was_lost_rolls_both_back(shop: Shop, name: str) -> None:  # G4
    stand = shop.stand
    async with stand.worker(wake=Stand.silent_wake, poll_interval="200ms") as running:
        task_id = shop.send(name, "wait")
        await running.until(lambda: gate.journal == ["in the block"])
        running.worker._leases._deaf_poll_s = 60.0  # it must not be told by anybody but its own commit
        stand.recover(task_id)
        gate.opened.set()
        await running.until(lambda: bool(running.of(LeasesLost)))
        await running.until(lambda: running.worker._executors["thread"].occupied == 0)
    row = stand.task(task_id)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "WORKER_CRASHED")
    assert shop.rows == []
    assert gate.journal == ["in the block"]  # nothing ran after it
    assert [one["outcome"] for one in stand.attempts(task_id)] == ["LOST"]


async def test_nothing_more_is_stored_once_it_is_committed(shop: Shop) -> None:
    async with shop.stand.worker() as running:
        for how in ("checkpoint after", "commit twice"):
            gate.journal.clear()
            row = await shop.ended(running, shop.send("commit_in_thread", how))
            await running.until(lambda: len(gate.journal) == 3)
            assert isinstance(gate.journal[2], CommitRefused)
            assert "is completed" in gate.journal[2].message
            assert row["checkpoint"] is None


async def test_progress_does_not_disturb_a_transaction_with_a_snapshot(shop: Shop) -> None:
    async with shop.stand.worker() as running:
        row = await shop.ended(running, shop.send("commit_in_thread", "serializable"))
    assert (row["state"], row["result"], row["retry_count"]) == ("COMPLETED", "serializable", 0)
    assert shop.rows == ["1"]


@pytest.mark.parametrize(
    "name", ["commit_wrong_result", "commit_wrong_result_async", "commit_wrong_result_in_process"]
)
async def test_the_result_is_checked_like_any_other(shop: Shop, name: str) -> None:
    target = shop.stand.target
    async with shop.stand.worker(task_process_argv=PROGRAM) as running:
        for result, message in (
            ("text", f"result of task '{name}'"),
            ("object", "is of type object"),
            (None, "expected `int`, got `null`"),
        ):
            sent = shop.stand.send(name, url=target.url, schema=target.schema, result=result)
            row = await shop.ended(running, sent)
            assert (row["state"], row["error"]["code"]) == ("FAILED", "RESULT_UNSERIALISABLE")
            assert row["error"]["type"] == "everbeat.errors.PayloadError"
            assert message in row["error"]["message"]
            if result is None:
                assert "set completion.result inside the block" in row["error"]["message"]
    assert shop.rows == []


async def test_a_commit_that_does_not_commit_is_found_out(shop: Shop) -> None:
    async with shop.stand.worker() as running:
        sent = shop.stand.send(
            "commit_joined_session", url=shop.stand.target.url, schema=shop.stand.target.schema
        )
        row = await shop.ended(running, sent)
    assert row["state"] == "FAILED"
    assert "commit() returned, and its transaction was still open" in row["error"]["message"]
    assert shop.rows == []


@pytest.mark.parametrize("how", ["commit", "rollback"])
async def test_a_transaction_that_is_ended_inside_the_block_completes_nothing(shop: Shop, how: str) -> None:
    target = shop.stand.target
    async with shop.stand.worker() as running:
        sent = shop.stand.send("end_inside", url=target.url, schema=target.schema, how=how)
        row = await shop.ended(running, sent)
    assert row["state"] == "FAILED"
    assert "was ended inside its block" in row["error"]["message"]


class TestWhileItCommits:
    """What is heard meanwhile waits for the outcome."""

    @pytest.mark.parametrize("name", ["commit_async", "commit_in_thread", "commit_in_process"])
    @pytest.mark.parametrize("heard", ["lost", "cancelled", "timed_out", "shutting_down"])
    async def test_a_commit_that_lands_outranks_it(self, shop: Shop, name: str, heard: Any) -> None:  # G4
        shop.linger("1", seconds=1.5)
        async with shop.stand.worker(task_process_argv=PROGRAM) as running:
            task_id = shop.send(name, "landed")
            await running.until(shop.is_committing)
            attempt = running.attempt(task_id)
            if heard == "lost":
                running.worker.obey(Lost([attempt.lease]))
            else:
                running.worker._conductor.stop(attempt, heard)
            row = await shop.ended(running, task_id)
            await running.until(
                lambda: attempt not in running.worker._conductor.trailing and attempt.is_committed
            )
        assert (row["state"], row["result"]) == ("COMPLETED", "landed")
        assert shop.rows == ["1"]
        assert running.of(LeasesLost) == []
        assert [event.state for event in running.finishes()] == ["COMPLETED"]
        assert running.crashes == []

    async def test_code_that_cancels_itself_in_its_commit_has_committed(self, shop: Shop) -> None:
        target = shop.stand.target
        shop.linger("slow", seconds=1.5)
        async with shop.stand.worker() as running:
            task_id = shop.stand.send("commit_in_a_hurry", url=target.url, schema=target.schema)
            row = await shop.ended(running, task_id)
            await running.until(lambda: running.worker._executors["async"].occupied == 0)
        assert row["state"] == "COMPLETED"
        assert shop.rows == ["slow"]
        assert gate.journal == []


class TestElsewhere:  # bad input: a commit on a connection to another database
    async def test_a_database_without_everbeat(self, shop: Shop, other_database: str) -> None:
        async with shop.stand.worker() as running:
            row = await shop.ended(running, shop.send("commit_in_thread", url=other_database))
        message = row["error"]["message"]
        assert "CommitRefused" in row["error"]["type"]
        assert "leads to database 'other_" in message
        assert "has no tables of everbeat; the task lives in schema" in message
        assert row["state"] == "FAILED"

    async def test_another_installation_of_the_same_name(self, shop: Shop, other_database: str) -> None:
        elsewhere = Target.parse(other_database, schema=shop.stand.target.schema)
        with elsewhere.connect("everbeat test") as connection:
            migrating.migrate(connection, elsewhere)
            async with shop.stand.worker() as running:
                row = await shop.ended(running, shop.send("commit_async", url=other_database))
        assert "is another installation of everbeat" in row["error"]["message"]

    async def test_a_role_that_may_not(self, shop: Shop) -> None:
        role = f"guest_{uuid4().hex[:8]}"
        connection = shop.stand.connection
        connection.execute(f"create role {role} login")  # type: ignore[call-overload]
        try:
            url = psycopg.conninfo.make_conninfo(shop.stand.target.url, user=role)
            async with shop.stand.worker() as running:
                row = await shop.ended(running, shop.send("commit_in_thread", url=url))
        finally:
            connection.execute(f"drop role {role}")  # type: ignore[call-overload]
        assert (
            f"role '{role}'" in row["error"]["message"] or "may not complete tasks" in row["error"]["message"]
        )
        assert "grant it the rights" in row["error"]["message"]


class TestCommitUnknown:  # L: the reply of a COMMIT is lost
    @pytest.mark.parametrize("name", MODES)
    async def test_a_commit_whose_reply_was_lost_has_happened(self, shop: Shop, name: str) -> None:
        async with Proxy.before(shop.stand.target) as proxy:
            async with shop.stand.worker(task_process_argv=PROGRAM) as running:
                proxy.lose_reply(b"COMMIT")
                task_id = shop.send(name, "lost", url=proxy.target.url)
                row = await shop.ended(running, task_id)
            assert proxy.lost == 1
        # The code was told so, and went on as if nothing had been.
        assert [event.state for event in running.finishes()] == ["COMPLETED"]
        assert running.of(ZombieRefused) == []
        assert (row["state"], row["result"], row["retry_count"]) == ("COMPLETED", "lost", 0)
        assert shop.rows == ["1"]

    async def test_a_commit_that_was_ended_by_the_server_has_not_happened(self, shop: Shop) -> None:
        stand = shop.stand
        shop.linger("1", seconds=30)
        async with stand.worker() as running:
            task_id = shop.send("commit_async", "ended")
            await running.until(shop.is_committing)
            running.worker._conductor.stop(running.attempt(task_id), "cancelled")
            stand.query("select pg_terminate_backend(pid) from pg_stat_activity where query = 'COMMIT'")
            row = await shop.ended(running, task_id)
        # The cancel was held back while the outcome was open, and then done.
        assert row["state"] == "CANCELLED"
        assert shop.rows == []


class TestAfterwards:
    async def test_a_worker_that_leaves_waits_for_the_code_within_its_grace(self, shop: Shop) -> None:
        async with shop.stand.worker(async_concurrency=1) as running:
            task_id = shop.send("commit_async", "stay")
            await shop.ended(running, task_id)
            running.worker._departure.drain(grace_s=30.0)
            await asyncio.sleep(0.3)  # it would have left by now
            assert running.code is None
            gate.opened.set()
            assert await running.left() == 0
        assert gate.journal == ["in the block", "after the block"]

    async def test_code_that_goes_on_is_told_when_its_time_is_up(self, shop: Shop) -> None:
        async with shop.stand.worker() as running:
            task_id = shop.stand.send("trail_in_thread", url=shop.stand.target.url)
            row = await shop.ended(running, task_id)
            await running.until(lambda: len(gate.journal) == 1)
        assert "told in everbeat-task" in gate.journal[0]
        assert (row["state"], shop.stand.task(task_id)["state"]) == ("COMPLETED", "COMPLETED")
