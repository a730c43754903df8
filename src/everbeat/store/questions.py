"""Statements for the questions of tasks and their answers."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from msgspec import Struct

from everbeat.domain.labels import decode_labels
from everbeat.domain.task.questions import OpenQuestion, step_of, stored_question
from everbeat.domain.task.steps import ANSWER_PREFIX
from everbeat.store import rows
from everbeat.store.statement import Statement


class AskedQuestion(Struct, frozen=True):
    """The state of a locked task, and one of its questions, if it has asked any.

    `event` is the name under which the answer is stored, and `asked` the stored question while it is open. The answer's fields are None
    until it is answered.
    """

    state: str
    event: str | None
    wait_state: str | None
    asked: str | None
    answer_id: UUID | None
    answer: str | None
    answered_at: datetime | None


def list_open(*, after: UUID, limit: int) -> Statement[list[OpenQuestion]]:
    """Return the open questions of the next `limit` tasks that wait for an answer, by task id."""
    return Statement("question/list_open", {"after": after, "limit": limit}, rows.each(_open_question))


def read_question(task_id: UUID, *, step: str | None = None) -> Statement[OpenQuestion | None]:
    """Return an open question of the task, or None if there is none. Without a step, it is the one that the task waits for."""
    event = None if step is None else f"{ANSWER_PREFIX}{step}"
    return Statement("question/read_question", {"id": task_id, "event": event}, rows.first(_open_question))


def hold_task(task_id: UUID) -> Statement[bool]:
    """Lock a task before its questions are read. Return False if the task is not in `tasks`."""
    return Statement("question/hold_task", {"id": task_id}, rows.any_row)


def list_asked(task_id: UUID, *, event: str | None) -> Statement[list[AskedQuestion]]:
    """Return the questions of a locked task, or only the one with this event, the latest first."""
    return Statement("question/list_asked", {"id": task_id, "event": event}, rows.each(AskedQuestion))


def _open_question(
    task_id: UUID,
    name: str,
    queue: str,
    event: str,
    asked: str | None,
    since: datetime,
    until: datetime | None,
    labels: str | None,
) -> OpenQuestion:
    stored = stored_question(asked)
    return OpenQuestion(
        task_id=task_id,
        name=name,
        queue=queue,
        step=step_of(event),
        question=stored.question,
        type=stored.type,
        note=stored.note,
        since=since,
        until=until,
        labels=decode_labels(labels),
    )
