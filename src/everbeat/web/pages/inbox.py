"""The inbox: the questions of tasks that wait for a person, each with a form that fits its answer."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from msgspec import structs

from everbeat.client.database_access import database_of
from everbeat.domain.hiding import HIDDEN
from everbeat.domain.task.questions import OpenQuestion
from everbeat.errors import NoQuestion
from everbeat.errors.wording import amount, is_storable
from everbeat.store.plan import ask
from everbeat.store.questions import read_question
from everbeat.web import wording
from everbeat.web.filters import to_uuid
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.refusals import RequestRefused

_PER_PAGE: Final = 100


async def show(visit: Visit) -> PageResult:
    """Return the open questions, those of the task that was sent first at the beginning."""
    after = visit.query.get("after")
    start = None if after is None else to_uuid(after, what="task")
    found = await visit.part("The questions", visit.app.ainbox(limit=_PER_PAGE, after=start), None)
    shown = [_shown(visit, each) for each in found or ()]
    documents = [structs.asdict(each) | {"answer": str(each.type)} for each in shown]
    data = {"questions": None if found is None else documents}
    is_full = len({each.task_id for each in shown}) == _PER_PAGE
    more = {"shown": shown, "older": shown[-1].task_id if is_full else None, "hidden": HIDDEN}
    says = _sentence(visit, found)
    return Page(
        template="inbox.html", title="Inbox", says=says, data=data, more=more, command="everbeat inbox"
    )


def place_of(visit: Visit, task_id: UUID) -> str:
    """Return the address at which the question of a task is the first of the list."""
    return f"{visit.link('/inbox', after=str(UUID(int=max(task_id.int - 1, 0))))}#{task_id}"


def _shown(visit: Visit, question: OpenQuestion) -> OpenQuestion:
    if not visit.hiding.touches(question.name):
        return question
    kind = structs.replace(question.type, choices=None)
    return structs.replace(
        question, question=HIDDEN, note=None if question.note is None else HIDDEN, type=kind
    )


def _sentence(visit: Visit, found: list[OpenQuestion] | None) -> str:
    if found is None:
        return "The questions could not be read"
    if not found:
        return "No task waits for an answer"
    waited_s = (visit.now - min(each.since for each in found)).total_seconds()
    verb = "waits" if len(found) == 1 else "wait"
    return f"{amount(len(found), 'question')} {verb} for an answer, the first for {wording.span(waited_s)}"


async def answer(visit: Visit) -> PageResult:
    """Answer a question of a task. The first answer counts."""
    task_id = to_uuid(visit.path_values["id"], what="task")
    step = visit.form.get("step")
    if step is not None and not is_storable(step):
        raise RequestRefused(400, "WRONG_FORM", "No question has such a name.")
    asked = await database_of(visit.app).arun(ask(read_question(task_id, step=step)))
    if asked is None:
        info = await visit.app.ainfo(task_id)
        raise NoQuestion(task_id, state=info.state, step=step)
    if visit.hiding.touches(asked.name):
        raise RequestRefused(
            403, "PAYLOAD_HIDDEN", "The question is hidden here, so it cannot be answered here."
        )
    value: Any = asked.type.read(visit.form.require("value"))
    answered = await visit.app.aanswer(task_id, value, step=step, by=visit.user.name)
    return ActionDone(
        goto=visit.link("/inbox"),
        says=f"The answer is stored, and {asked.name} continues.",
        data={"id": task_id, "step": answered, "by": visit.user.name},
    )
