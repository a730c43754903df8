"""The decision about stalled code, and the certificate that is stored about it."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from everbeat.domain.recovery.decision import (
    Charge,
    Decision,
    EndCancelled,
    Fail,
    LeaseFacts,
    RecoveryRules,
    Retry,
    Stall,
    StallCertificate,
    charge_of_stall,
    decide,
)
from everbeat.domain.task.outcome import error_from_json, error_to_json
from everbeat.domain.task.policy import StoredPolicy

PLAIN = StoredPolicy(stall_timeout_ms=2_000)
LISTED = replace(PLAIN, max_retries=2, intervals=(3.0,), retry_for=("TASK_STALLED",))
CRASH_LISTED = replace(LISTED, retry_for=("WORKER_CRASHED",))
AGAIN = replace(PLAIN, on_crash="retry")
RULES = RecoveryRules(delay_ms=750, delay_jitter=0.0)
MOMENT = datetime(2030, 1, 2, tzinfo=UTC)


def decided(policy: StoredPolicy, **facts: Any) -> tuple[Decision, Charge | None]:
    lease = LeaseFacts(started=True, stalled=True, policy=policy, **facts)
    charge = charge_of_stall(lease, charge=Charge.CRASH)
    return decide(lease, rules=RULES, charge=charge, random=Random(1)), charge


@pytest.mark.parametrize(
    ("policy", "facts", "decision", "charge"),
    [
        (PLAIN, {}, Fail(poison=False), None),
        (PLAIN, {"cancel_requested": True}, EndCancelled(), None),
        (LISTED, {}, Retry(3_000), None),
        (LISTED, {"crash_count": 99}, Retry(3_000), None),
        (LISTED, {"retry_count": 2}, Fail(poison=False), None),
        (CRASH_LISTED, {}, Fail(poison=False), None),
        (AGAIN, {}, Retry(750), Charge.CRASH),
        (AGAIN, {"crash_count": 1}, Retry(750), Charge.CRASH),
        (AGAIN, {"crash_count": 2}, Fail(poison=True), Charge.CRASH),
        (replace(LISTED, on_crash="retry"), {}, Retry(3_000), None),
        (replace(LISTED, on_crash="retry"), {"retry_count": 2}, Retry(750), Charge.CRASH),
        (
            replace(LISTED, on_crash="retry"),
            {"retry_count": 2, "crash_count": 2},
            Fail(poison=True),
            Charge.CRASH,
        ),
    ],
)
def test_the_decision_and_charge_of_a_stall_follow_the_table(
    policy: StoredPolicy, facts: dict[str, Any], decision: Decision, charge: Charge | None
) -> None:  # G2
    assert decided(policy, **facts) == (decision, charge)


def test_the_on_crash_default_of_the_app_adds_no_retry_to_a_task_that_lists_the_stall() -> None:
    bounded = replace(LISTED, on_crash="retry", retries_bound=True)
    assert decided(bounded) == (Retry(3_000), None)
    assert decided(bounded, retry_count=2) == (Fail(poison=False), None)


def test_a_stall_that_cannot_be_charged_to_one_task_is_a_loss() -> None:
    lease = LeaseFacts(started=True, stalled=True, policy=AGAIN)
    assert charge_of_stall(lease, charge=Charge.LOSS) is Charge.LOSS


def test_the_cause_of_a_stall_names_the_limit() -> None:
    assert Stall(silent_s=2.3, timeout_s=2.0).cause == "no progress for 2s"
    assert Stall(silent_s=95.0, timeout_s=90.0, loop_blocked=True).cause == (
        "no progress for 90s: the event loop of its worker is blocked"
    )


def certificate(**changes: Any) -> StallCertificate:
    whole = StallCertificate(
        worker_id="w1", hostname="box", pid=7, cause="no progress for 2s", silent_for_s=2.25, stall_timeout_s=2.0,
        started_at=MOMENT, last_progress_at=MOMENT, stage="upload", fraction=0.5, message="page 5", detected_at=MOMENT,
        noticed_by="progress", crash_count=1, poison=False,
    )  # fmt: skip
    return replace(whole, **changes)


def test_a_stall_certificate_is_an_error_that_survives_storage() -> None:
    error = error_from_json(error_to_json(certificate().error()))
    assert error.code == "TASK_STALLED"
    assert error.data["last_progress_at"] == MOMENT.isoformat()
    assert (error.data["stage"], error.data["fraction"], error.data["message"]) == ("upload", 0.5, "page 5")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {},
            "reported no progress for 2.2 s, with 2s allowed, in worker w1 (pid 7 on box). Its last progress was 'upload', 'page 5'.",
        ),
        ({"message": ""}, "Its last progress was 'upload'."),
        ({"last_progress_at": None, "stage": None}, "It had reported no progress at all."),
        ({"poison": True, "crash_count": 3}, "does not run again: 3 crashes and stalls are charged to it."),
    ],
)
def test_the_summary_of_a_stall_certificate_states_its_facts(changes: dict[str, Any], says: str) -> None:
    assert says in certificate(**changes).summary()
