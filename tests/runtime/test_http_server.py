"""The HTTP server of probes answers, and no client can hold it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from everbeat.errors import ConfigurationError
from everbeat.runtime import http_server
from everbeat.runtime.http_server import (
    JSON,
    LONGEST_REQUEST,
    MOST_CONNECTIONS,
    HttpAnswer,
    HttpServer,
    listen,
    shown_address,
)

LARGE = "x" * 10_000_000  # more than the buffers of a connection hold


def fail() -> HttpAnswer:
    raise ValueError("secret")


ROUTES = {
    "/ok": lambda: HttpAnswer(200, json.dumps({"ok": True}), JSON),
    "/bad": lambda: HttpAnswer(503, "not now\n"),
    "/large": lambda: HttpAnswer(200, LARGE),
    "/fails": fail,
    "/surrogate": lambda: HttpAnswer(200, "\udc80"),
}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(http_server, "LONGEST_EXCHANGE_S", 60.0)  # longer than any client of the tests waits
    listening = listen("127.0.0.1:0", subject="--probe")
    server = HttpServer(listening, ROUTES, name="test")
    server.start()
    yield listening[0].getsockname()[1]
    server.close()


def asked(port: int, path: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers={"User-Agent": "kube-probe/1.33"})
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.getheaders())
    finally:
        connection.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def test_a_path_is_answered_with_its_status_type_and_body(port: int) -> None:
    status, body, headers = asked(port, "/ok")
    assert (status, json.loads(body)) == (200, {"ok": True})
    assert headers["Content-Type"] == JSON
    assert headers["Cache-Control"] == "no-store"
    assert asked(port, "/bad")[:2] == (503, "not now\n")
    assert asked(port, "/ok?verbose=1")[0] == 200
    assert asked(port, "/large")[1] == LARGE
    assert asked(port, "/surrogate")[1] == "\\udc80"


def test_head_has_the_length_but_no_body(port: int) -> None:
    status, body, headers = asked(port, "/bad", "HEAD")
    assert (status, body, headers["Content-Length"]) == (503, "", str(len("not now\n")))


def test_other_methods_paths_and_protocols_are_rejected(port: int) -> None:
    status, _, headers = asked(port, "/ok", "POST")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    status, body, _ = asked(port, "/etc/passwd")
    assert (status, "/ok /bad" in body) == (404, True)
    with connected(port) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert client.recv(1_000).startswith(b"HTTP/1.1 400 ")


def test_an_answer_that_fails_gives_500_and_no_detail_and_the_server_continues(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    status, body, _ = asked(port, "/fails")
    assert (status, "secret" in body) == (500, False)
    assert "secret" in caplog.text
    assert asked(port, "/ok")[0] == 200


def test_a_request_that_is_too_large_is_rejected(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"GET /ok HTTP/1.1\r\nX: " + b"x" * LONGEST_REQUEST)
        assert client.recv(1_000).startswith(b"HTTP/1.1 431 ")


SENDS_SLOWLY, READS_NOTHING = b"GET /ok HT", b"GET /large HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("sent", [SENDS_SLOWLY, READS_NOTHING])
def test_a_slow_client_delays_no_other_client(port: int, sent: bytes) -> None:
    with slow_client(port, sent):
        assert asked(port, "/ok")[0] == 200


@contextmanager
def slow_client(port: int, sent: bytes) -> Iterator[socket.socket]:
    with connected(port) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        slow.sendall(sent)
        yield slow


def test_a_client_that_sends_slowly_is_dropped(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LONGEST_EXCHANGE_S", 0.3)
    with slow_client(port, SENDS_SLOWLY) as slow:
        assert slow.recv(1_000) == b"", "the server closes the connection in the end"


def test_a_client_that_does_not_read_is_dropped(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LONGEST_EXCHANGE_S", 0.3)
    with slow_client(port, READS_NOTHING) as lazy, slow_client(port, SENDS_SLOWLY) as later:
        assert later.recv(1_000) == b""  # its time ends after that of the client before it
        read = 0
        with suppress(ConnectionResetError):
            while part := lazy.recv(65_536):
                read += len(part)
        assert read < len(LARGE)


def test_more_clients_than_allowed_replace_the_oldest(port: int) -> None:
    clients = [connected(port) for _ in range(MOST_CONNECTIONS + 5)]
    try:
        assert asked(port, "/ok")[0] == 200
        assert clients[0].recv(10) == b""
        clients[-1].sendall(b"GET /ok HTTP/1.0\r\n\r\n")
        assert clients[-1].recv(1_000).startswith(b"HTTP/1.1 200 ")
    finally:
        for each in clients:
            each.close()


def test_the_server_acts_regularly_and_at_once_when_it_is_woken() -> None:
    acted = threading.Semaphore(0)
    listening = listen("127.0.0.1:0", subject="--probe")
    server = HttpServer(listening, ROUTES, name="test", act=acted.release, every_s=0.05)
    server.start()
    try:
        assert all(acted.acquire(timeout=10) for _ in range(3))
    finally:
        server.close()
    woken = threading.Semaphore(0)
    server = HttpServer([], {}, name="test", act=woken.release, every_s=3_600)
    server.start()
    try:
        assert woken.acquire(timeout=10)
        server.wake()
        assert woken.acquire(timeout=10)
    finally:
        server.close()


@pytest.mark.parametrize("text", ["8090", "host", "host:", "host:99999", "::1:80", "[::1]", "a:b", ""])
def test_an_invalid_address_is_rejected_with_the_form_that_is_valid(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--probe = .*must be HOST:PORT or :PORT.*:8090"):
        listen(text, subject="--probe")


def test_a_port_alone_is_rejected_with_that_port_in_the_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"write 127\.0\.0\.1:9109 for this machine only, or :9109 "):
        listen("9109", subject="--listen")


def test_an_address_that_is_in_use_or_not_of_this_machine_is_rejected() -> None:
    (taken,) = listen("127.0.0.1:0", subject="--probe")
    with taken, pytest.raises(ConfigurationError, match=r"cannot listen there.*use a free port"):
        listen(shown_address(taken), subject="--probe")
    with pytest.raises(ConfigurationError, match="cannot listen there"):
        listen("192.0.2.1:8090", subject="--probe")
    with pytest.raises(ConfigurationError, match="cannot listen there"):
        listen("no-such-host.invalid:8090", subject="--probe")


def test_an_address_without_a_host_accepts_ipv4() -> None:
    (listening,) = listen(":0", subject="--probe")
    server = HttpServer([listening], ROUTES, name="test")
    server.start()
    try:
        assert asked(listening.getsockname()[1], "/ok")[0] == 200
    finally:
        server.close()
