"""Gathers: many children of a durable task whose outcomes it waits for together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b, sha256
from typing import Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.task.context_backend import ChildEnd, NewChild
from everbeat.domain.task.outcome import error_from_json, error_to_json
from everbeat.domain.task.states import TaskState
from everbeat.errors import RESULT_NOT_AVAILABLE, PayloadError, TaskError
from everbeat.errors.wording import storable

MOST_CHILDREN: Final = 10_000
"""The maximum number of calls of one gather. Each attempt of the task reads the outcomes of all of them."""
PORTION_ROWS: Final = 500
PORTION_BYTES: Final = 8 * 1024 * 1024
"""A statement sends at most this many children, and at most this many bytes of arguments, but at least one child."""
ENDS_PER_RECORD: Final = 500
_FULL_ERRORS_BYTES: Final = 256 * 1024
"""If the errors of one record take more bytes, their tracebacks and data are left out. Every later attempt reads the record."""
_MESSAGE_BYTES: Final = 1_000


EVENT_PREFIX: Final = "gather/"
"""With the name of a gather behind it, the event for which the task waits. A signal cannot have such a name."""


def awaited(event: str) -> str:
    """Return a phrase for what a suspended task is waiting for: an event, or the children of a gather."""
    return "its gathered children" if event.startswith(EVENT_PREFIX) else f"event {event!r}"


class NewGather(Struct, frozen=True):
    """The number of children of a gather, and the digest of their names and arguments."""

    count: int
    digest: str

    @classmethod
    def of(cls, children: Sequence[NewChild]) -> NewGather:
        """Return the gather of these children. Raises PayloadError if there are too many, or if one has a key."""
        if len(children) > MOST_CHILDREN:
            raise PayloadError(
                f"Context.gather got {len(children):,} calls; one gather takes at most {MOST_CHILDREN:,}.",
                parameter="calls",
                fix="gather them in several portions, give each child several items, or send them to a batch: app.batch(...).",
            )
        digest = blake2b(digest_size=16)
        for place, child in enumerate(children):
            if child.key is not None:
                raise PayloadError(
                    f"Entry {place} of the calls to gather, a call of {child.name!r}, has the key {child.key!r}, but a gather waits only for"
                    " its own tasks.",
                    parameter="calls",
                    fix="leave with_options(key=...) out.",
                )
            digest.update(f"{child.name}\x1f{child.digest}\x1e".encode())
        return cls(len(children), digest.hexdigest())

    @staticmethod
    def id_in(task_id: UUID, name: str) -> UUID:
        """Return the id of the gather with this name in a task."""
        return _derived(task_id, name)

    def ids(self, gather_id: UUID) -> tuple[UUID, ...]:
        """Return the ids of the children. They are the same in each attempt, so no child is sent twice."""
        return tuple(_derived(gather_id, str(place)) for place in range(self.count))


def portions(children: Sequence[NewChild]) -> Iterator[slice]:
    """Return the portions in which the children are sent. Without children, there is one empty portion."""
    first = size = 0
    for place, child in enumerate(children):
        size += len(child.args)
        if place > first and (place - first >= PORTION_ROWS or size > PORTION_BYTES):
            yield slice(first, place)
            first, size = place, len(child.args)
    yield slice(first, len(children))


def recorded_ends(ends: Sequence[ChildEnd]) -> str | None:
    """Return the record of the children that did not complete, as JSON text, or None if all completed."""
    missed = {
        str(place): _explained(end) for place, end in enumerate(ends) if end.state != TaskState.COMPLETED
    }
    if not missed:
        return None
    record = msgspec.json.encode(missed)
    if len(record) > _FULL_ERRORS_BYTES:
        record = msgspec.json.encode({place: _shortened(end) for place, end in missed.items()})
    return record.decode()


def with_recorded(ends: Sequence[ChildEnd], record: str | None) -> Iterator[ChildEnd]:
    """Return the outcomes, with those of the record in place of the present ones."""
    missed = {} if record is None else msgspec.json.decode(record, type=dict[str, ChildEnd])
    return (missed.get(str(place), end) for place, end in enumerate(ends))


def _explained(end: ChildEnd) -> ChildEnd:
    """Return the outcome with an error that says why a child has no outcome, if it has none."""
    if end.state is None:
        return _unavailable("The task was deleted, so its outcome is unknown.")
    if TaskState(end.state).is_terminal:
        return ChildEnd(end.state, None, end.error)
    return _unavailable(
        "The task was retried after all tasks of the gather had ended, and has not ended again."
    )


def _unavailable(message: str) -> ChildEnd:
    return ChildEnd("FAILED", None, error_to_json(TaskError(RESULT_NOT_AVAILABLE, message)).decode())


def _shortened(end: ChildEnd) -> ChildEnd:
    if end.error is None:
        return end
    error = error_from_json(end.error)
    short = TaskError(error.code, storable(error.message, limit=_MESSAGE_BYTES), type=error.type)
    return ChildEnd(end.state, None, error_to_json(short).decode())


def _derived(owner: UUID, name: str) -> UUID:
    """Return an id that begins with the owner's time, as in a UUIDv7, and is derived from the owner and a name."""
    tail = bytearray(sha256(owner.bytes + name.encode()).digest()[:10])
    tail[0], tail[2] = 0x70 | tail[0] & 0x0F, 0x80 | tail[2] & 0x3F
    return UUID(bytes=owner.bytes[:6] + bytes(tail))
