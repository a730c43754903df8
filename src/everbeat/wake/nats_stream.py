"""The stream and its consumers at the server: made, changed where they differ from the plan, made again where they are gone.

What lives here: asking JetStream's API over one link. What may not: hints, and streams of somebody else, which are left alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from random import Random
from typing import Any, Final

from everbeat.runtime.events import Event, log_event
from everbeat.wake.nats_link import Link, LinkLost, NoResponders
from everbeat.wake.nats_problems import (
    MOST_CONSUMERS,
    NO_STREAM,
    STREAM_NAME_TAKEN,
    ApiProblem,
    of_api,
    of_stream,
)
from everbeat.wake.stream_plan import MOST_QUEUES, StreamPlan

API: Final = "$JS.API"
API_TIMEOUT_S: Final = 4.0
CONSUMERS_AT_ONCE: Final = 50
"""A stream made anew needs all consumers again: the last of a thousand must not time out behind the others."""
RETRY_REFUSED_S: Final = 15.0
"""How often a consumer that was refused is asked for again, for example because a consumer of another program takes its subject."""
TROUBLE: Final = (ApiProblem, LinkLost, NoResponders, TimeoutError)
"""What asking may raise, and what may pass."""

_LAST_FIRST_PLACE: Final = 1 << 52  # as far as a number of JSON is exact everywhere, there is room after it


class NatsConsumersLimited(Event, frozen=True, kw_only=True):
    """The server allows no consumer for this queue, and perhaps for others: PostgreSQL tells workers of their tasks.

    Too many consumers, or a right that the user does not have.
    """

    room = "wake"
    level = logging.WARNING
    stream: str
    first_queue: str
    problem: str


class NatsConsumerRefused(Event, frozen=True, kw_only=True):
    """NATS refuses the consumer of this queue; PostgreSQL notifies workers of its tasks. Other queues are not affected."""

    room = "wake"
    level = logging.WARNING
    stream: str
    queue: str
    problem: str


class NatsConsumerMade(Event, frozen=True, kw_only=True):
    """NATS accepts the consumer that it refused before: the queue is carried again."""

    room = "wake"
    stream: str
    queue: str


def read(data: bytes) -> dict[str, Any]:
    """An answer of the API; raises ApiProblem where it is an error, or none of its answers at all."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ApiProblem(500, 0, "an answer that is not understood")
    error = answer.get("error")
    if error is not None:
        raise ApiProblem(
            error.get("code", 500), error.get("err_code", 0), error.get("description", "no reason given")
        )
    return answer


async def ask(link: Link, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer of the API; raises ApiProblem, LinkLost, NoResponders, TimeoutError."""
    data = b"" if body is None else json.dumps(body).encode()
    return read((await link.ask(f"{API}.{subject}", data, timeout_s=API_TIMEOUT_S)).data)


class StreamKeeper:
    """Sees to the stream over one link. What it made is remembered until somebody doubts it."""

    def __init__(self, link: Link, plan: StreamPlan, random: Random) -> None:
        self.link = link
        self.plan = plan
        self.created: str | None = None
        """When the stream was made; another moment is another stream."""
        self.generation = 0
        """How often the stream has been looked at: who doubts says which look, so that a crowd doubts once."""
        self.without: dict[str, str] = {}
        """Queues without a consumer, each with the server's reason. The others are not affected by them."""
        self._random = random
        self._sure = False
        self._made: set[str] = set()
        self._lock = asyncio.Lock()
        self._turns = asyncio.Semaphore(CONSUMERS_AT_ONCE)
        self._has_asked_for_more = False
        self._final: set[str] = set()
        self._retry_at = 0.0

    def doubt(self, generation: int) -> None:
        """Something seems to be gone since this look."""
        if generation == self.generation:
            self._sure = False
            self._made.clear()

    def look_again(self) -> None:
        """Look at the stream at the next opportunity; consumers are believed to be there if it is the same one."""
        self._sure = False

    async def ensure(self, queues: Iterable[str]) -> None:
        """Stream and consumers of these queues are there; raises NatsRefused, ApiProblem, LinkLost, NoResponders, TimeoutError."""
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
        # A stream made anew begins elsewhere: no place of its predecessor, which somebody may ask for or acknowledge, means anything in it.
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
            return found  # somebody else made it meanwhile

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
            self._refused(queue, denied, final=True)  # what a user may not do is not answered
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
        """`final`: it is not asked for again over this link."""
        stream = self.plan.stream
        if final:
            if not self._final:
                log_event(NatsConsumersLimited(stream=stream, first_queue=queue, problem=reason))
            self._final.add(queue)
        elif self.without.get(queue) != reason:
            log_event(NatsConsumerRefused(stream=stream, queue=queue, problem=reason))
        self.without[queue] = reason

    async def _ask_for_more(self) -> None:
        """Raise the stream's own limit of consumers; nats-server 2.15 and newer allow 1,000 where a stream has none."""
        if self._has_asked_for_more:
            return
        self._has_asked_for_more = True
        try:
            found = await self._info()
            if found is not None:
                limit = {"max_consumers": MOST_QUEUES}
                await ask(self.link, f"STREAM.UPDATE.{self.plan.stream}", {**found["config"], **limit})
        except ApiProblem:
            pass  # the account, or an older server, allows no more: these queues go without a consumer
