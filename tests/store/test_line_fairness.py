"""Turns of lines and queues, and rates of several claimers, at the level of the statements."""

from __future__ import annotations

import threading
import time
from typing import Any
from uuid import uuid4

import pytest

from everbeat.store import claims, lines
from everbeat.store.claims import Claimed
from everbeat.store.database import Database
from tests.store.conftest import StoreHarness
from tests.store.lining import apply, put_limit, send, take

SMALL_TENANTS, SMALL = 50, 10
MOST_STARTS = 560
CLAIMERS = 4
RATE, BURST, SECONDS = 200, 10, 4.0
WINDOWS_S = (0.1, 1.0, 5.0)


def claim_and_end(db: StoreHarness, *, limit: int, **options: Any) -> list[Claimed]:
    taken = take(db, limit=limit, **options)
    db.complete(*taken)
    return taken


def send_tenant(db: StoreHarness, key: str, count: int) -> set[Any]:
    return set(send(db, f"tenant/{key}", count=count))


@pytest.mark.parametrize(
    "large", [5_000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(300)])]
)
def test_a_tenant_with_many_tasks_delays_small_tenants_by_one_round(
    db: StoreHarness, large: int
) -> None:  # K7
    put_limit(db, "tenant", concurrency=1000, fair=True)
    db.connection.execute(
        db.plain(
            "insert into {schema}.tasks (id, name, queue, args, gates)"
            " select gen_random_uuid(), 'work', 'default', '{{}}', array['tenant/large'] from generate_series(1, %s)"
        ),
        [large],
    )
    for _ in range(200):
        if not apply(db).applied:
            break
    small = set[Any]()
    for number in range(SMALL_TENANTS):
        small |= send_tenant(db, str(number), SMALL)
    started, starts = set[Any](), 0
    while starts < MOST_STARTS:
        taken = claim_and_end(db, limit=20)
        assert taken != []
        starts += len(taken)
        started |= {one.id for one in taken}
    assert small - started == set()


def test_ready_lines_with_one_task_each_fill_a_claim(db: StoreHarness) -> None:
    put_limit(db, "tenant", concurrency=3)
    for key in range(20):
        send_tenant(db, str(key), 1)
    assert len(take(db, limit=10)) == 10


def test_a_weight_of_four_gives_four_tasks_for_each_turn(db: StoreHarness) -> None:  # K7
    put_limit(db, "tenant", concurrency=1000, fair=True, weights='{"a": 4}')
    heavy, light = send_tenant(db, "a", 400), send_tenant(db, "b", 400)
    taken = set[Any]()
    for _ in range(20):
        taken |= {one.id for one in claim_and_end(db, limit=10)}
    assert len(taken) == 200
    assert 0.9 * 4 <= len(taken & heavy) / len(taken & light) <= 1.1 * 4


@pytest.mark.parametrize("permits", [1, 3])
def test_keys_take_turns_for_the_permits_of_a_shared_limit(db: StoreHarness, permits: int) -> None:  # K7
    put_limit(db, "shared", concurrency=permits)
    put_limit(db, "tenant", concurrency=50, fair=True, weights='{"large": 2}')
    for key in ("large", "a", "b"):
        send(db, "shared", f"tenant/{key}", count=32)
    running: list[Claimed] = []
    starts: list[str] = []
    while len(starts) < 32:
        free_slots = permits - len(running) if starts else 20
        taken = take(db, limit=20, starts=free_slots)
        assert len(running) + len(taken) == permits
        starts += [key_of(db, one) for one in taken]
        running += taken
        db.complete(running.pop(0))
    counts = {key: starts[:32].count(key) for key in ("large", "a", "b")}
    assert counts == {"large": 16, "a": 8, "b": 8}


def key_of(db: StoreHarness, claimed: Claimed) -> str:
    return str(db.row(claimed.id, "gates[2]")).removeprefix("tenant/")


def test_queues_of_equal_priority_share_a_claim(db: StoreHarness) -> None:  # K7
    send(db, count=20_000, queue="a")
    few = set(send(db, count=5, queue="b"))
    assert few <= {one.id for one in claim_and_end(db, limit=100)}


def test_queues_of_tasks_with_limits_share_a_claim(db: StoreHarness) -> None:  # K7
    put_limit(db, "wide", concurrency=100_000)
    send(db, "wide", count=1_500, queue="a")
    few = set(send(db, "wide", count=5, queue="b"))
    taken = {one.id for one in claim_and_end(db, limit=100)}
    assert len(taken) == 100
    assert few <= taken


def test_tasks_with_and_without_limits_take_turns(db: StoreHarness) -> None:  # K7
    put_limit(db, "wide", concurrency=100_000)
    plain = set(send(db, count=300))
    limited = set(send(db, "wide", count=300))
    for limit in (1, 2, 10, 10, 100):
        before = len(plain), len(limited)
        taken = {one.id for one in claim_and_end(db, limit=limit)}
        assert len(taken) == limit
        plain -= taken
        limited -= taken
        if limit > 1:
            assert (before[0] - len(plain), before[1] - len(limited)) == (limit // 2, limit // 2)


def test_claims_of_one_task_starve_neither_tasks_with_limits_nor_others(db: StoreHarness) -> None:  # K7
    put_limit(db, "wide", concurrency=100_000)
    plain = set(send(db, count=100))
    limited = set(send(db, "wide", count=5))
    for _ in range(105):
        taken = {one.id for one in claim_and_end(db, limit=1)}
        assert len(taken) == 1
        plain -= taken
        limited -= taken
    assert (plain, limited) == (set(), set())


def test_four_claimers_start_tasks_at_the_rate_and_no_faster(db: StoreHarness) -> None:  # K5
    put_limit(db, "rate", starts=RATE, period_s=1.0, burst=BURST)
    send(db, "rate", count=int(RATE * SECONDS) * 2)
    apply(db)
    ends_at = time.monotonic() + SECONDS
    starts: list[float] = []

    def work(number: int) -> None:
        database = Database(db.target)
        while time.monotonic() < ends_at:
            database.run(lines.apply_changes(readers=["work"], queues=None, channel=None))
            claim = claims.claim(
                worker_id=f"w{1 + number % 2}",
                claim_call=uuid4(),
                names=["work"],
                limit=5,
                queues=None,
                queue_priorities={},
                starts=5,
            )
            taken = database.run(claim)
            starts.extend(one.started_at.timestamp() for one in taken if one.started_at is not None)
            if not taken:
                time.sleep(0.002)  # the pace of an idle claimer
        database.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLAIMERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts.sort()
    for window_s in WINDOWS_S:
        first = 0
        for last, at in enumerate(starts):
            while starts[first] <= at - window_s:
                first += 1
            assert last - first + 1 <= BURST + RATE * window_s + 1e-6
    took_s = starts[-1] - starts[0]
    print(f"{len(starts)} starts in {took_s:.2f} s")
    assert len(starts) >= 0.4 * RATE * took_s, "the claimers should use the rate"
