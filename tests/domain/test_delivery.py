"""The decision about a delivered message: every row of the table. The task's row decides, not the message's text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from everbeat.domain.delivery import ACKNOWLEDGED, DeliveryVerdict, Facts, judge
from everbeat.domain.task.states import TASK_TERMINAL_STATES

WAITS = Facts(
    name="work", state="PENDING", fence=1, due=True, paused=False, kept_back=False, holder=None, stale=None
)
HELD = Facts(
    name="work", state="RUNNING", fence=2, due=True, paused=False, kept_back=False, holder="w1", stale=False
)


def changed(facts: Facts, **changes: Any) -> Facts:
    values = {name: getattr(facts, name) for name in facts.__struct_fields__}
    return Facts(**(values | changes))


@pytest.mark.parametrize(
    ("facts", "fence", "verdict"),
    [
        (None, 0, DeliveryVerdict.UNKNOWN),
        (WAITS, 1, DeliveryVerdict.CLAIMABLE),
        (changed(WAITS, fence=0), 0, DeliveryVerdict.CLAIMABLE),
        (changed(WAITS, fence=1), 2, DeliveryVerdict.CLAIMABLE),  # a failover lost a claim, so the row decides
        (WAITS, 0, DeliveryVerdict.OVER),  # the task was claimed after this message was written, and a later message exists
        (changed(WAITS, name="new"), 1, DeliveryVerdict.FOREIGN),
        (changed(HELD, name="new"), 1, DeliveryVerdict.ELSEWHERE),
        (changed(WAITS, due=False), 1, DeliveryVerdict.NOT_NOW),
        (changed(WAITS, paused=True), 1, DeliveryVerdict.NOT_NOW),
        (changed(WAITS, kept_back=True), 1, DeliveryVerdict.KEPT_BACK),
        (changed(WAITS, kept_back=True, paused=True), 1, DeliveryVerdict.NOT_NOW),
        (HELD, 1, DeliveryVerdict.ELSEWHERE),
        (changed(HELD, holder="me"), 1, DeliveryVerdict.OURS),
        (changed(HELD, holder="me", stale=True), 1, DeliveryVerdict.OURS),  # the worker's own beats decide whether the task continues
        (changed(HELD, stale=True), 1, DeliveryVerdict.STALE),
        (changed(HELD, stale=None), 1, DeliveryVerdict.ELSEWHERE),
        (changed(HELD, state="CLAIMED"), 0, DeliveryVerdict.ELSEWHERE),
        (changed(HELD, state="CLAIMED", stale=True), 0, DeliveryVerdict.STALE),
        *((changed(WAITS, state=str(state)), 1, DeliveryVerdict.OVER) for state in sorted(TASK_TERMINAL_STATES)),
    ],
)  # fmt: skip
def test_judge_returns_the_verdict_of_each_row_of_the_delivery_table(
    facts: Facts | None, fence: int, verdict: DeliveryVerdict
) -> None:  # N1 N7
    assert judge(facts, fence=fence, worker_id="me", names={"work"}) is verdict


def test_a_message_is_foreign_to_a_worker_that_cannot_read_the_arguments() -> None:  # J2
    assert (
        judge(WAITS, fence=1, worker_id="me", names={"work"}, is_understood=False) is DeliveryVerdict.FOREIGN
    )
    assert judge(HELD, fence=1, worker_id="w1", names={"work"}, is_understood=False) is DeliveryVerdict.OURS


def test_a_message_of_a_due_task_without_a_live_holder_is_never_acknowledged() -> None:
    """Messages of later or paused tasks are acknowledged: the outbox publishes a new one when they are due or resumed."""
    for holder, stale in ((None, None), ("other", True)):
        for kept_back, names in itertools.product((False, True), ({"work"}, set[str]())):
            state = "PENDING" if holder is None else "RUNNING"
            facts = Facts(
                "work", state, 1, due=True, paused=False, kept_back=kept_back, holder=holder, stale=stale
            )
            assert judge(facts, fence=1, worker_id="me", names=names) not in ACKNOWLEDGED
