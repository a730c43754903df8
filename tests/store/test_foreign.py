"""The user's connections, each of them real: rows and the outcome of a task in one transaction, or neither."""

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
from everbeat.store import partial_work, tasks
from everbeat.store.foreign import Do, Plan, Run, Transaction, async_connection, sync_connection
from everbeat.store.foreign_statement import named, numbered
from everbeat.store.leases import Claimed, Settlement, settle
from everbeat.store.partial_work import ConnectionFacts
from everbeat.store.statement import compose
from tests.store.conftest import Hands
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

STATEMENTS = ["task/settle", "commit/facts", "commit/hurry", "commit/lease", "commit/mark"]


class NoLine:
    """A transaction that asks nobody."""

    def ask(self, request: Any) -> Any:
        raise AssertionError(request)

    async def aask(self, request: Any) -> Any:
        raise AssertionError(request)


@dataclass
class Seen:
    """What the database answered on the user's connection."""

    facts: ConnectionFacts | None = None
    found: Any = None
    is_marked: bool | None = None
    verdict: str | None = None


class Completing:
    """Settles a running task last, as a commit does."""

    def __init__(self, hands: Hands, claimed: Claimed) -> None:
        self.seen = Seen()
        self._hands = hands
        self._claimed = claimed
        self._mark = str(uuid4())

    def begin(self) -> Plan[Seen]:
        schema = self._hands.target.schema
        yield Do("begin")
        self.seen.facts = yield Run(partial_work.commit_facts(schema=schema, mark=self._mark), schema)
        lease = partial_work.commit_lease(self._claimed.id, self._claimed.claim_id)
        self.seen.found = yield Run(lease, schema)
        return self.seen

    def end(self, error: BaseException | None) -> Plan[None]:
        if error is not None:
            yield Do("rollback")
            return
        target = self._hands.target
        yield Do("flush")
        self.seen.is_marked = yield Run(partial_work.commit_mark(self._mark), target.schema)
        outcome = Settlement(
            id=self._claimed.id, claim_id=self._claimed.claim_id, outcome="COMPLETED", result=b'"\\u0000"'
        )
        verdicts = yield Run(settle([outcome], channel=target.channel), target.schema)
        self.seen.verdict = next(iter(verdicts.values()))
        yield Do("commit")


@pytest.fixture
def table(hands: Hands) -> Iterator[str]:
    """A table of the user's, beside everbeat's."""
    name = f"user_rows_{uuid4().hex[:8]}"
    hands.connection.execute(f"create table {name} (word text)")  # type: ignore[call-overload]
    yield name
    hands.connection.execute("set lock_timeout = '10s'")
    hands.connection.execute(f"drop table {name}")  # type: ignore[call-overload]


def words(hands: Hands, table: str) -> list[str]:
    return [row[0] for row in hands.connection.execute(f"select word from {table}")]  # type: ignore[call-overload]


def check_completed(hands: Hands, claimed: Claimed, seen: Seen) -> None:
    assert hands.row(claimed.id, "state, result::text") == ("COMPLETED", '"\\u0000"')
    assert hands.table("attempts", "outcome, claim_id") == [("COMPLETED", claimed.claim_id)]
    assert hands.run(partial_work.commit_outcome(claimed.id, claimed.claim_id)) == "landed"
    assert seen.facts is not None
    assert (seen.facts.has_tables, seen.facts.is_read_only, seen.facts.isolation) == (
        True,
        False,
        "read committed",
    )
    assert seen.found == (hands.run(partial_work.installation()), True)
    assert (seen.is_marked, seen.verdict) == (True, "COMPLETED")


def check_untouched(hands: Hands, claimed: Claimed) -> None:
    assert hands.row(claimed.id, "state, claim_id") == ("RUNNING", claimed.claim_id)
    assert hands.table("attempts") == []
    assert hands.run(partial_work.commit_outcome(claimed.id, claimed.claim_id)) == "rolled_back"


def fail_in(block: Transaction[Seen], work: Callable[[], None]) -> None:
    with block:
        work()
        raise LookupError("mine")


async def afail_in(block: Transaction[Seen], work: Awaitable[None]) -> None:
    async with block:
        await work
        raise LookupError("mine")


@pytest.mark.parametrize("kind", SYNC_KINDS, ids=lambda kind: kind.name)
class TestSync:  # G4
    def test_rows_and_outcome_are_committed_together(self, hands: Hands, table: str, kind: SyncKind) -> None:
        claimed = hands.running()
        with kind.open(hands.target.url) as connection:
            with Transaction(connection, Completing(hands, claimed), line=NoLine()) as seen:
                kind.write(connection, f"insert into {table} values ('kept')")
                assert words(hands, table) == []
                assert hands.row(claimed.id, "state") == "RUNNING"
            assert words(hands, table) == ["kept"]
            check_completed(hands, claimed, seen)
        assert words(hands, table) == ["kept"]

    def test_an_exception_rolls_both_back(self, hands: Hands, table: str, kind: SyncKind) -> None:
        claimed = hands.running()
        with kind.open(hands.target.url) as connection:
            block = Transaction(connection, Completing(hands, claimed), line=NoLine())
            with pytest.raises(LookupError, match="mine"):
                fail_in(block, lambda: kind.write(connection, f"insert into {table} values ('gone')"))
            check_untouched(hands, claimed)
        assert words(hands, table) == []


@pytest.mark.parametrize("kind", ASYNC_KINDS, ids=lambda kind: kind.name)
class TestAsync:  # G4
    async def test_rows_and_outcome_are_committed_together(
        self, hands: Hands, table: str, kind: AsyncKind
    ) -> None:
        claimed = hands.running()
        async with kind.open(hands.target.url) as connection:
            async with Transaction(connection, Completing(hands, claimed), line=NoLine()) as seen:
                await kind.write(connection, f"insert into {table} values ('kept')")
                assert words(hands, table) == []
                assert hands.row(claimed.id, "state") == "RUNNING"
            assert words(hands, table) == ["kept"]
            check_completed(hands, claimed, seen)
        assert words(hands, table) == ["kept"]

    async def test_an_exception_rolls_both_back(self, hands: Hands, table: str, kind: AsyncKind) -> None:
        claimed = hands.running()
        async with kind.open(hands.target.url) as connection:
            block = Transaction(connection, Completing(hands, claimed), line=NoLine())
            with pytest.raises(LookupError, match="mine"):
                await afail_in(block, kind.write(connection, f"insert into {table} values ('gone')"))
            check_untouched(hands, claimed)
        assert words(hands, table) == []


class TestRefused:
    @pytest.mark.parametrize("thing", [None, "postgresql://x", object(), 3])
    def test_what_is_no_connection(self, thing: object) -> None:
        for find in (sync_connection, async_connection):
            with pytest.raises(
                CommitRefused, match=r"no connection it knows\. It accepts psycopg.Connection"
            ) as refusal:
                find(thing)
            assert "asyncpg.Connection" in refusal.value.message
            assert "SQLAlchemy's Connection, Session" in refusal.value.message

    def test_engines_pools_and_cursors(self, hands: Hands) -> None:
        engine = create_engine("postgresql+psycopg://")
        with (
            psycopg_plain(hands.target.url) as connection,
            pytest.raises(CommitRefused, match="not an engine"),
        ):
            sync_connection(connection.cursor())
        with pytest.raises(CommitRefused, match=r"sqlalchemy\.engine\.base\.Engine"):
            sync_connection(engine)

    async def test_the_wrong_form_is_told_its_twin(self, hands: Hands) -> None:
        with (
            psycopg_plain(hands.target.url) as connection,
            pytest.raises(
                CommitRefused, match=r"'async with' with a psycopg.Connection.*Fix: write 'with ctx"
            ),
        ):
            async_connection(connection)
        async with psycopg_async(hands.target.url) as other:
            with pytest.raises(
                CommitRefused, match=r"'with' with a psycopg.AsyncConnection.*Fix: write 'async with ctx"
            ):
                sync_connection(other)

    async def test_a_blocking_block_on_a_loop(self, hands: Hands) -> None:
        claimed = hands.running()
        with psycopg_plain(hands.target.url) as connection:
            with pytest.raises(BlockingCallInLoop, match="use 'async with' and an async connection"):
                Transaction(connection, Completing(hands, claimed), line=NoLine()).__enter__()
            assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE

    def test_a_failed_transaction(self, hands: Hands) -> None:
        with psycopg_plain(hands.target.url) as connection:
            with pytest.raises(psycopg.errors.UndefinedTable):
                connection.execute("select * from nowhere")
            with pytest.raises(CommitRefused, match=r"has failed\. Fix: roll it back first"):
                sync_connection(connection).begin()
            connection.rollback()
            sync_connection(connection).begin()

    def test_a_block_that_somebody_else_will_end(self, hands: Hands) -> None:
        with (
            psycopg_plain(hands.target.url) as connection,
            connection.transaction(),
            pytest.raises(CommitRefused, match="inside a transaction block that somebody else will end"),
        ):
            sync_connection(connection).begin()
        with (
            sqlalchemy_plain(hands.target.url) as connection,
            connection.begin(),
            connection.begin_nested(),
            pytest.raises(CommitRefused, match="inside a savepoint"),
        ):
            sync_connection(connection).begin()

    async def test_an_open_transaction_of_asyncpg(self, hands: Hands) -> None:
        async with asyncpg_plain(hands.target.url) as connection, connection.transaction():
            with pytest.raises(CommitRefused, match=r"open ctx\.commit outside of it"):
                await async_connection(connection).begin()

    def test_closed_and_pipelined(self, hands: Hands) -> None:
        with (
            psycopg_plain(hands.target.url) as connection,
            connection.pipeline(),
            pytest.raises(CommitRefused, match="in a pipeline"),
        ):
            sync_connection(connection).begin()
        with pytest.raises(CommitRefused, match="is closed"):
            sync_connection(connection).begin()

    def test_another_database_system(self) -> None:
        engine = create_engine("sqlite://")
        try:
            with Session(engine) as session, pytest.raises(CommitRefused, match="speaks sqlite"):
                sync_connection(session).begin()
        finally:
            engine.dispose()


class TestOpenTransactions:
    def test_what_was_written_before_the_block_is_committed_with_it(self, hands: Hands, table: str) -> None:
        claimed = hands.running()
        with psycopg_plain(hands.target.url) as connection:
            connection.execute(f"insert into {table} values ('before')")
            with Transaction(connection, Completing(hands, claimed), line=NoLine()):
                connection.execute(f"insert into {table} values ('inside')")
        assert sorted(words(hands, table)) == ["before", "inside"]

    def test_what_a_session_holds_back_is_written_before_the_outcome(self, hands: Hands, table: str) -> None:
        claimed = hands.running()
        with sqlalchemy_session(hands.target.url) as session:
            with Transaction(session, Completing(hands, claimed), line=NoLine()):
                session.execute(text(f"insert into {table} values ('by session')"))
            assert not session.in_transaction()
        assert words(hands, table) == ["by session"]

    def test_a_commit_inside_the_block_is_noticed(self, hands: Hands, table: str) -> None:
        claimed = hands.running()
        with sqlalchemy_session(hands.target.url) as session:
            with Transaction(session, Completing(hands, claimed), line=NoLine()) as seen:
                session.commit()
            assert seen.is_marked is False

    def test_an_outcome_is_open_while_a_transaction_holds_the_task(self, hands: Hands) -> None:
        claimed = hands.running()
        with psycopg_plain(hands.target.url) as connection:
            connection.execute(
                compose("task/check_leases", hands.target.schema),
                {"ids": [claimed.id], "claim_ids": [claimed.claim_id]},
            )
            adapter = sync_connection(connection)
            adapter.begin()
            outcome = Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome="COMPLETED", result=b"1")
            adapter.run(settle([outcome], channel=hands.target.channel), schema=hands.target.schema)
            assert hands.run(partial_work.commit_outcome(claimed.id, claimed.claim_id)) == "open"
            adapter.rollback()
        check_untouched(hands, claimed)

    def test_an_outcome_of_a_lost_lease(self, hands: Hands) -> None:
        claimed = hands.running()
        (lease,) = hands.leases()
        hands.recover(lease, "retry")
        assert hands.run(partial_work.commit_outcome(claimed.id, claimed.claim_id)) == "lost"
        assert hands.run(partial_work.commit_outcome(uuid4(), claimed.claim_id)) == "lost"


class TestCheckpoints:
    def test_a_checkpoint_is_stored_by_whoever_holds_the_claim_only(self, hands: Hands) -> None:  # G3, D5
        claimed = hands.running()
        stored = partial_work.record_checkpoint(
            claimed.id, claimed.claim_id, b'{"value": 1}', number=1, progress=b'{"stage": "s"}'
        )
        assert hands.run(stored)
        assert hands.run(
            partial_work.record_checkpoint(
                claimed.id, claimed.claim_id, b'{"value": 2}', number=2, progress=None
            )
        )
        row = hands.row(claimed.id, "checkpoint, progress, progress_at is not null")
        assert row == ({"value": 2}, {"stage": "s"}, True)
        (lease,) = hands.leases()
        hands.recover(lease, "retry")
        assert not hands.run(stored)
        (again,) = hands.claim("w2")
        assert again.checkpoint == '{"value": 2}'
        assert not hands.run(stored)
        assert hands.start(again) == ["started"]
        assert not hands.run(stored)
        assert hands.row(claimed.id, "checkpoint") == {"value": 2}

    def test_one_that_arrives_after_a_later_one_changes_nothing(self, hands: Hands) -> None:  # G3
        """A connection that was given up may still carry out what it was asked."""
        claimed = hands.running()

        def store(number: int) -> bool:
            checkpoint = f'{{"value": {number}}}'.encode()
            return hands.run(
                partial_work.record_checkpoint(
                    claimed.id, claimed.claim_id, checkpoint, number=number, progress=None
                )
            )

        assert [store(number) for number in (1, 3, 2, 3)] == [True] * 4
        assert hands.row(claimed.id, "checkpoint") == {"value": 3}
        (lease,) = hands.leases()
        hands.recover(lease, "retry")
        (claimed,) = hands.claim("w2")
        hands.start(claimed)
        assert store(1), "each attempt counts anew"
        assert hands.row(claimed.id, "checkpoint") == {"value": 1}

    def test_a_completed_task_has_none_and_an_operators_retry_keeps_it(self, hands: Hands) -> None:
        claimed = hands.running()
        hands.run(
            partial_work.record_checkpoint(
                claimed.id, claimed.claim_id, b'{"value": 1}', number=1, progress=None
            )
        )
        assert hands.settle(claimed, "FAILED", error=b'{"code": "X"}') == "FAILED"
        hands.run(tasks.retry(claimed.id, channel=hands.target.channel, call=uuid4()))
        (again,) = hands.claim()
        assert again.checkpoint == '{"value": 1}'
        hands.start(again)
        assert hands.settle(again, result=b"1") == "COMPLETED"
        assert hands.row(claimed.id, "checkpoint") is None


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_are_rewritten_for_other_drivers(name: str) -> None:
    original = compose(name, "s").decode()
    parameters = re.findall(r"%\((\w+)\)", original)
    text_, names = numbered(name, "s")
    assert names == tuple(dict.fromkeys(parameters))
    assert "%" not in text_
    assert set(re.findall(r"\$(\d+)", text_)) == {str(n) for n in range(1, len(names) + 1)}
    assert re.findall(r"%\((\w+)\)s", named(name, "s")) == parameters
