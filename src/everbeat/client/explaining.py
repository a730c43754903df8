"""Plans that explain tasks, workflows and schedules. The plans read the facts from the database, and `domain/explain` derives the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TypeVar
from uuid import UUID

from msgspec import structs

from everbeat.client.workflow import operations as workflow_operations
from everbeat.config import RecoveryConfig
from everbeat.domain.doctor.server import why_locked, why_read_only
from everbeat.domain.explain.holding import why_again, why_ended, why_held
from everbeat.domain.explain.limits import why_limited
from everbeat.domain.explain.reasons import Explanation, Reason, SilenceRules, Waiting, WorkflowExplanation
from everbeat.domain.explain.schedules import TICKS_READ, ScheduleExplanation, Scheduling, why_not_sent
from everbeat.domain.explain.waiting import why_waiting
from everbeat.domain.explain.workflows import MOST_TASKS, NodeGroup, open_kinds, why_not_ended
from everbeat.domain.inspection import RecoveryInfo
from everbeat.domain.schedule.timing import zone_is_known
from everbeat.domain.task.needs import unfit_workers
from everbeat.domain.task.questions import is_answer
from everbeat.domain.task.states import TaskState
from everbeat.domain.workflow.states import NodeState, WorkflowState
from everbeat.errors import TaskNotFound, UnknownName, WorkflowNotFound
from everbeat.store import diagnosis, inspection, limits, questions, schedules, workflow_control
from everbeat.store.inspection import StoredTask
from everbeat.store.plan import Plan, ask

MOST_RECOVERIES = 1_000
E = TypeVar("E", bound=Explanation | WorkflowExplanation | ScheduleExplanation)
_ENDED: Final = frozenset(
    {str(state) for state in TaskState if state.is_terminal}
    | {str(state) for state in WorkflowState if state.is_final}
    | {"RETIRED", "ENDED"}
)

MOST_CHILDREN: Final = 4
DEEPEST: Final = 6
_BEGUN: Final = frozenset({NodeState.ENQUEUED, NodeState.RUNNING})


def silence_rules(config: RecoveryConfig) -> SilenceRules:
    """Return the thresholds after which a silent lease holder is considered dead."""
    return SilenceRules(
        claimed_ms=config.claimed_stale_threshold_ms if config.auto_requeue_stale_claimed else None,
        running_ms=config.running_stale_threshold_ms if config.auto_fail_stale_running else None,
        beat_interval_ms=max(config.runner_heartbeat_interval_ms, config.claimer_heartbeat_interval_ms),
        check_interval_ms=config.check_interval_ms,
        multiplier=config.resilient_sweep_threshold_multiplier,
        resilient_flags=tuple(config.resilient_task_flags),
    )


def explain_plan(task_id: UUID, *, rules: SilenceRules, alive_within_ms: int) -> Plan[Explanation]:
    """Return an explanation of one task's state. Raises TaskNotFound if the task does not exist."""
    stored = yield from ask(inspection.task(task_id))
    if stored is None:
        raise TaskNotFound(task_id)
    task = stored.summary
    attempts = yield from ask(inspection.attempts(task_id))
    recoveries = yield from ask(inspection.recoveries(task_id, limit=MOST_RECOVERIES))
    if task.state is TaskState.PENDING:
        reasons = yield from reasons_to_wait(stored, recoveries, rules=rules, alive_within_ms=alive_within_ms)
    elif task.state.is_terminal:
        reasons = why_ended(task, policy=stored.policy, attempts=attempts)
    else:
        holding = yield from ask(diagnosis.holding(task_id, stale_ms=alive_within_ms))
        if holding is None:  # the task was settled after the first query
            return (yield from explain_plan(task_id, rules=rules, alive_within_ms=alive_within_ms))
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
        labels=task.labels,
    )


def explained_with_locks(plan: Plan[E], *, schema: str) -> Plan[E]:
    """Return the explanation that `plan` returns, with problems of the database server added.

    If the task, workflow or schedule has not finished, the first reasons report a read-only server and locks that block everbeat, if any.
    """
    found = yield from plan
    if found.state in _ENDED:
        return found
    holders = yield from ask(diagnosis.lock_holders(schema))
    read_only = yield from ask(diagnosis.read_only())
    return structs.replace(found, reasons=(*why_read_only(read_only), *why_locked(holders), *found.reasons))


def reasons_to_wait(
    stored: StoredTask, recoveries: Sequence[RecoveryInfo], *, rules: SilenceRules, alive_within_ms: int
) -> Plan[tuple[Reason, ...]]:
    """Return the reasons why a task has not been claimed, or an empty tuple if the task is not PENDING."""
    if stored.summary.state is not TaskState.PENDING:
        return ()
    waiting = yield from _waiting(stored, alive_within_ms=alive_within_ms)
    if waiting is None:
        return ()  # the task was pruned in the meantime
    if not waiting.fitting and not waiting.is_standby:
        failing = yield from ask(diagnosis.failing_starts(stale_ms=alive_within_ms))
        restarting = yield from ask(diagnosis.restarting(stored.summary.id, stale_ms=alive_within_ms))
        waiting = structs.replace(waiting, failing_starts=tuple(failing), restarting=restarting)
    if waiting.alive and not waiting.knowing:
        waiting = yield from _with_names(waiting, alive_within_ms=alive_within_ms)
    if is_answer(stored.summary.waits_for):
        asked = yield from ask(questions.read_question(stored.summary.id))
        waiting = structs.replace(waiting, question=asked)
    gates = yield from ask(limits.read_waiting_gates(stored.summary.id))
    return why_waiting(
        stored.summary,
        waiting,
        policy=stored.policy,
        recoveries=recoveries,
        at=stored.at,
        limited=tuple(why_limited(gates, rules=rules)),
    )


def _waiting(stored: StoredTask, *, alive_within_ms: int) -> Plan[Waiting | None]:
    """Return the facts about a waiting task.

    Workers that know the task's name but cannot run it with its arguments are not counted.
    """
    task_id = stored.summary.id
    waiting = yield from ask(diagnosis.waiting(task_id, stale_ms=alive_within_ms))
    needs = stored.needs or stored.given
    if waiting is None or needs is None:
        return waiting
    unfit = unfit_workers(needs, waiting.registered)
    ids = [worker for each in unfit for worker in each.workers]
    # Any worker can claim an unmarked task. A worker that cannot run the task marks it.
    if not ids or (stored.needs is None and len(ids) < waiting.knowing):
        return waiting
    again = yield from ask(diagnosis.waiting(task_id, stale_ms=alive_within_ms, unfit=ids))
    return None if again is None else structs.replace(again, needs=needs, unfit_workers=unfit)


def _with_names(waiting: Waiting, *, alive_within_ms: int) -> Plan[Waiting]:
    """Add the known names of tasks and queues to the facts, so that the explanation can correct a misspelled name."""
    tasks, queues = yield from ask(diagnosis.known_names(stale_ms=alive_within_ms))
    return structs.replace(waiting, known_tasks=tasks, known_queues=queues)


def explained_workflow(
    workflow_id: UUID, *, rules: SilenceRules, alive_within_ms: int, deeper: int = DEEPEST
) -> Plan[WorkflowExplanation]:
    """Return an explanation of a workflow and its child workflows, up to `deeper` levels deep.

    Raises WorkflowNotFound if the workflow does not exist.
    """
    info = yield from workflow_operations.info(workflow_id)
    nodes = yield from workflow_operations.nodes(workflow_id)
    movement = yield from ask(diagnosis.movement(workflow_id, stale_ms=alive_within_ms))
    if info.state.is_final:
        return why_not_ended(info, nodes, movement)
    if not movement.alive and not movement.is_standby:
        restarting = yield from ask(diagnosis.restarting(stale_ms=alive_within_ms))
        movement = structs.replace(movement, restarting=restarting)
    stuck = yield from workflow_operations.stuck(workflow_id)
    kinds = open_kinds(nodes)
    tasks = yield from _explained_tasks(kinds, rules=rules, alive_within_ms=alive_within_ms)
    children: dict[str, WorkflowExplanation] = {}
    for kind in [each for each in kinds if each.node.kind == "workflow"][:MOST_CHILDREN]:
        node = kind.node
        if node.task_id is None or node.state not in _BEGUN or not deeper:
            continue
        try:
            children[node.name] = yield from explained_workflow(
                node.task_id, rules=rules, alive_within_ms=alive_within_ms, deeper=deeper - 1
            )
        except WorkflowNotFound:
            continue  # the list of stuck nodes reports it
    return why_not_ended(info, nodes, movement, stuck=stuck, tasks=tasks, children=children)


def _explained_tasks(
    kinds: Sequence[NodeGroup], *, rules: SilenceRules, alive_within_ms: int
) -> Plan[dict[str, Explanation]]:
    found: dict[str, Explanation] = {}
    begun = [each.node for each in kinds if each.node.kind == "task" and each.node.state in _BEGUN]
    for node in begun[:MOST_TASKS]:
        if node.task_id is None:
            continue
        try:
            found[node.name] = yield from explain_plan(
                node.task_id, rules=rules, alive_within_ms=alive_within_ms
            )
        except TaskNotFound:
            continue  # as above
    return found


def explained_schedule(name: str, *, rules: SilenceRules, alive_within_ms: int) -> Plan[ScheduleExplanation]:
    """Return an explanation of a schedule and its oldest live run. Raises UnknownName if the schedule does not exist."""
    info = yield from ask(schedules.read_schedule(name))
    if info is None:
        raise UnknownName("schedule", [name], known=(yield from ask(schedules.known_schedules())))
    ticks = yield from ask(schedules.list_ticks(name, limit=TICKS_READ))
    runs = yield from ask(schedules.list_live_runs(name))
    crew = yield from ask(diagnosis.crew(stale_ms=alive_within_ms))
    standing = yield from ask(diagnosis.standing())
    known_tasks, _ = yield from ask(diagnosis.known_names(stale_ms=alive_within_ms))
    first_run = None
    if runs:
        with suppress(TaskNotFound):  # the run was pruned in the meantime
            first_run = yield from explain_plan(runs[0].task_id, rules=rules, alive_within_ms=alive_within_ms)
    return why_not_sent(
        Scheduling(
            info=info,
            ticks=tuple(ticks),
            runs=tuple(runs),
            first_run=first_run,
            supervisors=crew.supervisors,
            workers=crew.workers,
            last_beat_at=crew.last_beat_at,
            known_tasks=known_tasks,
            is_standby=standing.is_standby,
            zone_is_known=info.rule is None or zone_is_known(info.rule.timing.timezone),
        )
    )
