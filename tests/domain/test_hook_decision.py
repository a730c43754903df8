"""The meaning of each answer of a recovery hook, and the rules that override it."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from everbeat.domain.recovery.decision import (
    Charge,
    EndCancelled,
    Fail,
    LeaseFacts,
    Leave,
    RecoveryRules,
    Requeue,
    Rerun,
    Retry,
    ToldDecision,
    decide_as_told,
)
from everbeat.domain.recovery.hooks import (
    Default,
    FailWithBackoff,
    Hook,
    HookAnswer,
    HookSet,
    Reschedule,
    Skip,
)
from everbeat.domain.task.policy import StoredPolicy
from everbeat.errors import ConfigurationError

PLAIN = StoredPolicy()
LISTED = StoredPolicy(max_retries=2, intervals=(3.0,), retry_for=("SMTP_DOWN",))
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def told(answer: HookAnswer, **facts: object) -> ToldDecision:
    lease = replace(LeaseFacts(started=True, policy=PLAIN), **facts)  # type: ignore[arg-type]
    rules = RecoveryRules(delay_jitter=0.0)
    return decide_as_told(answer, lease, rules=rules, charge=Charge.LOSS, random=Random(1))


def test_the_answer_default_keeps_the_ordinary_decision() -> None:  # F7
    assert told(Default()) == Fail(poison=False)
    assert told(Default(), started=False) == Requeue(None)


@pytest.mark.parametrize("policy", [PLAIN, StoredPolicy(on_crash="retry"), LISTED])
def test_the_answer_reschedule_overrides_the_policy(policy: StoredPolicy) -> None:  # F7
    assert told(Reschedule(NOON, 3), policy=policy) == Rerun(NOON, 3)
    assert told(Reschedule(timedelta(seconds=5)), started=False) == Rerun(timedelta(seconds=5), None)


def test_the_answer_skip_overrides_a_requested_cancel_and_the_loss_limit() -> None:  # F7
    assert told(Skip(), cancel_requested=True) == Leave()
    assert told(Skip(), loss_count=9) == Leave()


@pytest.mark.parametrize("answer", [Reschedule(NOON), FailWithBackoff()])
def test_a_requested_cancel_and_the_limits_override_other_answers(answer: HookAnswer) -> None:  # I18, I15
    assert told(answer, cancel_requested=True) == EndCancelled()
    assert told(answer, loss_count=9) == Fail(poison=True)


def test_the_answer_fail_with_backoff_uses_the_retries_of_the_policy() -> None:  # F7
    answers = [told(FailWithBackoff(), policy=LISTED, retry_count=count) for count in range(3)]
    assert answers == [Retry(3_000), Retry(3_000), Fail(poison=False)]


def test_the_answer_fail_with_backoff_has_default_delays_without_a_policy() -> None:  # F7
    delays = [told(FailWithBackoff(), retry_count=count) for count in (0, 1, 9, 24)]
    assert delays == [Retry(math.ceil(math.exp(n) * 1_000)) for n in (1, 2, 10, 10)]
    assert told(FailWithBackoff(), retry_count=25) == Fail(poison=False)


@pytest.mark.parametrize(
    ("answer", "started", "expected"),
    [
        (FailWithBackoff(), True, Retry(3_000)),
        (FailWithBackoff(), False, Requeue(3_000)),
        (Reschedule(NOON), True, Rerun(NOON, None)),
        (Reschedule(NOON), False, Rerun(NOON, None)),
        (Default(), False, Requeue(60_000)),
    ],
)
def test_the_recovery_delay_does_not_postpone_an_answer_with_a_time(
    answer: HookAnswer, started: bool, expected: ToldDecision
) -> None:  # F5, F7
    facts = LeaseFacts(started=started, policy=LISTED)
    rules = RecoveryRules(delay_ms=60_000, delay_jitter=0.0)
    assert decide_as_told(answer, facts, rules=rules, charge=Charge.LOSS, random=Random(1)) == expected


def test_the_answer_fail_with_backoff_requeues_code_that_had_not_started() -> None:
    answer = told(FailWithBackoff(), started=False, retry_count=25)
    assert answer == Requeue(math.ceil(math.exp(10) * 1_000))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"run_at": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001 - that is the mistake
        ({"run_at": "soon"}, "must be a timedelta or a datetime"),
        ({"run_at": timedelta(seconds=-1)}, "must not be negative"),
        ({"run_at": NOON, "attempts": -1}, "0 to 32767"),
        ({"run_at": NOON, "attempts": True}, "0 to 32767"),
        ({"run_at": NOON, "attempts": 1.5}, "0 to 32767"),
    ],
)
def test_an_invalid_reschedule_is_rejected(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Reschedule(**given)


def test_the_hook_of_a_task_takes_precedence_over_the_general_hook() -> None:  # F7
    for_all, for_one = (
        Hook(kind="on_recovery", function=print, is_async=False, task=task) for task in (None, "render")
    )
    hooks = HookSet(recovery={None: for_all, "render": for_one})
    assert (hooks.for_task("render"), hooks.for_task("mail")) == (for_one, for_all)
    assert hooks.scopes.decides("anything")
    only = HookSet(recovery={"render": for_one})
    assert (only.for_task("mail"), only.scopes.decides("mail"), only.scopes.decides("render")) == (
        None,
        False,
        True,
    )
