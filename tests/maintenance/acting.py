"""Store many tasks, and carry out bulk actions as a supervisor does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any, Literal, TypeVar

from psycopg import Connection

from everbeat import App
from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseUnreachable
from everbeat.maintenance.bulk import BulkActor
from everbeat.recovering.observer import NoObserver, RecoveryEnvironment
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import Event, EventBus
from everbeat.store.session import RunStatement, Session
from tests.store.conftest import StoreHarness

T = TypeVar("T")
ENDED = "expired_at = statement_timestamp() - interval '2 hours', error = '{{\"code\": \"SMTP_DOWN\"}}'"


def store(
    db: StoreHarness, count: int, *, state: str = "EXPIRED", name: str = "work", values: str = ENDED
) -> None:
    """Store tasks that were sent three hours ago, with the given assignments of columns."""
    db.connection.execute(
        db.plain(
            f"""
            with made as (
                insert into {{schema}}.tasks (id, name, queue, args, sent_at, enqueued_at)
                select gen_random_uuid(), '{name}', 'default', '{{{{}}}}', now() - interval '3 hours', now() - interval '3 hours'
                from generate_series(1, {count}) returning id
            )
            select count(*) from made
            """
        )
    )
    db.connection.execute(
        db.plain(
            f"update {{schema}}.tasks set state = '{state}', {values} "
            f" where name = '{name}' and state = 'PENDING' and sent_at < now() - interval '1 hour'"
        )
    )


class LossySession:
    """A session of which every third transaction is lost: before its commit, with its connection, or after it, with the reply."""

    def __init__(self, session: Session, connection: Connection[Any], *, after_commit: bool) -> None:
        self.run = session.run
        self.drop = session.drop
        self.lost = 0
        self._session = session
        self._connection = connection
        self._after_commit = after_commit
        self._count = 0

    async def transact(
        self, body: Callable[[RunStatement], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        self._count += 1
        if self._count % 3:
            return await self._session.transact(body, patience_s=patience_s)
        self.lost += 1

        async def cut(run: RunStatement) -> T:
            answer = await body(run)
            self._connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'everbeat test me%%'"
            )
            return answer

        answer = await self._session.transact(body if self._after_commit else cut, patience_s=0.0)
        raise DatabaseUnreachable(f"The reply was lost: {answer}.", fix="call it again.")


class Carrier:
    """A supervisor's service for bulk actions, with its own session. `lose` is when every third transaction is lost."""

    def __init__(
        self,
        db: StoreHarness,
        *,
        supervisor_id: str = "me",
        portion: int = 50,
        lose: Literal["before the commit", "after the commit"] | None = None,
    ) -> None:
        self.seen: list[Event] = []
        self._db = db
        self._id = supervisor_id
        self._portion = portion
        self._lose = lose
        self.lost = 0

    def run(self, *, portions: int | None = None, within_s: float = 60.0) -> int:
        """Carry out portions until no action is left, or this many. Return how many were carried out."""
        return asyncio.run(self._run(portions, within_s))

    async def _run(self, portions: int | None, within_s: float) -> int:
        session = Session(self._db.target, f"everbeat test {self._id}")
        events = EventBus()
        events.subscribe(self.seen.append)
        environment = RecoveryEnvironment(
            statements=session, config=RecoveryConfig(), channel=self._db.target.channel, observer=NoObserver(self._id),
            events=events, clock=SystemClock(), random=Random(1),
        )  # fmt: skip
        lossy = LossySession(session, self._db.connection, after_commit=self._lose == "after the commit")
        spare: Any = session if self._lose is None else lossy
        actor = BulkActor(environment, open_spare=lambda: spare, portion=self._portion)
        count = 0
        try:
            async with asyncio.timeout(within_s):
                while (portions is None or count < portions) and self._live():
                    with suppress(DatabaseUnreachable):  # the runner of the service ticks again
                        count += await actor._carry_out(spare) is not None
                    await asyncio.sleep(0.002)  # the next portion is due after a rest, which no event ends
        finally:
            await session.drop()
            self.lost = lossy.lost
        return count

    def _live(self) -> bool:
        found = self._db.connection.execute(
            self._db.plain("select exists (select from {schema}.bulk_actions where ended_at is null)")
        ).fetchone()
        return bool(found and found[0])


def app_of(db: StoreHarness) -> App:
    return App(db.target.url, schema=db.target.schema)


def rows(db: StoreHarness, text: str, *parameters: Any) -> list[Any]:
    return db.connection.execute(db.plain(text), parameters).fetchall()
