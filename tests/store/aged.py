"""Rows of any age, in bulk: tasks that ended long ago with their history, beats, snapshots, ended workers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from psycopg import Connection, sql

# Ids as a sender makes them: UUIDv7 of the moment of sending.
ID_AT = """(lpad(to_hex((extract(epoch from {at}) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text || {salt}), 1, 3)
    || '8' || substr(md5(n::text || {salt}), 4, 15))::uuid"""

ENDED = f"""
with moments as (
    select n, statement_timestamp() - %(age)s - n %% 1000 * interval '1 second' as at, 'w-ended' as worker
    from generate_series(1, %(count)s) n
), ids as (
    select {ID_AT.format(at="at - interval '1 minute'", salt="%(salt)s")} as id, at, worker, n from moments
), sent as (
    insert into {{schema}}.tasks (id, name, queue, state, args, sent_at, enqueued_at, claimed_at, claimed_by_worker_id, started_at,
        completed_at, failed_at, cancelled_at, expired_at, fence, attempt)
    select id, 'work', 'default', %(state)s, '{{{{}}}}', at - interval '1 minute', at - interval '1 minute',
        at - interval '1 second', worker, at - interval '1 second',
        case %(state)s when 'COMPLETED' then at end, case %(state)s when 'FAILED' then at end,
        case %(state)s when 'CANCELLED' then at end, case %(state)s when 'EXPIRED' then at end, 1, 1
    from ids
), tried as (
    insert into {{schema}}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at, ended_at, outcome, will_retry)
    select id, 1, gen_random_uuid(), 1, worker, at - interval '1 second', at - interval '1 second', at,
        case %(state)s when 'EXPIRED' then 'RELEASED' else %(state)s end, false
    from ids
), stepped as (
    insert into {{schema}}.steps (task_id, kind, name, attempt, begun_at, recorded_at)
    select id, 'step', 'charge', 1, at, at from ids where n %% 2 = 0
), told as (
    insert into {{schema}}.signals (id, target, name, value, sent_at)
    select {ID_AT.format(at="at", salt="%(salt)s || 's'")}, id, 'approved', '1', at from ids where n %% 5 = 0
)
insert into {{schema}}.recoveries (task_id, name, queue, fence, claim_id, attempt, worker_id, was, cause, noticed_by, noticed_at, action)
select id, 'work', 'default', 1, gen_random_uuid(), 1, worker, 'CLAIMED', 'vanished', 'age', at - interval '1 second', 'requeue'
from ids where n %% 5 = 0
returning task_id
"""
PENDING = f"""
insert into {{schema}}.tasks (id, name, queue, args, sent_at, enqueued_at)
select {ID_AT.format(at="statement_timestamp() - %(age)s", salt="%(salt)s")}, 'work', 'waiting', '{{{{}}}}',
    statement_timestamp() - %(age)s, statement_timestamp() + interval '1 year'
from generate_series(1, %(count)s) n
"""
DUE = f"""
insert into {{schema}}.tasks (id, name, queue, args, sent_at, enqueued_at)
select {ID_AT.format(at="statement_timestamp() - %(age)s", salt="%(salt)s")}, 'work', 'default', '{{{{}}}}',
    statement_timestamp() - %(age)s, statement_timestamp() - %(age)s
from generate_series(1, %(count)s) n
"""
BEATS = """
insert into {schema}.beats (supervisor_id, seq, sent_at, held)
select %(salt)s, n, statement_timestamp() - %(age)s - n %% 1000 * interval '1 second', 0 from generate_series(1, %(count)s) n
"""
STATES = """
insert into {schema}.worker_states (worker_id, at, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)
select 'w' || n %% 100, statement_timestamp() - %(age)s - n %% 1000 * interval '1 second', 0, 0, 1, 1, 0, 0
from generate_series(1, %(count)s) n
"""
HOLDERS = """
with supervisor as (
    insert into {schema}.supervisors (id, hostname, pid, lock_key, session_name, ended_at, ended_how)
    select %(salt)s || n, 'host', 1, n, 's', statement_timestamp() - %(age)s, 'left' from generate_series(1, %(count)s) n
    returning id
)
insert into {schema}.workers (id, supervisor_id, hostname, pid, ended_at, ended_how)
select id || '-w', id, 'host', 2, statement_timestamp() - %(age)s, 'left' from supervisor
"""


class Aged:
    """Fill the tables of one schema with old rows."""

    def __init__(self, connection: Connection[Any], schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._fillings = 0

    def ended(self, count: int, *, days: float, state: str = "COMPLETED") -> list[UUID]:
        """Insert tasks that ended this many days ago, each with an attempt, and every fifth with a recovery; return the ids."""
        return [row[0] for row in self._fill(ENDED, count, days, state=state).fetchall()]

    def pending(self, count: int, *, days: float) -> None:
        """Insert tasks that were sent this many days ago and are due next year."""
        self._fill(PENDING, count, days)

    def due(self, count: int) -> None:
        """Insert tasks that were sent a moment ago and are due."""
        self._fill(DUE, count, days=0)

    def beats(self, count: int, *, days: float) -> None:
        """Insert beats of one supervisor."""
        self._fill(BEATS, count, days)

    def states(self, count: int, *, days: float) -> None:
        """Insert snapshots of a hundred workers."""
        self._fill(STATES, count, days)

    def holders(self, count: int, *, days: float) -> None:
        """Insert ended supervisors with one ended worker each."""
        self._fill(HOLDERS, count, days)

    def analyze(self) -> None:
        """Update the statistics of the planner."""
        for table in (
            "tasks", "attempts", "recoveries", "steps", "signals", "beats", "worker_states", "workers", "supervisors",
        ):  # fmt: skip
            self._connection.execute(
                sql.SQL("vacuum analyze {}.{}").format(sql.Identifier(self._schema), sql.Identifier(table))
            )

    def _fill(self, text: str, count: int, days: float, **more: str) -> Any:
        self._fillings += 1
        values = {"count": count, "age": timedelta(days=days), "salt": f"filling {self._fillings}", **more}
        query = sql.SQL(text).format(schema=sql.Identifier(self._schema))  # type: ignore[arg-type]
        return self._connection.execute(query, values)
