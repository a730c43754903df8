"""Random storms of statements on lines and gates: no gate is exceeded, every task ends, and the invariants hold at every moment."""

from __future__ import annotations

import pytest

from tests.invariants import deadlocks, settled_line_breaches
from tests.store.conftest import StoreHarness
from tests.store.line_storm import LineStorm


def check_storm(db: StoreHarness, seed: int, *, seconds: float) -> None:
    before = deadlocks(db.connection)
    storm = LineStorm(db, seed)
    storm.run(seconds)
    print(f"seed {seed}: {dict(storm.counts)}")
    assert storm.problems == []
    assert settled_line_breaches(db.connection, db.target.schema) == []
    assert deadlocks(db.connection) == before, "I27: deadlocks"
    assert storm.counts["started"] > 20 * seconds, "the storm did too little"
    assert storm.counts["looks"] > seconds


def test_a_storm_of_statements_exceeds_no_gate_and_ends_every_task(db: StoreHarness) -> None:  # K1
    check_storm(db, 1, seconds=8)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 6))
def test_a_long_storm_of_statements_exceeds_no_gate_and_ends_every_task(db: StoreHarness, seed: int) -> None:
    check_storm(db, seed, seconds=60)
