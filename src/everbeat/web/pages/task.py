"""The page of one task: why it is where it is, its attempts as lanes, what it has recorded, and its actions."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import structs

from everbeat.client.captured_logs import read_logs
from everbeat.client.database_access import database_of
from everbeat.domain.bulk_actions import BulkVerb
from everbeat.domain.documents import task_document
from everbeat.domain.explain.reasons import Explanation
from everbeat.domain.inspection import CancelVerdict, TaskInfo
from everbeat.domain.task.captured_log import CapturedLog
from everbeat.domain.task.questions import is_answer
from everbeat.domain.task.states import TASK_TERMINAL_STATES, TaskState
from everbeat.store.plan import ask
from everbeat.store.recorded import list_steps, read_checkpoint
from everbeat.web.attempt_lanes import events_of, lanes_of
from everbeat.web.filters import to_uuid
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.pages.inbox import place_of
from everbeat.web.pages.sending import again_of
from everbeat.web.pages.tasks import VERB_ROLES, look_of
from everbeat.web.reasons import lead_of, shown_reasons
from everbeat.web.refusals import RequestRefused

_MOST_BEATS: Final = 200
_MOST_LOGS: Final = 3
_MOST_LINES: Final = 200
"""The page shows this many lines of each log. The command line shows all of them."""


async def show(visit: Visit) -> PageResult:
    """Return the page of a task. Raises TaskNotFound."""
    task_id = to_uuid(visit.path_values["id"], what="task")
    app, access = visit.app, database_of(visit.app)
    task = await visit.part("The task", app.ainfo(task_id), None)
    if task is None:
        return Page(
            template="task.html",
            title="Task",
            says="The task could not be read",
            data={"task": None},
            status=503,
        )
    found = await visit.parts(
        explanation=("The reasons", app.aexplain(task_id), None),
        steps=("The recorded steps", access.arun(ask(list_steps(task_id))), None),
        checkpoint=("The checkpoint", access.arun(ask(read_checkpoint(task_id))), None),
        streams=("The streams", app.handle(task_id).astreams(), None),
        logs=("The captured logs", access.arun(read_logs(task_id, attempt=None, limit=_MOST_LOGS)), []),
        beats=("The heartbeats", app.aheartbeats(task_id, limit=_MOST_BEATS), []),
    )
    hiding = visit.hiding
    explanation = _shown_reasons(visit, found["explanation"])
    shown = hiding.info(task)
    steps = (
        None if found["steps"] is None else [_shown_step(visit, task.name, each) for each in found["steps"]]
    )
    checkpoint = found["checkpoint"]
    data = {
        "task": task_document(shown),
        "explanation": explanation,
        "steps": steps,
        "checkpoint": hiding.payload(
            task.name, _decoded(checkpoint.text, is_cut=checkpoint.is_cut) if checkpoint else None
        ),
        "streams": found["streams"],
        "logs": [_shown_log(visit, task.name, each) for each in found["logs"]],
        "heartbeats": found["beats"],
    }
    lanes, marks = lanes_of(shown, found["beats"], found["steps"] or (), now=visit.now)
    more = {
        "info": shown,
        "look": look_of(shown, now=visit.now),
        "lanes": lanes,
        "marks": marks,
        "events": events_of(lanes),
        "can_retry": task.state in TASK_TERMINAL_STATES
        and task.state is not TaskState.COMPLETED
        and task.workflow_id is None,
        "can_cancel": task.state not in TASK_TERMINAL_STATES,
        "can_run_now": task.state is TaskState.PENDING
        and task.waits_for is None
        and task.enqueued_at > visit.now,
        "can_move": task.state is TaskState.PENDING and visit.may(VERB_ROLES[BulkVerb.MOVE]),
        "answer_at": place_of(visit, task.id) if is_answer(task.waits_for) else None,
        "again": again_of(visit, task),
    }
    return Page(
        template="task.html",
        title=task.name,
        says=lead_of(
            explanation.reasons if explanation else (), otherwise=f"It is {task.state.value.lower()}"
        ),
        data=data,
        more=more,
        command=f"everbeat explain {task_id}",
        targets=_targets(task),
    )


def _targets(task: TaskInfo) -> list[str]:
    """Return what the page is about: also the pauses and the workflow that decide whether the task runs."""
    found = [str(task.id), f"queue {task.queue}", f"task {task.name}", "everything"]
    return [*found, *(str(each) for each in (task.workflow_id, task.parent_id, task.batch_id) if each)]


def _shown_reasons(visit: Visit, found: Explanation | None) -> Explanation | None:
    if found is None:
        return None
    hides = visit.hiding.touches(found.name)
    return structs.replace(
        found,
        reasons=shown_reasons(found.reasons, hides=hides),
        second_runs=shown_reasons(found.second_runs, hides=hides),
    )


def _shown_step(visit: Visit, task: str, step: Any) -> dict[str, Any]:
    document = structs.asdict(step)
    value = None if step.result is None else _decoded(step.result, is_cut=bool(step.is_cut))
    return document | {"result": visit.hiding.payload(task, value)}


def _shown_log(visit: Visit, task: str, log: CapturedLog) -> dict[str, Any]:
    """Return the newest lines of a log. `missing` of a line counts the lines before it that are not shown."""
    hiding = visit.hiding
    lines: list[dict[str, Any]] = []
    for line, missing in log.with_gaps(newest=_MOST_LINES):
        shown = {} if line is None else structs.asdict(line)
        if line is not None:
            shown["logger"] = hiding.text(task, line.logger)
            shown["message"] = hiding.text(task, line.message)
            shown["exception"] = hiding.payload(task, line.exception)
        lines.append(shown | {"missing": missing})
    return {"attempt": log.attempt, "lines": lines}


def _decoded(text: str, *, is_cut: bool) -> Any:
    """Return a stored JSON text as a value, or as its text if only its beginning was read."""
    if is_cut:
        return f"{text}…"
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text


def _id(visit: Visit) -> UUID:
    return to_uuid(visit.path_values["id"], what="task")


def _back(visit: Visit, says: str, **data: Any) -> ActionDone:
    task_id = _id(visit)
    return ActionDone(goto=visit.link(f"/tasks/{task_id}"), says=says, data={"id": task_id, **data})


async def retry(visit: Visit) -> PageResult:
    """Run an ended task again. Raises TaskNotFound or TaskNotRetryable."""
    await visit.app.aretry(_id(visit))
    return _back(visit, "The task will run again.")


async def cancel(visit: Visit) -> PageResult:
    """Cancel a task, or ask its worker to stop it. Raises TaskNotFound."""
    result = await visit.app.acancel(_id(visit))
    says = {
        CancelVerdict.CANCELLED: "The task is cancelled.",
        CancelVerdict.REQUESTED: "Its worker was asked to stop the task.",
        CancelVerdict.ALREADY_ENDED: "The task had already ended, and does not change.",
    }
    return _back(visit, says[result.verdict], verdict=result.verdict, state=result.state)


async def run_now(visit: Visit) -> PageResult:
    """Make a scheduled or retrying task due. Raises TaskNotFound or ActionRefused."""
    await visit.app.arun_now(_id(visit))
    return _back(visit, "The task is due now.")


async def signal(visit: Visit) -> PageResult:
    """Send a signal to a task. Its value is JSON. Raises TaskNotFound, SignalRefused or PayloadError."""
    name, text = visit.form.require("name"), visit.form.get("value") or "null"
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise RequestRefused(
            400, "WRONG_FORM", "The value is not JSON.", fix='put quotes around a text: "yes".'
        ) from None
    await visit.app.asignal(_id(visit), name, value)
    return _back(visit, "The signal is stored.", name=name)
