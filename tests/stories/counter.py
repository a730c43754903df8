"""A service with a limit, seen from outside: it counts the connections that are open at the same time."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Counter:
    """Counts open connections. The kernel closes the connections of a killed process, so a death counts as an end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0
        self.most = 0
        self._is_over = False
        self._open: set[socket.socket] = set()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(1_000)
        self._server.setblocking(False)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._thread.join(10)
        for each in (self._server, *self._open):
            each.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._is_over:
                ready = [key.fileobj for key, _ in selector.select(0.05)]
                # Ends count before beginnings, because both can be noticed together.
                for each in ready:
                    if each is not self._server and isinstance(each, socket.socket):
                        self._end(selector, each)
                if self._server in ready:
                    connection, _ = self._server.accept()
                    selector.register(connection, selectors.EVENT_READ)
                    self._open.add(connection)
                    self.now += 1
                    self.most = max(self.most, self.now)

    def _end(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        selector.unregister(connection)
        self._open.discard(connection)
        self.now -= 1
        try:
            if connection.recv(1):
                connection.send(b"a")
        except OSError:
            pass  # its process was killed
        connection.close()


@contextmanager
def counting(folder: Path) -> Iterator[Counter]:
    """Count connections during the block."""
    counter = Counter(folder / "counter")
    try:
        yield counter
    finally:
        counter.close()
