"""The end of a connection under the code that waits for it."""

from __future__ import annotations

import socket


def shut_down(descriptor: int) -> None:
    """Shut a socket down, which its readers see at once; the descriptor stays with its owner. Raises OSError.

    No copy of the descriptor is made: a process may have no descriptor left.
    """
    line = socket.socket(fileno=descriptor)
    try:
        line.shutdown(socket.SHUT_RDWR)
    finally:
        line.detach()
