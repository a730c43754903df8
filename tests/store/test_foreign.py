"""The connections of users, all of them real: rows and the outcome of a task are committed in one transaction, or neither."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from everbeat.errors import BlockingCallInLoop, CommitRefused
from everbeat.store import steps, tasks
from everbeat.store.claims import Claimed
from everbeat.store.leases import Settlement, settle
from everbeat.store.statement import compose
from everbeat.store.steps import ConnectionFacts
from everbeat.store.user_connection.connection import (
    DriverPlan,
    DriverStatement,
    TransactionAction,
    UserTransaction,
    async_connection,
    sync_connection,
)
from everbeat.store.user_connection.drivers import named, numbered
from tests.store.conftest import StoreHarness
from tests.store.foreign_kinds import (
    ASYNC_KINDS,
    SYNC_KINDS,
    AsyncKind,
    SyncKind,
    asyncpg_plain,
    psycopg_async,
    psycopg_plain,
    sqlalchemy_plain,
    sqlalchemy_session,
)

STATEMENTS = [
    "task/settle_attempts",
    "commit/read_connection",
    "commit/limit_idle_time",
    "commit/check_lease",
    "commit/check_transaction",
]


class NoWorkerLine:
    """A transaction that sends no requests to its worker."""

    def ask(self, request: Any) -> Any:
        raise AssertionError(request)

    async def aask(self, request: Any) -> Any:
        raise AssertionError(request)


@dataclass
class Seen:
    """The database's replies on the user's connection."""

    facts: ConnectionFacts | None = None
    found: Any = None
    is_marked: bool | None = None
    verdict: str | None = None


class Completing:
    """Settle a running task at the end, as a commit does."""

    def __init__(self, db: StoreHarness, claimed: Claimed) -> None:
        self.seen = Seen()
        self._db = db
        self._claimed = claimed
        self._mark = str(uuid4())

    def begin(self) -> DriverPlan[Seen]:
        schema = self._db.target.schema
        yield TransactionAction("begin")
        self.seen.facts = yield DriverStatement(steps.commit_facts(schema=schema, mark=self._mark), schema)
        lease = steps.commit_lease(self._claimed.id, self._claimed.claim_id)
        self.seen.found = yield DriverStatement(lease, schema)
        return self.seen

    def end(self, error: BaseException | None) -> DriverPlan[None]:
        if error is not None:
            yield TransactionAction("rollback")
            return
        target = self._db.target
        yield TransactionAction("flush")
        self.seen.is_marked = yield DriverStatement(steps.commit_mark(self._mark), target.schema)
        outcome = Settlement(
            id=self._claimed.id, claim_id=self._claimed.claim_id, outcome="COMPLETED", result=b'"\\u0000"'
        )
        verdicts = yield DriverStatement(settle([outcome], channel=target.channel), target.schema)
        self.seen.verdict = next(iter(verdicts.values()))
        yield TransactionAction("commit")


@pytest.fixture
def table(db: StoreHarness) -> Iterator[str]:
    """A table of the user beside the tables of everbeat."""
    name = f"user_rows_{uuid4().hex[:8]}"
    db.connection.execute(f"create table {name} (word text)")  # type: ignore[call-overload]
    yield name
    db.connection.execute("set lock_timeout = '10s'")
    db.connection.execute(f"drop table {name}")  # type: ignore[call-overload]


def words(db: StoreHarness, table: str) -> list[str]:
    return [row[0] for row in db.connection.execute(f"select word from {table}")]  # type: ignore[call-overload]


def check_completed(db: StoreHarness, claimed: Claimed, seen: Seen) -> None:
    assert db.row(claimed.id, "state, result::text") == ("COMPLETED", '"\\u0000"')
    assert db.table("attempts", "outcome, claim_id") == [("COMPLETED", claimed.claim_id)]
    assert db.run(steps.commit_outcome(claimed.id, claimed.claim_id)) == "landed"
    assert seen.facts is not None
    assert (seen.facts.has_tables, seen.facts.is_read_only, seen.facts.isolation) == (
        True,
        False,
        "read committed",
    )
    assert seen.found == (db.run(steps.installation()), True)
    assert (seen.is_marked, seen.verdict) == (True, "COMPLETED")


def check_untouched(db: StoreHarness, claimed: Claimed) -> None:
    assert db.row(claimed.id, "state, claim_id") == ("RUNNING", claimed.claim_id)
    assert db.table("attempts") == []
    assert db.run(steps.commit_outcome(claimed.id, claimed.claim_id)) == "rolled_back"


def fail_in(block: UserTransaction[Seen], work: Callable[[], None]) -> None:
    with block:
        work()
        raise LookupError("mine")


async def afail_in(block: UserTransaction[Seen], work: Awaitable[None]) -> None:
    async with block:
        await work
        raise LookupError("mine")


@pytest.mark.parametrize("kind", SYNC_KINDS, ids=lambda kind: kind.name)
class TestSync:  # G4
    def test_rows_and_outcome_are_committed_together_on_a_sync_connection(
        self, db: StoreHarness, table: str, kind: SyncKind
    ) -> None:
        claimed = db.running()
        with kind.open(db.target.url) as connection:
            with UserTransaction(connection, Completing(db, claimed), line=NoWorkerLine()) as seen:
                kind.write(connection, f"insert into {table} values ('kept')")
                assert words(db, table) == []
                assert db.row(claimed.id, "state") == "RUNNING"
            assert words(db, table) == ["kept"]
            check_completed(db, claimed, seen)
        assert words(db, table) == ["kept"]

    def test_an_exception_rolls_back_rows_and_outcome_on_a_sync_connection(
        self, db: StoreHarness, table: str, kind: SyncKind
    ) -> None:
        claimed = db.running()
        with kind.open(db.target.url) as connection:
            block = UserTransaction(connection, Completing(db, claimed), line=NoWorkerLine())
            with pytest.raises(LookupError, match="mine"):
                fail_in(block, lambda: kind.write(connection, f"insert into {table} values ('gone')"))
            check_untouched(db, claimed)
        assert words(db, table) == []


@pytest.mark.parametrize("kind", ASYNC_KINDS, ids=lambda kind: kind.name)
class TestAsync:  # G4
    async def test_rows_and_outcome_are_committed_together_on_an_async_connection(
        self, db: StoreHarness, table: str, kind: AsyncKind
    ) -> None:
        claimed = db.running()
        async with kind.open(db.target.url) as connection:
            async with UserTransaction(connection, Completing(db, claimed), line=NoWorkerLine()) as seen:
                await kind.write(connection, f"insert into {table} values ('kept')")
                assert words(db, table) == []
                assert db.row(claimed.id, "state") == "RUNNING"
            assert words(db, table) == ["kept"]
            check_completed(db, claimed, seen)
        assert words(db, table) == ["kept"]

    async def test_an_exception_rolls_back_rows_and_outcome_on_an_async_connection(
        self, db: StoreHarness, table: str, kind: AsyncKind
    ) -> None:
        claimed = db.running()
        async with kind.open(db.target.url) as connection:
            block = UserTransaction(connection, Completing(db, claimed), line=NoWorkerLine())
            with pytest.raises(LookupError, match="mine"):
                await afail_in(block, kind.write(connection, f"insert into {table} values ('gone')"))
            check_untouched(db, claimed)
        assert words(db, table) == []


class TestRefused:
    @pytest.mark.parametrize("thing", [None, "postgresql://x", object(), 3])
    def test_an_object_that_is_not_a_connection_is_rejected(self, thing: object) -> None:
        for find in (sync_connection, async_connection):
            with pytest.raises(
                CommitRefused, match=r"which it does not support\. It accepts psycopg.Connection"
            ) as refusal:
                find(thing)
            assert "asyncpg.Connection" in refusal.value.message
            assert "SQLAlchemy's Connection, Session" in refusal.value.message

    def test_engines_and_cursors_are_rejected(self, db: StoreHarness) -> None:
        engine = create_engine("postgresql+psycopg://")
        with (
            psycopg_plain(db.target.url) as connection,
            pytest.raises(CommitRefused, match="not an engine"),
        ):
            sync_connection(connection.cursor())
        with pytest.raises(CommitRefused, match=r"sqlalchemy\.engine\.base\.Engine"):
            sync_connection(engine)

    async def test_a_connection_of_the_other_kind_is_rejected_with_the_right_form(
        self, db: StoreHarness
    ) -> None:
        with (
            psycopg_plain(db.target.url) as connection,
            pytest.raises(
                CommitRefused, match=r"'async with' with a psycopg.Connection.*Fix: write 'with ctx"
            ),
        ):
            async_connection(connection)
        async with psycopg_async(db.target.url) as other:
            with pytest.raises(
                CommitRefused, match=r"'with' with a psycopg.AsyncConnection.*Fix: write 'async with ctx"
            ):
                sync_connection(other)

    async def test_a_blocking_transaction_in_an_event_loop_is_rejected(self, db: StoreHarness) -> None:
        claimed = db.running()
        with psycopg_plain(db.target.url) as connection:
            with pytest.raises(BlockingCallInLoop, match="use 'async with' and an async connection"):
                UserTransaction(connection, Completing(db, claimed), line=NoWorkerLine()).__enter__()
            assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE

    def test_a_connection_with_a_failed_transaction_is_rejected(self, db: StoreHarness) -> None:
        with psycopg_plain(db.target.url) as connection:
            with pytest.raises(psycopg.errors.UndefinedTable):
                connection.execute("select * from nowhere")
            with pytest.raises(CommitRefused, match=r"has failed\. Fix: roll it back first"):
                sync_connection(connection).begin()
            connection.rollback()
            sync_connection(connection).begin()

    def test_a_connection_inside_another_transaction_block_or_savepoint_is_rejected(
        self, db: StoreHarness
    ) -> None:
        with (
            psycopg_plain(db.target.url) as connection,
            connection.transaction(),
            pytest.raises(CommitRefused, match="inside a transaction block that other code will end"),
        ):
            sync_connection(connection).begin()
        with (
            sqlalchemy_plain(db.target.url) as connection,
            connection.begin(),
            connection.begin_nested(),
            pytest.raises(CommitRefused, match="inside a savepoint"),
        ):
            sync_connection(connection).begin()

    async def test_an_asyncpg_connection_with_an_open_transaction_is_rejected(self, db: StoreHarness) -> None:
        async with asyncpg_plain(db.target.url) as connection, connection.transaction():
            with pytest.raises(CommitRefused, match=r"open ctx\.commit outside the block"):
                await async_connection(connection).begin()

    def test_closed_and_pipelined_connections_are_rejected(self, db: StoreHarness) -> None:
        with (
            psycopg_plain(db.target.url) as connection,
            connection.pipeline(),
            pytest.raises(CommitRefused, match="in a pipeline"),
        ):
            sync_connection(connection).begin()
        with pytest.raises(CommitRefused, match="is closed"):
            sync_connection(connection).begin()

    def test_a_connection_of_another_database_system_is_rejected(self) -> None:
        engine = create_engine("sqlite://")
        try:
            with Session(engine) as session, pytest.raises(CommitRefused, match="speaks sqlite"):
                sync_connection(session).begin()
        finally:
            engine.dispose()


class TestOpenTransactions:
    def test_rows_written_before_the_block_are_committed_with_it(self, db: StoreHarness, table: str) -> None:
        claimed = db.running()
        with psycopg_plain(db.target.url) as connection:
            connection.execute(f"insert into {table} values ('before')")
            with UserTransaction(connection, Completing(db, claimed), line=NoWorkerLine()):
                connection.execute(f"insert into {table} values ('inside')")
        assert sorted(words(db, table)) == ["before", "inside"]

    def test_rows_pending_in_a_sqlalchemy_session_are_written_before_the_outcome(
        self, db: StoreHarness, table: str
    ) -> None:
        claimed = db.running()
        with sqlalchemy_session(db.target.url) as session:
            with UserTransaction(session, Completing(db, claimed), line=NoWorkerLine()):
                session.execute(text(f"insert into {table} values ('by session')"))
            assert not session.in_transaction()
        assert words(db, table) == ["by session"]

    def test_a_commit_inside_the_block_is_detected(self, db: StoreHarness, table: str) -> None:
        claimed = db.running()
        with sqlalchemy_session(db.target.url) as session:
            with UserTransaction(session, Completing(db, claimed), line=NoWorkerLine()) as seen:
                session.commit()
            assert seen.is_marked is False

    def test_commit_outcome_is_open_while_a_transaction_holds_the_task(self, db: StoreHarness) -> None:
        claimed = db.running()
        with psycopg_plain(db.target.url) as connection:
            connection.execute(
                compose("task/check_leases", db.target.schema),
                {"ids": [claimed.id], "claim_ids": [claimed.claim_id]},
            )
            adapter = sync_connection(connection)
            adapter.begin()
            outcome = Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome="COMPLETED", result=b"1")
            adapter.run(settle([outcome], channel=db.target.channel), schema=db.target.schema)
            assert db.run(steps.commit_outcome(claimed.id, claimed.claim_id)) == "open"
            adapter.rollback()
        check_untouched(db, claimed)

    def test_commit_outcome_is_lost_after_the_lease_was_recovered(self, db: StoreHarness) -> None:
        claimed = db.running()
        (lease,) = db.leases()
        db.recover(lease, "retry")
        assert db.run(steps.commit_outcome(claimed.id, claimed.claim_id)) == "lost"
        assert db.run(steps.commit_outcome(uuid4(), claimed.claim_id)) == "lost"


class TestCheckpoints:
    def test_a_checkpoint_is_stored_only_by_the_holder_of_the_claim(self, db: StoreHarness) -> None:  # G3, D5
        claimed = db.running()
        stored = steps.record_checkpoint(
            claimed.id, claimed.claim_id, b'{"value": 1}', number=1, progress=b'{"stage": "s"}'
        )
        assert db.run(stored)
        assert db.run(
            steps.record_checkpoint(claimed.id, claimed.claim_id, b'{"value": 2}', number=2, progress=None)
        )
        row = db.row(claimed.id, "checkpoint, progress, progress_at is not null")
        assert row == ({"value": 2}, {"stage": "s"}, True)
        (lease,) = db.leases()
        db.recover(lease, "retry")
        assert not db.run(stored)
        (again,) = db.claim("w2")
        assert again.checkpoint == '{"value": 2}'
        assert not db.run(stored)
        assert db.start(again) == ["started"]
        assert not db.run(stored)
        assert db.row(claimed.id, "checkpoint") == {"value": 2}

    def test_a_checkpoint_that_arrives_after_a_later_one_changes_nothing(
        self, db: StoreHarness
    ) -> None:  # G3
        """An abandoned connection can still carry out its statement."""
        claimed = db.running()

        def store(number: int) -> bool:
            checkpoint = f'{{"value": {number}}}'.encode()
            return db.run(
                steps.record_checkpoint(
                    claimed.id, claimed.claim_id, checkpoint, number=number, progress=None
                )
            )

        assert [store(number) for number in (1, 3, 2, 3)] == [True] * 4
        assert db.row(claimed.id, "checkpoint") == {"value": 3}
        (lease,) = db.leases()
        db.recover(lease, "retry")
        (claimed,) = db.claim("w2")
        db.start(claimed)
        assert store(1), "each attempt counts anew"
        assert db.row(claimed.id, "checkpoint") == {"value": 1}

    def test_a_completed_task_has_no_checkpoint_and_an_operator_retry_keeps_it(
        self, db: StoreHarness
    ) -> None:
        claimed = db.running()
        db.run(
            steps.record_checkpoint(claimed.id, claimed.claim_id, b'{"value": 1}', number=1, progress=None)
        )
        assert db.settle(claimed, "FAILED", error=b'{"code": "X"}') == "FAILED"
        db.run(tasks.retry(claimed.id, channel=db.target.channel, call=uuid4()))
        (again,) = db.claim()
        assert again.checkpoint == '{"value": 1}'
        db.start(again)
        assert db.settle(again, result=b"1") == "COMPLETED"
        assert db.row(claimed.id, "checkpoint") is None


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_are_rewritten_for_the_placeholders_of_other_drivers(name: str) -> None:
    original = compose(name, "s").decode()
    parameters = re.findall(r"%\((\w+)\)", original)
    text_, names = numbered(name, "s")
    assert names == tuple(dict.fromkeys(parameters))
    assert "%" not in text_
    assert set(re.findall(r"\$(\d+)", text_)) == {str(n) for n in range(1, len(names) + 1)}
    assert re.findall(r"%\((\w+)\)s", named(name, "s")) == parameters
