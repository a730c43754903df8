"""The statement that expires late tasks."""

from __future__ import annotations

from uuid import UUID

from msgspec import Struct

from everbeat.store.statement import Statement


class ExpiredTask(Struct, frozen=True):
    """A task that has expired."""

    id: UUID
    queue: str
    name: str


def expire(*, channel: str, limit: int = 200) -> Statement[list[ExpiredTask]]:
    """Expire a batch of late tasks, and return them."""
    given = {"channel": channel, "limit": limit}
    return Statement("task/expire_tasks", given, lambda found: [ExpiredTask(*row[:3]) for row in found])
