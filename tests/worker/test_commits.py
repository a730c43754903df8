"""Test `commit_with` in every mode: one transaction stores the user's rows and the completion."""

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
from everbeat.protocol import DropLeases
from everbeat.runtime.events import LeasesLost, ZombieRefused, event_text
from everbeat.store import migrating
from everbeat.store.target import Target
from everbeat.worker import context_backend
from everbeat.worker.attempt import Stage
from everbeat.worker.settlement import CodeFailedAfterItsCommit
from tests.variants import long_except
from tests.worker import sample_orm_tasks, sample_partial_tasks
from tests.worker.harness import Running, WorkerHarness
from tests.worker.proxy import Proxy
from tests.worker.sample_tasks import DEFINITIONS, gate

PROGRAM = [sys.executable, str(Path(__file__).parent / "programs" / "partial_task_process.py")]
assert sample_partial_tasks.commit_async.__name__ in DEFINITIONS
assert sample_orm_tasks.end_inside.__name__ in DEFINITIONS
MODES = ["commit_async", "commit_in_thread", "commit_in_process", "commit_async_in_process"]

# Each stop in one mode, and each mode with one stop.
COMMITS_HEARD = long_except(
    [(name, heard) for name in MODES[:3] for heard in ("lost", "cancelled", "timed_out", "shutting_down")],
    ("commit_async", "lost"),
    ("commit_in_process", "cancelled"),
    ("commit_in_thread", "timed_out"),
    ("commit_in_process", "shutting_down"),
)


class Shop:
    """The harness with a table of the user in the same database."""

    def __init__(self, harness: WorkerHarness) -> None:
        self.harness = harness
        harness.connection.execute(f'create table "{harness.target.schema}".user_rows (word text)')  # type: ignore[call-overload]

    @property
    def rows(self) -> list[str]:
        return [
            row["word"] for row in self.harness.query("select word from {schema}.user_rows order by word")
        ]

    def send(self, name: str, how: str = "", *, url: str | None = None) -> UUID:
        target = self.harness.target
        return self.harness.send(name, url=url or target.url, schema=target.schema, how=how)

    def linger(self, word: str, *, seconds: float) -> None:
        """Delay the COMMIT of transactions that write this word, so that a test can act during it."""
        schema = self.harness.target.schema
        self.harness.connection.execute(
            f"""create function "{schema}".linger() returns trigger language plpgsql as $$
                begin if new.word = '{word}' then perform pg_sleep({seconds}); end if; return null; end $$"""  # type: ignore[call-overload]
        )
        self.harness.connection.execute(
            f"""create constraint trigger linger after insert on "{schema}".user_rows deferrable initially deferred
                for each row execute function "{schema}".linger()"""  # type: ignore[call-overload]
        )

    def is_committing(self) -> bool:
        """Return whether a session is executing COMMIT."""
        return (
            self.harness.query("select 1 from pg_stat_activity where query = 'COMMIT' and state = 'active'")
            != []
        )

    async def ended(self, running: Running, task_id: UUID) -> dict[str, Any]:
        await running.until(
            lambda: self.harness.task(task_id)["state"] in ("COMPLETED", "FAILED", "CANCELLED")
        )
        return self.harness.task(task_id)


@pytest.fixture
def shop(harness: WorkerHarness) -> Shop:
    return Shop(harness)


@pytest.fixture
def other_database(database_url: str) -> Iterator[str]:
    """Yield the URL of another database on the same server."""
    name = f"other_{uuid4().hex[:12]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f'create database "{name}"')  # type: ignore[call-overload]
        yield urlsplit(database_url)._replace(path=f"/{name}").geturl()
        connection.execute(f'drop database "{name}" with (force)')  # type: ignore[call-overload]


@pytest.mark.parametrize("name", MODES)
async def test_commit_with_stores_the_users_rows_and_the_completion_together(
    shop: Shop, name: str
) -> None:  # G4
    harness = shop.harness
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = shop.send(name, "raise after")
        row = await shop.ended(running, task_id)
        await running.until(lambda: running.worker._executors["async"].occupied == 0)
    assert (row["state"], row["result"], row["error"]) == ("COMPLETED", "raise after", None)
    assert shop.rows == ["1"]
    assert [(one["attempt"], one["outcome"]) for one in harness.attempts(task_id)] == [(1, "COMPLETED")]
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


@pytest.mark.parametrize("name", long_except(MODES[:3], "commit_in_process"))
async def test_an_exception_in_the_commit_block_rolls_back_and_fails_the_attempt(
    shop: Shop, name: str
) -> None:  # G4
    async with shop.harness.worker(task_process_argv=PROGRAM) as running:
        task_id = shop.send(name, "raise once")
        row = await shop.ended(running, task_id)
    assert (row["state"], row["retry_count"]) == ("COMPLETED", 1)
    assert shop.rows == ["2"]
    first, second = shop.harness.attempts(task_id)
    assert (first["outcome"], first["error"]["message"]) == ("FAILED", "in the block")
    assert second["outcome"] == "COMPLETED"


async def test_a_process_killed_in_the_commit_block_stores_nothing(shop: Shop) -> None:  # G4
    async with shop.harness.worker(task_process_argv=PROGRAM) as running:
        task_id = shop.send("commit_in_process", "die once")
        await running.until(lambda: bool(running.crashes))
        row = await shop.ended(running, task_id)
    assert (row["state"], row["error"]["code"]) == (
        "FAILED",
        "WORKER_CRASHED",
    )  # the harness recovers without a retry
    assert shop.rows == []


@pytest.mark.parametrize("own_limit_ms", long_except([0, 60_000, 300], 300))
async def test_the_server_ends_a_transaction_that_idles_before_its_commit(
    shop: Shop, own_limit_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # G4
    monkeypatch.setattr(context_backend, "COMMIT_WITHIN_MS", 1_000)
    async with shop.harness.worker() as running:
        task_id = shop.send("commit_with_hesitation", str(own_limit_ms or ""))
        await running.until(lambda: gate.journal == ["about to commit"])
        began = time.monotonic()

        def is_free() -> bool:
            query = "select 1 from {schema}.tasks where id = %s for no key update skip locked"
            return shop.harness.query(query, task_id) != []

        assert own_limit_ms == 300 or not is_free()
        await running.until(is_free)
        assert own_limit_ms == 300 or time.monotonic() - began > 0.5
        assert shop.rows == []
        gate.opened.set()
        ended = await shop.ended(running, task_id)
    assert ended["state"] == "FAILED"
    assert shop.rows == []


@pytest.mark.parametrize("name", ["commit_async", "commit_in_thread"])
async def test_a_lost_lease_rolls_back_the_rows_and_the_completion(shop: Shop, name: str) -> None:  # G4
    harness = shop.harness
    async with harness.worker(hints=WorkerHarness.silent_hints, poll_interval="200ms") as running:
        task_id = shop.send(name, "wait")
        await running.until(lambda: gate.journal == ["in the block"])
        running.worker._leases._deaf_poll_s = 60.0  # only its own commit must report the lost lease
        harness.recover(task_id)
        gate.opened.set()
        await running.until(lambda: bool(running.of(LeasesLost)))
        await running.until(lambda: running.worker._executors["thread"].occupied == 0)
    row = harness.task(task_id)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "WORKER_CRASHED")
    assert shop.rows == []
    assert gate.journal == ["in the block"]  # nothing ran after it
    assert [one["outcome"] for one in harness.attempts(task_id)] == ["LOST"]


async def test_a_committed_task_refuses_checkpoints_and_a_second_commit(shop: Shop) -> None:
    async with shop.harness.worker() as running:
        for how in ("checkpoint after", "commit twice"):
            gate.journal.clear()
            row = await shop.ended(running, shop.send("commit_in_thread", how))
            await running.until(lambda: len(gate.journal) == 3)
            assert isinstance(gate.journal[2], CommitRefused)
            assert "is completed" in gate.journal[2].message
            assert row["checkpoint"] is None


async def test_progress_does_not_abort_a_serializable_commit_block(shop: Shop) -> None:
    async with shop.harness.worker() as running:
        row = await shop.ended(running, shop.send("commit_in_thread", "serializable"))
    assert (row["state"], row["result"], row["retry_count"]) == ("COMPLETED", "serializable", 0)
    assert shop.rows == ["1"]


@pytest.mark.parametrize(
    "name",
    long_except(
        ["commit_wrong_result", "commit_wrong_result_async", "commit_wrong_result_in_process"],
        "commit_wrong_result_in_process",
    ),
)
async def test_the_result_of_a_commit_block_is_checked_like_any_other(shop: Shop, name: str) -> None:
    target = shop.harness.target
    async with shop.harness.worker(task_process_argv=PROGRAM) as running:
        for result, message in (
            ("text", f"result of task '{name}'"),
            ("object", "is of type object"),
            (None, "expected `int`, got `null`"),
        ):
            sent = shop.harness.send(name, url=target.url, schema=target.schema, result=result)
            row = await shop.ended(running, sent)
            assert (row["state"], row["error"]["code"]) == ("FAILED", "RESULT_UNSERIALISABLE")
            assert row["error"]["type"] == "everbeat.errors.PayloadError"
            assert message in row["error"]["message"]
            if result is None:
                assert "set completion.result inside the block" in row["error"]["message"]
    assert shop.rows == []


async def test_a_commit_that_leaves_its_transaction_open_fails_the_attempt(shop: Shop) -> None:
    async with shop.harness.worker() as running:
        sent = shop.harness.send(
            "commit_joined_session", url=shop.harness.target.url, schema=shop.harness.target.schema
        )
        row = await shop.ended(running, sent)
    assert row["state"] == "FAILED"
    assert "commit() returned, and its transaction was still open" in row["error"]["message"]
    assert shop.rows == []


@pytest.mark.parametrize("how", ["commit", "rollback"])
async def test_a_transaction_ended_inside_the_commit_block_fails_the_attempt(shop: Shop, how: str) -> None:
    target = shop.harness.target
    async with shop.harness.worker() as running:
        sent = shop.harness.send("end_inside", url=target.url, schema=target.schema, how=how)
        row = await shop.ended(running, sent)
    assert row["state"] == "FAILED"
    assert "was ended inside its block" in row["error"]["message"]


class TestWhileItCommits:
    """Stops and lost leases during COMMIT wait for its outcome."""

    @pytest.mark.parametrize(("name", "heard"), COMMITS_HEARD)
    async def test_a_commit_that_takes_effect_outranks_a_stop_or_a_lost_lease(
        self, shop: Shop, name: str, heard: Any
    ) -> None:  # G4
        shop.linger("1", seconds=1.5)
        async with shop.harness.worker(task_process_argv=PROGRAM) as running:
            task_id = shop.send(name, "landed")
            await running.until(shop.is_committing)
            attempt = running.attempt(task_id)
            if heard == "lost":
                running.worker.obey(DropLeases([attempt.lease]))
            else:
                running.worker._lifecycle.stop(attempt, heard)
            row = await shop.ended(running, task_id)
            await running.until(
                lambda: (
                    attempt not in running.worker._lifecycle.running_after_commit
                    and attempt.stage is Stage.COMMITTED
                )
            )
        assert (row["state"], row["result"]) == ("COMPLETED", "landed")
        assert shop.rows == ["1"]
        assert running.of(LeasesLost) == []
        assert [event.state for event in running.finishes()] == ["COMPLETED"]
        assert running.crashes == []

    async def test_code_that_cancels_itself_during_its_commit_is_completed(self, shop: Shop) -> None:
        target = shop.harness.target
        shop.linger("slow", seconds=1.5)
        async with shop.harness.worker() as running:
            task_id = shop.harness.send("commit_in_a_hurry", url=target.url, schema=target.schema)
            row = await shop.ended(running, task_id)
            await running.until(lambda: running.worker._executors["async"].occupied == 0)
        assert row["state"] == "COMPLETED"
        assert shop.rows == ["slow"]
        assert gate.journal == []


class TestElsewhere:  # bad input: a commit on a connection to another database
    async def test_a_commit_to_a_database_without_everbeat_is_refused(
        self, shop: Shop, other_database: str
    ) -> None:
        async with shop.harness.worker() as running:
            row = await shop.ended(running, shop.send("commit_in_thread", url=other_database))
        message = row["error"]["message"]
        assert "CommitRefused" in row["error"]["type"]
        assert "leads to database 'other_" in message
        assert "has no tables of everbeat; the task lives in schema" in message
        assert row["state"] == "FAILED"

    async def test_a_commit_to_another_installation_of_everbeat_is_refused(
        self, shop: Shop, other_database: str
    ) -> None:
        elsewhere = Target.parse(other_database, schema=shop.harness.target.schema)
        with elsewhere.connect("everbeat test") as connection:
            migrating.migrate(connection, elsewhere)
            async with shop.harness.worker() as running:
                row = await shop.ended(running, shop.send("commit_async", url=other_database))
        assert "is another installation of everbeat" in row["error"]["message"]

    async def test_a_commit_by_a_role_without_privileges_is_refused(self, shop: Shop) -> None:
        role = f"guest_{uuid4().hex[:8]}"
        connection = shop.harness.connection
        connection.execute(f"create role {role} login")  # type: ignore[call-overload]
        try:
            url = psycopg.conninfo.make_conninfo(shop.harness.target.url, user=role)
            async with shop.harness.worker() as running:
                row = await shop.ended(running, shop.send("commit_in_thread", url=url))
        finally:
            connection.execute(f"drop role {role}")  # type: ignore[call-overload]
        assert (
            f"role '{role}'" in row["error"]["message"] or "cannot complete tasks" in row["error"]["message"]
        )
        assert "grant it the rights" in row["error"]["message"]


class TestCommitUnknown:  # L: the reply of a COMMIT is lost
    @pytest.mark.parametrize("name", long_except(MODES, "commit_async", "commit_in_process"))
    async def test_a_commit_whose_reply_was_lost_completes_the_task(self, shop: Shop, name: str) -> None:
        async with Proxy.before(shop.harness.target) as proxy:
            async with shop.harness.worker(task_process_argv=PROGRAM) as running:
                proxy.lose_reply(b"COMMIT")
                task_id = shop.send(name, "lost", url=proxy.target.url)
                row = await shop.ended(running, task_id)
            assert proxy.lost == 1
        # The code got the result of the commit and continued normally.
        assert [event.state for event in running.finishes()] == ["COMPLETED"]
        assert running.of(ZombieRefused) == []
        assert (row["state"], row["result"], row["retry_count"]) == ("COMPLETED", "lost", 0)
        assert shop.rows == ["1"]

    async def test_a_commit_that_the_server_ended_does_not_complete_the_task(self, shop: Shop) -> None:
        harness = shop.harness
        shop.linger("1", seconds=30)
        async with harness.worker() as running:
            task_id = shop.send("commit_async", "ended")
            await running.until(shop.is_committing)
            running.worker._lifecycle.stop(running.attempt(task_id), "cancelled")
            harness.query("select pg_terminate_backend(pid) from pg_stat_activity where query = 'COMMIT'")
            row = await shop.ended(running, task_id)
        # The worker deferred the cancel while the outcome was open, and then applied it.
        assert row["state"] == "CANCELLED"
        assert shop.rows == []


class TestAfterwards:
    async def test_a_draining_worker_waits_for_code_after_its_commit_within_the_grace_period(
        self, shop: Shop
    ) -> None:
        async with shop.harness.worker(async_concurrency=1) as running:
            task_id = shop.send("commit_async", "stay")
            await shop.ended(running, task_id)
            running.worker._shutdown.drain(grace_s=30.0)
            await asyncio.sleep(0.3)  # without the code, it would have exited by now
            assert running.code is None
            gate.opened.set()
            assert await running.left() == 0
        assert gate.journal == ["in the block", "after the block"]

    async def test_code_that_runs_on_after_its_commit_is_asked_to_stop_at_its_timeout(
        self, shop: Shop
    ) -> None:
        async with shop.harness.worker() as running:
            task_id = shop.harness.send("trail_in_thread", url=shop.harness.target.url)
            row = await shop.ended(running, task_id)
            await running.until(lambda: len(gate.journal) == 1)
        assert "told in everbeat-task" in gate.journal[0]
        assert (row["state"], shop.harness.task(task_id)["state"]) == ("COMPLETED", "COMPLETED")
