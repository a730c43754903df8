"""The sockets under the channels: making a pair, and keeping copies out of processes that user code forks."""

from __future__ import annotations

import os
import socket
from typing import Final
from weakref import WeakSet

READ_BYTES: Final = 256 * 1024

_ours: WeakSet[socket.socket] = WeakSet()


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: one to keep, one for the child."""
    return socket.socketpair()


def close_after_fork(sock: socket.socket) -> None:
    """Close `sock` in children made by a bare fork: their copy would hide our end from the peer."""
    _ours.add(sock)


def keep_after_fork(sock: socket.socket) -> None:
    """Forget `sock`, because it is closed or handed on."""
    _ours.discard(sock)


def _close_in_forked_child() -> None:
    for sock in list(_ours):
        sock.close()
    _ours.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_forked_child)
