"""Retention on an operator's word, from any program, by a thread or on a loop.

What lives here: making what the pass needs. What may not: the pass (`services.pruner`).
"""

from __future__ import annotations

from everbeat.config import RecoveryConfig
from everbeat.domain.retention import PruneResult
from everbeat.runtime.clock import SystemClock
from everbeat.services.pruner import count_old, prune
from everbeat.store.plan import Plan, PlannedStatements, planned


def prune_plan(recovery: RecoveryConfig, *, dry_run: bool) -> Plan[PruneResult]:
    """Deletes what is older than `recovery` keeps, or only counts it."""
    statements = PlannedStatements()
    if dry_run:
        return planned(lambda: count_old(statements, recovery))
    return planned(lambda: prune(statements, recovery, clock=SystemClock()))
