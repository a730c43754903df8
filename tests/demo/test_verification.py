"""The verification passes sound evidence, and every change of the evidence breaks a promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from rich.console import Console

from everbeat import TaskState
from everbeat.demo.command import document, show_verification
from everbeat.demo.source_files import Counts, total
from everbeat.demo.verification import FAULT_PLAN, CountedFile, Evidence, MessageCounts, verify
from tests.demo.evidence import (
    FENCE_LOST,
    FENCE_WON,
    NOON,
    counts,
    recovery,
    sound_evidence,
)


@pytest.fixture
def evidence() -> Evidence:
    return sound_evidence()


def test_sound_evidence_passes_the_verification(evidence: Evidence) -> None:
    verified = verify(evidence)
    assert verified.ok, verified.promises
    assert (verified.completed, verified.lost, verified.duplicated, verified.totals_match) == (6, 0, 0, True)
    found = document(evidence, verified)
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
    recoveries[number] = recovery(FAULT_PLAN[number], number, **changes)
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


def recovered_attempt_completed(evidence: Evidence) -> Evidence:
    counted = ((FENCE_LOST, "COMPLETED"), (FENCE_WON, "LOST"))
    return with_file(evidence, 1, replace(evidence.files[1], attempts=counted))


def noticed_otherwise(evidence: Evidence) -> Evidence:
    return with_recovery(evidence, 0, noticed_by="age")


def noticed_late(evidence: Evidence) -> Evidence:
    return with_recovery(evidence, 2, noticed_at=NOON + timedelta(seconds=100))


def never_ran_again(evidence: Evidence) -> Evidence:
    return with_recovery(evidence, 2, ran_again_at=None)


def nothing_recovered(evidence: Evidence) -> Evidence:
    return replace(evidence, recoveries=evidence.recoveries[:2])


def fault_left_out(evidence: Evidence) -> Evidence:
    return replace(evidence, faults=evidence.faults[:2], recoveries=evidence.recoveries[:2])


def held_task_forgotten(evidence: Evidence) -> Evidence:
    fault = replace(evidence.faults[0], held=frozenset({UUID(int=0), UUID(int=99)}))
    return replace(evidence, faults=[fault, *evidence.faults[1:]])


def living_worker_declared_dead(evidence: Evidence) -> Evidence:
    other = recovery(FAULT_PLAN[0], 9, worker_id="worker-9", task_id=UUID(int=5), fence=7)
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
        (recovered_attempt_completed, "the thawed tree changed nothing"),
        (noticed_otherwise, "one worker process is killed"),
        (noticed_late, "one whole tree is killed"),
        (never_ran_again, "one whole tree is killed"),
        (nothing_recovered, "one whole tree is killed"),
        (fault_left_out, "one whole tree is killed"),
        (held_task_forgotten, "one worker process is killed"),
        (living_worker_declared_dead, "no living worker was declared dead"),
        (out_of_time, "the demo took at most a minute"),
        (longer_than_a_busy_machine_needs, "the demo took at most a minute"),
    ],
)
def test_tampered_evidence_breaks_a_promise(
    evidence: Evidence, tamper: Callable[[Evidence], Evidence], broken: str
) -> None:
    tampered = tamper(evidence)
    verified = verify(tampered)
    assert not verified.ok
    assert document(tampered, verified)["ok"] is False
    words = [promise.words for promise in verified.promises if not promise.held]
    assert any(one.startswith(broken) for one in words), words


def test_the_result_of_the_verification_is_shown_as_text(evidence: Evidence) -> None:
    for one, title in ((evidence, "every promise held"), (tampered_total(evidence), "a promise was broken")):
        console = Console(record=True, width=160, quiet=False, file=None, force_terminal=False)
        with console.capture() as shown:
            show_verification(console, one, verify(one))
        text = shown.get()
        assert title in text
        assert "6 of 8 files" in text
        assert "kill -9 of a whole tree" in text


def test_a_task_that_ended_before_the_kill_needs_no_recovery(evidence: Evidence) -> None:
    fault = replace(evidence.faults[0], held=frozenset({UUID(int=0), UUID(int=5)}))
    assert verify(replace(evidence, faults=[fault, *evidence.faults[1:]])).ok


COUNTS = MessageCounts(published=9, delivered=12, delivered_after=4, left=0, away_s=3.0, ended_meanwhile=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"published": 0}, "NATS notified"),
        ({"delivered_after": 0}, "NATS notified"),
        ({"delivered": 4}, "NATS notified"),
        ({"ended_meanwhile": 0}, "continues without it"),
        ({"left": 1}, "acknowledged"),
    ],
)
def test_each_promise_about_messages_can_be_broken(changes: dict[str, int], words: str) -> None:
    evidence = Evidence(
        folder=Path(),
        found=0,
        paths=(),
        files=(),
        faults=(),
        recoveries=(),
        independent=None,
        took_s=0.0,
        messages=replace(COUNTS, **changes),
    )
    about_messages = [
        one for one in verify(evidence).promises if "NATS" in one.words or "message" in one.words
    ]
    assert len(about_messages) == 3
    assert [words in one.words for one in about_messages if not one.held] == [True] * bool(words)
    assert verify(replace(evidence, messages=None)).promises == tuple(
        one for one in verify(evidence).promises if one not in about_messages
    )
