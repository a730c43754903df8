"""The recovery decision: every row of the table, and the limits that override it."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everbeat.domain.recovery.decision import (
    Blame,
    Charge,
    DeathCertificate,
    Decision,
    EndCancelled,
    Fail,
    LeaseFacts,
    Leave,
    RecoveryRules,
    Requeue,
    Retry,
    charge_of,
    decide,
    jittered_delay_ms,
)
from everbeat.domain.task.outcome import error_from_json, error_to_json
from everbeat.domain.task.policy import StoredPolicy, TaskOptions
from everbeat.domain.task.retry import RetryPolicy
from everbeat.errors import WORKER_CRASHED

PLAIN = StoredPolicy()
RETRIES_CRASH = StoredPolicy(
    max_retries=3, strategy="exponential", intervals=(2.0,), retry_for=("WORKER_CRASHED",)
)
ON_CRASH = StoredPolicy(on_crash="retry")
EXACT = RecoveryRules(delay_ms=750, delay_jitter=0.0)


def decided(
    *,
    started: bool = True,
    charge: Charge = Charge.CRASH,
    rules: RecoveryRules | None = None,
    **facts: object,
) -> Decision:
    lease = replace(LeaseFacts(started=started, policy=PLAIN), **facts)  # type: ignore[arg-type]
    return decide(lease, rules=rules or RecoveryRules(), charge=charge, random=Random(1))


def test_a_claimed_lease_is_requeued_without_charge() -> None:  # E1
    for policy in (PLAIN, RETRIES_CRASH, ON_CRASH):
        assert decided(started=False, policy=policy, crash_count=99, loss_count=99) == Requeue(None)
    assert decided(started=False, rules=EXACT) == Requeue(750)


def test_a_running_lease_without_a_policy_fails() -> None:  # E2
    assert decided() == Fail(poison=False)


def test_a_listed_crash_is_retried_with_the_delays_of_the_policy_until_retries_end() -> None:  # E3
    assert [decided(policy=RETRIES_CRASH, retry_count=count) for count in range(4)] == [
        Retry(2_000), Retry(4_000), Retry(8_000), Fail(poison=False),
    ]  # fmt: skip


def test_the_recovery_delay_is_the_minimum_delay_of_a_retry() -> None:
    rules = RecoveryRules(delay_ms=3_000, delay_jitter=0.0)
    assert decided(policy=RETRIES_CRASH, rules=rules) == Retry(3_000)
    assert decided(policy=RETRIES_CRASH, retry_count=1, rules=rules) == Retry(4_000)


@given(delay_ms=st.integers(0, 86_400_000), seed=st.integers())
def test_the_recovery_jitter_only_adds_delay(delay_ms: int, seed: int) -> None:  # F5
    delay = jittered_delay_ms(RecoveryRules(delay_ms=delay_ms), Random(seed))
    assert delay_ms <= delay <= delay_ms * 1.2 + 1


def test_the_recovery_jitter_spreads_requeued_tasks() -> None:  # F5
    dice = Random(1)
    found = {decide_with(dice) for _ in range(100)}
    assert len(found) > 50
    assert all(isinstance(each, Requeue) and each.delay_ms is not None for each in found)


def decide_with(dice: Random) -> Decision:
    facts = LeaseFacts(started=False, policy=PLAIN)
    return decide(facts, rules=RecoveryRules(delay_ms=10_000), charge=Charge.LOSS, random=dice)


def test_a_task_that_might_have_killed_a_shared_process_becomes_a_suspect() -> None:  # E13
    code, process = Blame(of_the_code=True, of_the_process=True), Blame(of_the_process=True)

    def suspect(blame: Blame, **facts: object) -> bool:
        lease = replace(LeaseFacts(started=True, policy=ON_CRASH), **facts)  # type: ignore[arg-type]
        decision = decide(lease, rules=RecoveryRules(), charge=Charge.LOSS, random=Random(1), blame=blame)
        assert isinstance(decision, Retry)
        return decision.suspect

    assert suspect(code)
    assert not suspect(process), "the first time that its process is killed from outside"
    assert suspect(process, process_deaths=1), "the second time"
    assert not suspect(process, loss_count=8), "the loss of a host is no evidence"
    assert not suspect(Blame(), process_deaths=1), "this time the host is lost"
    assert not suspect(code, alone=True, process_deaths=1), "a task that ran alone is judged by its crashes"


def test_only_a_task_that_ran_alone_in_the_dead_process_is_charged_a_crash() -> None:  # E13
    shared, own = (LeaseFacts(started=True, policy=PLAIN, alone=alone) for alone in (False, True))
    assert charge_of(shared, sharers=1) is Charge.CRASH
    assert charge_of(shared, sharers=2) is Charge.LOSS
    assert charge_of(own, sharers=1) is Charge.LOSS, "its own process was another one"
    assert charge_of(LeaseFacts(started=False, policy=PLAIN), sharers=1) is Charge.LOSS


def test_on_crash_retry_retries_at_once_until_max_crashes_and_then_fails_as_poison() -> None:  # E8
    assert [decided(policy=ON_CRASH, crash_count=count, retry_count=count) for count in range(3)] == [
        Retry(0), Retry(0), Fail(poison=True),
    ]  # fmt: skip


def test_losses_have_their_own_limit() -> None:
    assert decided(policy=ON_CRASH, charge=Charge.LOSS, crash_count=2, loss_count=8) == Retry(0)
    assert decided(policy=ON_CRASH, charge=Charge.LOSS, loss_count=9) == Fail(poison=True)


def test_the_limits_of_the_task_override_the_defaults() -> None:
    policy = replace(ON_CRASH, max_crashes=1, max_losses=20)
    assert decided(policy=policy) == Fail(poison=True)
    assert decided(policy=policy, charge=Charge.LOSS, loss_count=18) == Retry(0)


def test_the_crash_limit_overrides_a_policy_that_lists_the_crash() -> None:
    policy = replace(RETRIES_CRASH, max_retries=20)
    assert decided(policy=policy, crash_count=2) == Fail(poison=True)


def test_a_task_with_a_requested_cancel_is_cancelled_and_not_retried() -> None:  # I18
    for policy in (PLAIN, RETRIES_CRASH, ON_CRASH):
        assert decided(policy=policy, cancel_requested=True) == EndCancelled()


@pytest.mark.parametrize("cancel_requested", [False, True])
def test_recovery_rules_that_are_off_leave_their_leases_alone(cancel_requested: bool) -> None:  # A7
    no_running = RecoveryRules(settle_running=False)
    no_claimed = RecoveryRules(requeue_claimed=False)
    assert decided(rules=no_running, cancel_requested=cancel_requested, policy=ON_CRASH) == Leave()
    assert decided(started=False, rules=no_running) == Requeue(None)
    assert decided(started=False, rules=no_claimed) == Leave()
    assert decided(rules=no_claimed) == Fail(poison=False)


@given(
    started=st.booleans(),
    policy=st.sampled_from([PLAIN, RETRIES_CRASH, ON_CRASH]),
    counts=st.tuples(*[st.integers(0, 30)] * 3),
    cancel_requested=st.booleans(),
    charge=st.sampled_from(Charge),
)
def test_no_decision_retries_beyond_a_limit(
    started: bool, policy: StoredPolicy, counts: tuple[int, int, int], cancel_requested: bool, charge: Charge
) -> None:  # I15, I16
    retries, crashes, losses = counts
    decision = decided(
        started=started, policy=policy, retry_count=retries, crash_count=crashes, loss_count=losses,
        cancel_requested=cancel_requested, charge=charge,
    )  # fmt: skip
    if isinstance(decision, Retry):
        assert started
        assert not cancel_requested
        assert (crashes if charge is Charge.CRASH else losses) + 1 < (3 if charge is Charge.CRASH else 10)


def test_a_death_certificate_states_all_facts_and_survives_storage() -> None:  # E2
    now = datetime(2030, 1, 1, tzinfo=UTC)
    certificate = DeathCertificate(
        worker_id="web-7-aa", hostname="web", pid=7, supervisor_id="web-6-bb", cause="killed by SIGSEGV",
        exit_code=None, signal=11, out_of_memory=False, started_at=now, last_beat=now, detected_at=now,
        noticed_by="child_exit", noticed_after_ms=12, crash_count=3, loss_count=1, poison=True,
    )  # fmt: skip
    error = error_from_json(error_to_json(certificate.error()))
    assert error.code == "WORKER_CRASHED"
    assert error.message == (
        "Worker web-7-aa (pid 7 on web) was running this task when it died: killed by SIGSEGV. It was noticed by child exit"
        " 12 ms after it ended. The task does not run again: 3 processes died while running only this task, 1 holder vanished."
    )
    assert error.data == {
        "worker_id": "web-7-aa", "hostname": "web", "pid": 7, "supervisor_id": "web-6-bb", "cause": "killed by SIGSEGV",
        "exit_code": None, "signal": 11, "out_of_memory": False, "started_at": now.isoformat(),
        "last_beat": now.isoformat(), "detected_at": now.isoformat(), "noticed_by": "child_exit",
        "noticed_after_ms": 12, "crash_count": 3, "loss_count": 1, "poison": True, "last_rss_bytes": None, "last_progress": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("noticed_by", "after_ms", "expected"),
    [
        ("child_exit", 4, "when it died: gone. It was noticed by child exit 4 ms after it ended."),
        ("child_exit", None, "when it died: gone."),
        (
            "session",
            2_500,
            "when it died: gone. It was noticed by session 2.5 s after its last sign of life.",
        ),
        ("age", 300_000, "when it died: gone. It was noticed by age 5 m after its last sign of life."),
        (
            "startup",
            90_000,
            "when it died: gone. It was noticed by startup 1 m 30 s after its last sign of life.",
        ),
        (
            "sweep",
            90_000,
            "when it died: gone. It was noticed by sweep 1 m 30 s after its last sign of life.",
        ),
        ("operator", 800, "when an operator released it. That was 0.8 s after its last sign of life."),
    ],
)
def test_a_death_certificate_states_how_the_death_was_noticed(
    noticed_by: str, after_ms: int | None, expected: str
) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    certificate = DeathCertificate(
        worker_id="w", hostname="web", pid=7, supervisor_id="s", cause="gone", exit_code=None, signal=None,
        out_of_memory=False, started_at=now, last_beat=now, detected_at=now, noticed_by=noticed_by,
        noticed_after_ms=after_ms, crash_count=0, loss_count=1, poison=False,
    )  # fmt: skip
    assert certificate.message() == f"Worker w (pid 7 on web) was running this task {expected}"


def test_the_on_crash_default_of_the_app_adds_no_retry_to_a_task_that_lists_the_crash() -> None:
    options = TaskOptions(retry=RetryPolicy(max_retries=1, auto_retry_for=[WORKER_CRASHED], jitter=0))
    policy = options.stored(on_crash="retry")
    assert isinstance(decided(policy=policy), Retry)
    assert decided(policy=policy, retry_count=1) == Fail(poison=False)
    assert isinstance(decided(policy=policy, retry_count=1, stalled=True), Retry), "a stall is not listed"
    assert policy.retries_stop, "a stop is not listed"
    assert StoredPolicy.from_json(policy.to_json()) == policy


def test_the_on_crash_default_of_the_app_decides_on_unlisted_crashes() -> None:
    policy = TaskOptions(retry=RetryPolicy(max_retries=1, auto_retry_for=["SMTP_DOWN"])).stored(
        on_crash="retry"
    )
    assert decided(policy=policy, retry_count=1) == Retry(0)


def test_the_on_crash_option_of_a_task_applies_after_its_listed_retries() -> None:
    own = TaskOptions(retry=RetryPolicy(max_retries=1, auto_retry_for=[WORKER_CRASHED]), on_crash="retry")
    assert decided(policy=own.stored(on_crash="fail"), retry_count=1) == Retry(0)
