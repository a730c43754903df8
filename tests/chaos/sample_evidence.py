"""The evidence of a small correct run. Tests of the oracles change one fact in this evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.chaos.evidence import (
    AttemptRow,
    Effect,
    EndRow,
    Evidence,
    InjectedFault,
    Life,
    RecoveryRow,
    Refusal,
    Sends,
    TaskRow,
    Timeline,
)
from tests.chaos.plan import Kind, make_plan

FROZEN = "host-101-aaaa"
WATCHES = "host-102-bbbb"


def effect(task: str, attempt: int, step: str, at: float, **other: Any) -> Effect:
    """Return a line of the effects file."""
    given = {"name": "again", "fence": attempt, "claim": f"{task}-{attempt}", "pid": 201} | other
    return Effect(task=task, attempt=attempt, step=step, at=at, **given)


def attempt(task: str, number: int, outcome: str, *, will_retry: bool = False, **other: Any) -> AttemptRow:
    """Return an attempt that has ended."""
    given = {"claim_id": f"{task}-{number}", "fence": number} | other
    return AttemptRow(task_id=task, attempt=number, outcome=outcome, will_retry=will_retry, **given)


def fault(
    number: int, kind: Kind, tree: int | None, began: float, ended: float, **detail: Any
) -> InjectedFault:
    """Return an injected fault."""
    return InjectedFault(number=number, kind=kind, tree=tree, began=began, ended=ended, detail=detail)


def sample_run() -> Evidence:
    """Return the evidence of a correct run.

    Tree 0 (pid 101) is frozen from 110 to 116 while it is running task t1, which tree 1 runs again. Task t2 is cancelled in time.
    """
    return Evidence(
        plan=make_plan(seed=1, seconds=30),
        timeline=Timeline(
            ready=100.0, healed=130.0, quiet=132.0, asked=132.1, exit_codes=(0, 0), longest_stop_s=1.0,
            left_behind=(), stalls=(), skipped=(),
        ),
        lives=[
            Life(tree=0, pid=101, began=99.0, ended=133.0, exit_code=0, was_killed=False),
            Life(tree=1, pid=102, began=99.0, ended=133.0, exit_code=0, was_killed=False),
        ],
        effects=[
            effect("t1", 1, "start", 109.0),
            effect("t1", 2, "start", 114.5, pid=202),
            effect("t1", 2, "end", 115.0, pid=202),
        ],
        sends=Sends(
            intended={1: "again", 2: "cancelled"},
            acknowledged={1: "t1", 2: "t2"},
            cancels={"t2": ("CANCELLED", 105.0)},
        ),
        faults=[fault(0, Kind.FREEZE_TREE, 0, 110.0, 116.0, pids=[101, 201])],
        refusals=[Refusal(tree=0, task="t1", by_word=True, at=116.1)],
        tasks=[
            TaskRow(id="t1", name="again", number=1, state="COMPLETED", attempt=2),
            TaskRow(id="t2", name="cancelled", number=2, state="CANCELLED", attempt=0),
        ],
        attempts=[attempt("t1", 1, "LOST", will_retry=True), attempt("t1", 2, "COMPLETED")],
        recoveries=[recovery()],
        ends=[EndRow(supervisor_id=FROZEN, supervisor=101, how="age", at=114.05)],
        beats={FROZEN: [*range(100, 110), 109.9], WATCHES: [float(at) for at in range(100, 133)]},
        ledger=[],
        breaches=[],
        sessions=[],
        logs="all is well\n",
        server_log="LOG: ready\n",
    )  # fmt: skip


def recovery(**other: Any) -> RecoveryRow:
    """Return the recovery of the first attempt of t1."""
    given: dict[str, Any] = {
        "task_id": "t1", "name": "again", "claim_id": "t1-1", "was": "RUNNING", "noticed_by": "age", "noticed_after_ms": 4100,
        "action": "retry", "cause": "its supervisor fell silent", "victim": 201, "supervisor": 101, "supervisor_id": FROZEN,
        "observer": 102, "at": 114.0,
    }  # fmt: skip
    return RecoveryRow(**{**given, **other})


def with_faults(evidence: Evidence, *faults: InjectedFault) -> Evidence:
    """Return the evidence with its faults replaced by these faults."""
    return replace(evidence, faults=list(faults))
