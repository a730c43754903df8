"""NATS JetStream as a message transport. It maintains one link at a time and reports the link's state."""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final
from uuid import UUID

from everbeat.errors import NatsError, NatsRefused
from everbeat.hints.delivery import reconnect_backoff
from everbeat.nats.inspection import StoredMessages
from everbeat.nats.inspection import check as check
from everbeat.nats.link import LinkLost, NatsLink, NoResponders, reason_of
from everbeat.nats.options import NatsConfig
from everbeat.nats.problems import NO_MESSAGE, NO_ROOM, NO_STREAM, ApiProblem, RightMissing
from everbeat.nats.pull_consumer import JetStreamDelivery, PullConsumer
from everbeat.nats.stream import API, TROUBLE, StreamKeeper, read
from everbeat.nats.stream_plan import NOT_CARRIED, StreamPlan, TaskMessage, decode, encode
from everbeat.runtime.events import Event, log_event

_logger = logging.getLogger("everbeat.nats")


class NatsNotHeard(Event, frozen=True, kw_only=True):
    """Messages are currently neither published nor received. Polling continues."""

    component = "nats"
    level = logging.WARNING
    stream: str
    problem: str


class NatsHeardAgain(Event, frozen=True, kw_only=True):
    """Messages are being published and received again."""

    component = "nats"
    stream: str


class NatsRightMissing(Event, frozen=True, kw_only=True):
    """The NATS user lacks a permission that everbeat needs. `problem` names the subject to which the user cannot publish."""

    component = "nats"
    level = logging.WARNING
    stream: str
    problem: str


class LinkStateReporter:
    """Reports each change of the link's state once, and logs it."""

    def __init__(self, stream: str, on_state: Callable[[bool], None]) -> None:
        self._stream = stream
        self._on_state = on_state
        self._reported: bool | None = None
        self._problem = ""
        self._denied: set[str] = set()

    def found(self) -> None:
        if self._reported is False:
            log_event(NatsHeardAgain(stream=self._stream))
        self._report(True)

    def lost(self, reason: object) -> None:
        """Report that the link is down. A rejection is logged even if the link was already down, because it will not go away by itself."""
        problem = " ".join(str(reason).split())
        if self._reported is not False or (isinstance(reason, NatsRefused) and problem != self._problem):
            log_event(NatsNotHeard(stream=self._stream, problem=problem))
            self._problem = problem
        self._report(False)

    def denied(self, problem: str) -> None:
        """Log a missing permission, once across all links."""
        if problem not in self._denied:
            self._denied.add(problem)
            log_event(NatsRightMissing(stream=self._stream, problem=problem))

    def ended(self) -> None:
        if self._reported:
            self._report(False)

    def _report(self, up: bool) -> None:
        if self._reported is up:
            return
        self._reported = up
        try:
            self._on_state(up)
        except Exception:  # an error in the callback must not close the link
            _logger.exception("state_handler_failed stream=%s up=%s", self._stream, up)


PUBLISH_TIMEOUT_S: Final = 5.0
LONGEST_PAUSE_S: Final = 1.0
CHECK_INTERVAL_S: Final = 5.0
"""Seconds between two checks of the stream, which might be deleted while nothing is being published."""
MOST_UNSENT: Final = 100_000

_RETRY_S: Final = 0.25
_REFUSED_RETRY_S: Final = 5.0


class JetStream:
    """A link to the stream of one schema. `name` appears in the servers' lists of connections."""

    def __init__(self, plan: StreamPlan, config: NatsConfig, *, name: str, random: Random) -> None:
        self._plan = plan
        self._config = config
        self._name = name
        self._random = random
        self._backoff = reconnect_backoff(random)
        self._queues: set[str] = set()
        self._consumers: dict[str, PullConsumer] = {}
        self._consumers_made = 0
        self._keeper: StreamKeeper | None = None
        self._is_up = False
        self._work = asyncio.Event()
        self._unsent: deque[tuple[str, bytes]] = deque(maxlen=MOST_UNSENT)
        self.stored = StoredMessages(plan, self._require_up)
        self.not_taken: set[str] = set()
        """Queues that are not published because no worker requests their messages. The sweeper fills this set."""
        self.share = config.share
        """The maximum number of waiting messages of one queue in the stream, so that other queues have room. None means no limit."""
        self.refusal: str | None = None
        """Why the stream had no room for a message in the last publication, or None if it had room."""
        self.problem: str | None = None
        """The server's reply to a message that it rejected in the last publication, or None if there was no such reply."""

    @property
    def without(self) -> Mapping[str, str]:
        """Return the queues whose consumer the server rejects, each with the reason."""
        return {} if self._keeper is None else self._keeper.without

    @property
    def denied(self) -> Sequence[str]:
        """Return the server's errors about the user's missing permissions, one per subject."""
        return () if self._keeper is None else [*self._keeper.link.rights.denied.values()]

    @property
    def is_up(self) -> bool:
        """Return whether the link is believed to work. A dead link is noticed within about 3 s."""
        return self._is_up

    async def run(self, on_state: Callable[[bool], None]) -> None:
        """Connect, reconnect and maintain the stream until cancelled. No other exception is raised.

        `on_state` is called at the start and on every change.
        """
        reporter = LinkStateReporter(self._plan.stream, on_state)
        try:
            while True:
                pause = LONGEST_PAUSE_S
                try:
                    await self._use_one_link(reporter)
                except NatsRefused as problem:
                    reporter.lost(problem)
                    pause = _REFUSED_RETRY_S
                except Exception as problem:  # noqa: BLE001  # after any error, polling continues and a retry follows
                    reporter.lost(problem)
                await asyncio.sleep(min(self._backoff.next(), pause))
        finally:
            reporter.ended()

    async def publish(self, messages: Sequence[TaskMessage]) -> Sequence[int | None]:
        """Publish messages. Return the place of each message in the stream, `NOT_CARRIED`, or None if its place is unknown.

        If a message is published twice with the same `TaskMessage.id` within the stream's duplicate window, it is stored once. Without a
        link, all places are None. The call takes at most a few seconds.
        """
        places: list[int | None] = [None] * len(messages)
        keeper = self._keeper if self._is_up else None
        if keeper is None:
            return places
        queues = {message.queue for message in messages}
        self._queues |= queues
        before, self.refusal, self.problem = self.refusal, None, None
        with suppress(NatsError, *TROUBLE):
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                await keeper.ensure(queues)
                generation = keeper.generation
                unheard = await self._put(keeper, messages, places, range(len(messages)))
                if unheard:
                    keeper.doubt(generation)
                    self._work.set()
                    await keeper.ensure(queues)
                    await self._put(keeper, messages, places, unheard)
        if self.refusal is None and not any(places):
            self.refusal = before  # nothing was sent to the stream
        return places

    async def missing(self, places: Mapping[int, UUID]) -> set[int]:
        """Return those of `places` at which the stream has no message of the given task. Raises ConnectionError if there is no link.

        A new stream may have another message at the same place.
        """
        keeper = self._require_up()
        bodies = [json.dumps({"seq": place}).encode() for place in places]
        answers = await self._answers(keeper, f"STREAM.MSG.GET.{self._plan.stream}", bodies)
        gone = set()
        for (place, task_id), answer in zip(places.items(), answers, strict=True):
            if isinstance(answer, ApiProblem):
                if answer.err_code not in (NO_MESSAGE, NO_STREAM):
                    raise ConnectionError(str(answer))
                if answer.err_code == NO_STREAM:
                    self._doubt()
                gone.add(place)
            else:
                held = decode(b64decode(answer["message"].get("data", "")))
                if held is None or held.task_id != task_id:
                    gone.add(place)
        return gone

    def consume(self, queue: str, on_delivered: Callable[[JetStreamDelivery], None]) -> PullConsumer:
        """Receive messages of a queue while the link is up. `on_delivered` runs in the loop and must not block."""
        plan = self._plan
        self._consumers_made += 1
        token = f"t{self._consumers_made}"

        def forget(_: PullConsumer) -> None:
            if self._consumers.pop(token, None) is not None and self._keeper is not None:
                self._keeper.link.unsubscribe(token)

        made = PullConsumer(
            queue,
            on_delivered,
            subject=f"{API}.CONSUMER.MSG.NEXT.{plan.stream}.{plan.consumer(queue)}",
            send_message=self._send_message,
            on_trouble=self._doubt,
            on_closed=forget,
        )
        self._consumers[token] = made
        self._queues.add(queue)
        self._work.set()
        return made

    async def _use_one_link(self, reporter: LinkStateReporter) -> None:
        link = await NatsLink.open(self._config, name=self._name, random=self._random)
        link.rights.on_denied = reporter.denied
        orderly = False
        try:
            await link.run_with(self._keep(link, reporter), on_tick=self._tick)
        except asyncio.CancelledError:
            orderly = True
            raise
        finally:
            self._keeper, self._is_up = None, False
            for consumer in list(self._consumers.values()):
                consumer.detach()
            self._unsent.extend(link.unproven())
            await link.close(orderly=orderly)

    async def _keep(self, link: NatsLink, reporter: LinkStateReporter) -> None:
        keeper = self._keeper = StreamKeeper(link, self._plan, self._random)
        while True:
            self._work.clear()
            before = keeper.created, keeper.generation
            try:
                await keeper.ensure(self._queues)
            except LinkLost:
                raise
            except (NatsRefused, *TROUBLE) as problem:
                self._is_up = False
                reporter.lost(reason_of(problem))
                keeper.doubt(keeper.generation)
                await asyncio.sleep(_REFUSED_RETRY_S if isinstance(problem, NatsRefused) else _RETRY_S)
                continue
            await self._attach(keeper, anew=before != (keeper.created, keeper.generation))
            if not self._is_up:
                self._is_up = True
                self._backoff.reset()
                while self._unsent:
                    link.send(*self._unsent.popleft(), kept=True)
                reporter.found()
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._work.wait()
            except TimeoutError:
                keeper.look_again()

    async def _attach(self, keeper: StreamKeeper, *, anew: bool) -> None:
        link = keeper.link
        for token, consumer in list(self._consumers.items()):
            if consumer.queue in keeper.without:
                # The consumer's requests would be rejected repeatedly, and each rejection would restart all consumers.
                if consumer.is_attached:
                    link.unsubscribe(token)
                    consumer.detach()
            elif consumer.is_attached:
                if anew:
                    consumer.begin_anew()
            else:
                consumer.attach(link.send, await link.subscribe(token, consumer.receive))

    async def _put(
        self,
        keeper: StreamKeeper,
        messages: Sequence[TaskMessage],
        places: list[int | None],
        which: Iterable[int],
    ) -> list[int]:
        """Publish these messages and record their places. Return the messages that no stream received."""
        sent: dict[int, asyncio.Future[Any]] = {}
        for number in which:
            queue = messages[number].queue
            if queue in keeper.without or queue in self.not_taken:
                places[number] = NOT_CARRIED
            else:
                sent[number] = self._sent(keeper.link, messages[number])
        try:
            if sent:
                await asyncio.wait(sent.values())
        finally:
            unheard = []
            for number, future in sent.items():
                if not future.done():
                    future.cancel()
                elif isinstance(future.exception(), NoResponders):
                    unheard.append(number)
                elif isinstance(future.exception(), RightMissing):
                    places[number] = NOT_CARRIED
                elif future.exception() is None:
                    places[number] = self._place(future.result().data)
        return unheard

    def _place(self, answer: bytes) -> int | None:
        try:
            return read(answer).get("seq")
        except ApiProblem as problem:
            if problem.err_code not in NO_ROOM:
                self.problem = str(problem)
                return None  # not accepted, for example because there is no leader
            self.refusal = str(problem)
            return NOT_CARRIED

    def _sent(self, link: NatsLink, message: TaskMessage) -> asyncio.Future[Any]:
        headers = {
            "Nats-Msg-Id": self._plan.message_id(message.id),
            "Everbeat-Task": str(message.task_id),
        }
        if message.cleared:
            headers |= {"cleared": "true", "clear_reason": " ".join((message.reason or "").split())}
        return link.request_later(self._plan.subject(message.queue), encode(message), headers=headers)

    async def _answers(
        self, keeper: StreamKeeper, subject: str, bodies: Sequence[bytes]
    ) -> list[dict[str, Any] | ApiProblem]:
        asked = [keeper.link.request_later(f"{API}.{subject}", body) for body in bodies]
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                messages = await asyncio.gather(*asked)
        except (LinkLost, NoResponders, TimeoutError) as problem:
            raise ConnectionError(reason_of(problem)) from None
        finally:
            for future in asked:
                future.cancel()
        answers: list[dict[str, Any] | ApiProblem] = []
        for message in messages:
            try:
                answers.append(read(message.data))
            except ApiProblem as problem:
                answers.append(problem)
        return answers

    def _require_up(self) -> StreamKeeper:
        if self._keeper is None or not self._is_up:
            raise ConnectionError(f"There is no link to NATS at {self._config.shown}.")
        return self._keeper

    def _doubt(self) -> None:
        """Check the stream and its consumers again, because one of them seems to be missing."""
        if self._keeper is not None:
            self._keeper.doubt(self._keeper.generation)
            self._work.set()

    def _tick(self) -> None:
        for consumer in list(self._consumers.values()):
            consumer.tick()

    def _send_message(self, subject: str, data: bytes, /, *, kept: bool) -> None:
        if self._keeper is not None:
            self._keeper.link.send(subject, data, kept=kept)
        elif kept:
            self._unsent.append((subject, data))
