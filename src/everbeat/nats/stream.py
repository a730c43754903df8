"""Create and correct the stream of one schema and its consumers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from random import Random
from typing import Any, Final

from everbeat.nats.link import LinkLost, NatsLink, NoResponders
from everbeat.nats.problems import MOST_CONSUMERS, NO_STREAM, STREAM_NAME_TAKEN, ApiProblem, of_api, of_stream
from everbeat.nats.stream_plan import MOST_QUEUES, StreamPlan
from everbeat.runtime.events import Event, log_event

API: Final = "$JS.API"
API_TIMEOUT_S: Final = 4.0
CONSUMERS_AT_ONCE: Final = 50
"""A new stream needs all consumers again. The last of a thousand requests must not time out while it is waiting for the others."""
RETRY_REFUSED_S: Final = 15.0
"""Seconds between two attempts to create a rejected consumer, for example one whose subject another program's consumer uses."""
TROUBLE: Final = (ApiProblem, LinkLost, NoResponders, TimeoutError)
"""The errors that a request may raise, all of which may be temporary."""

_LAST_FIRST_PLACE: Final = 1 << 52  # larger places would leave too little room for exact JSON numbers


class NatsConsumersLimited(Event, frozen=True, kw_only=True):
    """The server allows no consumer for this queue, and perhaps for others. PostgreSQL notifies workers of the tasks in these queues.

    Either the stream has too many consumers, or the user lacks a permission.
    """

    component = "nats"
    level = logging.WARNING
    stream: str
    first_queue: str
    problem: str


class NatsConsumerRefused(Event, frozen=True, kw_only=True):
    """NATS has rejected the consumer of this queue. PostgreSQL notifies workers of the queue's tasks instead. Other queues are not affected."""

    component = "nats"
    level = logging.WARNING
    stream: str
    queue: str
    problem: str


class NatsConsumerMade(Event, frozen=True, kw_only=True):
    """NATS has accepted a consumer that it previously rejected, and the queue is being published again."""

    component = "nats"
    stream: str
    queue: str


def read(data: bytes) -> dict[str, Any]:
    """Decode a reply of the JetStream API. Raises ApiProblem if the reply is an error or unreadable."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ApiProblem(500, 0, "an unreadable answer")
    error = answer.get("error")
    if error is not None:
        raise ApiProblem(
            error.get("code", 500), error.get("err_code", 0), error.get("description", "no reason given")
        )
    return answer


async def ask(link: NatsLink, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request to the JetStream API and return the reply. Raises ApiProblem, LinkLost, NoResponders or TimeoutError on failure."""
    data = b"" if body is None else json.dumps(body).encode()
    return read((await link.request(f"{API}.{subject}", data, timeout_s=API_TIMEOUT_S)).data)


class StreamKeeper:
    """Maintains the stream over one link. The keeper remembers the objects that it has created until a caller calls `doubt`."""

    def __init__(self, link: NatsLink, plan: StreamPlan, random: Random) -> None:
        self.link = link
        self.plan = plan
        self.created: str | None = None
        """The time when the stream was created. A different time means a different stream."""
        self.generation = 0
        """The number of checks of the stream. Callers pass it to `doubt`, so that many doubts about the same check cause only one more check."""
        self.without: dict[str, str] = {}
        """Queues without a consumer, each with the server's reason. Other queues are not affected."""
        self._random = random
        self._sure = False
        self._made: set[str] = set()
        self._lock = asyncio.Lock()
        self._more_lock = asyncio.Lock()
        self._turns = asyncio.Semaphore(CONSUMERS_AT_ONCE)
        self._has_asked_for_more = False
        self._final: set[str] = set()
        self._retry_at = 0.0

    def doubt(self, generation: int) -> None:
        """Check everything again, because something seems to be missing since the given check."""
        if generation == self.generation:
            self._sure = False
            self._made.clear()

    def look_again(self) -> None:
        """Check the stream at the next `ensure`. Its consumers are checked only if the stream is a different one."""
        self._sure = False

    async def ensure(self, queues: Iterable[str]) -> None:
        """Create the stream and the consumers of these queues if they are missing.

        Raises NatsRefused, ApiProblem, LinkLost, NoResponders or TimeoutError on failure.
        """
        async with self._lock:
            if not self._sure:
                created = await self._stream()
                if created != self.created:
                    self._made.clear()
                    self._final.clear()
                    self._retry_at = 0.0
                    self._has_asked_for_more = False
                self.created, self._sure = created, True
                self.generation += 1
            wanted = {*queues} - self._made - self._final
            now = asyncio.get_running_loop().time()
            if now < self._retry_at:
                wanted -= self.without.keys()
            else:
                self._retry_at = now + RETRY_REFUSED_S
            await asyncio.gather(*(self._consumer(queue) for queue in sorted(wanted)))

    async def _stream(self) -> str:
        plan = self.plan
        try:
            found = await self._info()
            if found is None:
                found = await self._create()
            settings = found["config"]
            foreign = plan.foreign(settings)
            if foreign is not None:
                raise of_stream(plan.stream, self.link.server, foreign)
            if plan.differs(settings):
                await ask(self.link, f"STREAM.UPDATE.{plan.stream}", {**settings, **plan.stream_settings()})
        except ApiProblem as problem:
            if problem.may_pass:
                raise
            raise of_api(plan.stream, self.link.server, problem) from None
        return str(found["created"])

    async def _info(self) -> dict[str, Any] | None:
        try:
            return await ask(self.link, f"STREAM.INFO.{self.plan.stream}")
        except ApiProblem as problem:
            if problem.err_code != NO_STREAM:
                raise
            return None

    async def _create(self) -> dict[str, Any]:
        # A new stream starts at a random place, so places that refer to its predecessor match no message in it.
        first = self._random.randrange(1, _LAST_FIRST_PLACE)
        try:
            return await ask(
                self.link,
                f"STREAM.CREATE.{self.plan.stream}",
                {**self.plan.stream_settings(), "first_seq": first},
            )
        except ApiProblem as problem:
            found = await self._info() if problem.err_code == STREAM_NAME_TAKEN else None
            if found is None:
                raise
            return found  # another program has created it in the meantime

    async def _consumer(self, queue: str) -> None:
        try:
            async with self._turns:
                await self._make(queue)
        except ApiProblem as problem:
            if not problem.is_of_one_consumer:
                raise
            self._refused(queue, str(problem), final=problem.err_code == MOST_CONSUMERS)
            return
        except TimeoutError:
            denied = " ".join(str(self.link.last_reason).split())
            if f'.{self.plan.stream}.{self.plan.consumer(queue)}"'.lower() not in denied.lower():
                raise
            self._refused(
                queue, denied, final=True
            )  # the server does not reply to requests that the user has no permission to make
            return
        self._made.add(queue)
        if self.without.pop(queue, None) is not None:
            log_event(NatsConsumerMade(stream=self.plan.stream, queue=queue))

    async def _make(self, queue: str) -> None:
        plan = self.plan
        subject = f"CONSUMER.DURABLE.CREATE.{plan.stream}.{plan.consumer(queue)}"
        try:
            await ask(self.link, subject, plan.consumer_settings(queue))
        except ApiProblem as problem:
            if problem.err_code != MOST_CONSUMERS:
                raise
            await self._ask_for_more()
            await ask(self.link, subject, plan.consumer_settings(queue))

    def _refused(self, queue: str, reason: str, *, final: bool) -> None:
        """Record a rejection. If `final` is set, the consumer is not requested again over this link."""
        stream = self.plan.stream
        if final:
            if not self._final:
                log_event(NatsConsumersLimited(stream=stream, first_queue=queue, problem=reason))
            self._final.add(queue)
        elif self.without.get(queue) != reason:
            log_event(NatsConsumerRefused(stream=stream, queue=queue, problem=reason))
        self.without[queue] = reason

    async def _ask_for_more(self) -> None:
        """Raise the stream's consumer limit, or wait until the request for another queue has raised it.

        nats-server 2.15 and newer allow 1,000 consumers if the stream has no limit.
        """
        async with self._more_lock:
            if self._has_asked_for_more:
                return
            self._has_asked_for_more = True
            try:
                found = await self._info()
                if found is not None:
                    limit = {"max_consumers": MOST_QUEUES}
                    await ask(self.link, f"STREAM.UPDATE.{self.plan.stream}", {**found["config"], **limit})
            except ApiProblem:
                pass  # the account or an older server allows no more consumers, so these queues have none
