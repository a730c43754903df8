"""Tasks that no live worker can run with their arguments: the reason of `explain`, the check of `doctor`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.domain.explanation import Reason, ReasonCode, Waiting, counted
from everbeat.domain.needs import Knowing, Marked, Misfit, Needs, misfits
from everbeat.errors.wording import some

_MOST_NAMES: Final = 10
_MOST_WORKERS: Final = 3
_LONGEST_NAME: Final = 100


def why_unfit(waiting: Waiting) -> Iterator[Reason]:
    """The reason of a task whose name live workers know, if none of them can run it with its arguments."""
    if waiting.needs is None or not waiting.misfits:
        return
    lack = _lack(waiting.needs, waiting.misfits, names_workers=True)
    fix = _remedy(waiting.needs, waiting.misfits)
    yield Reason(
        code=ReasonCode.NEEDS_OTHER_CODE,
        text=f"no live worker can run it with its arguments: {lack}; {fix}, or cancel the task",
        blocked_by=_quoted(waiting.needs.other or (*_unknown(waiting.misfits), *_missing(waiting.misfits))),
        command="everbeat worker MODULE:APP",
    )


def others_unfit(waiting: Waiting) -> str:
    """The live workers that pass over a task which others can run, as the end of a sentence."""
    if waiting.needs is None or not waiting.misfits:
        return ""
    unfit = {worker for each in waiting.misfits for worker in each.workers}
    fit = sorted(worker for each in waiting.registered for worker in each.workers if worker not in unfit)
    lack = _lack(waiting.needs, waiting.misfits, names_workers=True)
    return f"; its arguments fit only {some(fit, limit=_MOST_WORKERS)}: {lack}"


def judge_needs(marked: Sequence[Marked], crew: Sequence[Knowing]) -> Check:
    """Whether a live worker fits every marked task whose name live workers of its queue know."""
    found: list[tuple[Marked, tuple[Misfit, ...]]] = []
    for each in sorted(marked, key=lambda one: -one.waiting):
        known = [
            one.registered
            for one in crew
            if one.name == each.name and (one.queues is None or each.queue in one.queues)
        ]
        unfit = misfits(each.needs, known)
        if unfit and _workers(unfit) == sum(len(one.workers) for one in known):
            found.append((each, unfit))
    if not found:
        return Check(CheckCode.NEEDS, Verdict.OK, "no task waits for workers with other code")
    told = [
        f"{each.name} ({each.waiting:,} in queue {each.queue}): {_lack(each.needs, unfit)}"
        for each, unfit in found
    ]
    text = f"tasks wait that no live worker can run with their arguments: {some(told, limit=_MOST_NAMES)}"
    first, unfit = found[0]
    waiting = f"everbeat tasks list --state pending --name {shlex.quote(first.name)}"
    fix = f"{_remedy(first.needs, unfit)}, or cancel the tasks: {waiting}."
    return Check(CheckCode.NEEDS, Verdict.WARN, text, fix)


def _lack(needs: Needs, found: Sequence[Misfit], *, names_workers: bool = False) -> str:
    """What workers lack, as a clause."""
    if needs.other:
        return f"it needs {_quoted(needs.other)}, which this version of everbeat does not know"
    return ", and ".join(_lack_of(each, names_workers=names_workers) for each in found)


def _lack_of(each: Misfit, *, names_workers: bool) -> str:
    who = counted(len(each.workers), "live worker")
    if names_workers:
        who += f" ({some(each.workers, limit=_MOST_WORKERS)})"
    is_one = len(each.workers) == 1
    parts: list[str] = []
    if each.unknown:
        parts.append(f"{'does' if is_one else 'do'} not take {_quoted(each.unknown)}")
    if each.missing:
        parts.append(
            f"{'requires' if is_one else 'require'} {_quoted(each.missing)}, which is not among its arguments"
        )
    return f"{who} {' and '.join(parts)}"


def _remedy(needs: Needs, found: Sequence[Misfit]) -> str:
    if needs.other:
        return "start workers with a newer version of everbeat"
    unknown, missing = _unknown(found), _missing(found)
    parts: list[str] = []
    if unknown:
        parts.append(f"takes {_quoted(unknown)}")
    if missing:
        parts.append(f"does not require {_quoted(missing)}")
    return f"deploy the version that {' and '.join(parts)}"


def _unknown(found: Sequence[Misfit]) -> list[str]:
    return sorted({name for each in found for name in each.unknown})


def _missing(found: Sequence[Misfit]) -> list[str]:
    return sorted({name for each in found for name in each.missing})


def _workers(found: Sequence[Misfit]) -> int:
    return sum(len(each.workers) for each in found)


def _quoted(names: Sequence[str]) -> str:
    return some([repr(name[:_LONGEST_NAME]) for name in names], limit=_MOST_NAMES)
