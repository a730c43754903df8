"""The check of bulk actions: whether supervisors carry them out, and whether one failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from everbeat.domain.bulk_actions import BulkProblem, BulkState
from everbeat.domain.doctor.findings import Check, CheckCode
from everbeat.errors.wording import amount, brief_duration, some

_MOST_NAMED: Final = 3


def judge_bulk_actions(found: Sequence[BulkProblem]) -> Check:
    """Judge whether each bulk action that has not ended makes progress, and whether an action failed within a day."""
    stuck = [each for each in found if each.state != BulkState.FAILED]
    if stuck:
        first = stuck[0]
        still = brief_duration(first.still_s)
        named = some([f"{each.id} ({each.action})" for each in stuck], limit=_MOST_NAMED)
        because = "" if first.problem is None else f", because of: {first.problem}"
        text = (
            f"{amount(len(stuck), 'bulk action')} made no progress, the first for {still}{because}: {named}"
        )
        return CheckCode.BULK_ACTIONS.fail(
            text,
            "start a worker whose version is not older than the program that requested it, or stop it with 'everbeat bulk cancel ID'.",
        )
    if found:
        named = some([f"{each.id} ({each.action})" for each in found], limit=_MOST_NAMED)
        text = f"{amount(len(found), 'bulk action')} failed within a day: {named}; the first because of: {found[0].problem}"
        return CheckCode.BULK_ACTIONS.warn(text, f"see how far it came: everbeat bulk show {found[0].id}.")
    return CheckCode.BULK_ACTIONS.ok("all bulk actions make progress")
