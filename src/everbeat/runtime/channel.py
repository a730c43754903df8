"""Messages between the processes of one tree: the wire format, and channels for event loops and for blocking code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final, Self, cast

import msgspec

from everbeat.errors import EverbeatError
from everbeat.runtime.fork import close_in_forked_child

FRAME_LIMIT_BYTES: Final = 512 * 1024 * 1024
"""The largest message in bytes. A larger length comes from a peer that speaks another protocol, and this process must not wait for gigabytes."""

_LENGTH = struct.Struct("!I")


class ChannelError(EverbeatError):
    """A channel between two processes of one tree has failed."""

    code: ClassVar[str] = "CHANNEL_ERROR"


class ChannelClosed(ChannelError):
    """The other end has closed the channel or exited, or this end was closed."""

    code: ClassVar[str] = "CHANNEL_CLOSED"


class ChannelFull(ChannelError):
    """The peer is not reading, and the send buffer is full."""

    code: ClassVar[str] = "CHANNEL_FULL"


class FrameTooLarge(ChannelError):
    """A message exceeds `FRAME_LIMIT_BYTES`."""

    code: ClassVar[str] = "FRAME_TOO_LARGE"


class FrameInvalid(ChannelError):
    """The received bytes are not a message of this channel."""

    code: ClassVar[str] = "FRAME_INVALID"


class FrameFormat:
    """Encodes messages as frames and decodes them. `messages` is the union of tagged Structs that a receiver accepts.

    An instance must not be used by two threads at the same time.
    """

    __slots__ = ("_decoder", "_encoder")

    def __init__(self, messages: Any) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(messages)

    def encode(self, message: object) -> bytearray:
        """Return the frame of one message. Raises FrameTooLarge if the message is too large."""
        frame = bytearray(_LENGTH.size)
        self._encoder.encode_into(message, frame, _LENGTH.size)
        size = len(frame) - _LENGTH.size
        if size > FRAME_LIMIT_BYTES:
            raise _too_large(size, what=type(message).__name__)
        _LENGTH.pack_into(frame, 0, size)
        return frame

    def decode(self, body: bytes | bytearray | memoryview) -> Any:
        """Return the message in the body of one frame. Raises FrameInvalid if the body is not a valid message."""
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise FrameInvalid(
                f"A frame of {len(body)} bytes is not a message of this channel: {error}.",
                fix="run parent and child from the same version of everbeat.",
            ) from error


class FrameBuffer:
    """Splits a stream of bytes, which arrives in chunks of any size, into the bodies of frames."""

    __slots__ = ("_bytes", "_needed")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._needed = _LENGTH.size

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data` and return the frame bodies that are now complete. Raises FrameTooLarge if a frame is too large."""
        held = self._bytes
        held += data
        if len(held) < self._needed:
            return []
        bodies: list[bytes] = []
        start = 0
        with memoryview(held) as view:
            while True:
                self._needed = _LENGTH.size
                if len(held) - start < self._needed:
                    break
                (size,) = _LENGTH.unpack_from(held, start)
                if size > FRAME_LIMIT_BYTES:
                    raise _too_large(size, what="a received frame")
                self._needed += size
                if len(held) - start < self._needed:
                    break
                bodies.append(bytes(view[start + _LENGTH.size : start + self._needed]))
                start += self._needed
        del held[:start]
        return bodies

    def __len__(self) -> int:
        return len(self._bytes)


def _too_large(size: int, *, what: str) -> FrameTooLarge:
    return FrameTooLarge(
        f"{what} has {size:,} bytes; a message between processes can have {FRAME_LIMIT_BYTES:,}.",
        fix="keep large data in files or tables and send its location.",
    )


READ_BYTES: Final = 256 * 1024


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets: one to keep and one for the child.

    Processes forked by user code keep neither socket. A copy would hide the exit of this process from the peer.
    """
    ours, theirs = socket.socketpair()
    close_in_forked_child(ours)
    close_in_forked_child(theirs)
    return ours, theirs


SEND_BUFFER_BYTES: Final = 64 * 1024 * 1024
"""Once this many bytes are unsent, `send` waits and `send_nowait` raises ChannelFull."""

RECEIVE_BUFFER_BYTES: Final = 64 * 1024 * 1024
"""Once unread messages reach this many bytes, the channel stops reading from the socket."""


class AsyncChannel(asyncio.Protocol):
    """One end of a channel, owned by one event loop. Other threads must not use it."""

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
        self.queued_bytes = 0
        """The size of all messages that were ever queued."""
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

        `on_eof` is called in the loop's thread when the peer has closed the channel or has sent an invalid frame, but not after `close`.
        The callback may run before all messages are received, and only a full receive buffer delays it.
        """
        channel = cls(sock, messages=messages, on_eof=on_eof)
        close_in_forked_child(sock)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
        return channel

    @property
    def is_closed(self) -> bool:
        """Return whether sending has become impossible. Messages that were received earlier can still be read."""
        return self._error is not None

    @property
    def unsent_bytes(self) -> int:
        """Return how many of the queued bytes still wait in this process, because the peer is not reading."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send_nowait(self, message: object) -> None:
        """Queue a message. If ChannelClosed, ChannelFull or FrameTooLarge is raised, nothing was sent."""
        transport = self._sendable()
        waiting = transport.get_write_buffer_size()
        if waiting > SEND_BUFFER_BYTES:
            raise ChannelFull(f"The peer leaves {waiting:,} bytes unread, of {SEND_BUFFER_BYTES:,} allowed.")
        self._write(transport, message)

    async def send(self, message: object) -> None:
        """Queue a message, waiting while the peer is too slow. Raises ChannelClosed or FrameTooLarge if it cannot be sent."""
        # Wait first: a cancellation could not withdraw a message that is already written.
        while not self._writable.is_set():
            await self._writable.wait()
        self._write(self._sendable(), message)

    async def receive(self) -> Any:
        """Return the next message. Raises ChannelClosed after the last message, and FrameInvalid if a frame is invalid.

        Only one receiver may wait at a time. A cancellation loses no message.
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
        """Send the queued messages and then close the connection, without waiting. A second call does nothing."""
        self._closed_here = True
        self._fail(ChannelClosed("This end of the channel was closed."))
        if self._transport is not None:
            self._transport.close()

    async def aclose(self, *, flush_timeout_s: float = 1.0) -> None:
        """Close the channel. Give the peer `flush_timeout_s` seconds to read the queued messages, and then drop the rest."""
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
        )  # not checked by class: uvloop's transport is not a subclass
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
        """Called by asyncio: the peer has closed the connection, so unsent messages are dropped."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        """Called by asyncio: the connection was closed by the peer or by this end."""
        if self._error is None:
            self._read_the_rest()
            self._fail(ChannelClosed("The process at the other end of the channel has ended."))
        self._lost.set()
        if not self._closed_here and self._on_eof is not None:
            self._on_eof()

    def _read_the_rest(self) -> None:
        # A write that fails with EPIPE closes the transport, although the peer's last messages are still unread.
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

    def _write(self, transport: asyncio.Transport, message: object) -> None:
        frame = self._format.encode(message)
        self.queued_bytes += len(frame)
        transport.write(frame)

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


_log = logging.getLogger("everbeat.runtime")


class BlockingChannel:
    """One end of a channel, for code without an event loop. Any thread may send, and one thread at a time may receive."""

    def __init__(self, sock: socket.socket, *, messages: Any) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._send_format = FrameFormat(messages)
        self._receive_format = FrameFormat(messages)
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._buffer = FrameBuffer()
        self._bodies: deque[bytes] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        close_in_forked_child(sock)

    def send(self, message: object) -> None:
        """Send a message, waiting while the peer is slow. Raises ChannelClosed or FrameTooLarge if it cannot be sent."""
        with self._send_lock:
            frame = self._send_format.encode(message)
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise self._gone(error) from error
            except BaseException:
                # A signal handler raised an exception in the middle of a frame, so the stream is unusable.
                self._shut_down()
                raise

    def receive(self, *, timeout_s: float | None = None) -> Any:
        """Return the next message. Raises ChannelClosed, FrameInvalid, or TimeoutError after `timeout_s` seconds.

        A timeout loses no data: the next call completes a partially received message. Each received part of a message restarts the timeout.
        """
        with self._receive_lock:
            while not self._bodies:
                self._bodies.extend(self._buffer.feed(self._read(timeout_s)))
            return self._receive_format.decode(self._bodies.popleft())

    def read_in_thread(
        self, *, on_message: Callable[[Any], None], on_eof: Callable[[], None]
    ) -> threading.Thread:
        """Pass every message to `on_message` from a daemon thread, and call `on_eof` once when the channel closes.

        The method is for processes whose main thread runs user code and cannot read. Such processes can still receive a cancellation. With
        `on_eof=lambda: os._exit(...)` they exit together with their parent, except while C code holds the GIL.
        """

        def read() -> None:
            try:
                while True:
                    on_message(self.receive())
            except ChannelClosed:
                pass
            except Exception:  # noqa: BLE001 - after any error, the thread stops reading and calls `on_eof`
                _log.exception("channel_reader_failed")
            finally:
                on_eof()

        thread = threading.Thread(target=read, name="everbeat-channel", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Close the connection. A thread that is waiting in `receive` gets ChannelClosed. A second call does nothing."""
        self._shut_down()
        # The shutdown has woken the reader. The descriptor must not be reused while the reader still uses it.
        with self._receive_lock, self._send_lock:
            self._selector.close()
            self._socket.close()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, timeout_s: float | None) -> bytes:
        try:
            if timeout_s is not None and not self._selector.select(timeout_s):
                raise TimeoutError(f"No message within {timeout_s:g} s.")
            data = self._socket.recv(READ_BYTES)
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._gone(error) from error
        if not data:
            raise self._gone(None)
        return data

    @staticmethod
    def _gone(error: Exception | None) -> ChannelClosed:
        reason = "" if error is None else f" ({error})"
        return ChannelClosed(
            f"The channel has ended{reason}: the other process is gone, or this end was closed."
        )
