"""Statements of code that runs about what it has done for good: its steps, sleeps, waits and children; all under its fence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias
from uuid import UUID

from msgspec import Struct, structs

from everbeat.domain.recorded import NewChild, Recorded, StepState
from everbeat.store.statement import Row, Statement

PAGE_ROWS: Final = 500
PAGE_BYTES: Final = 16 * 1024 * 1024

Place: TypeAlias = tuple[str, str]
"""(kind, name) of a record, by which they are ordered."""
FIRST: Final[Place] = ("", "")


class StepsPage(Struct, frozen=True):
    """Some of the records of a task; `next_after` is where the next page begins, None after the last."""

    records: tuple[Recorded, ...]
    next_after: Place | None


class Waited(Struct, frozen=True):
    """What became of a wait: OPEN, DONE with the signal's value as JSON text, or TIMED_OUT."""

    state: StepState
    value: str | None


class ChildVerdict(Struct, frozen=True):
    """What became of a child: "sent", or "cancelled" where its parent is asked to end, or "again": ask once more."""

    verdict: Literal["sent", "cancelled", "again"]
    id: UUID | None


def load_steps(task_id: UUID, claim_id: UUID, *, after: Place = FIRST) -> Statement[StepsPage | None]:
    """What earlier attempts have recorded, a page at a time; None when the lease was lost."""
    parameters = {
        "id": task_id,
        "claim_id": claim_id,
        "kind": after[0],
        "name": after[1],
        "limit": PAGE_ROWS,
        "bytes": PAGE_BYTES,
    }
    return Statement("step/load", parameters, _page)


def record_step(task_id: UUID, claim_id: UUID, *, name: str, result: bytes) -> Statement[bool]:
    """Records what a step returned, once; False when the lease was lost."""
    parameters = {"id": task_id, "claim_id": claim_id, "name": name, "result": result.decode()}
    return Statement("step/record", parameters, bool)


def begin_sleep(task_id: UUID, claim_id: UUID, *, name: str, duration_ms: int) -> Statement[float | None]:
    """Sets the moment of waking, once; answers the milliseconds left, None when the lease was lost."""
    parameters = {"id": task_id, "claim_id": claim_id, "name": name, "duration_ms": duration_ms}
    return Statement("step/sleep", parameters, lambda found: float(found[0][0]) if found else None)


def wait_for_signal(
    task_id: UUID, claim_id: UUID, *, name: str, event: str, timeout_ms: int | None
) -> Statement[Waited | None]:
    """Takes a signal, or says that the task waits for it; None when the lease was lost. What is OPEN is asked for once more."""
    parameters = {
        "id": task_id,
        "claim_id": claim_id,
        "name": name,
        "event": event,
        "timeout_ms": timeout_ms,
    }
    return Statement("step/wait", parameters, lambda found: Waited(*found[0]) if found else None)


def send_child(
    task_id: UUID, claim_id: UUID, *, step: str, child: NewChild, channel: str
) -> Statement[ChildVerdict | None]:
    """Sends a child under the name of this step, once in all attempts; None when the lease was lost."""
    parameters = {
        "id": task_id, "claim_id": claim_id, "step": step, "channel": channel, **structs.asdict(child)
    }  # fmt: skip
    return Statement("step/send_child", parameters, _child)


def _page(found: Sequence[Row]) -> StepsPage | None:
    if not found:
        return None
    records = tuple(Recorded(*row[:5]) for row in found if row[0] is not None)
    if not records:
        return StepsPage((), None)
    looked = found[0][5]
    is_last = looked < PAGE_ROWS and len(records) == looked
    return StepsPage(records, None if is_last else (records[-1].kind, records[-1].name))


def _child(found: Sequence[Row]) -> ChildVerdict | None:
    if not found:
        return None
    return ChildVerdict(*found[0][:2])
