"""Notifications to systemd about the state of this process, by the protocol of `sd_notify`."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final, Self

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
_WATCHDOG_VARIABLE: Final = "WATCHDOG_USEC"
_WATCHDOG_PID_VARIABLE: Final = "WATCHDOG_PID"


class ServiceManager:
    """The service manager that started this process. `watchdog_s` is the watchdog's timeout in seconds, or None without a watchdog."""

    def __init__(self, address: str, *, watchdog_s: float | None) -> None:
        self.watchdog_s = watchdog_s
        # Linux spells an address in the abstract namespace with a leading "@", and the kernel expects a null byte.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> Self | None:
        """Return the service manager that the environment names, or None. Its variables are removed, so that no child notifies it."""
        address = environment.pop(SOCKET_VARIABLE, "")
        period = environment.pop(_WATCHDOG_VARIABLE, "")
        pid = environment.pop(_WATCHDOG_PID_VARIABLE, "")
        if not address.startswith(("/", "@")):
            return None
        is_watched = period.isdecimal() and int(period) > 0 and pid in ("", str(os.getpid()))
        return cls(address, watchdog_s=int(period) / 1_000_000 if is_watched else None)

    def notify(self, *lines: str) -> None:
        """Send the lines, such as `READY=1`. Errors are ignored, because a service must not fail for its manager."""
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), self._address)
