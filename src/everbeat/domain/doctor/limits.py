"""The check of limits: whether each gate has a limit, and whether the waiting tasks can ever start."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct

from everbeat.domain.doctor.findings import Check, CheckCode
from everbeat.domain.limit.model import OF_QUEUE, OF_TASK, limit_of
from everbeat.errors.wording import brief_duration, some

SET_MS: Final = 86_400_000
"""A limit that an operator set longer ago than this, without an end, was probably forgotten."""
_MOST_NAMES: Final = 5


class SetLimit(Struct, frozen=True):
    """A limit that an operator has set without an end, and the time since then in milliseconds."""

    name: str
    reason: str | None
    age_ms: int


class CostlyTask(Struct, frozen=True):
    """Waiting tasks that need more permits of a gate than its limit has. `bounds` are the numbers of the limit that are below the cost."""

    gate: str
    task: str
    cost: int
    bounds: tuple[Literal["concurrency", "burst", "rate"], ...] = ("concurrency",)


class LimitProblems(Struct, frozen=True):
    """The findings about limits for the doctor. `changes` is the number of noted changes that are committed."""

    undeclared: tuple[str, ...] = ()
    forgotten: tuple[SetLimit, ...] = ()
    costly: tuple[CostlyTask, ...] = ()
    changes: int = 0


def judge_limits(found: LimitProblems, *, unapplied: bool) -> Check:
    """Judge the limits. `unapplied` means that changes of lines stay unapplied although workers are alive."""
    findings: list[tuple[str, str]] = []
    if unapplied:
        text = f"{found.changes:,} changes of limited or serial tasks are not applied, so permits stay in use, although workers are alive"
        findings.append((text, "find what holds a lock: everbeat doctor reports it as LOCKS."))
    if found.undeclared:
        names = sorted({limit_of(each) for each in found.undeclared})
        text = f"tasks wait for limits or hold permits of limits that do not exist, so nothing limits them: {_some(names)}"
        kinds = sorted({_declaration(each) for each in names})
        findings.append((text, f"start a worker whose code declares them with {' and '.join(kinds)}."))
    if found.costly:
        names = [f"{each.task} needs {each.cost:,} of {each.gate}" for each in found.costly]
        text = f"tasks need more permits than their limit has, so they never start: {_some(names)}"
        findings.append((text, f"raise the limit: {_raising(found.costly[0])}, or cancel the tasks."))
    if found.forgotten:
        names = [f"{each.name} ({_age(each)})" for each in found.forgotten]
        text = f"operators set these limits more than a day ago, without an end: {_some(names)}"
        findings.append(
            (text, f"restore the numbers of the code: everbeat limits clear {shlex.quote(found.forgotten[0].name)}.")
        )  # fmt: skip
    if not findings:
        return CheckCode.LIMITS.ok("every limit of a waiting task exists and can be met")
    text = "; ".join(each for each, _ in findings)
    fix = " ".join(
        each if at == 0 else f"{each[0].upper()}{each[1:]}" for at, (_, each) in enumerate(findings)
    )
    return CheckCode.LIMITS.warn(text, fix)


def _declaration(limit: str) -> str:
    """Return the option of the code that declares this limit."""
    if limit.startswith(OF_TASK):
        return "@app.task(concurrency=...)"
    return "QueueConfig(concurrency=...)" if limit.startswith(OF_QUEUE) else "App(limits=...)"


def _raising(costly: CostlyTask) -> str:
    """Return the command that lets the tasks start."""
    numbers = {bound: str(costly.cost) for bound in costly.bounds}
    if "rate" in numbers:
        numbers["rate"] = f"{costly.cost}/PERIOD"
    options = " ".join(f"--{bound} {number}" for bound, number in numbers.items())
    return f"everbeat limits set {shlex.quote(limit_of(costly.gate))} {options}"


def _age(each: SetLimit) -> str:
    return brief_duration(each.age_ms / 1_000)


def _some(names: Sequence[str]) -> str:
    return some(list(names), limit=_MOST_NAMES)
