"""Statements about suspects: tasks that may have killed their process, and run alone next."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from everbeat.store.declining import marked_json
from everbeat.store.lease_records import MarkedGroup
from everbeat.store.statement import Statement


def suspects_wait(
    *, names: Sequence[str], queues: Sequence[str] | None, marked: Sequence[MarkedGroup] = ()
) -> Statement[bool]:
    """Whether any suspect of these names and queues is due; costs next to nothing where there is none."""
    parameters = {
        "names": list(names),
        "queues": None if queues is None else list(queues),
        "marked": marked_json(marked),
    }
    return Statement("task/suspects_wait", parameters, lambda found: bool(found[0][0]))


def process_ends(ids: Sequence[UUID]) -> Statement[list[tuple[UUID, str]]]:
    """Task and cause of each earlier end of a process under the code of these tasks."""
    return Statement(
        "task/process_ends", {"ids": list(ids)}, lambda found: [(row[0], row[1]) for row in found]
    )
