"""Plans that act on tasks on behalf of an operator: on single tasks, and on all tasks that match filters."""

from __future__ import annotations

import asyncio
import getpass
import socket
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID, uuid4

from msgspec import structs

from everbeat.client.database_access import DatabaseAccess
from everbeat.client.inspection import task_query
from everbeat.client.waiter import Deadline
from everbeat.domain.bulk_actions import (
    SKIPPED,
    BulkActionInfo,
    BulkState,
    BulkVerb,
    Operator,
    SkippedTask,
)
from everbeat.domain.filters import TaskFilters
from everbeat.domain.settings.checks import remark, switch
from everbeat.domain.settings.settings import refused
from everbeat.errors import ActionRefused, BulkActionNotFound, TaskNotFound, WaitTimeout
from everbeat.store import bulk
from everbeat.store.inspection import TaskQuery, read_clock
from everbeat.store.plan import Action, Plan, ask, together

DRY_RUN_EXAMINES: Final = 1_000_000
"""How many tasks a dry run examines."""
_STEP: Final = 4_000
_MOST_EXAMPLES: Final = 10
_LONGEST_POLL_S: Final = 1.0


def own_operator(by: str | None, database: DatabaseAccess, *, subject: str) -> Operator:
    """Return the operator of a call: `by`, or the one of `acting_as`, or the user and host of this process."""
    known = database.operator
    if by is not None:
        return Operator(remark(by, subject=subject), "python" if known is None else known.origin)
    return known or Operator(user_at_host(), "python")


def user_at_host() -> str:
    """Return the name of this process's user and of this host, as in "ann@web-1"."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container can run with a uid that has no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def changed(
    database: DatabaseAccess, verb: BulkVerb, task_id: UUID, *, parameters: Mapping[str, Any] = {}
) -> Plan[None]:
    """Change one task.

    Raises ActionRefused if the task cannot be changed, and TaskNotFound if it does not exist.
    """
    call = uuid4()

    def make() -> Plan[str | None]:
        state = yield from ask(bulk.hold(task_id))
        if state is None:
            raise TaskNotFound(task_id)
        acted = yield from ask(
            bulk.act(verb, [task_id], call=call, parameters=parameters, channel=database.channel)
        )
        refusal = acted[0].refusal if acted else "CHANGED"
        if refusal == "CHANGED":
            raise ActionRefused(task_id, action=verb.value, text=f"it is {state}", reason="STATE")
        return refusal

    refusal = yield from together(make)
    if refusal is not None:
        raise ActionRefused(task_id, action=verb.value, text=SKIPPED[refusal], reason=refusal)


def requested(
    database: DatabaseAccess,
    verb: BulkVerb,
    filters: TaskFilters,
    *,
    method: str,
    parameters: Mapping[str, Any] = {},
    everything: bool,
    dry_run: bool,
    by: str | None,
    reason: str | None,
    action_id: UUID,
) -> Plan[BulkActionInfo]:
    """Request a bulk action, or count the tasks that it would change. Raises ConfigurationError if there are no filters."""
    query = task_query(method, filters)
    is_unlimited = switch(everything, subject=f"{method}.everything")
    if not bulk.filters_of(query) and not is_unlimited:
        raise refused(
            "nothing",
            subject=f"{method}.filters",
            code="MISSING",
            rule="selects all tasks, so it needs everything=True",
            shell_rule="selects all tasks, so it needs --everything",
            fix="pass a filter such as name='mail', or everything=True",
            shell_fix="give a filter such as --name mail, or --everything",
        )
    operator = own_operator(by, database, subject=f"{method}.by")
    note = None if reason is None else remark(reason, subject=f"{method}.reason")
    is_dry = switch(dry_run, subject=f"{method}.dry_run")
    return _requested(verb, query, parameters, operator, note, is_dry=is_dry, action_id=action_id)


def _requested(
    verb: BulkVerb,
    query: TaskQuery,
    parameters: Mapping[str, Any],
    operator: Operator,
    note: str | None,
    *,
    is_dry: bool,
    action_id: UUID,
) -> Plan[BulkActionInfo]:
    now = yield from ask(read_clock())
    ages = {
        name: now - value for name, value in structs.asdict(query).items() if isinstance(value, timedelta)
    }
    filters = bulk.filters_of(structs.replace(query, **ages))
    if is_dry:
        info = BulkActionInfo(
            id=None, action=verb, filters=filters, parameters=parameters, state=BulkState.DRY_RUN, requested_by=operator.actor,
            origin=operator.origin, requested_at=now,
        )  # fmt: skip
        return (yield from _counted(info))
    while True:  # None: an identical action ended or was requested at the same moment
        found = yield from ask(
            bulk.request(
                action_id, verb, filters=filters, asked=bulk.filters_of(query), parameters=parameters, by=operator.actor,
                origin=operator.origin, note=note
            )
        )  # fmt: skip
        if found is not None:
            return structs.replace(found, joined=found.id != action_id)


def _counted(info: BulkActionInfo) -> Plan[BulkActionInfo]:
    """Walk over the tasks as the action would, without a lock or a change."""
    position, is_over, examined, done = bulk.FIRST_ID, False, 0, 0
    reasons: Counter[str] = Counter()
    examples: list[SkippedTask] = []
    filters = bulk.parameters_of(info.filters)
    while not is_over and examined < DRY_RUN_EXAMINES:
        step = yield from ask(
            bulk.find(
                info.action, filters=filters, parameters=info.parameters, requested_at=info.requested_at, after=position,
                acted=_STEP, most=_STEP,
            )
        )  # fmt: skip
        position, is_over = step.position or position, step.is_over
        examined, done = examined + step.examined, done + len(step.ids)
        reasons.update(reason for _, reason in step.refused)
        examples += [SkippedTask(*each) for each in step.refused[: _MOST_EXAMPLES - len(examples)]]
    skipped = reasons.total()
    return structs.replace(
        info, examined=examined, matched=done + skipped, done=done, skipped=skipped, reasons=dict(reasons), examples=examples,
        is_exact=is_over,
    )  # fmt: skip


def described(action_id: UUID) -> Plan[BulkActionInfo]:
    """Return a bulk action. Raises BulkActionNotFound if it does not exist."""
    found = yield from ask(bulk.action(action_id))
    if found is None:
        raise BulkActionNotFound(action_id)
    return found


def stopped(database: DatabaseAccess, action_id: UUID, *, by: str | None) -> Plan[BulkActionInfo]:
    """Request that a bulk action stops after its current portion. Raises BulkActionNotFound if it does not exist."""
    operator = own_operator(by, database, subject="cancel_bulk_action.by")
    found = yield from ask(bulk.cancel_action(action_id, by=operator.actor, origin=operator.origin))
    if found is None:
        raise BulkActionNotFound(action_id)
    return found


def ended(action_id: UUID, *, until: Deadline) -> Plan[BulkActionInfo]:
    """Wait until a bulk action has ended, and return it. Raises WaitTimeout if the deadline passes first."""
    pause_s = 0.05
    while not (info := (yield from described(action_id))).state.has_ended:
        left_s = until.left_s
        if left_s == 0.0:
            raise WaitTimeout(action_id, until.waited_s, state=info.state, what="Bulk action")
        pause_s = min(_LONGEST_POLL_S, pause_s * 1.5)
        rest_s = pause_s if left_s is None else min(pause_s, left_s)
        yield Action(run=partial(time.sleep, rest_s), arun=partial(asyncio.sleep, rest_s))
    return info
