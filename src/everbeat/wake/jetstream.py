"""NATS JetStream as the carrier of hints: one link after another, for ever, and the stream at the other end of it.

What lives here: connecting again, publishing, asking what is there, handing deliveries to their taps. What may not: truth; the database
knows what a message is worth, and everything here may be lost.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final
from uuid import UUID

from everbeat.errors import NatsError, NatsRefused
from everbeat.wake.carrier import NOT_CARRIED, Delivered, Message, Stock, Tap, decode, encode
from everbeat.wake.delivery import Pauses
from everbeat.wake.nats_check import check as check
from everbeat.wake.nats_link import Link, LinkLost, NoResponders, reason_of
from everbeat.wake.nats_problems import NO_MESSAGE, NO_ROOM, NO_STREAM, ApiProblem
from everbeat.wake.nats_states import NatsStates
from everbeat.wake.nats_stock import StreamStock
from everbeat.wake.nats_stream import API, TROUBLE, StreamKeeper, read
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan
from everbeat.wake.tap import JetTap

PUBLISH_TIMEOUT_S: Final = 5.0
LONGEST_PAUSE_S: Final = 1.0
LOOK_INTERVAL_S: Final = 5.0
"""So often the stream is looked at, which somebody may have deleted while nothing is published."""
MOST_KEPT_WORDS: Final = 100_000

_RETRY_S: Final = 0.25
_REFUSED_RETRY_S: Final = 5.0


class JetStream:
    """A link to the stream of one schema. `name` is what the servers' lists of connections show."""

    def __init__(self, plan: StreamPlan, config: NatsConfig, *, name: str, random: Random) -> None:
        self._plan = plan
        self._config = config
        self._name = name
        self._random = random
        self._pauses = Pauses(random)
        self._queues: set[str] = set()
        self._taps: dict[str, JetTap] = {}
        self._taps_made = 0
        self._keeper: StreamKeeper | None = None
        self._is_up = False
        self._work = asyncio.Event()
        self._words: deque[tuple[str, bytes]] = deque(maxlen=MOST_KEPT_WORDS)
        self.stock: Stock = StreamStock(plan, self._require_up)
        self.not_taken: set[str] = set()
        self.share = config.share
        self.refusal: str | None = None

    @property
    def without(self) -> Mapping[str, str]:
        """The queues for which the server refuses a consumer, each with its reason."""
        return {} if self._keeper is None else self._keeper.without

    @property
    def is_up(self) -> bool:
        """Whether messages can be carried at this moment, as far as is known; a dead link is noticed within about 3 s."""
        return self._is_up

    async def run(self, on_state: Callable[[bool], None]) -> None:
        """Connect, stay connected, see to the stream, until cancelled; never raises otherwise."""
        told = NatsStates(self._plan.stream, on_state)
        try:
            while True:
                pause = LONGEST_PAUSE_S
                try:
                    await self._use_one_link(told)
                except NatsRefused as problem:
                    told.lost(problem)
                    pause = _REFUSED_RETRY_S
                except Exception as problem:  # noqa: BLE001  # whatever it is, polling goes on and so does trying
                    told.lost(problem)
                await asyncio.sleep(min(self._pauses.next(), pause))
        finally:
            told.ended()

    async def publish(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """Puts messages into the stream; answers the place of each, None for those of which it is not known."""
        places: list[int | None] = [None] * len(messages)
        keeper = self._keeper if self._is_up else None
        if keeper is None:
            return places
        queues = {message.queue for message in messages}
        self._queues |= queues
        before, self.refusal = self.refusal, None
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
            self.refusal = before  # nothing was put into the stream
        return places

    async def missing(self, places: Mapping[int, UUID]) -> set[int]:
        """Those of these places at which the stream holds no message of the task named; raises ConnectionError where it cannot be asked."""
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

    def tap(self, queue: str, on_delivered: Callable[[Delivered], None]) -> Tap:
        """Deliveries of a queue from now on, whenever the link is up; `on_delivered` is called in the loop, and must not block."""
        plan = self._plan
        self._taps_made += 1
        token = f"t{self._taps_made}"

        def forget(_: JetTap) -> None:
            if self._taps.pop(token, None) is not None and self._keeper is not None:
                self._keeper.link.unsubscribe(token)

        made = JetTap(
            queue,
            on_delivered,
            subject=f"{API}.CONSUMER.MSG.NEXT.{plan.stream}.{plan.consumer(queue)}",
            speak=self._speak,
            on_trouble=self._doubt,
            on_closed=forget,
        )
        self._taps[token] = made
        self._queues.add(queue)
        self._work.set()
        return made

    async def _use_one_link(self, told: NatsStates) -> None:
        link = await Link.open(self._config, name=self._name, random=self._random)
        orderly = False
        try:
            await link.during(self._keep(link, told), on_tick=self._tick)
        except asyncio.CancelledError:
            orderly = True
            raise
        finally:
            self._keeper, self._is_up = None, False
            for tap in list(self._taps.values()):
                tap.detach()
            self._words.extend(link.unproved())
            await link.close(orderly=orderly)

    async def _keep(self, link: Link, told: NatsStates) -> None:
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
                told.lost(reason_of(problem))
                keeper.doubt(keeper.generation)
                await asyncio.sleep(_REFUSED_RETRY_S if isinstance(problem, NatsRefused) else _RETRY_S)
                continue
            await self._attach(keeper, anew=before != (keeper.created, keeper.generation))
            if not self._is_up:
                self._is_up = True
                self._pauses.reset()
                while self._words:
                    link.say(*self._words.popleft(), kept=True)
                told.found()
            try:
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await self._work.wait()
            except TimeoutError:
                keeper.look_again()

    async def _attach(self, keeper: StreamKeeper, *, anew: bool) -> None:
        link = keeper.link
        for token, tap in list(self._taps.items()):
            if tap.queue in keeper.without:
                # Its requests would be refused again and again, and each refusal makes all taps begin anew.
                if tap.is_attached:
                    link.unsubscribe(token)
                    tap.detach()
            elif tap.is_attached:
                if anew:
                    tap.begin_anew()
            else:
                tap.attach(link.say, await link.subscribe(token, tap.hear))

    async def _put(
        self,
        keeper: StreamKeeper,
        messages: Sequence[Message],
        places: list[int | None],
        which: Iterable[int],
    ) -> list[int]:
        """Publishes these of the messages, notes their places, and answers those for which no stream was there."""
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
                elif future.exception() is None:
                    places[number] = self._place(future.result().data)
        return unheard

    def _place(self, answer: bytes) -> int | None:
        try:
            return read(answer).get("seq")
        except ApiProblem as problem:
            if problem.err_code not in NO_ROOM:
                return None  # for example no leader: it was not taken
            self.refusal = str(problem)
            return NOT_CARRIED

    def _sent(self, link: Link, message: Message) -> asyncio.Future[Any]:
        headers = {
            "Nats-Msg-Id": self._plan.message_id(message.id),
            "Everbeat-Task": str(message.task_id),
        }
        if message.cleared:
            headers |= {"cleared": "true", "clear_reason": " ".join((message.reason or "").split())}
        return link.expect(self._plan.subject(message.queue), encode(message), headers=headers)

    async def _answers(
        self, keeper: StreamKeeper, subject: str, bodies: Sequence[bytes]
    ) -> list[dict[str, Any] | ApiProblem]:
        asked = [keeper.link.expect(f"{API}.{subject}", body) for body in bodies]
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
        """Something at the server seems to be gone."""
        if self._keeper is not None:
            self._keeper.doubt(self._keeper.generation)
            self._work.set()

    def _tick(self) -> None:
        for tap in list(self._taps.values()):
            tap.tick()

    def _speak(self, subject: str, data: bytes, /, *, kept: bool) -> None:
        if self._keeper is not None:
            self._keeper.link.say(subject, data, kept=kept)
        elif kept:
            self._words.append((subject, data))
