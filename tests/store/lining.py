"""Tasks with limits as the tests of lines and gates send them, and what the tests ask about gates and lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from everbeat.store import lines
from tests.store.conftest import StoreHarness

SEND = """
insert into {schema}.tasks (id, name, queue, priority, args, gates, costs, serial, sent_at, enqueued_at, serial_at, good_until, suspect)
select t.id, %(name)s, %(queue)s, %(priority)s, '{{}}', %(gates)s, %(costs)s, %(serial)s, statement_timestamp(), due.at,
    case when %(serial)s::text is not null then due.at end, due.at + %(good_ms)s::bigint * interval '1 ms', %(suspect)s
from unnest(%(ids)s::uuid[]) with ordinality t (id, place)
cross join lateral (select statement_timestamp() + %(delay_ms)s::bigint * interval '1 ms' as at) due
"""

SET_LIMIT = """
insert into {schema}.limits (name, concurrency, starts, period_s, burst, sliding, fair, weights, when_full)
values (%(name)s, %(concurrency)s, %(starts)s, %(period_s)s, %(burst)s, %(sliding)s, %(fair)s, %(weights)s, %(when_full)s)
on conflict (name) do update set concurrency = excluded.concurrency, starts = excluded.starts, period_s = excluded.period_s,
    burst = excluded.burst, sliding = excluded.sliding, fair = excluded.fair, weights = excluded.weights, when_full = excluded.when_full
"""


def put_limit(db: StoreHarness, name: str, **values: Any) -> None:
    """Set the numbers of a limit, as the statement of an operator does."""
    given = {
        "name": name, "concurrency": None, "starts": None, "period_s": None, "burst": 1, "sliding": False, "fair": False, "weights": "{}",
        "when_full": "wait",
    } | values  # fmt: skip
    db.connection.execute(db.plain(SET_LIMIT), given)


def parameters(ids: Sequence[UUID], **values: Any) -> dict[str, Any]:
    """Return the parameters of SEND."""
    return {
        "ids": list(ids), "name": "work", "queue": "default", "priority": 0, "gates": None, "costs": None, "serial": None, "delay_ms": 0,
        "good_ms": None, "suspect": False,
    } | values  # fmt: skip


def send(db: StoreHarness, *gates: str, count: int = 1, **values: Any) -> list[UUID]:
    """Send tasks with these gates, as a sender does: it writes the gates and costs, and nothing else of the limits."""
    ids = [uuid4() for _ in range(count)]
    db.connection.execute(db.plain(SEND), parameters(ids, gates=list(gates) or None, **values))
    return ids


def apply(db: StoreHarness, *, names: Sequence[str] = ("work",)) -> lines.Applied:
    """Apply the noted changes once."""
    return db.run(lines.apply_changes(readers=names, queues=None, channel=db.target.channel))


def take(db: StoreHarness, worker: str = "w1", **options: Any) -> list[Any]:
    """Claim and start up to 100 tasks, with or without limits."""
    limit = options.pop("limit", 100)
    return db.claim(worker, limit=limit, starts=options.pop("starts", limit), **options)


def gate(db: StoreHarness, name: str, columns: str = "held") -> Any:
    """Return columns of a gate."""
    row = db.connection.execute(
        db.plain(f"select {columns} from {{schema}}.gates where gate = %s"), [name]
    ).fetchone()
    assert row is not None
    return row[0] if len(row) == 1 else row
