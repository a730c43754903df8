"""The types of hints and their payloads.

The statements that finish, cancel or recover tasks write the same payloads: `t:<queue>`, `d:<id>,<id>`, `c:<id>`, `l:<id>,<id>`, `w`, `q`,
`m`, and `*` for everything. The triggers of the message outbox write `o:`, `o:<number>:<task id>:<queue>` and, when the relay has stopped,
`r`. The statement that stores the items of streams writes `e:<id>,<id>` on a separate channel.

Every role that can connect can send any of these payloads. Therefore a hint only makes its receiver query the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from uuid import UUID

from msgspec import Struct

MAX_PAYLOAD_BYTES: Final = 7_900
"""PostgreSQL rejects a notification of 8,000 bytes, together with the statement that sends it."""

_ID_BYTES: Final = 37  # a UUID and its comma
IDS_PER_PAYLOAD: Final = (MAX_PAYLOAD_BYTES - 2) // _ID_BYTES


class TasksReady(Struct, frozen=True):
    """A queue might have tasks to claim."""

    queue: str


class TaskEnded(Struct, frozen=True):
    """These tasks might have reached a terminal state."""

    ids: tuple[UUID, ...]


class ItemsStored(Struct, frozen=True):
    """These tasks might have new items in their streams."""

    ids: tuple[UUID, ...]


class CancelAsked(Struct, frozen=True):
    """A cancellation of this running task might have been requested."""

    id: UUID


class LeaseTaken(Struct, frozen=True):
    """The leases of these tasks might have been taken from their holder."""

    ids: tuple[UUID, ...]


class Everything(Struct, frozen=True):
    """Hints might have been missed, so the receiver must check everything that it is waiting for."""


class WorkflowsMoved(Struct, frozen=True):
    """Workflows might have changed."""


class MessagesWritten(Struct, frozen=True):
    """The outbox might have rows to publish. `queue` is the queue of these rows, if the payload names it. The queue might be new to the receiver."""

    queue: str | None = None


class TurnFree(Struct, frozen=True):
    """The relay might have stopped, so that no worker is publishing the rows of the outbox."""


class TreesQuiet(Struct, frozen=True):
    """An operator might have quieted or resumed trees."""


class TasksMarked(Struct, frozen=True):
    """Tasks that require something of the worker's code might be waiting."""


Hint = (
    TasksReady
    | TaskEnded
    | ItemsStored
    | CancelAsked
    | LeaseTaken
    | WorkflowsMoved
    | MessagesWritten
    | TurnFree
    | TreesQuiet
    | TasksMarked
    | Everything
)


def encode(hint: Hint) -> tuple[str, ...]:
    """Return the payloads of `hint`. A list of ids that is too long for one payload is split, and an empty list has no payloads.

    If a queue name is too long, the payload is `*`, which stands for everything.
    """
    match hint:
        case TasksReady(queue):
            payload = f"t:{queue}"
            return (payload if len(payload.encode(errors="replace")) <= MAX_PAYLOAD_BYTES else "*",)
        case TaskEnded(ids):
            return tuple(_encode_ids("d", ids))
        case ItemsStored(ids):
            return tuple(_encode_ids("e", ids))
        case CancelAsked(task_id):
            return (f"c:{task_id}",)
        case LeaseTaken(ids):
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


_PLAIN: Final[Mapping[str, Hint]] = {
    "*": Everything(),
    "w": WorkflowsMoved(),
    "r": TurnFree(),
    "q": TreesQuiet(),
    "m": TasksMarked(),
}


def decode(payload: str) -> Hint | None:
    """Return the hint in a payload, or None for an unknown payload, which is not an error."""
    if (plain := _PLAIN.get(payload)) is not None:
        return plain
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
        case "e" if ids := tuple(_decode_ids(subject)):
            return ItemsStored(ids)
        case "c" if ids := tuple(_decode_ids(subject)):
            return CancelAsked(ids[0])
        case "l" if ids := tuple(_decode_ids(subject)):
            return LeaseTaken(ids)
        case _:
            return None


def _decode_written(subject: str) -> MessagesWritten:
    # The number and the task id are ignored: only the rows decide what is published.
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
            continue  # the other ids may be valid
