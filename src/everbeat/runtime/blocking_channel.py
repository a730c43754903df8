"""Messages between the processes of one tree, for a process that runs synchronous code.

The twin of `channel.AsyncChannel` over the same frames; what a loop does for the one, threads do for the
other.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from everbeat.runtime.fork import close_in_forked_child
from everbeat.runtime.frames import ChannelClosed, FrameBuffer, FrameFormat
from everbeat.runtime.sockets import READ_BYTES

_log = logging.getLogger("everbeat.runtime")


class BlockingChannel:
    """One end of a channel for code without a loop: any thread may send, one at a time receives."""

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
        """Send a message, waiting while the peer is slow; raises ChannelClosed or FrameTooLarge."""
        with self._send_lock:
            frame = self._send_format.encode(message)
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise self._gone(error) from error
            except BaseException:
                # A signal handler raised in the middle of a frame: the stream is of no use any more.
                self._shut_down()
                raise

    def receive(self, *, timeout_s: float | None = None) -> Any:
        """The next message; raises ChannelClosed, FrameInvalid, or TimeoutError after `timeout_s`.

        A timeout loses nothing: a message half received is completed by the next call. The time is counted
        anew for every piece of a message.
        """
        with self._receive_lock:
            while not self._bodies:
                self._bodies.extend(self._buffer.feed(self._read(timeout_s)))
            return self._receive_format.decode(self._bodies.popleft())

    def read_in_thread(
        self, *, on_message: Callable[[Any], None], on_eof: Callable[[], None]
    ) -> threading.Thread:
        """Hand every message to `on_message` from a daemon thread; call `on_eof` once when it ends.

        For processes whose main thread runs user code and cannot look: they still hear a cancel, and die with
        their parent by `on_eof=lambda: os._exit(...)`, except while C code holds the GIL.
        """

        def read() -> None:
            try:
                while True:
                    on_message(self.receive())
            except ChannelClosed:
                pass
            except Exception:  # noqa: BLE001 - whatever it was, nobody reads any more, which is an end of the channel
                _log.exception("channel_reader_failed")
            finally:
                on_eof()

        thread = threading.Thread(target=read, name="everbeat-channel", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` gets ChannelClosed. Safe to call twice."""
        self._shut_down()
        # The reader has been woken by the shutdown; the descriptor must not be reused under it.
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
