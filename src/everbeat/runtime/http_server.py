"""A small HTTP server for probes and metrics. It runs in one thread, answers GET and HEAD, and bounds what each client can use."""

from __future__ import annotations

import logging
import re
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Final

from msgspec import Struct

from everbeat.errors import ConfigurationError, Problem
from everbeat.runtime.fork import close_in_forked_child

PLAIN: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
MOST_CONNECTIONS: Final = 32
"""How many clients can be connected at once. A further client replaces the one that has been connected for longest."""
LONGEST_REQUEST: Final = 8_192
"""The largest request with its headers, in bytes."""
LONGEST_EXCHANGE_S: Final = 5.0
"""How long one client can take to send its request and to read the answer, in seconds."""
_BACKLOG: Final = 64
_CHUNK: Final = 65_536
_RESET: Final = struct.pack("ii", 1, 0)
_NO_DESCRIPTOR_S: Final = 0.1
_AFTER_FAILURE_S: Final = 1.0
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_log = logging.getLogger("everbeat.runtime")


class HttpAnswer(Struct, frozen=True):
    """The answer to a request: its status code, its body, and the type of the body."""

    status: int
    body: str
    content_type: str = PLAIN


Responder = Callable[[], HttpAnswer]
"""A function that answers the requests for one path. It is called in the server's thread."""


def listen(text: str, *, subject: str) -> list[socket.socket]:
    """Return sockets that listen on `HOST:PORT`, or on all addresses of this machine for `:PORT`.

    `subject` names the setting in errors. Raises ConfigurationError if the address is not valid or cannot be used.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        proposed = text if text.isascii() and text.isdigit() and int(text) <= 65_535 else "8090"
        raise _refused(
            text,
            subject,
            code="WRONG_ADDRESS",
            rule="must be HOST:PORT or :PORT, with a port of at most 65,535",
            fix=f"write 127.0.0.1:{proposed} for this machine only, or :{proposed} for all of its addresses",
        )
    host, port = match["v6"] or match["host"] or "", int(match["port"])
    try:
        return [_listening(host, port)]
    except OSError as problem:
        raise _refused(
            text,
            subject,
            code="UNUSABLE",
            rule=f"this machine cannot listen there ({problem.strerror or problem})",
            fix="use a free port, and an address of this machine",
        ) from None


def _listening(host: str, port: int) -> socket.socket:
    """Return one listening socket. Without a host, it accepts IPv4 and IPv6, or only IPv4 if this machine has no IPv6."""
    if not host and socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    family, _, _, _, address = socket.getaddrinfo(
        host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def _refused(text: str, subject: str, *, code: str, rule: str, fix: str) -> ConfigurationError:
    return ConfigurationError([Problem(code=code, subject=subject, value=repr(text), rule=rule, fix=fix)])


def shown_address(listening: socket.socket) -> str:
    """Return the address of a listening socket as `HOST:PORT`."""
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HttpServer:
    """Answers requests in its own thread, until `close`.

    `routes` are the answers by path. `act` is called in the same thread at least every `every_s` seconds, and after `wake`; None means
    that there is nothing to do between requests.
    """

    def __init__(
        self,
        listening: list[socket.socket],
        routes: Mapping[str, Responder],
        *,
        name: str,
        act: Callable[[], object] | None = None,
        every_s: float | None = None,
    ) -> None:
        self._listening = listening
        self._routes = dict(routes)
        self._act = act
        self._every_s = every_s
        self._clients: dict[socket.socket, _Exchange] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._is_closing = False
        for each in (*listening, self._wake_reader, self._wake_writer):
            each.setblocking(False)
            close_in_forked_child(each)
        for each in (*listening, self._wake_reader):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let the thread call `act` soon. This function can be called from any thread."""
        with suppress(OSError):  # enough wakes are waiting, or the server is closed
            self._wake_writer.send(b"\0")

    def close(self) -> None:
        """Stop the thread, and close all sockets."""
        self._is_closing = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(LONGEST_EXCHANGE_S)
        for each in (*self._listening, *self._clients, self._wake_reader, self._wake_writer):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        act_at = monotonic()
        while not self._is_closing:
            try:
                if self._act is not None and monotonic() >= act_at:
                    self._act()
                    act_at = monotonic() + (self._every_s or 0.0)
                if self._step(None if self._act is None or self._every_s is None else act_at):
                    act_at = monotonic()
            except Exception:  # noqa: BLE001 - no request may end the thread that answers all others
                _log.exception("http_server_failed name=%s", self._thread.name)
                sleep(_AFTER_FAILURE_S)

    def _step(self, act_at: float | None) -> bool:
        """Wait for the next event and handle it. Return whether `wake` was called."""
        deadlines = [each.ends_at for each in self._clients.values()]
        if act_at is not None:
            deadlines.append(act_at)
        timeout = max(0.0, min(deadlines) - monotonic()) if deadlines else None
        was_woken = False
        for key, _ in self._selector.select(timeout):
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            if ready is self._wake_reader:
                with suppress(BlockingIOError):
                    ready.recv(_CHUNK)
                was_woken = True
            elif ready in self._clients:
                self._go_on(ready, self._clients[ready])
            else:
                self._accept(ready)
        now = monotonic()
        for client in [client for client, exchange in self._clients.items() if exchange.ends_at <= now]:
            self._drop(client)
        return was_woken

    def _accept(self, listening: socket.socket) -> None:
        try:
            client, _ = listening.accept()
        except BlockingIOError:  # the client is gone again
            return
        except OSError:  # no file descriptor is free: the client waits, and this thread must not spin
            sleep(_NO_DESCRIPTOR_S)
            return
        if len(self._clients) >= MOST_CONNECTIONS:
            self._drop(next(iter(self._clients)))
        client.setblocking(False)
        self._clients[client] = _Exchange(ends_at=monotonic() + LONGEST_EXCHANGE_S)
        self._selector.register(client, selectors.EVENT_READ)

    def _drop(self, client: socket.socket) -> None:
        exchange = self._clients.pop(client, None)
        if exchange is None:
            return
        self._selector.unregister(client)
        if exchange.left:  # the client does not read: the kernel must not keep the rest of the answer for it
            with suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        client.close()

    def _go_on(self, client: socket.socket, exchange: _Exchange) -> None:
        try:
            if exchange.is_answered:
                exchange.left = exchange.left[client.send(exchange.left[:_CHUNK]) :]
                if exchange.left:
                    return
                client.shutdown(socket.SHUT_WR)
            else:
                data = client.recv(LONGEST_REQUEST)
                exchange.received += data
                if data and not exchange.is_complete:
                    return
                if data:
                    exchange.left = self._answered(exchange.received)
                    exchange.is_answered = True
                    self._selector.modify(client, selectors.EVENT_WRITE)
                    return
        except BlockingIOError:
            return
        except OSError:  # the client is gone
            pass
        self._drop(client)

    def _answered(self, request: bytes) -> bytes:
        method, answer = self._answer(request)
        allowed = "Allow: GET, HEAD\r\n" if answer.status == 405 else ""
        # A lone surrogate would raise an error here, and stop all answers for a second.
        body = answer.body.encode(errors="backslashreplace")
        head = (
            f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{allowed}"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == b"HEAD" else body)

    def _answer(self, request: bytes) -> tuple[bytes, HttpAnswer]:
        if len(request) > LONGEST_REQUEST:
            return b"", HttpAnswer(431, "The request is too large.\n")
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return b"", HttpAnswer(400, "This is not an HTTP/1 request.\n")
        method, target, _ = words
        if method not in (b"GET", b"HEAD"):
            return method, HttpAnswer(405, "Only GET and HEAD are allowed.\n")
        route = self._routes.get(target.split(b"?", 1)[0].decode("latin-1"))
        if route is None:
            return method, HttpAnswer(404, f"Paths: {' '.join(self._routes)}\n")
        try:
            return method, route()
        except Exception:  # noqa: BLE001 - the client gets an answer, and the log the reason
            _log.exception("http_answer_failed path=%s", target.decode("latin-1")[:100])
            return method, HttpAnswer(500, "The answer could not be made. See the log.\n")


class _Exchange(Struct):
    """One request and its answer."""

    ends_at: float
    received: bytes = b""
    is_answered: bool = False
    left: bytes = b""

    @property
    def is_complete(self) -> bool:
        """Return whether the request has ended or is too large."""
        return b"\r\n\r\n" in self.received or len(self.received) > LONGEST_REQUEST
