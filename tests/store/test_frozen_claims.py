"""A claim whose transaction stays open delays only the lines and gates that it has locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest

from everbeat.store import claims, lines, tasks
from everbeat.store.statement import compose
from tests.invariants import settled_line_breaches
from tests.store.conftest import StoreHarness
from tests.store.lining import apply, gate, put_limit, send, take


@contextmanager
def frozen(db: StoreHarness, statement: Any) -> Iterator[None]:
    """Run a statement in a transaction that stays open during the block, and then commit it."""
    with db.target.connect("everbeat frozen") as connection:
        connection.execute("begin")
        connection.execute(compose(statement.name, db.target.schema), statement.parameters)
        yield
        connection.execute("commit")


def claim(*names: str, limit: int = 1) -> Any:
    return claims.claim(
        worker_id="w2",
        claim_call=uuid4(),
        names=names,
        limit=limit,
        queues=None,
        queue_priorities={},
        starts=limit,
        channel="c",
    )


@pytest.fixture
def hurried(db: StoreHarness) -> StoreHarness:
    """Let every statement that waits for a lock fail at once."""
    db.connection.execute("set lock_timeout = '2s'")
    return db


def test_a_frozen_claim_delays_only_its_own_lines_and_gates(hurried: StoreHarness) -> None:
    db = hurried
    put_limit(db, "mine", concurrency=5)
    put_limit(db, "other", concurrency=1)
    (held,) = send(db, "other")
    (holder,) = take(db)
    assert holder.id == held
    mine = send(db, "mine", count=2)
    apply(db)
    with frozen(db, claim("work")):
        waiting = send(db, "other") + send(db, serial="key:a") + send(db)
        assert {one.id for one in take(db)} == set(waiting[1:])
        db.complete(holder)
        assert [one.id for one in take(db)] == waiting[:1], "the release of another gate is applied"
        late = send(db, "mine", priority=1)
        assert take(db) == [], "the gate is locked"
    taken = {one.id for one in take(db)}
    assert len(taken) == 2
    assert taken <= {*mine, *late}
    assert gate(db, "mine") == 3
    assert settled_line_breaches(db.connection, db.target.schema) == []


@pytest.mark.parametrize("limit", [1, 10])
def test_claims_find_the_lines_behind_those_of_a_frozen_claim(hurried: StoreHarness, limit: int) -> None:
    db = hurried
    first = {send(db, serial=f"key:{number}")[0] for number in range(limit)}
    apply(db)
    later = {send(db, serial=f"key:later {number}")[0] for number in range(limit)}
    apply(db)
    with frozen(db, claim("work", limit=limit)):
        assert {one.id for one in db.run(claim("work", limit=limit))} == later
    assert {
        row[0] for row in db.table("tasks", "id") if db.row(row[0], "state") == "RUNNING"
    } == first | later


def test_ends_and_sends_of_a_frozen_claims_line_do_not_wait(hurried: StoreHarness) -> None:
    db = hurried
    put_limit(db, "mine", concurrency=2)
    send(db, "mine", count=3)
    (first,) = take(db, limit=1)
    apply(db)
    with frozen(db, claim("work")):
        db.complete(first)
        send(db, "mine", count=2)
        for _ in range(3):
            assert apply(db).is_busy
        assert take(db) == []
    assert gate(db, "mine") == 2, "the permit of the end is counted until its change is applied"
    assert len(take(db)) == 1
    assert settled_line_breaches(db.connection, db.target.schema) == []


def test_a_frozen_call_that_applies_changes_stops_no_claim_of_ready_lines(hurried: StoreHarness) -> None:
    db = hurried
    put_limit(db, "mine", concurrency=5)
    send(db, "mine")
    apply(db)
    send(db, serial="key:a")
    plain = send(db)
    with frozen(db, lines.apply_changes(readers=["work"], queues=None, channel=None)):
        assert apply(db).is_busy
        taken = db.run(claim("work", limit=10))
        assert len(taken) == 2
        assert plain[0] in {one.id for one in taken}
        assert db.run(tasks.next_due(names=["work"], queues=None)).lines_changed
    assert len(take(db)) == 1


def test_a_claim_that_is_rolled_back_leaves_lines_and_gates_as_they_were(db: StoreHarness) -> None:
    put_limit(db, "mine", starts=10, period_s=100.0, burst=2)
    sent = send(db, "mine", count=2)
    apply(db)
    with db.target.connect("everbeat lost") as connection:
        connection.execute("begin")
        statement = claim("work", limit=2)
        connection.execute(compose(statement.name, db.target.schema), statement.parameters)
        connection.execute("rollback")
    assert {one.id for one in take(db)} == set(sent)
    assert settled_line_breaches(db.connection, db.target.schema) == []
