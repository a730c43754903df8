"""Statements about suspects: tasks that may have killed their process, and run alone next."""

from __future__ import annotations

from collections.abc import Sequence

from everbeat.store.statement import Statement


def suspects_wait(*, names: Sequence[str], queues: Sequence[str] | None) -> Statement[bool]:
    """Whether any suspect of these names and queues is due; costs next to nothing where there is none."""
    parameters = {"names": list(names), "queues": None if queues is None else list(queues)}
    return Statement("task/suspects_wait", parameters, lambda found: bool(found[0][0]))
