"""What becomes of a lease whose holder died: one pure decision for every way to notice a death.

What lives here: the facts, the rules and the five decisions. What may not: how a death is noticed, and carrying out.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import Final, TypeAlias

from msgspec import Struct

from everbeat.domain.duration import milliseconds
from everbeat.domain.policy import StoredPolicy


class Charge(StrEnum):
    """What a death under running code costs the task."""

    CRASH = "crash"
    """Its process died under it alone: the code itself is suspected."""
    LOSS = "loss"
    """Its holder vanished, or died under several tasks: nobody knows whose fault it was."""


class LeaseFacts(Struct, frozen=True, kw_only=True):
    """What a decision needs to know of a dead lease; `started`: its code was running; `alone`: in a process of its own.

    `stalled`: its process lives, but its code reported no progress for its stall_timeout. `process_deaths`: how many processes ended under
    its code before.
    """

    started: bool
    policy: StoredPolicy
    retry_count: int = 0
    crash_count: int = 0
    loss_count: int = 0
    cancel_requested: bool = False
    alone: bool = False
    stalled: bool = False
    process_deaths: int = 0


class Blame(Struct, frozen=True, kw_only=True):
    """What is known of whose fault a death was.

    `of_the_code`: the process died as code makes it die (SIGSEGV, SIGBUS, SIGILL, SIGABRT, an exit code, out of memory, a
    hang). `of_the_process`: the process itself ended, for no reason of ours, while its supervisor lived. A lost host, container
    or supervisor is no such death.
    """

    of_the_code: bool = False
    of_the_process: bool = False


NOBODYS: Final = Blame()


class RecoveryRules(Struct, frozen=True, kw_only=True):
    """What the finder's configuration says; the caps hold for tasks whose own policy names none.

    The delay is the least one; chance adds up to `delay_jitter` of it, so that a herd is spread.
    """

    requeue_claimed: bool = True
    settle_running: bool = True
    delay_ms: int = 0
    delay_jitter: float = 0.2
    max_crashes: int = 3
    max_losses: int = 10


class Requeue(Struct, frozen=True):
    """Its code never started: back to its place in the queue, at no cost; `delay_ms` from now if given."""

    delay_ms: int | None


class Retry(Struct, frozen=True):
    """Its policy runs it again, in `delay_ms`. `suspect`: alone in a process, since it may be what killed the last one."""

    delay_ms: int
    suspect: bool = False


class Fail(Struct, frozen=True):
    """It is not run again. `poison`: because it has used up its crashes or losses."""

    poison: bool


class Cancel(Struct, frozen=True):
    """A cancel was requested: never a retry."""


class Leave(Struct, frozen=True):
    """Recovery of this state is switched off: an operator resolves it."""


Decision: TypeAlias = Requeue | Retry | Fail | Cancel | Leave


def decide(
    facts: LeaseFacts, *, rules: RecoveryRules, charge: Charge | None, random: Random, blame: Blame = NOBODYS
) -> Decision:
    """What becomes of one dead lease."""
    if not (rules.settle_running if facts.started else rules.requeue_claimed):
        return Leave()
    if facts.cancel_requested:
        return Cancel()
    if not facts.started:
        return Requeue(spread(rules, random) or None)
    if is_exhausted(facts, rules=rules, charge=charge):
        return Fail(poison=True)
    policy = facts.policy
    suspect = is_suspicious(facts, blame=blame)
    if is_listed(facts):
        own_ms = milliseconds(policy.delay(facts.retry_count + 1, random))
        return Retry(max(spread(rules, random), own_ms), suspect)
    if is_left_to_on_crash(facts):
        return Retry(spread(rules, random), suspect)
    return Fail(poison=False)


def is_listed(facts: LeaseFacts) -> bool:
    """Whether the policy has a retry left for this very end."""
    return _lists(facts) and facts.retry_count < facts.policy.max_retries


def is_left_to_on_crash(facts: LeaseFacts) -> bool:
    """Whether `on_crash` runs it again when no listed retry does. The app's default decides only on ends that the task does not list."""
    policy = facts.policy
    return policy.on_crash == "retry" and not (policy.retries_bound and _lists(facts))


def _lists(facts: LeaseFacts) -> bool:
    return facts.policy.retries_stall if facts.stalled else facts.policy.retries_crash


def spread(rules: RecoveryRules, random: Random) -> int:
    """The recovery delay of one task in ms: never less than the rules say."""
    return rules.delay_ms + round(rules.delay_ms * rules.delay_jitter * random.random())


def charge_of(facts: LeaseFacts, *, sharers: int) -> Charge:
    """What the death of a worker process costs a task; `sharers`: how many tasks ran in that very process."""
    return Charge.CRASH if facts.started and not facts.alone and sharers == 1 else Charge.LOSS


def charge_of_stall(facts: LeaseFacts, *, charge: Charge) -> Charge | None:
    """What a stall costs; one that the policy lists, or that ends the task, is a failure like any other."""
    return None if is_listed(facts) or not is_left_to_on_crash(facts) else charge


def is_suspicious(facts: LeaseFacts, *, blame: Blame) -> bool:
    """Whether started code may have killed its process: one that died of code, or the second process that ended under it.

    The loss of a whole tree is no evidence against the code. A task that ran in a process of its own is judged by its crashes.
    """
    if facts.alone or not facts.started:
        return False
    return blame.of_the_code or (blame.of_the_process and facts.process_deaths >= 1)


def is_exhausted(facts: LeaseFacts, *, rules: RecoveryRules, charge: Charge | None) -> bool:
    """Whether this death is the last one that the task is allowed."""
    policy = facts.policy
    match charge:
        case Charge.CRASH:
            return facts.crash_count + 1 >= (policy.max_crashes or rules.max_crashes)
        case Charge.LOSS:
            return facts.loss_count + 1 >= (policy.max_losses or rules.max_losses)
        case None:
            return False
