"""Samples, trees and recoveries for the tests of the pulse."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

from everbeat.client.explaining import silence_rules
from everbeat.config import RecoveryConfig
from everbeat.domain.inspection import RecoveryInfo
from everbeat.domain.pulse.memory import PulseMemory
from everbeat.domain.pulse.sample import PulseSample, SampledTree, SampledWorker
from everbeat.domain.task.states import TaskState

NOW = datetime(2030, 1, 31, 14, 3, 20, tzinfo=UTC)
RULES = silence_rules(RecoveryConfig())


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def tree(name: str = "fra-1", *, beat_s: float = 3.0, **more: Any) -> SampledTree:
    """Return a tree that beats every 10 s, beat `beat_s` seconds ago, and holds its session."""
    given: dict[str, Any] = {
        "id": f"{name}-1-a", "hostname": name, "pid": 1, "started_at": ago(3_600), "last_beat_at": ago(beat_s), "beat_seq": 7,
        "draining": False, "session_held": True, "held_here": True, "locked": True, "sessions": 3, "beat_ms": 10_000,
        "claimed_stale_ms": 30_000, "running_stale_ms": 30_000,
    }  # fmt: skip
    return SampledTree(**(given | more))


def worker(name: str = "fra-1", number: int = 2, **more: Any) -> SampledWorker:
    given: dict[str, Any] = {
        "id": f"{name}-{number}-w", "supervisor_id": f"{name}-1-a", "pid": number, "started_at": ago(3_600), "claimed": 0, "running": 2,
        "slots": 8,
    }  # fmt: skip
    return SampledWorker(**(given | more))


def dead_tree(
    name: str = "fra-2", *, beat_s: float = 50.0, ended_s: float = 44.0, how: str = "session"
) -> SampledTree:
    return tree(name, beat_s=beat_s, locked=False, sessions=0, ended_at=ago(ended_s), ended_how=how)


def memory(*trees: SampledTree, workers: tuple[SampledWorker, ...] = (), **more: Any) -> PulseMemory:
    """Return a memory after one sample at NOW."""
    made = PulseMemory(RULES)
    made.record(PulseSample(at=NOW, is_standby=False, trees=trees, workers=workers, **more))
    return made


def recovery(
    number: int = 1, *, silent_s: float = 46.0, noticed_s: float = 43.9, **more: Any
) -> RecoveryInfo:
    """Return the recovery of a task of fra-2, whose last sign of life was `silent_s` ago."""
    given: dict[str, Any] = {
        "id": number, "task_id": uuid5(UUID(int=0), str(number)), "name": "film", "queue": "default", "attempt": 1, "fence": 1,
        "worker_id": "fra-2-2-w", "supervisor_id": "fra-2-1-a", "hostname": "fra-2", "pid": 2, "was": TaskState.RUNNING,
        "cause": "its database session ended: the whole tree is gone", "noticed_by": "session", "last_beat_at": ago(silent_s + 4),
        "noticed_at": ago(noticed_s), "noticed_after_ms": round((silent_s - noticed_s) * 1_000), "action": "retry", "next_retry_at": None,
        "recovered_by": "fra-1-1-a", "certificate": None, "ran_again_at": ago(noticed_s - 0.6), "ran_again_on": "fra-1-2-w",
        "became": TaskState.RUNNING, "charge": "loss",
    }  # fmt: skip
    return RecoveryInfo(**(given | more))
