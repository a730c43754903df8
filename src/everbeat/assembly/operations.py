"""Plans for an operator's sweeps, releases and pruning. Any program can execute a plan, in a thread or on an event loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final
from uuid import uuid4

from everbeat.config import RecoveryConfig
from everbeat.domain.bulk_actions import Operator
from everbeat.domain.inspection import PruneResult, SweepResult
from everbeat.domain.recovery.hooks import HookSet
from everbeat.domain.settings.checks import sequence_of, sought, switch
from everbeat.domain.settings.settings import refused
from everbeat.domain.settings.units import Duration, spelled_duration, to_milliseconds
from everbeat.errors.wording import amount
from everbeat.maintenance.cleanup import prune
from everbeat.maintenance.counting import count_old
from everbeat.recovering.hooks import PlannedHooks
from everbeat.recovering.observer import NoObserver, RecoveryEnvironment
from everbeat.recovering.recoverer import Recoverer
from everbeat.recovering.sweep import Sweep, release
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.environment import logging_environment
from everbeat.runtime.identity import new_id
from everbeat.store import audit
from everbeat.store.plan import Plan, PlannedStatements, ask, planned

RETENTIONS: Final = (
    "terminal_record_retention_hours",
    "worker_state_retention_hours",
    "heartbeat_retention_hours",
)
"""The settings that say how long records are kept."""


def _recoverer(recovery: RecoveryConfig, *, channel: str, hooks: HookSet) -> Recoverer:
    """Return the recoverer for an operator's command. The recoverer calls the app's hooks in this process."""
    process = logging_environment()
    return Recoverer(
        RecoveryEnvironment(
            statements=PlannedStatements(),
            config=recovery,
            channel=channel,
            observer=NoObserver(new_id()),
            events=process.events,
            clock=process.clock,
            random=process.random,
            hooks=PlannedHooks(hooks, timeout_s=recovery.hook_timeout_ms / 1_000, events=process.events),
        )
    )


def sweep_plan(
    recovery: RecoveryConfig,
    *,
    channel: str,
    hooks: HookSet,
    dry_run: bool,
    sweep_threshold: Duration | None,
    recovery_delay: Duration | None,
    resilient_task_flags: Collection[str] | None,
    resilient_sweep_threshold_multiplier: int | None,
) -> Plan[SweepResult]:
    """Return a plan for one sweep. For each argument that is None, the configured value applies.

    Raises ConfigurationError at once if an argument is invalid.
    """
    switch(dry_run, subject="dry_run")
    given = {
        "resilient_task_flags": resilient_task_flags,
        "resilient_sweep_threshold_multiplier": resilient_sweep_threshold_multiplier,
        "recovery_delay_ms": _milliseconds(recovery_delay, "recovery_delay"),
    }
    config = recovery.replace(**{name: value for name, value in given.items() if value is not None})
    threshold_ms = _threshold(sweep_threshold, config)
    once = Sweep(_recoverer(config, channel=channel, hooks=hooks), threshold_ms=threshold_ms)
    return planned(once.preview if dry_run else once.run)


def release_plan(
    recovery: RecoveryConfig, worker_ids: Sequence[str], *, channel: str, hooks: HookSet
) -> Plan[SweepResult]:
    """Return a plan that declares these workers dead and recovers their tasks.

    Raises ConfigurationError at once if the ids are invalid. The plan raises UnknownName, without changing anything, if a worker
    does not exist.
    """
    ids: tuple[str, ...] = sequence_of(sought, shortest=1, longest=10_000)(
        worker_ids, subject="release_workers.worker_ids"
    )
    recoverer = _recoverer(recovery, channel=channel, hooks=hooks)
    return planned(lambda: release(recoverer, ids))


def _threshold(given: Duration | None, config: RecoveryConfig) -> int | None:
    threshold_ms = _milliseconds(given, "sweep_threshold")
    beat_ms = config.beat_interval_ms
    if threshold_ms is not None and threshold_ms < 2 * beat_ms:
        least = spelled_duration(2 * beat_ms / 1_000)
        raise refused(
            given,
            subject="sweep_threshold",
            code="THRESHOLD_TOO_LOW",
            rule=f"must be at least two heartbeat intervals ({least}): a worker that only waits for its next beat is not dead",
            fix=f"use {least} or more, name the app whose workers beat faster, or release workers by id with release_workers",
            shell_fix=f"use {least} or more, give --app if its workers beat faster, or release workers by id: everbeat workers release",
        )
    return threshold_ms


def _milliseconds(given: Duration | None, subject: str) -> int | None:
    return None if given is None else to_milliseconds(given, subject=subject)


def prune_plan(
    recovery: RecoveryConfig, *, dry_run: bool, operator: Operator | None = None
) -> Plan[PruneResult]:
    """Return a plan that deletes rows that are older than the retention periods in `recovery`. If `dry_run` is true, the plan only
    counts them.

    The audit log contains the start and the end under the name of the operator, if one is given. Pruning consists of many transactions, so
    a process that is killed leaves only the start.
    """
    statements = PlannedStatements()
    if dry_run:
        return planned(lambda: count_old(statements, recovery))
    plan = planned(lambda: prune(statements, recovery, clock=SystemClock()))
    return plan if operator is None else _noted_prune(plan, recovery, operator)


def _noted_prune(plan: Plan[PruneResult], recovery: RecoveryConfig, operator: Operator) -> Plan[PruneResult]:
    kept = {name: getattr(recovery, name) for name in RETENTIONS}
    note = ", ".join(f"{name}={hours}" for name, hours in kept.items() if hours is not None)
    yield from ask(audit.record(operator, "prune", outcome="requested", note=note, call=uuid4()))
    found = yield from plan
    total = f"{amount(found.total, 'row')} deleted"
    yield from ask(
        audit.record(operator, "prune", affected=found.tasks, outcome="completed", note=total, call=uuid4())
    )
    return found
