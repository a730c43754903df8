"""The sockets under the channels."""

from __future__ import annotations

import socket
from typing import Final

from everbeat.runtime.fork import close_in_forked_child

READ_BYTES: Final = 256 * 1024


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: one to keep, one for the child. What user code forks keeps neither, or it would hide the end of ours."""
    ours, theirs = socket.socketpair()
    close_in_forked_child(ours)
    close_in_forked_child(theirs)
    return ours, theirs
