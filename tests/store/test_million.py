"""No statement that workers and supervisors repeat takes the server 100 ms, with a million tasks that wait and a million that ended."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any
from uuid import uuid4

import pytest
from psycopg import sql

from everbeat.store import leases, retention, suspects, sweeping, tasks, workers
from everbeat.store.foreign_statement import numbered
from everbeat.store.session import KEYED
from everbeat.store.statement import Statement
from everbeat.worker import settler
from tests.store.conftest import Hands
from tests.store.test_plans import filled, held

ROWS = 1_000_000
HELD = 2_000
BATCH = 500
MOST = settler.MOST_ROWS
LIMIT_MS = 100.0
"""On an idle machine the slowest takes a fifth of it."""


@pytest.fixture(scope="module")
def million(database_url: str) -> Iterator[Hands]:
    with filled(database_url, rows=ROWS, in_flight=HELD) as hands:
        hands.connection.execute("checkpoint")
        yield hands


def took_ms(hands: Hands, statement: Statement[Any], *, keyed: bool) -> float:
    """As the server says, the middle one of three; what it changes is rolled back."""
    text, names = numbered(statement.name, hands.target.schema)
    given = sql.SQL(", ").join(sql.Literal(statement.parameters[name]) for name in names)
    asked = (
        sql.SQL("execute as_a_session_does ({})").format(given)
        if names
        else sql.SQL("execute as_a_session_does")
    )
    times = []
    for _ in range(3):
        with hands.connection.transaction(force_rollback=True):
            if keyed:
                hands.connection.execute(KEYED.replace(b"set ", b"set local "))
            hands.connection.execute(f"prepare as_a_session_does as {text}".encode())
            row = hands.connection.execute(
                sql.SQL("explain (analyze, format json) {}").format(asked)
            ).fetchone()
            hands.connection.execute("deallocate as_a_session_does")
        assert row is not None
        times.append(float(row[0][0]["Execution Time"]))
    return median(times)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_repeated_statement_takes_the_server_100_ms(million: Hands) -> None:
    leased = held(million, BATCH)
    all_leased = held(million, HELD)
    outcomes = [
        leases.Settlement(id=one, claim_id=claim, outcome="COMPLETED", result=b"1")
        for one, claim in all_leased[:MOST]
    ]
    failures = [
        leases.Settlement(id=one, claim_id=claim, outcome="FAILED", error=b"{}", retry_in_ms=1_000)
        for one, claim in all_leased[:MOST]
    ]

    def claim(limit: int, **more: Any) -> Statement[Any]:
        asked = {"names": ["work"], "queues": None, "queue_priorities": {}, "starts": limit} | more
        return leases.claim(worker_id="w2", claim_call=uuid4(), limit=limit, **asked)

    new = [
        tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}") for _ in range(BATCH)
    ]
    of_workers: dict[str, Statement[Any]] = {
        "claim of 1": claim(1),
        f"claim of {BATCH}": claim(BATCH, queue_priorities={"mail": 1}),
        "claim of a name that has nothing in a queue that has nothing": claim(
            1, names=["none"], queues=["none"]
        ),
        f"start of {BATCH}": leases.start(leased, channel="c"),
        f"complete of {MOST}": leases.complete(outcomes, channel="c"),
        f"settle of {MOST} with retries": leases.settle(failures, channel="c"),
        f"release of {BATCH}": leases.release(leased, channel="c"),
        f"check of {HELD}": leases.check_leases(all_leased),
    }
    of_others: dict[str, Statement[Any]] = {
        "next due": leases.next_due(names=["work"], queues=None),
        "suspects": suspects.suspects_wait(names=["work"], queues=None),
        f"send of {BATCH}": tasks.insert_tasks(new, channel="c"),
        "send": tasks.insert_task(new[0], channel="c"),
        "cancel": tasks.cancel(leased[0][0], channel="c", call=uuid4()),
        f"outcomes of {BATCH}": tasks.outcomes([one for one, _ in leased]),
        "expiry of 200": tasks.expire(channel="c"),
        f"beat for {HELD}": workers.beat("s1", all_leased, draining=False),
        "sessions": workers.watch_sessions(),
        "beats": workers.watch_beats(),
        "silent supervisors": sweeping.silent_supervisors(silent_ms=0),
        "orphans": leases.leases_orphaned(silent_ms=1, limit=100),
        "leases of the ended": leases.leases_of_ended(limit=100),
        "leases of a supervisor": leases.leases_of_supervisor("s1", limit=100),
        "bounds of retention": retention.task_id_bounds(hours=720),
    }
    found = {name: took_ms(million, one, keyed=True) for name, one in of_workers.items()}
    found |= {name: took_ms(million, one, keyed=False) for name, one in of_others.items()}
    for name, ms in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{ms:8.2f} ms  {name}")
    assert {name: ms for name, ms in found.items() if ms >= LIMIT_MS} == {}
