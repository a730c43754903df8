"""What becomes of a lease whose holder died: one pure decision for every way to notice a death.

What lives here: the facts, the rules and the five decisions. What may not: how a death is noticed, and carrying out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeAlias

from everbeat.domain.duration import milliseconds
from everbeat.domain.policy import StoredPolicy


class Charge(StrEnum):
    """What a death under running code costs the task."""

    CRASH = "crash"
    """Its process died under it alone: the code itself is suspected."""
    LOSS = "loss"
    """Its holder vanished, or died under several tasks: nobody knows whose fault it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFacts:
    """What a decision needs to know of a dead lease; `started`: its code was running."""

    started: bool
    policy: StoredPolicy
    retry_count: int = 0
    crash_count: int = 0
    loss_count: int = 0
    cancel_requested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRules:
    """What the finder's configuration says; the caps hold for tasks whose own policy names none."""

    requeue_claimed: bool = True
    settle_running: bool = True
    delay_ms: int = 0
    max_crashes: int = 3
    max_losses: int = 10


@dataclass(frozen=True, slots=True)
class Requeue:
    """Its code never started: back to its place in the queue, at no cost; `delay_ms` from now if given."""

    delay_ms: int | None


@dataclass(frozen=True, slots=True)
class Retry:
    """Its policy runs it again, in `delay_ms`."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class Fail:
    """It is not run again. `poison`: because it has used up its crashes or losses."""

    poison: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """A cancel was requested: never a retry."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Recovery of this state is switched off: an operator resolves it."""


Decision: TypeAlias = Requeue | Retry | Fail | Cancel | Leave


def decide(facts: LeaseFacts, *, rules: RecoveryRules, charge: Charge, random: Random) -> Decision:
    """What becomes of one dead lease."""
    if not (rules.settle_running if facts.started else rules.requeue_claimed):
        return Leave()
    if facts.cancel_requested:
        return Cancel()
    if not facts.started:
        return Requeue(rules.delay_ms or None)
    if is_exhausted(facts, rules=rules, charge=charge):
        return Fail(poison=True)
    policy = facts.policy
    if policy.retries_crash and facts.retry_count < policy.max_retries:
        return Retry(max(rules.delay_ms, milliseconds(policy.delay(facts.retry_count + 1, random))))
    if policy.on_crash == "retry":
        return Retry(rules.delay_ms)
    return Fail(poison=False)


def is_exhausted(facts: LeaseFacts, *, rules: RecoveryRules, charge: Charge) -> bool:
    """Whether this death is the last one that the task is allowed."""
    policy = facts.policy
    match charge:
        case Charge.CRASH:
            return facts.crash_count + 1 >= (policy.max_crashes or rules.max_crashes)
        case Charge.LOSS:
            return facts.loss_count + 1 >= (policy.max_losses or rules.max_losses)
