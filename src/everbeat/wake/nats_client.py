"""The client library, made careful: it connects once, in the way a link needs, and not without the encryption that is wanted.

What lives here: the settings of connections, and TLS. What may not: what is said over them.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final
from urllib.parse import urlsplit

from nats.aio.client import Client

from everbeat.runtime.fork import close_in_forked_child
from everbeat.wake.nats_problems import NotEncrypted
from everbeat.wake.options import NatsConfig, shown_server, user_info

CONNECT_TIMEOUT_S: Final = 2.0


class CarefulClient(Client):
    """Speaks no word to a server without encryption where that is wanted: the next word would be a password."""

    wants_tls: bool = False

    def __init__(self) -> None:
        super().__init__()
        close_in_forked_child(self)

    def fileno(self) -> int:
        """The socket's descriptor, from the connection's first moment to its end; encryption comes on top of it."""
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
        reasons: list[Exception],
    ) -> None:
        """Connect, once, to this server; raises whatever stands in the way. `ended` is set at the end, `reasons` are the last complaints."""

        async def on_error(problem: Exception) -> None:
            reasons.append(problem)
            del reasons[:-10]
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
            connect_timeout=CONNECT_TIMEOUT_S,  # type: ignore[arg-type]  # it may be any number
            pending_size=0,  # with a bound it would wait for the socket, and not be cancelled
            ping_interval=86_400,  # a link sends echoes of its own
            user=user,
            password=password,
            token=token,
            tls=context,
            user_credentials=config.credentials,
            nkeys_seed=config.nkey_seed,
        )
        ended.clear()  # it may have been an earlier attempt of its own

    def _connect_command(self) -> bytes:
        if self.wants_tls and not self._server_info.get("tls_required"):
            raise NotEncrypted
        return super()._connect_command()


async def knock(server: str) -> None:
    """Raises OSError unless somebody there says a word, which every NATS server does first."""
    parts = urlsplit(server)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        if not await reader.read(1):
            raise ConnectionResetError("it hung up without a word")
    finally:
        writer.transport.abort()


def tls_context(config: NatsConfig) -> ssl.SSLContext:
    """What encrypts; raises OSError or ssl.SSLError for files that are of no use."""
    context = ssl.create_default_context(cafile=config.tls_ca)
    if config.tls_cert is not None and config.tls_key is not None:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    return context
