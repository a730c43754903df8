"""One connection to a NATS server, from its beginning to its end: it never connects again by itself.

What lives here: connecting, saying, asking, hearing answers, noticing that nobody answers any more. What may not: JetStream, and what to
do about an end, which is the affair of whoever opened it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from random import Random
from typing import Any, Final, TypeVar
from uuid import uuid4

from nats.aio.msg import Msg
from nats.errors import Error as ClientError

from everbeat.errors import NatsError, NatsRefused
from everbeat.wake.nats_client import CONNECT_TIMEOUT_S, CarefulClient, knock, tls_context
from everbeat.wake.nats_problems import LinkLost as LinkLost
from everbeat.wake.nats_problems import NoResponders as NoResponders
from everbeat.wake.nats_problems import first_of as first_of
from everbeat.wake.nats_problems import of_connecting, of_files, of_nobody
from everbeat.wake.nats_problems import reason_of as reason_of
from everbeat.wake.nats_words import KeptWords
from everbeat.wake.options import NatsConfig, shown_server

ECHO_INTERVAL_S: Final = 1.0
"""So often a link sends something to itself."""
MOST_ECHOES_UNANSWERED: Final = 2
"""With the next echo due and so many unanswered, nobody is there. Counted, not timed: a busy process is not a dead server."""
_CLOSE_TIMEOUT_S: Final = 1.0
_MOST_AT_ONCE: Final = 200  # the client does not let others run while it has room

OnMessage = Callable[[Msg], None]
Result = TypeVar("Result")


class Link:
    """Made by `open`; `carry` must run as long as it is used."""

    def __init__(self, client: CarefulClient, server: str) -> None:
        self.server = server
        self._client = client
        self._ended = asyncio.Event()
        self._reasons: list[Exception] = []
        self._inbox = f"_INBOX.{uuid4().hex}"
        self._answers: dict[str, asyncio.Future[Msg]] = {}
        self._number = 0
        self._subscriptions: dict[str, Any] = {}
        self._out: deque[tuple[str, bytes, str, dict[str, str] | None]] = deque()
        self._something = asyncio.Event()
        self._echoes_unanswered = 0
        self._kept = KeptWords()

    @classmethod
    async def open(cls, config: NatsConfig, *, name: str, random: Random) -> Link:
        """Connect to one of the servers; raises NatsUnreachable, or NatsRefused where any of them answered and refused."""
        servers = list(config.servers)
        random.shuffle(servers)
        problems: list[NatsError] = []
        for server in servers:
            try:
                return await cls._open_one(config, server, name=name)
            except NatsError as problem:
                problems.append(problem)
        raise next((found for found in problems if isinstance(found, NatsRefused)), of_nobody(problems))

    @classmethod
    async def _open_one(cls, config: NatsConfig, server: str, *, name: str) -> Link:
        with of_files(config):
            pass  # what is wrong with files is told whoever answers
        try:
            # A client and what it encrypts with are large, and an outage is long: not before somebody answers.
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await knock(server)
        except (OSError, TimeoutError) as problem:
            raise of_connecting(server, problem, [], config) from None
        with of_files(config):
            context = tls_context(config)
        client = CarefulClient()
        link = cls(client, shown_server(server))
        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                await client.connect_to(
                    server, config, context, name=name, ended=link._ended, reasons=link._reasons
                )
                await link.subscribe("a", link._on_answer)
            if task is not None and task.cancelling() > cancelled_before:
                raise asyncio.CancelledError  # the client, and wait_for before 3.12, may swallow it
        except Exception as problem:  # noqa: BLE001  # of files, TLS, names, sockets, the client, and of a key
            await link.close(orderly=False)
            raise of_connecting(server, problem, link._reasons, config) from None
        except BaseException:
            await link.close(orderly=False)
            raise
        return link

    @property
    def last_reason(self) -> Exception | None:
        """What the client complained about last."""
        return self._reasons[-1] if self._reasons else None

    @property
    def is_alone_without_jetstream(self) -> bool:
        """Whether the server said so of itself, and has no neighbours who might have it."""
        info: Mapping[str, Any] = self._client._server_info
        return not info.get("jetstream") and not info.get("cluster")

    async def subscribe(self, token: str, on_message: OnMessage) -> str:
        """Hand what comes to the returned inbox, or below it, to `on_message`; raises LinkLost."""
        inbox = f"{self._inbox}.{token}"

        async def hear(message: Msg) -> None:
            on_message(message)

        try:
            self._subscriptions[token] = await self._client.subscribe(f"{inbox}.>", cb=hear)
        except (ClientError, OSError) as problem:
            raise LinkLost(str(problem)) from None
        return inbox

    def unsubscribe(self, token: str) -> None:
        """Hand it to nobody from now on."""
        self._stop_hearing(self._subscriptions.pop(token, None))

    def say(
        self,
        subject: str,
        data: bytes = b"",
        *,
        reply: str = "",
        headers: dict[str, str] | None = None,
        kept: bool = False,
    ) -> None:
        """Send, in the order of calls, without waiting. A `kept` word is among `unproved` until it is known to have arrived."""
        if kept:
            self._kept.add(subject, data)
        self._out.append((subject, data, reply, headers))
        self._something.set()

    def unproved(self) -> list[tuple[str, bytes]]:
        """The kept words that may not have arrived."""
        return self._kept.unproved()

    def expect(
        self, subject: str, data: bytes = b"", *, headers: dict[str, str] | None = None
    ) -> asyncio.Future[Msg]:
        """Send, and answer what will hold the reply; raises LinkLost when awaited, or NoResponders.

        Whoever gives up must cancel it.
        """
        self._number += 1
        token = f"{self._inbox}.a.{self._number}"
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        if self._ended.is_set():
            _fail(future, LinkLost())
            return future
        self._answers[token] = future
        future.add_done_callback(lambda _: self._answers.pop(token, None))
        self.say(subject, data, reply=token, headers=headers)
        return future

    async def ask(self, subject: str, data: bytes = b"", *, timeout_s: float) -> Msg:
        """The reply; raises LinkLost, NoResponders, TimeoutError."""
        future = self.expect(subject, data)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            future.cancel()

    async def during(
        self, work: Coroutine[Any, Any, Result], *, on_tick: Callable[[], None] = lambda: None
    ) -> Result:
        """Carry while `work` runs; returns or raises what that does, or raises LinkLost where the link ends before.

        Not by a task that fails in a TaskGroup: before 3.13 that leaves its parent counted as cancelled, and no timeout around it works.
        """
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        async def carry() -> None:
            try:
                await self.carry(on_tick)
            except Exception as problem:  # noqa: BLE001  # raised below
                _fail(outcome, problem)

        async def act() -> None:
            try:
                result = await work
                if not outcome.done():
                    outcome.set_result(result)
            except Exception as problem:  # noqa: BLE001  # raised below
                _fail(outcome, problem)
            finally:
                outcome.cancel()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(carry()), group.create_task(act())]
                try:
                    await asyncio.wait([outcome])
                finally:
                    self._ended.set()
                for task in tasks:
                    task.cancel()
        finally:
            work.close()  # it may not have begun
        return outcome.result()

    async def carry(self, on_tick: Callable[[], None]) -> None:
        """Send what is said, until nobody answers any more; `on_tick` is called every `ECHO_INTERVAL_S`. Raises LinkLost at the end."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send())
                group.create_task(self._watch(on_tick))
        except BaseExceptionGroup as ended:
            raise first_of(ended) from None
        finally:
            self._ended.set()
            for future in list(self._answers.values()):
                _fail(future, LinkLost())

    async def close(self, *, orderly: bool) -> None:
        """End it; `orderly`: what was said is sent before. Waits for a second at most."""
        self._ended.set()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if orderly:
                    while self._out:
                        await self._publish_next()
                else:
                    self._abort()
                await self._client.close()
        except (ClientError, LinkLost, OSError, TimeoutError, AssertionError):
            pass  # it was over before, or never began
        finally:
            self._abort()
            for subscription in self._subscriptions.values():
                self._stop_hearing(subscription)
            for future in list(self._answers.values()):
                future.cancel()

    def _abort(self) -> None:
        """Hang up without a farewell, for which a frozen server would make the client wait."""
        client: Any = self._client
        with suppress(AttributeError):
            client._pending, client._pending_data_size = [], 0
            client._transport._io_writer.transport.abort()

    async def _send(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            while self._out:
                for _ in range(min(len(self._out), _MOST_AT_ONCE)):
                    await self._publish_next()
                    if self._ended.is_set():  # the client swallows a cancellation
                        raise LinkLost(str(self.last_reason or "the link was closed"))
                await asyncio.sleep(0)

    async def _publish_next(self) -> None:
        subject, data, reply, headers = self._out.popleft()
        try:
            await self._client.publish(subject, data, reply=reply, headers=headers)
        except (ClientError, OSError) as problem:
            raise LinkLost(str(problem) or type(problem).__name__) from None

    async def _watch(self, on_tick: Callable[[], None]) -> None:
        inbox = f"{await self.subscribe('e', lambda _: self._on_echo())}.e"
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ECHO_INTERVAL_S):
                    await self._ended.wait()
            if self._ended.is_set() or self._client.is_closed:
                raise LinkLost(str(self.last_reason or "the connection was closed"))
            if self._echoes_unanswered >= MOST_ECHOES_UNANSWERED:
                self._ended.set()
                raise LinkLost(f"nothing was heard for {MOST_ECHOES_UNANSWERED * ECHO_INTERVAL_S:.0f} s")
            self._echoes_unanswered += 1
            self._kept.echo_sent()
            self.say(inbox)
            on_tick()

    def _on_echo(self) -> None:
        self._echoes_unanswered = 0
        self._kept.echo_heard()

    def _on_answer(self, message: Msg) -> None:
        future = self._answers.get(message.subject)
        if future is None or future.done():
            return
        if (message.headers or {}).get("Status") == "503":
            _fail(future, NoResponders())
        else:
            future.set_result(message)

    @staticmethod
    def _stop_hearing(subscription: Any) -> None:
        # The client leaves its task alone when it fails on its way out.
        with suppress(AttributeError):
            subscription._stop_processing()


def _fail(future: asyncio.Future[Any], problem: Exception) -> None:
    if not future.done():
        future.set_exception(problem)
        future.exception()  # seen, should nobody wait any more
