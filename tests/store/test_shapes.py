"""The statements of workers and operators cost as much beside 10,000,000 tasks in 1,000 queues as with nearly empty tables.

Each statement is compared with itself in a schema that has only the tasks that it handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.store import claims, diagnosis, inspection, retention, tasks
from everbeat.store.claims import ClaimPlace
from everbeat.store.statement import Statement
from everbeat.worker.claim.query import LEAST_SEARCHED, LONGEST_S
from tests.store.conftest import StoreHarness
from tests.store.plans import nodes
from tests.store.shapes import FRONT, Execution, Measured, Shape, compared, shaped

QUICK = Shape(ended=180_000, due=20_000, scheduled=50_000, foreign=50_000, queues=1_000, priorities=4)
LONG = replace(QUICK, ended=7_900_000, due=100_000, scheduled=1_000_000, foreign=1_000_000)
RUNS = 20
TRIES = 3
PRUNED = 500
MOST_RATIO = 1.25
MOST_EXTRA_MS = 0.3
"""The accepted difference of short statements, for which a hundredth of a millisecond matters."""
MOST_EXTRA_MS_EACH = 0.01
"""The accepted difference for each claimed task. Beside many others, each task of a queue lies in another page of the table."""
MOST_EXTRA_PAGES = 30
"""The accepted difference of short statements: an index of a large table is up to two levels higher."""
SHARE = 0.05
"""The accepted share of time of claims that walk through all lanes."""
FORMER, HINTED = "q0000", "q0001"
"""The queue with tasks of an unknown function in front, and the queue of a hint."""
TURN = [f"q{n:04}" for n in range(1, LEAST_SEARCHED + 1)]


@dataclass(frozen=True)
class Pair:
    """A schema of a shape, and one with only the tasks of the queues that the statements name. `due`: the due tasks of each queue."""

    full: StoreHarness
    empty: StoreHarness
    due: int


@contextmanager
def pair_of(database_url: str, shape: Shape) -> Iterator[Pair]:
    """Create both schemas. The tasks of the unknown function have been set aside, as a worker does."""
    due = shape.due // shape.queues
    queues = LEAST_SEARCHED + 1
    only = Shape(ended=4 * PRUNED, due=due * queues, queues=queues, priorities=shape.priorities)
    with shaped(database_url, shape) as full, shaped(database_url, only) as empty:
        portions = 0
        while full.run(claims.set_aside(names=["work"], queues=None, channel=full.target.channel)):
            portions += 1
        assert portions == FRONT // 1_000
        full.connection.execute(full.plain("vacuum (index_cleanup on) {schema}.tasks"))  # as autovacuum does
        yield Pair(full, empty, due)


@pytest.fixture(scope="module")
def quick(database_url: str) -> Iterator[Pair]:
    with pair_of(database_url, QUICK) as pair:
        yield pair


@pytest.fixture(scope="module")
def long(database_url: str) -> Iterator[Pair]:
    with pair_of(database_url, LONG) as pair:
        yield pair


def a_claim(limit: int, **more: Any) -> Statement[Any]:
    given = {"names": ["work"], "queue_priorities": {}, "starts": limit} | more
    return claims.claim(worker_id="w2", claim_call=uuid4(), limit=limit, **given)


def places(db: StoreHarness) -> dict[tuple[str, int], ClaimPlace]:
    """Return a place in the first lane of each queue of a turn, as if a claim had taken a task of each."""
    query = (
        "select distinct on (queue, priority) queue, priority, enqueued_at, id from {schema}.tasks where state = 'PENDING' and name = 'work'"
        " and queue = any(%s) and priority = 0 and enqueued_at <= now() order by queue, priority, enqueued_at, id"
    )
    found = db.connection.execute(db.plain(query), [TURN]).fetchall()
    return {(queue, priority): (at, one) for queue, priority, at, one in found}


def last_due(db: StoreHarness) -> UUID:
    """Return the last due task of the lowest priority in the queue of the hint."""
    query = (
        "select id from {schema}.tasks where state = 'PENDING' and queue = %s and enqueued_at <= now()"
        " order by priority desc, enqueued_at desc limit 1"
    )
    row = db.connection.execute(db.plain(query), [HINTED]).fetchone()
    assert row is not None
    return UUID(str(row[0]))


def a_prune(db: StoreHarness) -> Statement[Any]:
    until = db.run(retention.task_id_bounds(hours=720)).old
    return retention.prune_tasks(hours=720, limit=PRUNED, after=UUID(int=0), until=until)


def of_workers(pair: Pair) -> dict[str, Callable[[StoreHarness], Statement[Any]]]:
    """Return the statements that must not cost more beside many tasks, and that a worker executes."""
    new = tasks.NewTask(id=uuid4(), name="work", queue=HINTED, priority=0, args=b"{}")
    return {
        f"claim of {pair.due} after a hint": lambda _: a_claim(pair.due, queues=[HINTED]),
        "claim of 1 after a hint": lambda _: a_claim(1, queues=[HINTED]),
        f"claim of {pair.due} where a million were set aside": lambda _: a_claim(pair.due, queues=[FORMER]),
        f"claim of {pair.due} in a turn of {LEAST_SEARCHED} queues": lambda db: a_claim(
            pair.due, queues=TURN, floors=places(db)
        ),
        "claim that finds nothing": lambda _: a_claim(pair.due, queues=["none"]),
        "idle check after a hint": lambda _: tasks.next_due(names=["work"], queues=[HINTED], margin_ms=5),
        "send": lambda _: tasks.insert_task(new, channel="c"),
        f"prune of {PRUNED}": a_prune,
    }


def of_operators() -> dict[str, Callable[[StoreHarness], Statement[Any]]]:
    return {
        "list of 50": lambda _: inspection.tasks(limit=50),
        "explain": lambda db: diagnosis.waiting(last_due(db), stale_ms=60_000),
        "doctor's check of workers": lambda _: diagnosis.crew(stale_ms=60_000),
    }


def walks() -> dict[str, Statement[Any]]:
    """Return the statements that walk through all lanes."""
    return {
        "claim from the start": a_claim(100, queues=None),
        "idle check of all queues": tasks.next_due(names=["work"], queues=None, margin_ms=5),
        "search for tasks to set aside": claims.set_aside(names=["work"], queues=None, channel="c"),
    }


def table(pair: Pair, *, runs: int) -> dict[str, tuple[Measured, Measured]]:
    """Measure all statements that must not cost more, and print the results."""
    made = {name: (make, True) for name, make in of_workers(pair).items()}
    made |= {name: (make, False) for name, make in of_operators().items()}
    found = {}
    for name, (make, keyed) in made.items():
        both = (Execution(db, make(db), keyed=keyed) for db in (pair.empty, pair.full))
        empty, full = compared(*both, runs=runs)
        found[name] = empty, full
    for name, (empty, full) in found.items():
        print(
            f"| {name} | {empty.ms:.2f} ms | {full.ms:.2f} ms | {full.ms / empty.ms:.2f} | {empty.pages} | {full.pages} |"
        )
    return found


def most_extra_ms(name: str, *, due: int) -> float:
    return MOST_EXTRA_MS + (MOST_EXTRA_MS_EACH * due if name.startswith(f"claim of {due} ") else 0.0)


def scans(measured: Measured) -> list[str]:
    """Return the parts of the plan that read the whole table of tasks, or sort an index of it for lack of order."""
    return [
        node["Node Type"]
        for node in nodes(measured.plan)
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "tasks"
    ]


def test_statements_read_no_more_pages_beside_300_000_tasks_in_1_000_queues(quick: Pair) -> None:  # R4
    found = table(quick, runs=3)
    assert {name: scans(full) for name, (_, full) in found.items() if scans(full)} == {}
    more = {
        name: (empty.pages, full.pages)
        for name, (empty, full) in found.items()
        if full.pages > MOST_RATIO * empty.pages + MOST_EXTRA_PAGES
    }
    assert more == {}


def test_a_walk_through_all_lanes_reads_a_few_pages_for_each(quick: Pair) -> None:  # R4
    lanes = QUICK.queues * QUICK.priorities
    for name, statement in walks().items():
        (found,) = compared(Execution(quick.full, statement), runs=1)
        print(f"{name}: {found.ms:.1f} ms, {found.pages} pages")
        assert scans(found) == [], name
        assert found.pages <= 12 * lanes, name
    (found,) = compared(Execution(quick.full, inspection.queues(), keyed=False), runs=1)
    print(f"queues: {found.ms:.1f} ms, {found.pages} pages")
    assert scans(found) == []
    assert found.pages <= 40 * lanes  # a table that could not be vacuumed whole costs a row for each entry


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1_200)
def test_statements_take_no_longer_beside_10_000_000_tasks_in_1_000_queues(long: Pair) -> None:  # R4
    slower: dict[str, tuple[float, float]] = {}
    for _ in range(TRIES):  # other processes can disturb a measurement
        slower = {
            name: (empty.ms, full.ms)
            for name, (empty, full) in table(long, runs=RUNS).items()
            if full.ms > MOST_RATIO * empty.ms and full.ms > empty.ms + most_extra_ms(name, due=long.due)
        }
        if not slower:
            break
    assert slower == {}


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1_200)
def test_claims_that_walk_through_4_000_lanes_take_at_most_a_twentieth_of_the_time(long: Pair) -> None:  # R4
    """A claim from the start is due after at most `LONGEST_S`. So its share is kept if it takes a twentieth of that time."""
    slow = {}
    for name, statement in walks().items():
        empty, full = compared(Execution(long.empty, statement), Execution(long.full, statement), runs=RUNS)
        print(
            f"| {name} | {empty.ms:.2f} ms | {full.ms:.2f} ms | {full.ms / empty.ms:.2f} | {empty.pages} | {full.pages} |"
        )
        if full.ms > SHARE * LONGEST_S * 1_000:
            slow[name] = full.ms
    queues = inspection.queues()
    empty, full = compared(*(Execution(db, queues, keyed=False) for db in (long.empty, long.full)), runs=3)
    print(
        f"| queues | {empty.ms:.2f} ms | {full.ms:.2f} ms | {full.ms / empty.ms:.2f} | {empty.pages} | {full.pages} |"
    )
    assert slow == {}
    assert full.ms < 5_000
