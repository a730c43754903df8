"""Tasks that failed lately: how many, of what, and the check of `doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.domain.duration import spelled
from everbeat.domain.explanation import counted
from everbeat.domain.outcome import TaskError, shown_code

LOOKED_AT_S: Final = 600
MOST_FAILURES: Final = 1_000
_MOST_NAMED: Final = 5


class RecentFailures(msgspec.Struct, frozen=True):
    """Failures of one task function with one code and class of exception; `since_s`: how long ago the first of them was."""

    name: str
    code: str
    type: str
    count: int
    since_s: float


def judge_failures(found: Sequence[RecentFailures]) -> Check:
    """Whether tasks ended FAILED lately. `found`: the most frequent kind first."""
    window = spelled(LOOKED_AT_S)
    if not found:
        return Check(CheckCode.FAILURES, Verdict.OK, f"no task failed in the last {window}")
    total = sum(each.count for each in found)
    since_s = max(each.since_s for each in found)
    kinds = [
        f"{each.name}: {shown_code(TaskError(each.code or '?', type=each.type))} {each.count:,} times, since {spelled(round(each.since_s))} ago"
        for each in found[:_MOST_NAMED]
    ]
    if (others := len(found) - _MOST_NAMED) > 0:
        kinds.append(f"and {counted(others, 'more kind')}")
    if total >= MOST_FAILURES:
        head = f"more than {total - 1:,} tasks failed in the last {spelled(max(1, round(since_s)))}"
    else:
        head = f"{counted(total, 'task')} failed in the last {window}"
    rate = f"{total / max(since_s, 1.0):.2g} a second since the first"
    fix = "everbeat tasks list --state failed, then everbeat explain ID; the log of the workers has each traceback."
    return Check(CheckCode.FAILURES, Verdict.WARN, f"{head} ({rate}): {'; '.join(kinds)}", fix)
