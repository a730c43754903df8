"""Why a task is not running, or why it was run again: asks what is needed, and lets the domain find the reasons.

What lives here: the questions, in order. What may not: the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar
from uuid import UUID

from msgspec import structs

from everbeat.config import RecoveryConfig
from everbeat.domain.explanation import (
    Explanation,
    Reason,
    SilenceRules,
    Waiting,
    WorkflowExplanation,
)
from everbeat.domain.holding import why_held
from everbeat.domain.inspection import RecoveryInfo
from everbeat.domain.locks import why_locked
from everbeat.domain.needs import misfits
from everbeat.domain.read_only import why_read_only
from everbeat.domain.second_runs import why_again, why_ended
from everbeat.domain.states import TaskState
from everbeat.domain.waiting import why_waiting
from everbeat.domain.workflow_info import WorkflowState
from everbeat.errors import TaskNotFound
from everbeat.store import explanation, inspect, workflow_control
from everbeat.store.inspect import StoredTask
from everbeat.store.plan import Plan, ask

MOST_RECOVERIES = 1_000
E = TypeVar("E", bound=Explanation | WorkflowExplanation)
_ENDED: Final = frozenset(
    {str(state) for state in TaskState if state.is_terminal}
    | {str(state) for state in WorkflowState if state.is_final}
)


def silence_rules(config: RecoveryConfig) -> SilenceRules:
    """From which silence a lease counts as dead, by this configuration."""
    return SilenceRules(
        claimed_ms=config.claimed_stale_threshold_ms if config.auto_requeue_stale_claimed else None,
        running_ms=config.running_stale_threshold_ms if config.auto_fail_stale_running else None,
        beat_interval_ms=max(config.runner_heartbeat_interval_ms, config.claimer_heartbeat_interval_ms),
        check_interval_ms=config.check_interval_ms,
        multiplier=config.resilient_sweep_threshold_multiplier,
        resilient_flags=tuple(config.resilient_task_flags),
    )


def explained(task_id: UUID, *, rules: SilenceRules, alive_within_ms: int) -> Plan[Explanation]:
    """The explanation of one task; raises TaskNotFound."""
    stored = yield from ask(inspect.task(task_id))
    if stored is None:
        raise TaskNotFound(task_id)
    task = stored.summary
    attempts = yield from ask(inspect.attempts(task_id))
    recoveries = yield from ask(inspect.recoveries(task_id, limit=MOST_RECOVERIES))
    if task.state is TaskState.PENDING:
        reasons = yield from reasons_to_wait(stored, recoveries, alive_within_ms=alive_within_ms)
    elif task.state.is_terminal:
        reasons = why_ended(task, policy=stored.policy, attempts=attempts)
    else:
        holding = yield from ask(explanation.holding(task_id, stale_ms=alive_within_ms))
        if holding is None:  # it was settled since the first question
            return (yield from explained(task_id, rules=rules, alive_within_ms=alive_within_ms))
        reasons = why_held(task, holding, policy=stored.policy, rules=rules, at=stored.at)
    ends = {} if task.workflow_id is None else (yield from ask(workflow_control.ends([task.workflow_id])))
    workflow = None if task.workflow_id is None else ends.get(task.workflow_id)
    return Explanation(
        task_id=task.id,
        name=task.name,
        queue=task.queue,
        state=task.state,
        at=stored.at,
        reasons=reasons,
        second_runs=why_again(attempts=attempts, recoveries=recoveries, task=task),
        workflow_id=task.workflow_id,
        workflow=None if workflow is None else workflow.name,
        node=task.node,
    )


def explained_with_locks(plan: Plan[E], *, schema: str) -> Plan[E]:
    """An explanation, and first of all that the server is read-only and who holds locks that others wait for, unless it has ended."""
    found = yield from plan
    if found.state in _ENDED:
        return found
    holders = yield from ask(explanation.lock_holders(schema))
    read_only = yield from ask(explanation.read_only())
    return structs.replace(found, reasons=(*why_read_only(read_only), *why_locked(holders), *found.reasons))


def reasons_to_wait(
    stored: StoredTask, recoveries: Sequence[RecoveryInfo], *, alive_within_ms: int
) -> Plan[tuple[Reason, ...]]:
    """Why the task is not claimed; nothing for one that is not PENDING."""
    if stored.summary.state is not TaskState.PENDING:
        return ()
    waiting = yield from _waiting(stored, alive_within_ms=alive_within_ms)
    if waiting is None:
        return ()  # pruned this very moment
    if not waiting.fitting and not waiting.is_standby:
        failing = yield from ask(explanation.failing_starts(stale_ms=alive_within_ms))
        waiting = structs.replace(waiting, failing_starts=tuple(failing))
    if waiting.alive and not waiting.knowing:
        waiting = yield from _with_names(waiting, alive_within_ms=alive_within_ms)
    return why_waiting(stored.summary, waiting, policy=stored.policy, recoveries=recoveries, at=stored.at)


def _waiting(stored: StoredTask, *, alive_within_ms: int) -> Plan[Waiting | None]:
    """What the task waits for; of the workers that know its name, only those that can run it with its arguments count."""
    task_id = stored.summary.id
    waiting = yield from ask(explanation.waiting(task_id, stale_ms=alive_within_ms))
    needs = stored.needs or stored.given
    if waiting is None or needs is None:
        return waiting
    unfit = misfits(needs, waiting.registered)
    ids = [worker for each in unfit for worker in each.workers]
    # Any worker takes an unmarked task. One that cannot run it marks it.
    if not ids or (stored.needs is None and len(ids) < waiting.knowing):
        return waiting
    again = yield from ask(explanation.waiting(task_id, stale_ms=alive_within_ms, unfit=ids))
    return None if again is None else structs.replace(again, needs=needs, misfits=unfit)


def _with_names(waiting: Waiting, *, alive_within_ms: int) -> Plan[Waiting]:
    """What a name nobody knows may have been meant for."""
    tasks, queues = yield from ask(explanation.known_names(stale_ms=alive_within_ms))
    return structs.replace(waiting, known_tasks=tasks, known_queues=queues)
