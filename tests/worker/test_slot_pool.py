"""Test how many tasks the pool of an executor claims and starts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from everbeat.runtime.clock import SystemClock
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.worker.attempt import Succeeded
from everbeat.worker.claim.durations import FEWEST_RUNS, RunDurations
from everbeat.worker.claim.slots import SlotPool
from everbeat.worker.executors.in_process import AsyncExecutor
from tests.worker.environments import environment_of


def pool_of(
    *, slots: int, prefetch: int, unsettled: int = 0, names: tuple[str, ...] = ("work", "other")
) -> SlotPool:
    session = Session(Target.parse("postgresql:///nowhere"), "everbeat test")
    executor = AsyncExecutor(environment_of(session), slots=slots)
    return SlotPool(
        name="async", names=names, executor=executor, prefetch=prefetch, queue_priorities={}, unsettled=Counter({"async": unsettled}),
        pace=RunDurations(SystemClock()),
    )  # fmt: skip


def measured(pool: SlotPool, name: str, seconds: float) -> None:
    """Let the pool know this function, whose runs take this many seconds."""
    pool.served = frozenset((name,))
    for _ in range(FEWEST_RUNS):
        pool.pace.ran(name, seconds)


@pytest.mark.parametrize(
    ("unsettled", "wanted", "ahead"), [(0, 2, 6), (2, 2, 6), (3, 1, 0), (4, 0, 0), (9, 0, 0)]
)
def test_a_pool_claims_nothing_ahead_while_unsettled_outcomes_pile_up(
    unsettled: int, wanted: int, ahead: int
) -> None:
    pool = pool_of(slots=2, prefetch=500, unsettled=unsettled)
    measured(pool, "work", 0.1)
    assert (pool.wanted, pool.prefetch_room()) == (wanted, ahead)


@pytest.mark.parametrize(
    ("seconds", "prefetch", "ahead"),
    [
        (0.3, 500, 0),
        (0.2, 500, 1),
        (0.12, 500, 2),
        (0.01, 500, 25),
        (0.0001, 500, 500),
        (0.01, 7, 7),
        (0.01, 0, 0),
    ],
)
def test_a_pool_claims_ahead_only_tasks_that_can_start_within_a_quarter_of_a_second(
    seconds: float, prefetch: int, ahead: int
) -> None:  # J5
    pool = pool_of(slots=1, prefetch=prefetch)
    measured(pool, "work", seconds)
    assert pool.prefetch_room(not_added=1) == ahead
    measured(pool, "another", 9.0)
    pool.served = frozenset(("work", "another"))
    assert pool.prefetch_room(not_added=1) == 0


def test_a_pool_does_not_count_on_a_slot_whose_code_runs_longer_than_estimated() -> None:  # J5
    pool = pool_of(slots=2, prefetch=500)
    measured(pool, "work", 0.1)
    now = pool.pace.now()
    running: list[Any] = [
        SimpleNamespace(task=SimpleNamespace(name="work"), launched_at=now - age) for age in (0.3, 0.0)
    ]
    pool.executor._running = running  # type: ignore[attr-defined]
    assert pool.prefetch_room() == 2  # a task that has run for 0.3 s might run for ever
    running.clear()
    assert pool.prefetch_room() == 2 + 4


@pytest.mark.parametrize(
    ("seconds", "prefetch", "least"), [(0.0001, 500, 250), (0.01, 500, 12), (0.01, 1, 1), (0.3, 500, 1)]
)
def test_a_claim_that_follows_another_one_ahead_takes_half_of_what_can_wait(
    seconds: float, prefetch: int, least: int
) -> None:
    pool = pool_of(slots=1, prefetch=prefetch)
    measured(pool, "work", seconds)
    assert pool.least_prefetched == least


@pytest.mark.parametrize(("names", "wanted"), [(("work",), 501), (("work", "other"), 1)])
def test_if_all_functions_are_fast_a_claim_for_all_of_them_can_take_as_many_as_can_wait(
    names: tuple[str, ...], wanted: int
) -> None:
    pool = pool_of(slots=1, prefetch=500, names=names)
    measured(pool, "work", 0.0001)
    assert (pool.serves_all, pool.wanted) == (len(names) == 1, wanted)


@pytest.mark.parametrize(("slots", "most"), [(1, 1 + 10), (3, 3 + 30), (100, 100 + 500)])
def test_a_claim_starts_at_most_ten_tasks_ahead_for_each_slot(slots: int, most: int) -> None:
    """If the process dies, they all count as running, although the code of most of them has not begun."""
    pool = pool_of(slots=slots, prefetch=500)
    measured(pool, "work", 0.0001)
    assert pool.starts(is_prefetch=True) == most


def test_a_pool_learns_the_duration_of_a_run_when_its_slot_is_free() -> None:
    pool = pool_of(slots=1, prefetch=500)
    for _ in range(FEWEST_RUNS):
        one: Any = SimpleNamespace(task=SimpleNamespace(name="work"), launched_at=pool.pace.now() - 3.0)
        pool.ended(one, Succeeded(b"1"))
    assert 3.0 <= pool.pace.slowest_s(["work"]) < 4.0
