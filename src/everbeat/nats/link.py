"""A single connection to a NATS server, which never reconnects by itself."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from random import Random
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as ClientError

from everbeat.errors import NatsError, NatsRefused
from everbeat.nats.options import NatsConfig, shown_server, user_info
from everbeat.nats.problems import LinkLost as LinkLost
from everbeat.nats.problems import NoResponders as NoResponders
from everbeat.nats.problems import NotEncrypted, Rights, of_connecting, of_files, of_nobody
from everbeat.nats.problems import first_of as first_of
from everbeat.nats.problems import reason_of as reason_of
from everbeat.runtime.fork import close_in_forked_child

CONNECT_TIMEOUT_S: Final = 2.0


class SecureClient(Client):
    """A NATS client that, if TLS is required, sends nothing over an unencrypted connection. The next command would contain a password."""

    wants_tls: bool = False

    def __init__(self) -> None:
        super().__init__()
        close_in_forked_child(self)

    def fileno(self) -> int:
        """Return the descriptor of the socket below TLS, as long as the connection exists."""
        writer = getattr(self._transport, "_bare_io_writer", None)
        return -1 if writer is None else int(writer.get_extra_info("socket").fileno())

    async def connect_to(
        self,
        server: str,
        config: NatsConfig,
        context: ssl.SSLContext,
        *,
        name: str,
        ended: asyncio.Event,
        complained: Callable[[Exception], None],
    ) -> None:
        """Connect once to this server. Raises the error that prevents the connection.

        `ended` is set when the connection closes. `complained` is called with each error.
        """

        async def on_error(problem: Exception) -> None:
            complained(problem)
            if isinstance(problem, OSError | EOFError) or "EOF" in str(problem):
                ended.set()

        async def on_closed() -> None:
            ended.set()

        self.wants_tls = config.wants_tls
        user, password, token = user_info(server)
        await self.connect(
            [shown_server(server)],
            error_cb=on_error,
            closed_cb=on_closed,
            name=name,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=CONNECT_TIMEOUT_S,  # type: ignore[arg-type]  # any number is allowed
            pending_size=0,  # with a limit, the client would wait for the socket and could not be cancelled
            ping_interval=86_400,  # a link sends its own echoes
            user=user,
            password=password,
            token=token,
            tls=context,
            user_credentials=config.credentials,
            nkeys_seed=config.nkey_seed,
        )
        ended.clear()  # an earlier connection attempt might have set it

    def _connect_command(self) -> bytes:
        if self.wants_tls and not self._server_info.get("tls_required"):
            raise NotEncrypted
        return super()._connect_command()


async def require_answer(server: str) -> None:
    """Raise OSError unless the server sends data first, as every NATS server does."""
    parts = urlsplit(server)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        if not await reader.read(1):
            raise ConnectionResetError("it closed the connection without an answer")
    finally:
        writer.transport.abort()


def tls_context(config: NatsConfig) -> ssl.SSLContext:
    """Return the TLS context for these settings. Raises OSError or ssl.SSLError if a file cannot be used."""
    context = ssl.create_default_context(cafile=config.tls_ca)
    if config.tls_cert is not None and config.tls_key is not None:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    return context


class UnprovenMessages:
    """Sent messages (subject and bytes) that might not have arrived. An echo proves that the messages sent before it arrived."""

    __slots__ = ("_before_echoes", "_fresh")

    def __init__(self) -> None:
        self._fresh: list[tuple[str, bytes]] = []
        self._before_echoes: deque[list[tuple[str, bytes]]] = deque()

    def add(self, subject: str, data: bytes) -> None:
        """Record a message that is being sent."""
        self._fresh.append((subject, data))

    def echo_sent(self) -> None:
        """Record that an echo is being sent after the messages recorded so far."""
        self._before_echoes.append(self._fresh)
        self._fresh = []

    def echo_heard(self) -> None:
        """Record that the oldest echo has come back."""
        if self._before_echoes:
            self._before_echoes.popleft()

    def unproven(self) -> list[tuple[str, bytes]]:
        """Return the messages that might not have arrived, in the order of sending."""
        return [*(word for words in self._before_echoes for word in words), *self._fresh]


ECHO_INTERVAL_S: Final = 1.0
"""Seconds between two echoes, which a link sends to itself."""
MOST_ECHOES_UNANSWERED: Final = 2
"""If this many echoes are unanswered when the next one is due, the link counts as lost. Echoes are counted, not timed, because this process
may be busy."""
_CLOSE_TIMEOUT_S: Final = 1.0
_MOST_AT_ONCE: Final = 200  # the client does not yield to the loop while its buffer has room

OnMessage = Callable[[Msg], None]
Result = TypeVar("Result")


class NatsLink:
    """A connection to a NATS server, created by `open`. Its `run` coroutine must be running while the link is in use."""

    def __init__(self, client: SecureClient, server: str) -> None:
        self.server = server
        self._client = client
        self._ended = asyncio.Event()
        self._reasons: list[Exception] = []
        self._inbox = f"_INBOX.{uuid4().hex}"
        self.rights = Rights()
        self._answers: dict[str, asyncio.Future[Msg]] = {}
        self._number = 0
        self._subscriptions: dict[str, Any] = {}
        self._out: deque[tuple[str, bytes, str, dict[str, str] | None]] = deque()
        self._something = asyncio.Event()
        self._echoes_unanswered = 0
        self._kept = UnprovenMessages()

    @classmethod
    async def open(cls, config: NatsConfig, *, name: str, random: Random) -> NatsLink:
        """Connect to one of the servers. Raises NatsUnreachable, or NatsRefused if any server replied and rejected the connection."""
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
    async def _open_one(cls, config: NatsConfig, server: str, *, name: str) -> NatsLink:
        with of_files(config):
            pass  # report problems with files even if no server responds
        try:
            # A client and its TLS context are large, and an outage can be long. They are created only after a server has responded.
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await require_answer(server)
        except (OSError, TimeoutError) as problem:
            raise of_connecting(server, problem, [], config) from None
        with of_files(config):
            context = tls_context(config)
        client = SecureClient()
        link = cls(client, shown_server(server))
        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                await client.connect_to(
                    server, config, context, name=name, ended=link._ended, complained=link._complained
                )
                await link.subscribe("a", link._on_answer)
            if task is not None and task.cancelling() > cancelled_before:
                raise asyncio.CancelledError  # the client, and wait_for before Python 3.12, may suppress a cancellation
        except Exception as problem:  # noqa: BLE001  # errors of files, TLS, names, sockets, the client or a key
            await link.close(orderly=False)
            raise of_connecting(server, problem, link._reasons, config) from None
        except BaseException:
            await link.close(orderly=False)
            raise
        return link

    @property
    def last_reason(self) -> Exception | None:
        """Return the last error that the client reported, or None."""
        return self._reasons[-1] if self._reasons else None

    @property
    def is_alone_without_jetstream(self) -> bool:
        """Return whether the server reports that it has no JetStream and belongs to no cluster that might have it."""
        info: Mapping[str, Any] = self._client._server_info
        return not info.get("jetstream") and not info.get("cluster")

    async def subscribe(self, token: str, on_message: OnMessage) -> str:
        """Subscribe to a new inbox and the subjects below it, and return the inbox.

        `on_message` is called with each message. Raises LinkLost if the link has been lost.
        """
        inbox = f"{self._inbox}.{token}"

        async def receive(message: Msg) -> None:
            on_message(message)

        try:
            self._subscriptions[token] = await self._client.subscribe(f"{inbox}.>", cb=receive)
        except (ClientError, OSError) as problem:
            raise LinkLost(str(problem)) from None
        return inbox

    def unsubscribe(self, token: str) -> None:
        """End the subscription."""
        self._stop_hearing(self._subscriptions.pop(token, None))

    def send(
        self,
        subject: str,
        data: bytes = b"",
        *,
        reply: str = "",
        headers: dict[str, str] | None = None,
        kept: bool = False,
    ) -> None:
        """Send without waiting, in the order of calls. A `kept` message is listed in `unproven` until its arrival is proven."""
        if kept:
            self._kept.add(subject, data)
        self._out.append((subject, data, reply, headers))
        self._something.set()

    def unproven(self) -> list[tuple[str, bytes]]:
        """Return the kept messages that might not have arrived."""
        return self._kept.unproven()

    def request_later(
        self, subject: str, data: bytes = b"", *, headers: dict[str, str] | None = None
    ) -> asyncio.Future[Msg]:
        """Send a request and return a future for its reply. The future may raise LinkLost, NoResponders or RightMissing.

        The caller must cancel the future if it stops waiting.
        """
        self._number += 1
        token = f"{self._inbox}.a.{self._number}"
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        if self._ended.is_set():
            _fail(future, LinkLost())
            return future
        self._answers[token] = future
        self.rights.asked(subject, future)
        future.add_done_callback(lambda _: self._answers.pop(token, None))
        self.send(subject, data, reply=token, headers=headers)
        return future

    async def request(self, subject: str, data: bytes = b"", *, timeout_s: float) -> Msg:
        """Send a request and return the reply. Raises LinkLost, NoResponders or TimeoutError if no reply arrives."""
        future = self.request_later(subject, data)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            future.cancel()

    async def run_with(
        self, work: Coroutine[Any, Any, Result], *, on_tick: Callable[[], None] = lambda: None
    ) -> Result:
        """Run `run` while `work` is running. Return the result of `work` or raise its error. Raises LinkLost if the link is lost first.

        No task of the TaskGroup may raise an error. Before Python 3.13, the parent task would then count as cancelled, and timeouts around
        the TaskGroup would not work.
        """
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        async def carry() -> None:
            try:
                await self.run(on_tick)
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
            work.close()  # in case it was never started
        return outcome.result()

    async def run(self, on_tick: Callable[[], None]) -> None:
        """Send queued messages until the server no longer responds, then raise LinkLost. Call `on_tick` every `ECHO_INTERVAL_S`."""
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
        """Close the link within 1 s. If `orderly` is set, send the queued messages first."""
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
            pass  # the connection was already closed or never opened
        finally:
            self._abort()
            for subscription in self._subscriptions.values():
                self._stop_hearing(subscription)
            for future in list(self._answers.values()):
                future.cancel()

    def _abort(self) -> None:
        """Abort the connection. A normal close would wait for a server that is not responding."""
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
                    if self._ended.is_set():  # the client suppresses a cancellation
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
                raise LinkLost(f"the server was silent for {MOST_ECHOES_UNANSWERED * ECHO_INTERVAL_S:.0f} s")
            self._echoes_unanswered += 1
            self._kept.echo_sent()
            self.send(inbox)
            on_tick()

    def _complained(self, problem: Exception) -> None:
        self._reasons.append(problem)
        del self._reasons[:-10]
        self.rights.complained(problem)

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
        # The client does not stop its task if it fails while closing.
        with suppress(AttributeError):
            subscription._stop_processing()


def _fail(future: asyncio.Future[Any], problem: Exception) -> None:
    if not future.done():
        future.set_exception(problem)
        future.exception()  # retrieve the exception, in case no code awaits the future
