"""A schema of many tasks in many queues, beside a schema with only the tasks that a statement handles. Statements are measured in both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final
from uuid import uuid4

from psycopg import sql

from everbeat.store import migrating
from everbeat.store.session import KEYED
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from everbeat.store.user_connection.drivers import numbered
from tests.store.conftest import StoreHarness

PORTION: Final = 1_000_000
"""The most rows that one insert adds."""
WARM: Final = 2
"""How many executions are not measured."""
_FOR_VALUES: Final = b"set local plan_cache_mode = force_custom_plan"
FRONT: Final = 10_000
"""How many of the tasks of an unknown function are not set aside yet."""

_TASKS: Final = """
insert into {schema}.tasks (id, name, queue, priority, state, args, sent_at, enqueued_at, claimed_at, claimed_by_worker_id, started_at,
    completed_at, failed_at, error, fence, attempt, needs, needs_id)
select (lpad(to_hex((extract(epoch from sent_at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n || name || state || sent_at), 1, 19))::uuid,
    name, queue, priority, state, '{{}}', sent_at, sent_at + delay, ended_at, case when ended_at is not null then 'w1' end, ended_at,
    case when state = 'COMPLETED' then ended_at end, case when state = 'FAILED' then ended_at end,
    case when state = 'FAILED' then '{{"code": "BROKEN"}}'::json end, (ended_at is not null)::integer, (ended_at is not null)::integer, needs,
    case when needs is not null then {schema}.mark_of(name, needs) end
from (select s.*, case when s.state <> 'PENDING' then s.sent_at + interval '1 s' end as ended_at from ({rows}) s) s
"""
_ENDED: Final = """
select n, 'work' as name, 'q' || lpad((n %% {queues})::text, 4, '0') as queue, n / {queues} %% {priorities} as priority,
    case when n %% 1000 = 0 then 'FAILED' else 'COMPLETED' end as state, now() - n * (interval '60 days' / {all}) as sent_at, interval '0' as delay,
    null::json as needs
from generate_series({first}, {last}) n
"""
_DUE: Final = """
select n, 'work' as name, 'q' || lpad((n %% {queues})::text, 4, '0') as queue, n / {queues} %% {priorities} as priority, 'PENDING' as state,
    now() - interval '1 hour' + n * (interval '1 hour' / {all}) as sent_at, interval '0' as delay, null::json as needs
from generate_series({first}, {last}) n
"""
_SCHEDULED: Final = """
select n, 'work' as name, 'q' || lpad((n %% {queues})::text, 4, '0') as queue, n / {queues} %% {priorities} as priority, 'PENDING' as state,
    now() - interval '1 hour' + n * (interval '1 hour' / {all}) as sent_at, interval '2 days' as delay, null::json as needs
from generate_series({first}, {last}) n
"""
_FOREIGN: Final = """
select n, 'unknown' as name, 'q0000' as queue, 0 as priority, 'PENDING' as state,
    now() - interval '3 hours' + n * (interval '1 hour' / {all}) as sent_at, interval '0' as delay,
    case when n <= {all} - {front} then '{{"arguments" : []}}'::json end as needs
from generate_series({first}, {last}) n
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many tasks a schema has. `due` and `scheduled` are spread evenly, `foreign` stand in front of the first lane."""

    ended: int = 0
    due: int = 0
    scheduled: int = 0
    foreign: int = 0
    queues: int = 1
    priorities: int = 1


@contextmanager
def shaped(database_url: str, shape: Shape) -> Iterator[StoreHarness]:
    """Create a schema of this shape."""
    target = Target.parse(database_url, schema=f"test_shapes_{uuid4().hex[:8]}")
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    db = StoreHarness(target, connection)
    db.supervisor("s1", "w1", "w2")
    try:
        fill(db, shape)
        yield db
    finally:
        connection.execute(db.plain("drop schema {schema} cascade"))
        db.database.close()
        connection.close()


def fill(db: StoreHarness, shape: Shape) -> None:
    """Insert the tasks in portions, then vacuum and analyze."""
    parts = (_ENDED, shape.ended), (_FOREIGN, shape.foreign), (_SCHEDULED, shape.scheduled), (_DUE, shape.due)
    for text, rows in parts:
        for first in range(1, rows + 1, PORTION):
            numbers = {
                "queues": shape.queues, "priorities": shape.priorities, "all": rows, "front": FRONT,
                "first": first, "last": min(rows, first + PORTION - 1),
            }  # fmt: skip
            literals = {name: sql.Literal(number) for name, number in numbers.items()}
            chosen = sql.SQL(text).format(**literals)  # type: ignore[arg-type]
            schema = sql.Identifier(db.target.schema)
            db.connection.execute(sql.SQL(_TASKS).format(schema=schema, rows=chosen), {})
    for table in ("tasks", "workers", "supervisors"):
        db.connection.execute(db.plain("vacuum analyze {schema}." + table))


@dataclass(frozen=True)
class Measured:
    """The median time and the median number of pages of warm executions, and a plan.

    `ms`: the processor time of the server in milliseconds, which other processes affect little. Where it is unknown, the elapsed time.
    """

    ms: float
    pages: int
    plan: dict[str, Any]


class Execution:
    """A statement, prepared as in a worker's session, or planned for its values as in other sessions if `keyed` is False."""

    def __init__(self, db: StoreHarness, statement: Statement[Any], *, keyed: bool = True) -> None:
        text, names = numbered(statement.name, db.target.schema)
        self._connection = db.connection
        self._name = sql.Identifier(f"as_a_session_does_{uuid4().hex[:8]}")
        self._settings = KEYED.replace(b"set ", b"set local ") if keyed else _FOR_VALUES
        given = sql.SQL(", ").join(sql.Literal(statement.parameters[name]) for name in names)
        asked = sql.SQL("execute {} ({})") if names else sql.SQL("execute {}")
        self._asked = asked.format(self._name, given)
        self._explain = sql.SQL("explain (analyze, buffers, timing off, format json) ") + self._asked
        self._connection.execute(sql.SQL("prepare {} as ").format(self._name) + sql.SQL(text))  # type: ignore[arg-type]

    def explained(self) -> dict[str, Any]:
        """Execute the statement, undo its changes, and return its plan."""
        with self._connection.transaction(force_rollback=True):
            self._connection.execute(self._settings)
            row = self._connection.execute(self._explain).fetchone()
        assert row is not None
        return dict(row[0][0]["Plan"])

    def took_ms(self) -> float:
        """Execute the statement, undo its changes, and return how long it took."""
        with self._connection.transaction(force_rollback=True):
            self._connection.execute(self._settings)
            began = self._used_ms()
            self._connection.execute(self._asked).fetchall()
            return self._used_ms() - began

    def _used_ms(self) -> float:
        file = Path(f"/proc/{self._connection.info.backend_pid}/schedstat")
        return int(file.read_text().split()[0]) / 1e6 if file.exists() else perf_counter() * 1_000


def compared(*executions: Execution, runs: int) -> list[Measured]:
    """Measure statements. They take turns, so that the load of the machine affects all alike."""
    plans = [[each.explained() for _ in range(3)] for each in executions]
    times = [[each.took_ms() for each in executions] for _ in range(runs + WARM)][WARM:]
    return [
        Measured(
            median(took[place] for took in times),
            round(median(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in plans[place])),
            plans[place][-1],
        )
        for place in range(len(executions))
    ]
