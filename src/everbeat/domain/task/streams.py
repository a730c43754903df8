"""The streams of a task: numbered items that running code emits and that other programs read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Generic, TypeVar, final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.plan import aperform, perform
from everbeat.domain.task.context_backend import (
    RECORD_LIMIT_BYTES,
    ContextBackend,
    EmittedItem,
    OpenStreams,
    StoreItems,
    StreamInfo,
)
from everbeat.domain.task.step_runner import StepPlan
from everbeat.domain.task.steps import checked_stream_name
from everbeat.domain.typed_json import Misfit, encode_untyped, refusal, require_plain, typed_json
from everbeat.errors import PayloadError, StopReason, StreamFull, TaskStopped

T_co = TypeVar("T_co", covariant=True)


MOST_STREAM_ITEMS: Final = 100_000
"""The maximum number of items in all streams of one task."""
UNSTORED_ITEMS: Final = 1_000
"""After this many items, the code waits until all its items are stored. A database that is away then fills no memory."""
UNSTORED_BYTES: Final = 1_048_576
"""The same limit for the JSON size of the items, in bytes."""


class StreamItem(Struct, Generic[T_co], frozen=True):
    """One item of a stream. `at` is when it was stored, in UTC by the database's clock. `attempt` is the attempt that emitted it."""

    number: int
    value: T_co
    at: datetime
    attempt: int


@final
class StreamBook:
    """Numbers the items of one attempt. Safe for concurrent use by threads, because the backend calls `draw` for one item at a time."""

    __slots__ = ("_bytes", "_earlier", "_emitted", "_numbers", "_unstored", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        """Whether the numbers of earlier attempts are known."""
        self._numbers: dict[str, int] = {}
        self._earlier = self._emitted = self._unstored = self._bytes = 0

    def open(self, streams: Sequence[StreamInfo]) -> None:
        """Continue the streams of earlier attempts. A second call, by another thread, changes no number that is already in use."""
        for each in streams:
            self._numbers.setdefault(each.name, each.items)
        if not self.is_open:
            self._earlier = sum(each.items for each in streams)
            self.is_open = True

    def draw(self, name: str, value: str, *, task_name: str) -> EmittedItem:
        """Return an item with the next number of its stream. Raises StreamFull if the task has emitted the maximum number of items."""
        if self._earlier + self._emitted >= MOST_STREAM_ITEMS:
            raise StreamFull(name, task_name=task_name, limit=MOST_STREAM_ITEMS)
        number = self._numbers.get(name, 0) + 1
        self._numbers[name] = number
        self._emitted += 1
        self._unstored += 1
        self._bytes += len(value)
        return EmittedItem(name, number, value)

    def take_full(self) -> bool:
        """Return whether the caller must now wait until all items are stored. The counts then start again."""
        is_full = self._unstored >= UNSTORED_ITEMS or self._bytes >= UNSTORED_BYTES
        if is_full:
            self._unstored = self._bytes = 0
        return is_full


class StreamMethods:
    """The methods of a Context that emit the items of streams."""

    __slots__ = ()

    task_id: UUID
    name: str
    fence: int
    _backend: ContextBackend
    _streams: StreamBook

    def emit(self, name: str, value: object) -> int:
        """Add an item to the task's stream `name` and return the item's number. Other programs read it with `Handle.stream`.

        The items of a stream are numbered from 1 across all attempts. The worker stores them soon, in portions, and before the end of the
        task. The call returns before the item is stored. It waits for the database only if many items are not stored yet, and when a later
        attempt begins to emit. Also restarts the stall timeout.

        Raises PayloadError if the name is invalid, JSON would change the value, or the value exceeds 1 MB. Raises StreamFull if the task
        has emitted 100,000 items. Raises TaskStopped if the task should stop, BlockingCallInLoop on an event loop, and DatabaseError if
        the database refuses an item.

        ctx.emit("tokens", token)
        """
        self._backend.refuse_in_loop("Context.emit", instead="await Context.aemit(...)")
        return perform(self._emitted(name, value), self._backend.ask_step)

    async def aemit(self, name: str, value: object) -> int:
        """Async version of `emit` that does not block the running event loop."""
        return await aperform(self._emitted(name, value), self._backend.aask_step)

    def _emitted(self, name: str, value: object) -> StepPlan[int]:
        checked_stream_name(name, owner=f"a stream of task {self.name!r}")
        data = encode_item(value, stream=name, task_name=self.name).decode()
        book = self._streams
        self._require_running()
        if not book.is_open:
            # The first claim has no earlier attempts.
            streams = () if self.fence <= 1 else (yield OpenStreams()).streams
            book.open(streams)
        item = self._backend.emit(partial(book.draw, name, data, task_name=self.name))
        if book.take_full():
            yield StoreItems()
        self._require_running()
        return item.number

    def _require_running(self) -> None:
        reason: StopReason | None = self._backend.stop_reason()
        if reason is not None:
            raise TaskStopped(reason, task_id=self.task_id)


def encode_item(value: object, *, stream: str, task_name: str) -> bytes:
    """Return the value of an item as JSON. Raises PayloadError if JSON would change the value, or the value exceeds 1 MB."""
    subject = f"item of stream {stream!r} of task {task_name!r}"
    try:
        data = encode_untyped(value)
        require_plain(value, data)
    except Misfit as misfit:
        place = f" at {misfit.path.lstrip('.')}" if misfit.path else ""
        raise PayloadError(
            f"The {subject}{place} {misfit.predicate}.",
            parameter="value",
            fix="emit plain values, such as value.isoformat() or str(value).",
        ) from None
    if len(data) > RECORD_LIMIT_BYTES:
        raise PayloadError(
            f"The {subject} takes {len(data):,} bytes of JSON; at most {RECORD_LIMIT_BYTES:,} are stored.",
            parameter="value",
            fix="emit smaller items, or store large data elsewhere and emit a reference to it.",
        )
    return data


def require_readable(annotation: Any, *, stream: str) -> None:
    """Raise PayloadError if no item can have the annotated type."""
    refused = refusal(annotation)
    if refused is not None:
        raise PayloadError(
            f"The type of the items of stream {stream!r} {refused.reason}.",
            parameter="type",
            fix=f"{refused.fix}.",
        )


def decode_item(annotation: Any, value: str, *, stream: str, number: int) -> Any:
    """Return the value of an item. Raises PayloadError if the value does not have the requested type."""
    try:
        return typed_json(annotation).decode(value)
    except Misfit as misfit:
        place = f" (at {misfit.path})" if misfit.path else ""
        raise PayloadError(
            f"Item {number} of stream {stream!r} is not of the expected type: {misfit.reason}{place}.",
            parameter="type",
            fix="read it with another type, or without one.",
        ) from None
