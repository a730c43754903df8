"""Reads the streams of a task: stored items, and new ones as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from time import monotonic
from typing import Any, Final, TypeVar, overload
from uuid import UUID

from everbeat.client.database_access import DatabaseAccess, DatabaseMethods, refuse_in_loop
from everbeat.client.waiter import EndedTask, Waiter
from everbeat.domain.settings.checks import switch, whole
from everbeat.domain.settings.units import Duration, to_seconds
from everbeat.domain.task.context_backend import StreamInfo
from everbeat.domain.task.steps import checked_stream_name
from everbeat.domain.task.streams import StreamItem, decode_item, require_readable
from everbeat.errors import TaskNotFound, WaitTimeout
from everbeat.store import history
from everbeat.store.plan import Action, Plan, ask
from everbeat.store.streams import StoredItem, list_items, list_streams

T = TypeVar("T")

_number: Final = whole(0, 2_147_483_647)
_POLL_S: Final = 1.0
"""How often a reader queries the items although no hint has arrived, in seconds. A hint can be lost."""
_DEAF_POLL_S: Final = 0.2
"""The same if no hints arrive at all."""


class StreamReaders(DatabaseMethods):
    """The methods of a Handle that read the streams of its task."""

    id: UUID
    _database: DatabaseAccess

    @overload
    def stream(
        self,
        name: str,
        /,
        *,
        after: int = 0,
        timeout: Duration | None = None,
        follow: bool = True,
        type: type[T],
    ) -> Iterator[StreamItem[T]]: ...
    @overload
    def stream(
        self,
        name: str,
        /,
        *,
        after: int = 0,
        timeout: Duration | None = None,
        follow: bool = True,
        type: Any = Any,
    ) -> Iterator[StreamItem[Any]]: ...
    def stream(
        self,
        name: str,
        /,
        *,
        after: int = 0,
        timeout: Duration | None = None,
        follow: bool = True,
        type: Any = Any,  # noqa: A002
    ) -> Iterator[StreamItem[Any]]:
        """Iterate over the items of a stream of the task, in their order, and wait for new items until the task has ended.

        `after` is the number of the last item that you have already read. `timeout` limits each wait for the next item. Without `follow`,
        the iteration ends after the stored items. An iteration that ends does not say how the task ended: see `outcome`.

        Raises WaitTimeout if a wait takes longer than `timeout`, TaskNotFound if the task does not exist, and AppClosed if the app is
        closed meanwhile. Raises PayloadError if an item is not of the given `type`, ConfigurationError if an argument is invalid, and
        BlockingCallInLoop on an event loop.

        for item in handle.stream("tokens", type=str):
            print(item.value, end="")
        """
        refuse_in_loop("Handle.stream", twin="Handle.astream")
        return self._items(_Reading(self._database, self.id, name, after, timeout, follow, type))

    @overload
    def astream(
        self,
        name: str,
        /,
        *,
        after: int = 0,
        timeout: Duration | None = None,
        follow: bool = True,
        type: type[T],
    ) -> AsyncIterator[StreamItem[T]]: ...
    @overload
    def astream(
        self,
        name: str,
        /,
        *,
        after: int = 0,
        timeout: Duration | None = None,
        follow: bool = True,
        type: Any = Any,
    ) -> AsyncIterator[StreamItem[Any]]: ...
    def astream(
        self,
        name: str,
        /,
        *,
        after: int = 0,
        timeout: Duration | None = None,
        follow: bool = True,
        type: Any = Any,  # noqa: A002
    ) -> AsyncIterator[StreamItem[Any]]:
        """Async version of `stream`, for use with `async for`."""
        return self._aitems(_Reading(self._database, self.id, name, after, timeout, follow, type))

    def streams(self) -> list[StreamInfo]:
        """Return the streams of the task, by name. A task that has emitted nothing has none.

        Raises TaskNotFound if the task does not exist.
        """
        return self._run("streams", _streams(self.id))

    async def astreams(self) -> list[StreamInfo]:
        """Async version of `streams` that does not block the running event loop."""
        return await self._arun(_streams(self.id))

    def _items(self, reading: _Reading) -> Iterator[StreamItem[Any]]:
        try:
            while page := self._run("stream", reading.next_page()):
                for item in page:
                    yield reading.decoded(item)
        finally:
            reading.close()

    async def _aitems(self, reading: _Reading) -> AsyncIterator[StreamItem[Any]]:
        try:
            while page := await self._arun(reading.next_page()):
                for item in page:
                    yield reading.decoded(item)
        finally:
            reading.close()


def _streams(task_id: UUID) -> Plan[list[StreamInfo]]:
    found = yield from ask(list_streams(task_id))
    if not found:
        yield from _require_task(task_id)
    return found


def _require_task(task_id: UUID) -> Plan[None]:
    if task_id not in (yield from ask(history.outcomes([task_id]))):
        raise TaskNotFound(task_id)


class _Reading:
    """The place of one reader in a stream."""

    def __init__(
        self,
        database: DatabaseAccess,
        task_id: UUID,
        name: str,
        after: int,
        timeout: Duration | None,
        follow: bool,
        annotation: Any,
    ) -> None:
        self._database = database
        self._task_id = task_id
        self._name = checked_stream_name(name, owner=f"a stream of task {task_id}")
        self._after: int = _number(after, subject="stream.after")
        self._timeout_s = None if timeout is None else to_seconds(timeout, subject="stream.timeout")
        self._follows = switch(follow, subject="stream.follow")
        require_readable(annotation, stream=name)
        self._annotation = annotation
        self._ended: EndedTask | None = None

    def decoded(self, item: StoredItem) -> StreamItem[Any]:
        """Return the item with its decoded value, and continue after it."""
        value = decode_item(self._annotation, item.value, stream=self._name, number=item.number)
        self._after = item.number
        return StreamItem(item.number, value, item.at, item.attempt)

    def next_page(self) -> Plan[Sequence[StoredItem]]:
        """Return the next stored items. If there are none, wait for them. An empty page is the end of the stream."""
        if not self._follows:
            return (yield from self._stored())
        waiter, began_at = self._database.waiter, monotonic()
        if self._ended is None:
            yield from self._database.announced()
            self._ended = waiter.wait(self._task_id)
            self._ended.add_done_callback(_hear)
        ended = self._ended
        while True:
            news = ended.news()
            is_last = ended.done()
            if found := (yield from ask(list_items(self._task_id, self._name, after=self._after))):
                return found
            if is_last:
                ended.result()  # raises if the task does not exist or the app was closed
                return ()
            yield from self._wait(waiter, ended, news, began_at)

    def _stored(self) -> Plan[Sequence[StoredItem]]:
        found = yield from ask(list_items(self._task_id, self._name, after=self._after))
        if not found:
            yield from _require_task(self._task_id)
        return found

    def _wait(self, waiter: Waiter, ended: EndedTask, news: Future[None], began_at: float) -> Plan[None]:
        pause_s = _POLL_S if waiter.is_listening else _DEAF_POLL_S
        if self._timeout_s is not None:
            waited_s = monotonic() - began_at
            if waited_s >= self._timeout_s:
                raise WaitTimeout(self._task_id, waited_s, state=ended.seen)
            pause_s = min(pause_s, self._timeout_s - waited_s)
        yield Action(lambda: futures.wait([news], timeout=pause_s), lambda: _await_news(news, pause_s))

    def close(self) -> None:
        """Stop waiting for the task."""
        if self._ended is not None:
            self._ended.cancel()


def _hear(ended: Future[Any]) -> None:
    if isinstance(ended, EndedTask):
        ended.hear()


async def _await_news(news: Future[None], pause_s: float) -> None:
    waiting = asyncio.wrap_future(news)
    try:
        await asyncio.wait([waiting], timeout=pause_s)
    finally:
        waiting.cancel()
