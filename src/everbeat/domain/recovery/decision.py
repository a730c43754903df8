"""The decision about a lease whose holder has died, and the certificate that records the cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from random import Random
from typing import Any, Final, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

from everbeat.domain.recovery.hooks import Default, FailWithBackoff, HookReply, NoAnswer, Reschedule, Skip
from everbeat.domain.settings.units import When, milliseconds, spelled_duration
from everbeat.domain.task.policy import StoredPolicy
from everbeat.errors import TASK_STALLED, WORKER_CRASHED, TaskError
from everbeat.errors.wording import amount, brief_duration, spoken_way


class Charge(StrEnum):
    """How a death that occurred while the task was running is charged to the task."""

    CRASH = "crash"
    """The process died while running only this task, so the task's code is suspected."""
    LOSS = "loss"
    """The holder vanished, or died while running several tasks, so the cause is unknown."""


class LeaseFacts(Struct, frozen=True, kw_only=True):
    """The facts about a dead lease on which the decision is based.

    `started` means that the task's code was running, and `alone` that it was running in its own process. `stalled` means that
    the process is alive, but the code has reported no progress within its stall timeout. `process_deaths` counts the processes
    that died earlier while running the task's code.
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
    """Known facts about the cause of a death.

    `of_the_code` means that code can cause such a death: SIGSEGV, SIGBUS, SIGILL, SIGABRT, an exit code, out of memory, or a
    hang. `of_the_process` means that the process exited unexpectedly while its supervisor was alive. The loss of a host,
    container or supervisor counts as neither.
    """

    of_the_code: bool = False
    of_the_process: bool = False


NOBODYS: Final = Blame()


class RecoveryRules(Struct, frozen=True, kw_only=True):
    """The recovery settings of the recovering app. The caps in these settings apply to tasks whose own policy has no caps.

    `delay_ms` is the minimum delay. A random share of up to `delay_jitter` is added, so that tasks do not all return at once.
    """

    requeue_claimed: bool = True
    settle_running: bool = True
    delay_ms: int = 0
    delay_jitter: float = 0.2
    max_crashes: int = 3
    max_losses: int = 10


class Requeue(Struct, frozen=True):
    """Return a task whose code never started to its place in the queue, after `delay_ms` if set. The task is not charged."""

    delay_ms: int | None


class Retry(Struct, frozen=True):
    """Run the task again after `delay_ms`, by its policy. A `suspect` runs alone in a process, because it might have killed its last process."""

    delay_ms: int
    suspect: bool = False


class Fail(Struct, frozen=True):
    """Fail the task without another run. `poison` means that the task has used up its crashes or losses."""

    poison: bool


class EndCancelled(Struct, frozen=True):
    """Cancel the task, because cancellation was requested."""


class Leave(Struct, frozen=True):
    """Leave the task to an operator, because recovery of tasks in this state is turned off."""


Decision: TypeAlias = Requeue | Retry | Fail | EndCancelled | Leave


def decide(
    facts: LeaseFacts, *, rules: RecoveryRules, charge: Charge | None, random: Random, blame: Blame = NOBODYS
) -> Decision:
    """Return the decision about the task of a dead lease."""
    if not (rules.settle_running if facts.started else rules.requeue_claimed):
        return Leave()
    if facts.cancel_requested:
        return EndCancelled()
    if not facts.started:
        return Requeue(jittered_delay_ms(rules, random) or None)
    if is_exhausted(facts, rules=rules, charge=charge):
        return Fail(poison=True)
    policy = facts.policy
    suspect = is_suspicious(facts, blame=blame)
    if is_listed(facts):
        own_ms = milliseconds(policy.delay(facts.retry_count + 1, random))
        return Retry(max(jittered_delay_ms(rules, random), own_ms), suspect)
    if is_left_to_on_crash(facts):
        return Retry(jittered_delay_ms(rules, random), suspect)
    return Fail(poison=False)


def is_listed(facts: LeaseFacts) -> bool:
    """Return whether the policy lists this failure and has a retry left."""
    return _lists(facts) and facts.retry_count < facts.policy.max_retries


def is_left_to_on_crash(facts: LeaseFacts) -> bool:
    """Return whether `on_crash` makes the task run again. The app's default applies only to failures that the task does not list."""
    policy = facts.policy
    return policy.on_crash == "retry" and not (policy.retries_bound and _lists(facts))


def _lists(facts: LeaseFacts) -> bool:
    return facts.policy.lists((TASK_STALLED if facts.stalled else WORKER_CRASHED,))


def jittered_delay_ms(rules: RecoveryRules, random: Random) -> int:
    """Return one task's recovery delay in milliseconds: the rules' `delay_ms` plus jitter."""
    return rules.delay_ms + round(rules.delay_ms * rules.delay_jitter * random.random())


def charge_of(facts: LeaseFacts, *, sharers: int) -> Charge:
    """Return the charge for the death of a worker process. `sharers` is the number of tasks that were running in that process."""
    return Charge.CRASH if facts.started and not facts.alone and sharers == 1 else Charge.LOSS


def charge_of_stall(facts: LeaseFacts, *, charge: Charge) -> Charge | None:
    """Return the charge for a stall, or None if the policy lists the stall or the task will not run again."""
    return None if is_listed(facts) or not is_left_to_on_crash(facts) else charge


def is_suspicious(facts: LeaseFacts, *, blame: Blame) -> bool:
    """Return whether started code might have killed its process. Either the code caused the death, or this is the second process that died with it.

    The loss of a whole tree is not evidence against the code. A task that ran in its own process is judged by its crash count.
    """
    if facts.alone or not facts.started:
        return False
    return blame.of_the_code or (blame.of_the_process and facts.process_deaths >= 1)


def is_exhausted(facts: LeaseFacts, *, rules: RecoveryRules, charge: Charge | None) -> bool:
    """Return whether this death uses up the allowed crashes or losses of the task."""
    policy = facts.policy
    match charge:
        case Charge.CRASH:
            return facts.crash_count + 1 >= (policy.max_crashes or rules.max_crashes)
        case Charge.LOSS:
            return facts.loss_count + 1 >= (policy.max_losses or rules.max_losses)
        case None:
            return False


BACKOFF_RETRIES: Final = 25
_STEEPEST: Final = 10


class Rerun(Struct, frozen=True):
    """Run the task again at the time that a hook returned. `attempts` replaces the task's retry count; None counts this retry as usual."""

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
    """Return the decision about a dead lease, given a hook's reply.

    A requested cancellation overrides every reply except Skip, and so do used-up crashes or losses.
    """
    ordinary = decide(facts, rules=rules, charge=charge, random=random, blame=blame)
    match answer, ordinary:
        case Default() | NoAnswer(), _:
            return ordinary
        case Skip(), _:
            return Leave()
        case _, EndCancelled() | Leave() | Fail(poison=True):
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


class DeathCertificate(Struct, frozen=True, kw_only=True):
    """A record of a death: the dead worker, the cause, and how the death was noticed. Times come from the database's clock.

    `noticed_after_ms` is counted from the event that `counted_from` returns, and is None if the time of that event is unknown.
    `poison` means that the task must not run again because of its `crash_count` or `loss_count`, which include this death.
    `last_rss_bytes` is the last known memory use of the process, and `last_progress` the last progress of the code. For an
    unregistered worker, unknown fields are None.
    """

    worker_id: str
    hostname: str | None
    pid: int | None
    supervisor_id: str | None
    cause: str
    exit_code: int | None
    signal: int | None
    out_of_memory: bool
    started_at: datetime | None
    last_beat: datetime
    detected_at: datetime
    noticed_by: str
    noticed_after_ms: int | None
    crash_count: int
    loss_count: int
    poison: bool
    last_rss_bytes: int | None = None
    last_progress: Mapping[str, Any] | None = None

    def error(self) -> TaskError:
        """Return the certificate as the error of its task."""
        return TaskError(WORKER_CRASHED, self.message(), self.data())

    def data(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return _as_json(self)

    def message(self) -> str:
        """Return one or two sentences for human readers."""
        verb = "was running this task" if self.started_at is not None else "had claimed this task"
        place = "not registered" if self.pid is None else f"pid {self.pid} on {self.hostname}"
        released = self.noticed_by == "operator"  # the worker might still be alive
        event = "an operator released it" if released else f"it died: {self.cause}"
        text = f"Worker {self.worker_id} ({place}) {verb} when {event}."
        if self.noticed_after_ms is not None:
            after = brief_duration(self.noticed_after_ms / 1_000)
            how = "That was" if released else f"It was noticed by {spoken_way(self.noticed_by)}"
            text += f" {how} {after} after {counted_from(self.noticed_by)}."
        if self.poison:
            text += (
                f" The task does not run again: {amount(self.crash_count, 'process', plural='processes')} died while running only this task,"
                f" {amount(self.loss_count, 'holder')} vanished."
            )
        return text


def _as_json(certificate: Struct) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in asdict(certificate).items()
    }


def counted_from(noticed_by: str) -> str:
    """Return the event from which `noticed_after_ms` is counted if the death was noticed in this way."""
    match noticed_by:
        case "child_exit":
            return "it ended"
        case "progress":
            return "the last sign of life of its code"
        case _:
            return "its last sign of life"


class Stall(Struct, frozen=True, kw_only=True):
    """How long running code has reported no progress, in seconds on the observer's clock, and the longest silence allowed.

    `loop_blocked` means that nothing else ran on the worker's event loop either.
    """

    silent_s: float
    timeout_s: float
    loop_blocked: bool = False

    @property
    def cause(self) -> str:
        """Return the cause as a phrase for logs and records."""
        cause = f"no progress for {spelled_duration(round(self.timeout_s, 3))}"
        return f"{cause}: the event loop of its worker is blocked" if self.loop_blocked else cause


class StallCertificate(Struct, frozen=True, kw_only=True):
    """A record of a stall: the worker whose code stalled, the length of the silence, and the last progress. Times come from the database's clock.

    `last_progress_at` is None if the code never reported progress. `poison` means that the task must not run again because
    of its `crash_count`, which includes this stall if it was charged.
    """

    worker_id: str
    hostname: str | None
    pid: int | None
    cause: str
    silent_for_s: float
    stall_timeout_s: float
    started_at: datetime | None
    last_progress_at: datetime | None
    stage: str | None
    fraction: float | None
    message: str | None
    detected_at: datetime
    noticed_by: str
    crash_count: int
    poison: bool

    def error(self) -> TaskError:
        """Return the certificate as the error of its task."""
        return TaskError(TASK_STALLED, self.summary(), self.data())

    def data(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return _as_json(self)

    def summary(self) -> str:
        """Return one or two sentences for human readers."""
        text = (
            f"The code ran but reported no progress for {brief_duration(self.silent_for_s)}, with {spelled_duration(self.stall_timeout_s)} allowed,"
            f" in worker {self.worker_id} (pid {self.pid} on {self.hostname})."
        )
        if self.last_progress_at is None:
            text += " It had reported no progress at all."
        else:
            text += (
                f" Its last progress was {self.stage!r}{'' if not self.message else f', {self.message!r}'}."
            )
        if self.poison:
            text += f" The task does not run again: {amount(self.crash_count, 'crash or stall is', plural='crashes and stalls are')} charged to it."
        return text


UNRESPONSIVE_S: Final = 10.0
"""A worker process that sends nothing to its supervisor for this many seconds is reported. Normally, each worker sends a report every second."""
_LEAST_KNOWN: Final = 3
_LEAST_SILENT: Final = 2


def is_mass(*, silent: int, known: int) -> bool:
    """Return whether the share of silent supervisors is too large for the supervisors themselves to be the cause."""
    return known >= _LEAST_KNOWN and silent >= _LEAST_SILENT and 2 * silent >= known
