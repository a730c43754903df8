"""What a hint can say, and its text on the wire.

What lives here: the kinds of hints, their payloads, reading them back. What may not: connections, and truth: a
hint may be lost, repeated or late, and whoever gets one looks into the database.

The statements that end, cancel or take tasks write the same payloads: `t:<queue>`, `d:<id>,<id>`, `c:<id>`,
`l:<id>,<id>`, `w`, `q`, `m`, and `*` for all there may be; the triggers of the message outbox `o:`,
`o:<number>:<task id>:<queue>` and, when whoever publishes has ended, `r`.

Every role that can connect can send any of them: a hint makes its receiver query the rows, and has no other effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from uuid import UUID

from msgspec import Struct

MAX_PAYLOAD_BYTES: Final = 7_900
"""PostgreSQL refuses a notification of 8,000 bytes, and with it the statement that sends it."""

_ID_BYTES: Final = 37  # a UUID and its comma
IDS_PER_PAYLOAD: Final = (MAX_PAYLOAD_BYTES - 2) // _ID_BYTES


class TasksReady(Struct, frozen=True):
    """A queue may have tasks to claim."""

    queue: str


class TaskEnded(Struct, frozen=True):
    """These tasks may have reached a terminal state."""

    ids: tuple[UUID, ...]


class CancelAsked(Struct, frozen=True):
    """Somebody may have asked to cancel this running task."""

    id: UUID


class LeaseLost(Struct, frozen=True):
    """The leases of these tasks may have been taken from their holder."""

    ids: tuple[UUID, ...]


class Everything(Struct, frozen=True):
    """Anything may have happened: hints may have been missed, so look at all that is waited for."""


class WorkflowsMoved(Struct, frozen=True):
    """Something may have happened to workflows."""


class MessagesWritten(Struct, frozen=True):
    """The outbox might have rows to be published. `queue`: perhaps of this queue, which the receiver might not know yet."""

    queue: str | None = None


class TurnFree(Struct, frozen=True):
    """Nobody may be publishing what stands in the outbox."""


class TreesQuiet(Struct, frozen=True):
    """An operator may have made trees quiet, or resumed them."""


class TasksMarked(Struct, frozen=True):
    """Tasks may wait that say what the code of a worker must understand."""


Hint = (
    TasksReady
    | TaskEnded
    | CancelAsked
    | LeaseLost
    | WorkflowsMoved
    | MessagesWritten
    | TurnFree
    | TreesQuiet
    | TasksMarked
    | Everything
)


def encode(hint: Hint) -> tuple[str, ...]:
    """The payloads that say `hint`: several where one would be too long, none where it names no task."""
    match hint:
        case TasksReady(queue):
            payload = f"t:{queue}"
            return (payload if len(payload.encode(errors="replace")) <= MAX_PAYLOAD_BYTES else "*",)
        case TaskEnded(ids):
            return tuple(_encode_ids("d", ids))
        case CancelAsked(task_id):
            return (f"c:{task_id}",)
        case LeaseLost(ids):
            return tuple(_encode_ids("l", ids))
        case WorkflowsMoved():
            return ("w",)
        case MessagesWritten(queue):
            return ("o:" if queue is None else f"o:::{queue}",)
        case TurnFree():
            return ("r",)
        case TreesQuiet():
            return ("q",)
        case TasksMarked():
            return ("m",)
        case Everything():
            return ("*",)


def decode(payload: str) -> Hint | None:
    """The hint in a payload; None for one that says nothing understandable, which is no error."""
    if payload == "*":
        return Everything()
    if payload == "w":
        return WorkflowsMoved()
    if payload == "r":
        return TurnFree()
    if payload == "q":
        return TreesQuiet()
    if payload == "m":
        return TasksMarked()
    kind, _, subject = payload.partition(":")
    if kind == "o":
        return _decode_written(subject)
    if not subject:
        return None
    match kind:
        case "t":
            return TasksReady(subject)
        case "d" if ids := tuple(_decode_ids(subject)):
            return TaskEnded(ids)
        case "c" if ids := tuple(_decode_ids(subject)):
            return CancelAsked(ids[0])
        case "l" if ids := tuple(_decode_ids(subject)):
            return LeaseLost(ids)
        case _:
            return None


def _decode_written(subject: str) -> MessagesWritten:
    # The number and the task are not read: only the rows say what is to be published.
    _, _, queue = subject.partition(":")[2].partition(":")
    return MessagesWritten(queue or None)


def _encode_ids(kind: str, ids: Sequence[UUID]) -> Iterator[str]:
    for first in range(0, len(ids), IDS_PER_PAYLOAD):
        yield f"{kind}:{','.join(map(str, ids[first : first + IDS_PER_PAYLOAD]))}"


def _decode_ids(subject: str) -> Iterator[UUID]:
    for text in subject.split(","):
        try:
            yield UUID(text)
        except ValueError:
            continue  # the others may still be right
