"""What becomes of a message: every row of the decision table, and what the rows say comes before what the message says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from everbeat.domain.delivery import ACKNOWLEDGED, Facts, Verdict, judge
from everbeat.domain.states import TASK_TERMINAL_STATES

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
        (None, 0, Verdict.UNKNOWN),
        (WAITS, 1, Verdict.CLAIMABLE),
        (changed(WAITS, fence=0), 0, Verdict.CLAIMABLE),
        (changed(WAITS, fence=1), 2, Verdict.CLAIMABLE),  # a failover lost a claim: the row decides
        (WAITS, 0, Verdict.OVER),  # it was claimed since this message was written, and has a later one
        (changed(WAITS, name="new"), 1, Verdict.FOREIGN),
        (changed(HELD, name="new"), 1, Verdict.ELSEWHERE),
        (changed(WAITS, due=False), 1, Verdict.NOT_NOW),
        (changed(WAITS, paused=True), 1, Verdict.NOT_NOW),
        (changed(WAITS, kept_back=True), 1, Verdict.KEPT_BACK),
        (changed(WAITS, kept_back=True, paused=True), 1, Verdict.NOT_NOW),
        (HELD, 1, Verdict.ELSEWHERE),
        (changed(HELD, holder="me"), 1, Verdict.OURS),
        (changed(HELD, holder="me", stale=True), 1, Verdict.OURS),  # its own beats decide whether it may go on
        (changed(HELD, stale=True), 1, Verdict.STALE),
        (changed(HELD, stale=None), 1, Verdict.ELSEWHERE),
        (changed(HELD, state="CLAIMED"), 0, Verdict.ELSEWHERE),
        (changed(HELD, state="CLAIMED", stale=True), 0, Verdict.STALE),
        *((changed(WAITS, state=str(state)), 1, Verdict.OVER) for state in sorted(TASK_TERMINAL_STATES)),
    ],
)  # fmt: skip
def test_the_table(facts: Facts | None, fence: int, verdict: Verdict) -> None:  # N1 N7
    assert judge(facts, fence=fence, worker_id="me", names={"work"}) is verdict


def test_a_task_whose_arguments_this_worker_does_not_understand_is_for_others() -> None:  # J2
    assert judge(WAITS, fence=1, worker_id="me", names={"work"}, is_understood=False) is Verdict.FOREIGN
    assert judge(HELD, fence=1, worker_id="w1", names={"work"}, is_understood=False) is Verdict.OURS


def test_what_still_has_to_run_and_nobody_alive_holds_is_never_acknowledged() -> None:
    """But for what waits for a later moment, of which the outbox tells again, or for somebody to resume it, which tells all workers."""
    for holder, stale in ((None, None), ("other", True)):
        for kept_back, names in itertools.product((False, True), ({"work"}, set[str]())):
            state = "PENDING" if holder is None else "RUNNING"
            facts = Facts(
                "work", state, 1, due=True, paused=False, kept_back=kept_back, holder=holder, stale=stale
            )
            assert judge(facts, fence=1, worker_id="me", names=names) not in ACKNOWLEDGED
