"""Evidence of a demo in which every promise held, written by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from everbeat import TaskState
from everbeat.demo.source_files import Counts, total
from everbeat.demo.verification import FAULT_PLAN, CountedFile, Evidence, InjectedFault, PlannedFault
from everbeat.inspection import RecoveryInfo

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
FENCE_LOST, FENCE_WON = 1, 2


def counts(number: int) -> Counts:
    return Counts(files=1, code_lines=10 + number, bytes=100)


def file(number: int, *, recovered: bool) -> CountedFile:
    attempts = ((FENCE_LOST, "LOST"), (FENCE_WON, "COMPLETED")) if recovered else ((FENCE_LOST, "COMPLETED"),)
    return CountedFile(
        task_id=UUID(int=number),
        path=f"{number}.py",
        task="count_on_the_loop",
        state=TaskState.COMPLETED,
        counts=counts(number),
        attempts=attempts,
    )


def injected(planned: PlannedFault, number: int) -> InjectedFault:
    return InjectedFault(
        planned=planned,
        tree=number,
        pid=100 + number,
        worker_ids=frozenset({f"worker-{number}"}),
        at=NOON,
        at_s=5.0,
        held=frozenset({UUID(int=number)}),
        refused=1 if planned.noticed_by == "age" else None,
    )


def recovery(planned: PlannedFault, number: int, **changes: Any) -> RecoveryInfo:
    facts = {
        "id": number,
        "task_id": UUID(int=number),
        "name": "count_on_the_loop",
        "queue": "default",
        "attempt": 1,
        "fence": FENCE_LOST,
        "worker_id": f"worker-{number}",
        "supervisor_id": None,
        "hostname": None,
        "pid": None,
        "was": TaskState.RUNNING,
        "cause": "killed by SIGKILL",
        "noticed_by": planned.noticed_by,
        "last_beat_at": None,
        "noticed_at": NOON + timedelta(seconds=planned.within_s / 2),
        "noticed_after_ms": None,
        "action": "retry",
        "next_retry_at": None,
        "recovered_by": None,
        "certificate": None,
        "ran_again_at": NOON + timedelta(seconds=planned.within_s),
    }
    return RecoveryInfo(**(facts | changes))


def sound_evidence() -> Evidence:
    """Evidence of six files, the first three of which were each held by a target of a fault."""
    files = [file(number, recovered=number < len(FAULT_PLAN)) for number in range(6)]
    return Evidence(
        folder=Path("code"),
        found=8,
        paths=tuple(one.path for one in files),
        files=files,
        faults=[injected(planned, number) for number, planned in enumerate(FAULT_PLAN)],
        recoveries=[recovery(planned, number) for number, planned in enumerate(FAULT_PLAN)],
        independent=total(counts(number) for number in range(6)),
        took_s=25.0,
    )
