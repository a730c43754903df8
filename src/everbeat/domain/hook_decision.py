"""What a hook's answer means for a dead lease: the ordinary decision, unless the answer says otherwise and may.

What lives here: the rules above the answers. What may not: asking.
"""

from __future__ import annotations

import math
from random import Random
from typing import Final, TypeAlias

from msgspec import Struct

from everbeat.domain.duration import When, milliseconds
from everbeat.domain.hooks import Default, FailWithBackoff, HookReply, NoAnswer, Reschedule, Skip
from everbeat.domain.recovery import (
    NOBODYS,
    Blame,
    Cancel,
    Charge,
    Decision,
    Fail,
    LeaseFacts,
    Leave,
    RecoveryRules,
    Requeue,
    Retry,
    decide,
    is_suspicious,
)

BACKOFF_RETRIES: Final = 25
_STEEPEST: Final = 10


class Rerun(Struct, frozen=True):
    """A hook said when it runs again; `attempts` replaces its retries, None counts as usual."""

    run_at: When
    attempts: int | None
    suspect: bool = False


ToldDecision: TypeAlias = Decision | Rerun


def decide_as_told(
    answer: HookReply,
    facts: LeaseFacts,
    *,
    rules: RecoveryRules,
    charge: Charge | None,
    random: Random,
    blame: Blame = NOBODYS,
) -> ToldDecision:
    """What becomes of one dead lease. A requested cancel and used up crashes or losses stand above every answer but Skip."""
    ordinary = decide(facts, rules=rules, charge=charge, random=random, blame=blame)
    match answer, ordinary:
        case Default() | NoAnswer(), _:
            return ordinary
        case Skip(), _:
            return Leave()
        case _, Cancel() | Leave() | Fail(poison=True):
            return ordinary
        case Reschedule(run_at=run_at, attempts=attempts), _:
            return Rerun(run_at, attempts, is_suspicious(facts, blame=blame))
        case FailWithBackoff(), _:
            return _backed_off(facts, random=random, blame=blame)
    return ordinary


def _backed_off(facts: LeaseFacts, *, random: Random, blame: Blame) -> Decision:
    policy, number = facts.policy, facts.retry_count + 1
    delay_s = policy.delay(number, random) if policy.intervals else math.exp(min(number, _STEEPEST))
    if not facts.started:
        return Requeue(milliseconds(delay_s))
    if facts.retry_count >= (policy.max_retries if policy.intervals else BACKOFF_RETRIES):
        return Fail(poison=False)
    return Retry(milliseconds(delay_s), is_suspicious(facts, blame=blame))
