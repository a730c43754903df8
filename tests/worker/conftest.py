"""A harness for workers, which checks leases and invariants at the end of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everbeat.store.target import Target
from everbeat.worker.claim import durations, slots
from tests.invariants import breaches
from tests.worker.harness import WorkerHarness
from tests.worker.sample_tasks import gate


@pytest.fixture
def harness(migrated: Target) -> Iterator[WorkerHarness]:
    gate.reset()
    running_tree = WorkerHarness(migrated)
    yield running_tree
    gate.opened.set()
    broken = breaches(running_tree.connection, migrated.schema)
    running_tree.close()
    assert broken == []


@pytest.fixture
def a_minute_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers prefetch tasks that can start within a minute instead of 0.25 s, so that a test can observe `CLAIMED` tasks."""
    for module in (durations, slots):
        monkeypatch.setattr(module, "PREFETCH_WITHIN_S", 60.0)
    monkeypatch.setattr(slots, "GIVE_BACK_AFTER_S", 60.0)
    monkeypatch.setattr(slots, "START_WITHIN_S", 0.0)
