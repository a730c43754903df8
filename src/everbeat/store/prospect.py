"""The statement of a worker that has nothing to do: what there is to wait for."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from everbeat.store.declining import marked_json
from everbeat.store.lease_records import MarkedGroup
from everbeat.store.statement import Row, Statement


class Prospect(Struct, frozen=True):
    """What there is to wait for: `due_in_ms` until the next scheduled task becomes due (negative: it just did; None: there is none),
    whether something has `happened` to workflows, and whether `suspects` are due."""

    due_in_ms: float | None
    happened: bool
    suspects: bool


def next_due(
    *,
    names: Sequence[str],
    queues: Sequence[str] | None,
    margin_ms: int = 0,
    marked: Sequence[MarkedGroup] = (),
) -> Statement[Prospect]:
    """What a worker with nothing to do asks, of tasks of these names; what became due within the margin counts."""
    parameters = {
        "names": list(names),
        "queues": None if queues is None else list(queues),
        "margin_ms": margin_ms,
        "marked": marked_json(marked),
    }

    def read(found: Sequence[Row]) -> Prospect:
        due_in_ms, happened, suspects = found[0]
        return Prospect(None if due_in_ms is None else float(due_in_ms), happened, suspects)

    return Statement("task/next_due", parameters, read)
