"""Messages between the processes of one tree, for a process that runs an event loop.

What lives here: sending, receiving, bounds and the end of a connection. What may not: the meaning of any
message, which comes as a union of tagged msgspec Structs from above.

The end of the peer is an event of its own (`on_eof`): the portable way for a child to die with its parent.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Self, cast

from everbeat.runtime.fork import close_in_forked_child
from everbeat.runtime.frames import (
    ChannelClosed,
    ChannelError,
    ChannelFull,
    FrameBuffer,
    FrameFormat,
    FrameTooLarge,
)
from everbeat.runtime.sockets import READ_BYTES

SEND_BUFFER_BYTES: Final = 64 * 1024 * 1024
"""Bytes that may wait to be sent before `send` waits and `send_nowait` refuses."""

RECEIVE_BUFFER_BYTES: Final = 64 * 1024 * 1024
"""Bytes of unread messages beyond which nothing more is taken from the socket."""


class AsyncChannel(asyncio.Protocol):
    """One end of a channel, owned by one event loop; not to be touched from other threads."""

    def __init__(
        self, sock: socket.socket, *, messages: Any, on_eof: Callable[[], None] | None = None
    ) -> None:
        self._socket = sock
        self._format = FrameFormat(messages)
        self._on_eof = on_eof
        self._buffer = FrameBuffer()
        self._bodies: deque[bytes] = deque()
        self._unread_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._error: ChannelError | None = None
        self._receiver: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = asyncio.Event()
        self._reading_paused = False
        self._closed_here = False

    @classmethod
    async def open(
        cls, sock: socket.socket, *, messages: Any, on_eof: Callable[[], None] | None = None
    ) -> Self:
        """Take over a connected stream socket.

        `on_eof` is called in the loop's thread as soon as the peer is gone or talks nonsense (not after
        `close`), messages not yet received notwithstanding; only a full receive buffer delays it.
        """
        channel = cls(sock, messages=messages, on_eof=on_eof)
        close_in_forked_child(sock)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
        return channel

    @property
    def is_closed(self) -> bool:
        """True once nothing can be sent any more; messages received before may still wait to be read."""
        return self._error is not None

    def send_nowait(self, message: object) -> None:
        """Queue a message; raises ChannelClosed, ChannelFull or FrameTooLarge, and then nothing was sent."""
        transport = self._sendable()
        waiting = transport.get_write_buffer_size()
        if waiting > SEND_BUFFER_BYTES:
            raise ChannelFull(f"The peer leaves {waiting:,} bytes unread, of {SEND_BUFFER_BYTES:,} allowed.")
        transport.write(self._format.encode(message))

    async def send(self, message: object) -> None:
        """Queue a message and wait while the peer is too slow; raises ChannelClosed or FrameTooLarge."""
        # Waiting comes first: once written, a message cannot be taken back by a cancellation.
        while not self._writable.is_set():
            await self._writable.wait()
        self._sendable().write(self._format.encode(message))

    async def receive(self) -> Any:
        """The next message; raises ChannelClosed after the last one, FrameInvalid for one that is none.

        For one receiver at a time. Cancelling it loses no message.
        """
        while not self._bodies:
            if self._error is not None:
                raise self._error
            if self._receiver is not None and not self._receiver.done():
                raise RuntimeError("Two coroutines receive from one channel: give it a single reader.")
            self._receiver = asyncio.get_running_loop().create_future()
            await self._receiver
        body = self._bodies.popleft()
        self._unread_bytes -= len(body)
        if self._reading_paused and self._unread_bytes < RECEIVE_BUFFER_BYTES:
            self._resume_reading()
        return self._format.decode(body)

    def close(self) -> None:
        """Send what is queued, then end the connection, without waiting; safe to call twice."""
        self._closed_here = True
        self._fail(ChannelClosed("This end of the channel was closed."))
        if self._transport is not None:
            self._transport.close()

    async def aclose(self, *, flush_timeout_s: float = 1.0) -> None:
        """Close, give the peer `flush_timeout_s` seconds to take what is queued, then drop the rest."""
        self.close()
        try:
            async with asyncio.timeout(flush_timeout_s):
                await self._lost.wait()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
            await self._lost.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast(
            asyncio.Transport, transport
        )  # not by its class: uvloop's is not derived from it
        self._transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        try:
            bodies = self._buffer.feed(data)
        except FrameTooLarge as error:
            self._fail(error)
            if self._transport is not None:
                self._transport.abort()
            return
        self._bodies.extend(bodies)
        self._unread_bytes += sum(map(len, bodies))
        if self._unread_bytes >= RECEIVE_BUFFER_BYTES:
            self._pause_reading()
        if bodies:
            self._wake_receiver()

    def pause_writing(self) -> None:
        """Called by asyncio."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Called by asyncio."""
        self._writable.set()

    def eof_received(self) -> None:
        """Called by asyncio: nobody is left to read what still waits to be sent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        """Called by asyncio: the peer is gone, or this end was closed."""
        if self._error is None:
            self._read_the_rest()
            self._fail(ChannelClosed("The process at the other end of the channel is gone."))
        self._lost.set()
        if not self._closed_here and self._on_eof is not None:
            self._on_eof()

    def _read_the_rest(self) -> None:
        # A write that failed with EPIPE ends the transport although the peer's last messages are still to be
        # read.
        try:
            while data := self._socket.recv(READ_BYTES):
                self._bodies.extend(self._buffer.feed(data))
        except (OSError, FrameTooLarge):
            pass

    def _sendable(self) -> asyncio.Transport:
        if self._error is not None:
            raise self._error
        if self._transport is None:
            raise RuntimeError("AsyncChannel is made by `await AsyncChannel.open(...)`.")
        return self._transport

    def _fail(self, error: ChannelError) -> None:
        if self._error is None:
            self._error = error
        self._writable.set()
        self._wake_receiver()

    def _wake_receiver(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        self._reading_paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
