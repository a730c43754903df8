"""The metrics of a cluster: those that the database knows, once for all supervisors."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from operator import add
from typing import Final
from uuid import UUID

from msgspec.structs import replace

from everbeat.client.explaining import silence_rules
from everbeat.client.trees import states_of_trees
from everbeat.config import RecoveryConfig
from everbeat.domain.doctor.work import SWEEPS_MISSED
from everbeat.domain.explain.reasons import SilenceRules
from everbeat.domain.inspection import Pause, SupervisorInfo, WorkerInfo
from everbeat.domain.limit.inspection import LimitInfo
from everbeat.domain.metrics import names
from everbeat.domain.metrics.demand import RUNS_OF_S, mean_run_s, slots_wanted
from everbeat.domain.metrics.text import MetricsText, bounded
from everbeat.domain.pulse.judging import TreeState
from everbeat.domain.schedule.inspection import ScheduleInfo
from everbeat.domain.series import DepthBucket
from everbeat.domain.workflow.states import WorkflowState
from everbeat.store import (
    diagnosis,
    inspection,
    limits,
    migrations,
    schedules,
    series,
    tasks,
    workflow_control,
)
from everbeat.store.plan import Plan, ask

MOST_PROCESSES: Final = 10_000
_FRESH_S: Final = 60.0
_STUCK_MS: Final = 60_000
_STUCK_PAGE: Final = 1_000
_TASK_STATES: Final = ("due", "scheduled", "suspended", "claimed", "running")
_WORKER_STATES: Final = ("live", "late", "draining", "suspect")
_ALL: Final = "all"


def cluster_metrics(
    config: RecoveryConfig, *, schema: str, version: str, known_queues: Collection[str] = ()
) -> Plan[MetricsText]:
    """Return the metrics of the cluster, from statements that an index serves. `version` is that of everbeat.

    `known_queues` are present even if they are empty, so that no series stops at its last value.
    """
    stale_ms = config.claimed_stale_threshold_ms
    found = MetricsText()
    add_build_info(found, version=version)
    pauses = yield from ask(tasks.pauses())
    _, served = yield from ask(diagnosis.known_names(stale_ms=stale_ms))
    paused_queues = {each.name for each in pauses if each.kind == "queue"}
    depths = yield from queue_depths()
    now = yield from ask(inspection.read_clock())
    since = now - timedelta(seconds=RUNS_OF_S)
    buckets = yield from ask(series.rates(since=since, until=now, bucket_s=round(RUNS_OF_S), by_queue=True))
    known = {*known_queues, *served, *paused_queues}
    _add_queues(found, depths, known=known, pauses=pauses, run_s=mean_run_s(buckets))
    trees = yield from ask(inspection.supervisors(stale_ms=stale_ms, ended_too=False, limit=MOST_PROCESSES))
    workers = yield from ask(inspection.workers(stale_ms=stale_ms, ended_too=False, limit=MOST_PROCESSES))
    states = yield from states_of_trees(config)
    _add_processes(found, trees, workers, states=states, now_s=now.timestamp())
    found.add(names.LEASES_OVERDUE, (yield from overdue_leases(config)))
    turns = yield from ask(inspection.turns())
    found.add(names.LAST_LOOK, {(service,): at for service, at in turns})
    suspects = yield from ask(diagnosis.suspects())
    found.add(names.SUSPECTS, suspects.count)
    yield from _add_workflows(found)
    planned = yield from ask(schedules.list_schedules(state="ACTIVE"))
    _add_schedules(found, planned)
    _add_limits(found, (yield from ask(limits.list_limits())))
    oldest = yield from ask(diagnosis.long_transactions(older_than_ms=0))
    found.add(names.TRANSACTION_OLDEST_SECONDS, max((each.age_s for each in oldest.found), default=0.0))
    dead = yield from ask(diagnosis.dead_rows(schema))
    found.add(names.TABLE_DEAD_ROWS, {("tasks",): 0 if dead is None else dead.dead})
    return found


def add_build_info(found: MetricsText, *, version: str) -> None:
    """Add the metric with the versions."""
    newest = migrations.known_migrations()[-1].version
    found.add(names.BUILD_INFO, {(version, str(newest), platform.python_version()): 1})


def overdue_leases(config: RecoveryConfig) -> Plan[int]:
    """Count the leases of dead workers that should have been recovered already."""
    rules = lasting_rules(config)
    margin_ms = SWEEPS_MISSED * rules.check_interval_ms
    statement = diagnosis.unswept(rules, margin_ms=margin_ms, stale_ms=config.claimed_stale_threshold_ms)
    found = yield from ask(statement)
    return found.silent + found.ended


def lasting_rules(config: RecoveryConfig) -> SilenceRules:
    """Return the rules of recovery as if it were on. A lease of a dead worker is overdue even if recovery was switched off."""
    return replace(
        silence_rules(config),
        claimed_ms=config.claimed_stale_threshold_ms,
        running_ms=config.running_stale_threshold_ms,
    )


def queue_depths() -> Plan[Sequence[DepthBucket]]:
    """Return the last sample of the queues, or count now if no supervisor samples: that is when the counts matter most."""
    sample = yield from ask(series.latest_depths())
    if sample.age_s is not None and sample.age_s <= _FRESH_S:
        return sample.queues
    now = yield from ask(inspection.read_clock())
    counted = yield from ask(inspection.queues())
    return [
        DepthBucket(
            now, each.name, each.pending, each.scheduled, 0, each.claimed, each.running, each.oldest_due_s
        )
        for each in counted
    ]


def _add_queues(
    found: MetricsText,
    depths: Sequence[DepthBucket],
    *,
    known: Collection[str],
    pauses: Sequence[Pause],
    run_s: Mapping[str, float],
) -> None:
    by_queue = {each.queue: each for each in depths}
    queues = sorted({"default", *known, *by_queue})
    counts = {
        (queue, state): float(getattr(by_queue[queue], state)) if queue in by_queue else 0.0
        for queue in queues
        for state in _TASK_STATES
    }
    found.add(names.TASKS, bounded(counts, add))
    ages = {(queue,): (by_queue[queue].oldest_due_s or 0.0) if queue in by_queue else 0.0 for queue in queues}
    found.add(names.OLDEST_DUE_SECONDS, bounded(ages, max))
    paused = {(each.kind, each.name) for each in pauses}
    is_all = any(kind == _ALL for kind, _ in paused)
    flags = {(queue,): float(is_all or ("queue", queue) in paused) for queue in queues}
    found.add(names.QUEUE_PAUSED, bounded(flags, max))
    wanted = {
        (queue,): slots_wanted(
            due=by_queue[queue].due if queue in by_queue else 0,
            held=by_queue[queue].claimed + by_queue[queue].running if queue in by_queue else 0,
            run_s=run_s.get(queue),
            is_paused=bool(flags[(queue,)]),
        )
        for queue in queues
    }
    found.add(names.SLOTS_WANTED, bounded(wanted, add))
    found.add(
        names.TASK_PAUSED, bounded({(name,): 1.0 for kind, name in sorted(paused) if kind == "task"}, max)
    )
    found.add(names.ALL_PAUSED, float(is_all))


def _add_processes(
    found: MetricsText,
    trees: Sequence[SupervisorInfo],
    workers: Sequence[WorkerInfo],
    *,
    states: Mapping[str, TreeState],
    now_s: float,
) -> None:
    counts = Counter(_state(worker, states.get(worker.supervisor_id)) for worker in workers)
    found.add(names.WORKERS, {(state,): counts[state] for state in _WORKER_STATES})
    found.add(names.SUPERVISORS, len(trees))
    ages = [now_s - each.last_heartbeat_at.timestamp() for each in trees]
    found.add(names.BEAT_AGE_SECONDS, max(0.0, *ages, 0.0))


def _state(worker: WorkerInfo, tree: TreeState | None) -> str:
    if tree in (TreeState.LATE, TreeState.SUSPECT):
        return tree.value
    return "draining" if worker.draining else "live"


def _add_workflows(found: MetricsText) -> Plan[None]:
    counts: Mapping[str, int] = yield from ask(inspection.live_workflows())
    live = [state for state in WorkflowState if not state.is_final]
    found.add(names.WORKFLOWS, {(state.value,): counts.get(state.value, 0) for state in live})
    page = yield from ask(workflow_control.stuck(after=UUID(int=0), limit=_STUCK_PAGE, grace_ms=_STUCK_MS))
    found.add(names.WORKFLOWS_STUCK, len({each.workflow_id for each in page.found}))


def _add_schedules(found: MetricsText, planned: Sequence[ScheduleInfo]) -> None:
    nexts = {(each.name,): 0.0 if each.next_at is None else each.next_at.timestamp() for each in planned}
    found.add(names.SCHEDULE_NEXT, bounded(nexts, min))


def _add_limits(found: MetricsText, declared: Sequence[LimitInfo]) -> None:
    permits: dict[tuple[str, ...], float] = {}
    for each in declared:
        permits[each.name, "held"] = each.held
        if each.key is None and each.numbers.concurrency is not None:
            permits[each.name, "free"] = max(0, each.numbers.concurrency - each.held)
    found.add(names.LIMIT_PERMITS, bounded(permits, add))
    found.add(names.LIMIT_WAITING, bounded({(each.name,): float(each.waiting) for each in declared}, add))
