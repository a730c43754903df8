"""An operator's sweep or release from any program, by a thread or on a loop.

What lives here: reading the options, and making what is needed. What may not: the work (`services.sweep`, `services.release`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everbeat.assembly.parts import Surroundings
from everbeat.config import RecoveryConfig
from everbeat.domain.checks import instance_of, sequence_of, switch
from everbeat.domain.duration import Duration, spelled, to_milliseconds
from everbeat.domain.hooks import HookSet
from everbeat.domain.inspection import SweepResult
from everbeat.domain.settings import refused
from everbeat.runtime.identity import new_id
from everbeat.services.planned_hooks import PlannedHooks
from everbeat.services.recovery import Recoverer
from everbeat.services.release import release
from everbeat.services.sweep import sweep
from everbeat.store.plan import Plan, PlannedStatements, planned


class Operator:
    """Recovers on an operator's word; the hooks of the app are called in this process."""

    def __init__(self, recovery: RecoveryConfig, *, channel: str, hooks: HookSet) -> None:
        self._around = Surroundings()
        self._config = recovery
        self._statements = PlannedStatements()
        self._id = new_id()
        self._recoverer = Recoverer(
            self._statements,
            recovery,
            channel=channel,
            observer_id=lambda: self._id,
            events=self._around.events,
            clock=self._around.clock,
            random=self._around.random,
            hooks=PlannedHooks(hooks, timeout_s=recovery.hook_timeout_ms / 1_000, events=self._around.events),
        )

    def sweep(self, *, threshold_ms: int | None, dry_run: bool) -> Plan[SweepResult]:
        """One sweep."""
        return planned(
            lambda: sweep(
                self._statements,
                self._config,
                recoverer=self._recoverer,
                threshold_ms=threshold_ms,
                dry_run=dry_run,
                random=self._around.random,
                sweeper_id=self._id,
            )
        )

    def release(self, worker_ids: Sequence[str]) -> Plan[SweepResult]:
        """Ends these workers."""
        return planned(lambda: release(self._statements, worker_ids, recoverer=self._recoverer))


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
    """One sweep; None takes the configuration's value. Raises ConfigurationError before anything is asked."""
    switch(dry_run, subject="dry_run")
    given = {
        "resilient_task_flags": resilient_task_flags,
        "resilient_sweep_threshold_multiplier": resilient_sweep_threshold_multiplier,
        "recovery_delay_ms": _milliseconds(recovery_delay, "recovery_delay"),
    }
    config = recovery.replace(**{name: value for name, value in given.items() if value is not None})
    threshold_ms = _threshold(sweep_threshold, config)
    return Operator(config, channel=channel, hooks=hooks).sweep(threshold_ms=threshold_ms, dry_run=dry_run)


def release_plan(
    recovery: RecoveryConfig, worker_ids: Sequence[str], *, channel: str, hooks: HookSet
) -> Plan[SweepResult]:
    """Ends these workers. Raises ConfigurationError before anything is asked, UnknownName before anything is done."""
    ids: tuple[str, ...] = sequence_of(instance_of(str), shortest=1, longest=10_000)(
        worker_ids, subject="release_workers.worker_ids"
    )
    return Operator(recovery, channel=channel, hooks=hooks).release(ids)


def _threshold(given: Duration | None, config: RecoveryConfig) -> int | None:
    threshold_ms = _milliseconds(given, "sweep_threshold")
    beat_ms = config.beat_interval_ms
    if threshold_ms is not None and threshold_ms < 2 * beat_ms:
        least = spelled(2 * beat_ms / 1_000)
        raise refused(
            given,
            subject="sweep_threshold",
            code="THRESHOLD_TOO_LOW",
            rule=f"must be at least two heartbeat intervals ({least}): who only waits for the next beat is not dead",
            fix=f"use {least} or more, name the app whose workers beat faster, or end workers by name with release_workers",
            shell_fix=f"use {least} or more, give --app if its workers beat faster, or end workers by name: everbeat workers release",
        )
    return threshold_ms


def _milliseconds(given: Duration | None, subject: str) -> int | None:
    return None if given is None else to_milliseconds(given, subject=subject)
