"""An operator's sweep from any program, by a thread or on a loop.

What lives here: making what the sweep needs. What may not: the sweep (`services.sweep`).
"""

from __future__ import annotations

from collections.abc import Collection

from everbeat.assembly.parts import Surroundings
from everbeat.config import RecoveryConfig
from everbeat.domain.duration import Duration, to_milliseconds
from everbeat.domain.inspection import SweepResult
from everbeat.runtime.identity import new_id
from everbeat.services.recovery import Recoverer
from everbeat.services.sweep import sweep
from everbeat.store.plan import Plan, PlannedStatements, planned


def sweep_plan(
    recovery: RecoveryConfig,
    *,
    channel: str,
    dry_run: bool,
    sweep_threshold: Duration | None,
    recovery_delay: Duration | None,
    resilient_task_flags: Collection[str] | None,
    resilient_sweep_threshold_multiplier: int | None,
) -> Plan[SweepResult]:
    """One sweep; None takes the configuration's value. Raises ConfigurationError before anything is asked."""
    given = {
        "resilient_task_flags": resilient_task_flags,
        "resilient_sweep_threshold_multiplier": resilient_sweep_threshold_multiplier,
        "recovery_delay_ms": _milliseconds(recovery_delay, "recovery_delay"),
    }
    config = recovery.replace(**{name: value for name, value in given.items() if value is not None})
    around, statements, sweeper = Surroundings(), PlannedStatements(), new_id()
    recoverer = Recoverer(
        statements,
        config,
        channel=channel,
        observer_id=lambda: sweeper,
        events=around.events,
        clock=around.clock,
        random=around.random,
    )
    threshold_ms = _milliseconds(sweep_threshold, "sweep_threshold")
    return planned(
        lambda: sweep(
            statements,
            config,
            recoverer=recoverer,
            threshold_ms=threshold_ms,
            dry_run=dry_run,
            random=around.random,
        )
    )


def _milliseconds(given: Duration | None, subject: str) -> int | None:
    return None if given is None else to_milliseconds(given, subject=subject)
