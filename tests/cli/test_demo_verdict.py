"""The demo's verdict is true to its evidence: sound evidence passes, and whatever is tampered with breaks a promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from rich.console import Console

from everbeat import RecoveryInfo, TaskState
from everbeat.cli.demo.count import Counts, total
from everbeat.cli.demo.evidence import CountedFile, Evidence, Strike
from everbeat.cli.demo.plan import ACTS, Act
from everbeat.cli.demo.report import document, show_verdict
from everbeat.cli.demo.verdict import judge

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
FENCE_LOST, FENCE_WON = 1, 2


def counts(number: int) -> Counts:
    return Counts(files=1, code_lines=10 + number, bytes=100)


def file(number: int, *, rescued: bool) -> CountedFile:
    attempts = ((FENCE_LOST, "LOST"), (FENCE_WON, "COMPLETED")) if rescued else ((FENCE_LOST, "COMPLETED"),)
    return CountedFile(
        task_id=UUID(int=number),
        path=f"{number}.py",
        task="count_on_the_loop",
        state=TaskState.COMPLETED,
        counts=counts(number),
        attempts=attempts,
    )


def strike(act: Act, number: int) -> Strike:
    return Strike(
        act=act,
        tree=number,
        pid=100 + number,
        worker_ids=frozenset({f"worker-{number}"}),
        at=NOON,
        at_s=5.0,
        held=frozenset({UUID(int=number)}),
        refused=1 if act.noticed_by == "age" else None,
    )


def recovery(act: Act, number: int, **changes: Any) -> RecoveryInfo:
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
        "noticed_by": act.noticed_by,
        "last_beat_at": None,
        "noticed_at": NOON + timedelta(seconds=act.within_s / 2),
        "noticed_after_ms": None,
        "action": "retry",
        "next_retry_at": None,
        "recovered_by": None,
        "certificate": None,
        "ran_again_at": NOON + timedelta(seconds=act.within_s),
    }
    return RecoveryInfo(**(facts | changes))


@pytest.fixture
def evidence() -> Evidence:
    """Of six files, the first three of which were held by a victim each."""
    files = [file(number, rescued=number < len(ACTS)) for number in range(6)]
    return Evidence(
        folder=Path("code"),
        found=8,
        paths=tuple(one.path for one in files),
        files=files,
        strikes=[strike(act, number) for number, act in enumerate(ACTS)],
        recoveries=[recovery(act, number) for number, act in enumerate(ACTS)],
        independent=total(counts(number) for number in range(6)),
        took_s=25.0,
    )


def test_sound_evidence_passes(evidence: Evidence) -> None:
    verdict = judge(evidence)
    assert verdict.ok, verdict.promises
    assert (verdict.completed, verdict.lost, verdict.duplicated, verdict.totals_match) == (6, 0, 0, True)
    found = document(evidence, verdict)
    assert (found["ok"], found["tasks"], found["files"]) == (True, 6, {"found": 8, "chosen": 6})
    assert [kill["what"] for kill in found["kills"]] == ["kill_worker", "freeze_tree", "kill_tree"]
    assert found["recoveries"][0] == {
        "task_id": str(UUID(int=0)),
        "path": "0.py",
        "task": "count_on_the_loop",
        "kill": "kill_worker",
        "worker_id": "worker-0",
        "was": "RUNNING",
        "cause": "killed by SIGKILL",
        "noticed_by": "child_exit",
        "action": "retry",
        "noticed_after_s": 0.5,
        "rerun_after_s": 1.0,
    }


def with_file(evidence: Evidence, number: int, changed: CountedFile) -> Evidence:
    files = [changed if place == number else one for place, one in enumerate(evidence.files)]
    return replace(evidence, files=files)


def with_recovery(evidence: Evidence, number: int, **changes: Any) -> Evidence:
    recoveries = list(evidence.recoveries)
    recoveries[number] = recovery(ACTS[number], number, **changes)
    return replace(evidence, recoveries=recoveries)


def tampered_total(evidence: Evidence) -> Evidence:
    return replace(evidence, independent=total([evidence.independent or Counts(), Counts(code_lines=1)]))


def tampered_result(evidence: Evidence) -> Evidence:
    return with_file(evidence, 5, replace(evidence.files[5], counts=counts(6)))


def no_independent_count(evidence: Evidence) -> Evidence:
    return replace(evidence, independent=None)


def failed_task(evidence: Evidence) -> Evidence:
    failed = replace(evidence.files[5], state=TaskState.FAILED, counts=None, attempts=((1, "FAILED"),))
    return with_file(evidence, 5, failed)


def missing_task(evidence: Evidence) -> Evidence:
    return replace(evidence, files=evidence.files[:-1])


def completed_without_attempt(evidence: Evidence) -> Evidence:
    return with_file(evidence, 5, replace(evidence.files[5], attempts=()))


def two_attempts_counted(evidence: Evidence) -> Evidence:
    return with_file(evidence, 5, replace(evidence.files[5], attempts=((1, "COMPLETED"), (2, "COMPLETED"))))


def two_tasks_of_one_file(evidence: Evidence) -> Evidence:
    twin = replace(evidence.files[5], task_id=UUID(int=77))
    return replace(evidence, files=[*evidence.files, twin])


def zombie_counted(evidence: Evidence) -> Evidence:
    counted = ((FENCE_LOST, "COMPLETED"), (FENCE_WON, "LOST"))
    return with_file(evidence, 1, replace(evidence.files[1], attempts=counted))


def noticed_otherwise(evidence: Evidence) -> Evidence:
    return with_recovery(evidence, 0, noticed_by="age")


def noticed_late(evidence: Evidence) -> Evidence:
    return with_recovery(evidence, 2, noticed_at=NOON + timedelta(seconds=100))


def never_ran_again(evidence: Evidence) -> Evidence:
    return with_recovery(evidence, 2, ran_again_at=None)


def nothing_rescued(evidence: Evidence) -> Evidence:
    return replace(evidence, recoveries=evidence.recoveries[:2])


def act_left_out(evidence: Evidence) -> Evidence:
    return replace(evidence, strikes=evidence.strikes[:2], recoveries=evidence.recoveries[:2])


def held_task_forgotten(evidence: Evidence) -> Evidence:
    struck = replace(evidence.strikes[0], held=frozenset({UUID(int=0), UUID(int=99)}))
    return replace(evidence, strikes=[struck, *evidence.strikes[1:]])


def somebody_alive_declared_dead(evidence: Evidence) -> Evidence:
    other = recovery(ACTS[0], 9, worker_id="worker-9", task_id=UUID(int=5), fence=7)
    return replace(evidence, recoveries=[*evidence.recoveries, other])


def out_of_time(evidence: Evidence) -> Evidence:
    return replace(evidence, problems=["waited for the last task to end"])


def longer_than_a_busy_machine_needs(evidence: Evidence) -> Evidence:
    return replace(evidence, took_s=181.0)


@pytest.mark.parametrize(
    ("tamper", "broken"),
    [
        (tampered_total, "the sums of all results"),
        (tampered_result, "the sums of all results"),
        (no_independent_count, "the sums of all results"),
        (failed_task, "every file was counted"),
        (missing_task, "every file was counted"),
        (completed_without_attempt, "every file was counted"),
        (two_attempts_counted, "no file was counted twice"),
        (two_tasks_of_one_file, "no file was counted twice"),
        (zombie_counted, "the tree that came back changed nothing"),
        (noticed_otherwise, "one worker process is killed"),
        (noticed_late, "one whole tree is killed"),
        (never_ran_again, "one whole tree is killed"),
        (nothing_rescued, "one whole tree is killed"),
        (act_left_out, "one whole tree is killed"),
        (held_task_forgotten, "one worker process is killed"),
        (somebody_alive_declared_dead, "nobody alive was declared dead"),
        (out_of_time, "it was over within a minute"),
        (longer_than_a_busy_machine_needs, "it was over within a minute"),
    ],
)
def test_tampered_evidence_breaks_a_promise(
    evidence: Evidence, tamper: Callable[[Evidence], Evidence], broken: str
) -> None:
    tampered = tamper(evidence)
    verdict = judge(tampered)
    assert not verdict.ok
    assert document(tampered, verdict)["ok"] is False
    words = [promise.words for promise in verdict.promises if not promise.held]
    assert any(one.startswith(broken) for one in words), words


def test_the_verdict_is_told_in_words(evidence: Evidence) -> None:
    for one, title in ((evidence, "every promise held"), (tampered_total(evidence), "a promise was broken")):
        console = Console(record=True, width=160, quiet=False, file=None, force_terminal=False)
        with console.capture() as shown:
            show_verdict(console, one, judge(one))
        text = shown.get()
        assert title in text
        assert "6 of 8 files" in text
        assert "kill -9 of a whole tree" in text


def test_a_task_that_ended_before_the_kill_reached_it_needs_no_rescue(evidence: Evidence) -> None:
    struck = replace(evidence.strikes[0], held=frozenset({UUID(int=0), UUID(int=5)}))
    assert judge(replace(evidence, strikes=[struck, *evidence.strikes[1:]])).ok
