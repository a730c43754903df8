"""Test retention with many rows: bounded steps that hardly delay claims and heartbeats."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar
from uuid import uuid4

import pytest

from everbeat.config import RecoveryConfig
from everbeat.maintenance.cleanup import STEP_ROWS, PrunePass
from everbeat.runtime.clock import SystemClock
from everbeat.store import claims, leases, migrating, workers
from everbeat.store.leases import Settlement
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.maintenance.pruning import Watched
from tests.recovering.conftest import StoreHarness
from tests.store.aged import Aged

T = TypeVar("T")


@pytest.fixture
def plain(database_url: str, schema: str) -> Iterator[StoreHarness]:
    """Yield a harness on a migrated schema without the audit triggers, which would double the time to fill it."""
    target = Target.parse(database_url, schema=schema)
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    db = StoreHarness(target, connection)
    db.supervisor("s1", "w1")
    yield db
    db.database.close()
    connection.close()


@dataclass
class Work:
    """Claims, starts, settlements and heartbeats, about a hundred a second, each one timed."""

    db: StoreHarness
    claims: list[tuple[float, float]] = field(default_factory=list)
    beats: list[tuple[float, float]] = field(default_factory=list)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Work:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _work(self) -> None:
        try:
            while not self._over.wait(0.01):
                self._one_round()
        except BaseException as problem:  # noqa: BLE001 - raised when the work is over
            self.failure = problem

    def _one_round(self) -> None:
        channel = self.db.target.channel
        claim = claims.claim(
            worker_id="w1", claim_call=uuid4(), names=["work"], limit=1, queues=None, queue_priorities={}
        )
        (claimed,) = self._timed(claim, self.claims)
        self.db.run(leases.start([(claimed.id, claimed.claim_id)], channel=channel))
        done = Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome="COMPLETED", result=b"1")
        self.db.run(leases.settle([done], channel=channel))
        self._timed(workers.beat("s1", [], draining=False), self.beats)

    def _timed(self, statement: Statement[T], times: list[tuple[float, float]]) -> T:
        began = monotonic()
        answer = self.db.run(statement)
        times.append((began, monotonic() - began))
        return answer


def p99_ms(times: list[tuple[float, float]], *periods: tuple[float, float]) -> float:
    """Return the 99th percentile of the durations that began in one of these periods."""
    found = sorted(took for began, took in times if any(first <= began < last for first, last in periods))
    assert len(found) >= 300, "too few samples for a 99th percentile"
    return found[len(found) * 99 // 100] * 1_000


async def prune_all(db: StoreHarness, breaks: Breaks | None = None) -> tuple[PrunePass, Watched]:
    watched = Watched(Session(db.target, "everbeat test pruner"))
    clock = SystemClock()

    async def rest(seconds: float) -> bool:
        await clock.sleep(seconds)  # the pauses of the pass itself
        if breaks is not None:
            await breaks.have(steps=len(watched.steps))
        return True

    one = PrunePass(watched, RecoveryConfig(), rest=rest, clock=clock)
    await one.run()
    await watched.drop()
    return one, watched


@dataclass
class Breaks:
    """Pauses without pruning, so that changing load of the machine affects both measurements alike."""

    every: int
    lasting_s: float
    idle: list[tuple[float, float]] = field(default_factory=list)

    async def have(self, *, steps: int) -> None:
        if steps % self.every == 0:
            began = monotonic()
            await asyncio.sleep(self.lasting_s)  # the idle half of a measurement
            self.idle.append((began, monotonic()))

    def busy(self, began: float, ended: float) -> list[tuple[float, float]]:
        edges = [began, *(edge for period in self.idle for edge in period), ended]
        return list(zip(edges[::2], edges[1::2], strict=True))


def check_steps(one: PrunePass, watched: Watched, *, tasks: int) -> None:
    """Check that all tasks are deleted, each step stayed within its limit, and no step revisited passed rows."""
    assert one.result.tasks == one.result.attempts == tasks
    assert one.result.recoveries == tasks // 5
    for name, step in watched.steps:
        assert max(step.deleted.values(), default=0) <= STEP_ROWS, name
    walked = [step for name, step in watched.steps if name == "retention/prune_tasks"]
    keys = [step.next_after for step in walked if step.next_after is not None]
    assert keys == sorted(set(keys))
    assert len(walked) <= tasks / STEP_ROWS + 4


async def test_the_pruner_deletes_thirty_thousand_old_tasks_in_bounded_steps(
    plain: StoreHarness,
) -> None:  # H2
    rows = Aged(plain.connection, plain.target.schema)
    for state in ("COMPLETED", "FAILED", "CANCELLED"):
        rows.ended(10_000, days=60, state=state)
    rows.ended(2_000, days=1)
    rows.pending(2_000, days=90)
    rows.beats(5_000, days=2)
    one, watched = await prune_all(plain)
    check_steps(one, watched, tasks=30_000)
    assert one.result.beats == 5_000
    assert len(plain.table("tasks", "id")) == 4_000


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_pruner_deletes_a_million_old_tasks_without_delaying_claims_and_heartbeats(
    plain: StoreHarness, capsys: pytest.CaptureFixture[str]
) -> None:  # H2
    rows = Aged(plain.connection, plain.target.schema)
    for _ in range(10):
        rows.ended(100_000, days=60)
    rows.due(60_000)
    rows.analyze()
    breaks = Breaks(every=100, lasting_s=5)
    with Work(plain) as work:
        began = monotonic()
        one, watched = await prune_all(plain, breaks)
        ended = monotonic()
    assert work.failure is None
    idle, busy = breaks.idle, breaks.busy(began, ended)
    pruning_s = sum(last - first for first, last in busy)
    claims = p99_ms(work.claims, *idle), p99_ms(work.claims, *busy)
    beats = p99_ms(work.beats, *idle), p99_ms(work.beats, *busy)
    with capsys.disabled():
        print(
            f"\n1,000,000 tasks pruned in {pruning_s:.1f} s, {one.statements} statements;"
            f" claim p99 {claims[0]:.2f} ms idle, {claims[1]:.2f} ms meanwhile (x {claims[1] / claims[0]:.2f});"
            f" beat p99 {beats[0]:.2f} ms idle, {beats[1]:.2f} ms meanwhile (x {beats[1] / beats[0]:.2f})"
        )
    check_steps(one, watched, tasks=1_000_000)
    assert claims[1] < 2 * claims[0]
    assert beats[1] < 1_000, "a heartbeat that exceeds its interval would look like a death"
