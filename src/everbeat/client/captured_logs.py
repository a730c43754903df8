"""Reads the captured logs of a task's attempts."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from everbeat.client.database_access import DatabaseMethods
from everbeat.domain.settings.checks import whole
from everbeat.domain.task.captured_log import CapturedLog, decode_lines
from everbeat.errors import TaskNotFound
from everbeat.store import history
from everbeat.store.attempt_logs import MOST_LOGS, LogSummary, list_logs, list_parts
from everbeat.store.plan import Plan, ask

_number: Final = whole(1, 2_147_483_647)


class LogReaders(DatabaseMethods):
    """The method of a Handle that reads the captured logs of its task."""

    id: UUID

    def logs(self, *, attempt: int | None = None) -> list[CapturedLog]:
        """Return what the code of the task has logged, for each of its newest 20 attempts, oldest first. `attempt` selects one attempt.

        The list is empty if no log was captured (see `capture_logs`), or the logs are older than `captured_log_retention_hours`. A worker
        writes new lines once per second, so the last lines of running code can be missing. Raises TaskNotFound if the task does not exist,
        and ConfigurationError if `attempt` is invalid.

        for log in handle.logs():
            print(log.attempt, [line.message for line in log.lines])
        """
        return self._run("logs", read_logs(self.id, attempt=attempt))

    async def alogs(self, *, attempt: int | None = None) -> list[CapturedLog]:
        """Async version of `logs` that does not block the running event loop."""
        return await self._arun(read_logs(self.id, attempt=attempt))


class LogReading:
    """The place of one reader in the captured logs of a task. `limit` is the maximum number of attempts to read."""

    def __init__(self, task_id: UUID, *, attempt: int | None = None, limit: int = MOST_LOGS) -> None:
        self._task_id = task_id
        self._attempt = None if attempt is None else _number(attempt, subject="logs.attempt")
        self._limit = limit
        self._seen: dict[tuple[int, UUID], int] = {}

    def next_lines(self) -> Plan[list[CapturedLog]]:
        """Return what the attempts have logged since the previous call, oldest attempt first.

        Raises TaskNotFound if the task does not exist and has no captured log.
        """
        found = yield from ask(list_logs(self._task_id, attempt=self._attempt, limit=self._limit))
        if not found and self._task_id not in (yield from ask(history.outcomes([self._task_id]))):
            raise TaskNotFound(self._task_id)
        logs: list[CapturedLog] = []
        for summary in reversed(found):
            after = self._seen.get((summary.attempt, summary.claim_id), 0)
            if summary.last > after:
                logs += yield from self._read(summary, after)
        return logs

    def _read(self, summary: LogSummary, after: int) -> Plan[list[CapturedLog]]:
        parts = yield from ask(list_parts(self._task_id, summary, after=after))
        lines = [line for part in parts for line in decode_lines(part.lines) if line.number > after]
        last = max((part.last for part in parts), default=after)
        self._seen[summary.attempt, summary.claim_id] = last
        return (
            [CapturedLog(summary.attempt, summary.claim_id, lines, last - after - len(lines))]
            if parts
            else []
        )


def read_logs(task_id: UUID, *, attempt: int | None, limit: int = MOST_LOGS) -> Plan[list[CapturedLog]]:
    """Return the captured logs of a task's newest attempts, oldest first."""
    return (yield from LogReading(task_id, attempt=attempt, limit=limit).next_lines())
