"""The `App` methods that list the questions of tasks and answer them."""

from __future__ import annotations

from uuid import UUID

from everbeat.client.database_access import DatabaseMethods
from everbeat.client.handle import to_task_id
from everbeat.client.questions import answer_plan, open_questions
from everbeat.domain.task.questions import OpenQuestion
from everbeat.store.plan import Plan


class QuestionMethods(DatabaseMethods):
    """The `App` methods for questions that tasks ask with `Context.ask`."""

    def inbox(self, *, limit: int = 100, after: UUID | str | None = None) -> list[OpenQuestion]:
        """Return the open questions of the tasks that wait for an answer, the task that was sent first at the beginning.

        `limit` is the maximum number of tasks, 1 to 10,000. To read the next page, pass the last task's id as `after`. Raises
        ConfigurationError if an argument is invalid.

        for each in app.inbox():
            print(each.task_id, each.question, each.type)
        """
        return self._run("inbox", self._inbox(limit, after))

    async def ainbox(self, *, limit: int = 100, after: UUID | str | None = None) -> list[OpenQuestion]:
        """Async version of `inbox` that does not block the running event loop."""
        return await self._arun(self._inbox(limit, after))

    def _inbox(self, limit: int, after: UUID | str | None) -> Plan[list[OpenQuestion]]:
        return open_questions(
            after=None if after is None else to_task_id(after, subject="inbox.after"), limit=limit
        )

    def answer(
        self, task_id: UUID | str, value: object, /, *, step: str | None = None, by: str | None = None
    ) -> str:
        """Answer the question that a task waits for, and return the question's step. The task continues with the value.

        `step` is needed only if several questions of the task are open. `by` says who answers, and is stored with the answer. The first
        answer counts. Raises AlreadyAnswered if there is one, and NoQuestion if the task does not wait for an answer. Raises TaskNotFound if
        the task does not exist, and PayloadError if the value does not fit the question.

        app.answer(task_id, True, by="ann")
        """
        return self._run("answer", self._answered(task_id, value, step, by))

    async def aanswer(
        self, task_id: UUID | str, value: object, /, *, step: str | None = None, by: str | None = None
    ) -> str:
        """Async version of `answer` that does not block the running event loop."""
        return await self._arun(self._answered(task_id, value, step, by))

    def _answered(self, task_id: UUID | str, value: object, step: str | None, by: str | None) -> Plan[str]:
        return answer_plan(self._database, to_task_id(task_id), value, step, by)
