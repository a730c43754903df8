"""Supervisors that cannot start a worker process: the reason as it is stored, the check of `doctor`, the reasons of `explain`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.domain.explanation import FailingStart, Reason, ReasonCode, counted
from everbeat.domain.stored_text import storable
from everbeat.errors.wording import some

_LONGEST_TEXT: Final = 500
_LONGEST_READ: Final = 5_000
"""Ten times what is stored: a cut here leaves no part of a URL in the stored text."""
_MOST_NAMED: Final = 3
_LOGINS: Final = re.compile(r"(?<=://)\S*@")
_SECRETS: Final = re.compile(r"(?i)((?:password|passwd|secret|token)['\"]?\s*[=:]\s*)\S+")


class StartProblem(msgspec.Struct, frozen=True):
    """Why a supervisor cannot start a worker process; `since` the first failure in a row, by its monotonic clock."""

    text: str
    since: float


def start_problem_text(message: str) -> str:
    """Return the first paragraph of a message on one line, short and without what looks like a password.

    User code that is imported may put anything into its exceptions, also the URL of a service with its password.
    """
    line = " ".join(message[:_LONGEST_READ].strip().partition("\n\n")[0].split())
    return storable(_SECRETS.sub(r"\1***", _LOGINS.sub("***@", line)), limit=_LONGEST_TEXT)


def judge_starts(found: Sequence[FailingStart]) -> Check:
    """Whether every live supervisor can start worker processes."""
    if not found:
        return Check(CheckCode.STARTS, Verdict.OK, "every live supervisor can start worker processes")
    named = [
        f"supervisor {each.supervisor_id} (pid {each.pid} on {each.hostname}, {_crew(each)}): {each.problem}"
        for each in found
    ]
    text = f"supervisors cannot start worker processes: {some(named)}"
    fix = (
        "repair what the reason names, or deploy the previous version again. The supervisor tries again every 30 s at the latest, or"
        f" restart it: kill -TERM {found[0].pid} on {found[0].hostname}; its log has the traceback."
    )
    return Check(CheckCode.STARTS, Verdict.FAIL, text, fix)


def why_not_started(found: Sequence[FailingStart]) -> Iterator[Reason]:
    """The supervisors that might have workers for a task which no live worker can run."""
    for number, each in enumerate(found[:_MOST_NAMED], start=1):
        text = f"supervisor {each.supervisor_id} (pid {each.pid}) on {each.hostname} cannot start a worker process: {each.problem}"
        others = len(found) - _MOST_NAMED if number == _MOST_NAMED else 0
        yield Reason(
            code=ReasonCode.WORKER_NOT_STARTED,
            text=f"{text}; and {counted(others, 'more supervisor')} cannot" if others > 0 else text,
            since=each.since,
            blocked_by=each.supervisor_id,
            command="everbeat workers",
        )


def _crew(start: FailingStart) -> str:
    wanted = "" if start.processes is None else f" of {start.processes}"
    return f"with {start.workers}{wanted} workers"
