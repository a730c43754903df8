"""Errors of streams and of the answers to questions."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from everbeat.errors.tree import EverbeatError
from everbeat.errors.wording import amount


class AlreadyAnswered(EverbeatError):
    """The question already has an answer. The new answer was not stored."""

    code = "ALREADY_ANSWERED"

    def __init__(self, task_id: UUID | str, *, step: str, by: str | None, at: datetime) -> None:
        who = "" if by is None else f" by {by}"
        super().__init__(
            f"The question of step {step!r} of task {task_id} was already answered{who}, at {at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC.",
            fix="leave it: the task continues with the first answer.",
        )
        self.task_id = task_id
        self.step = step
        self.by = by
        self.at = at


class NoQuestion(EverbeatError):
    """The task does not wait for this answer: it has not asked, its question has timed out, or the task has ended. Nothing was stored."""

    code = "NO_QUESTION"

    def __init__(
        self, task_id: UUID | str, *, state: str, step: str | None = None, timed_out: bool = False
    ) -> None:
        asked = "an answer" if step is None else f"an answer in step {step!r}"
        why = "the question has timed out" if timed_out else f"it is {state} and has no such question open"
        super().__init__(
            f"Task {task_id} does not wait for {asked}: {why}.",
            fix="list the open questions with 'everbeat inbox' or app.inbox().",
        )
        self.task_id = task_id
        self.state = state
        self.step = step


class StreamFull(EverbeatError):
    """The task has emitted the maximum number of items. The item was not stored; earlier items are kept."""

    code = "STREAM_FULL"

    def __init__(self, stream: str, *, task_name: str, limit: int) -> None:
        super().__init__(
            f"Stream {stream!r} of task {task_name!r} takes no more items: the task has emitted {amount(limit, 'item')}, the most that one task can.",
            fix="emit fewer and larger items, such as one per second, or write large amounts of data to your own table or file.",
        )
        self.stream = stream
        self.limit = limit
