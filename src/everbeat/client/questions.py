"""Lists the questions of tasks, and answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID, uuid4

import msgspec

from everbeat.client.database_access import DatabaseAccess, DatabaseMethods
from everbeat.domain.settings.checks import remark, whole
from everbeat.domain.task.questions import (
    OpenQuestion,
    StoredAnswer,
    require_fit,
    several_questions,
    step_of,
    stored_question,
)
from everbeat.domain.task.steps import ANSWER_PREFIX, encode_answer
from everbeat.errors import AlreadyAnswered, NoQuestion, TaskNotFound
from everbeat.store import history, tasks
from everbeat.store.plan import Plan, ask, together
from everbeat.store.questions import AskedQuestion, hold_task, list_asked, list_open

_limit: Final = whole(1, 10_000)
_FIRST: Final = UUID(int=0)


def open_questions(*, after: UUID | None, limit: int) -> Plan[list[OpenQuestion]]:
    """Return the open questions of up to `limit` tasks, by task id, after the task `after`."""
    checked: int = _limit(limit, subject="inbox.limit")
    return ask(list_open(after=after or _FIRST, limit=checked))


def answer_plan(
    database: DatabaseAccess, task_id: UUID, value: object, step: str | None, by: str | None
) -> Plan[str]:
    """Answer a question of a task and return its step. The client chooses the answer's id, so a repeated call is harmless.

    Raises AlreadyAnswered if it has another answer, and NoQuestion if the task does not wait for it. Raises TaskNotFound if the task does not
    exist. Raises PayloadError if the value does not fit the question, or it is not clear which question is meant.
    """
    if by is not None:
        by = str(remark(by, subject="answer.by"))
    encode_answer(value)
    answer_id, channel = uuid4(), database.channel

    def make() -> Plan[str | None]:
        event = None if step is None else f"{ANSWER_PREFIX}{step}"
        if not (yield from ask(hold_task(task_id))):
            return None
        chosen = _chosen(
            task_id,
            (yield from ask(list_asked(task_id, event=event))),
            step=step,
            answer_id=answer_id,
        )
        assert chosen.event is not None
        if chosen.answer_id is None:
            asked = stored_question(chosen.asked)
            require_fit(value, asked.type)
            stored = StoredAnswer(msgspec.Raw(msgspec.json.encode(value)), by, asked.question)
            data = msgspec.json.encode(stored)
            send = tasks.send_signal(
                answer_id, target=task_id, name=chosen.event, value=data, channel=channel
            )
            yield from ask(send)
        return step_of(chosen.event)

    found = yield from together(make)
    if found is not None:
        return found
    ended = yield from ask(history.outcomes([task_id]))
    if task_id not in ended:
        raise TaskNotFound(task_id)
    raise NoQuestion(task_id, state=ended[task_id].state, step=step)


def _chosen(
    task_id: UUID, held: Sequence[AskedQuestion], *, step: str | None, answer_id: UUID
) -> AskedQuestion:
    """Return the question to answer, or the one that this call has already answered."""
    asked = [each for each in held if each.event is not None]
    for each in asked:
        if each.answer_id == answer_id:
            return each
    state = held[0].state
    is_over = state in ("COMPLETED", "FAILED", "CANCELLED", "EXPIRED")
    is_open = [each for each in asked if each.wait_state == "OPEN" and each.answer_id is None and not is_over]
    if len(is_open) > 1:
        raise several_questions(task_id, sorted(step_of(each.event or "") for each in is_open))
    if is_open:
        return is_open[0]
    if asked and asked[0].answered_at is not None:
        by, event = _by(asked[0].answer), asked[0].event or ""
        raise AlreadyAnswered(task_id, step=step_of(event), by=by, at=asked[0].answered_at)
    timed_out = bool(asked) and asked[0].wait_state == "TIMED_OUT"
    raise NoQuestion(task_id, state=state, step=step, timed_out=timed_out)


def _by(answer: str | None) -> str | None:
    try:
        return msgspec.json.decode(answer or "", type=StoredAnswer).by
    except (msgspec.MsgspecError, UnicodeError):
        return None


class AnswerMethods(DatabaseMethods):
    """The methods of a Handle that answer the questions of its task."""

    id: UUID
    _database: DatabaseAccess

    def answer(self, value: object, /, *, step: str | None = None, by: str | None = None) -> str:
        """Answer the question that the task waits for, like `App.answer`, and return the question's step."""
        return self._run("answer", answer_plan(self._database, self.id, value, step, by))

    async def aanswer(self, value: object, /, *, step: str | None = None, by: str | None = None) -> str:
        """Async version of `answer` that does not block the running event loop."""
        return await self._arun(answer_plan(self._database, self.id, value, step, by))
