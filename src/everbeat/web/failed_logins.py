"""Counts failed logins by address, so that no client can try passwords without end. Each process counts for itself."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from math import ceil
from typing import Final

from starlette.requests import Request

from everbeat.runtime.clock import Clock, SystemClock
from everbeat.web.refusals import RequestRefused

MOST_FAILURES: Final = 10
"""How many logins of an address may fail within WITHIN_S. Then all of its logins are refused, also those with the right password."""
WITHIN_S: Final = 60.0
MOST_ADDRESSES: Final = 10_000
"""How many addresses are remembered. If there are more, those whose last failure is the oldest are forgotten."""
_OF_ONE_CLIENT: Final = 64
"""The length of the prefix of an IPv6 network that one client usually has for itself."""
_log = logging.getLogger("everbeat.web")


class FailedLogins:
    """Remembers the latest failed logins of each address. Its memory is bounded."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = SystemClock() if clock is None else clock
        self._failures: dict[str, deque[float]] = {}

    def require(self, address: str) -> None:
        """Raise RequestRefused with the status 429 if too many logins of this address have failed lately."""
        failures = self._failures.get(address)
        if failures is None or len(failures) < MOST_FAILURES:
            return
        left_s = failures[0] + WITHIN_S - self._clock.monotonic()
        if left_s <= 0:
            return
        wait_s = ceil(left_s)
        raise RequestRefused(
            429,
            "TOO_MANY_LOGINS",
            "Too many logins from your address have failed.",
            fix=f"wait {wait_s} s, and then log in with the right password.",
            headers={"retry-after": str(wait_s)},
        )

    def note(self, address: str) -> None:
        """Count a failed login. The log notes when an address reaches the limit, without the name that was tried: it can be a password."""
        now = self._clock.monotonic()
        failures = self._failures.pop(address, None) or deque(maxlen=MOST_FAILURES)
        failures.append(now)
        if len(self._failures) >= MOST_ADDRESSES:
            del self._failures[next(iter(self._failures))]
        self._failures[address] = failures
        if len(failures) == MOST_FAILURES and failures[0] > now - WITHIN_S:
            wait_s = ceil(failures[0] + WITHIN_S - now)
            _log.warning("logins_refused address=%s failures=%d for_s=%d", address, MOST_FAILURES, wait_s)

    def __len__(self) -> int:
        """Return how many addresses are remembered."""
        return len(self._failures)


def address_of_client(request: Request, proxies: Iterable[IPv4Network | IPv6Network]) -> str:
    """Return the address from which a request comes, or the network of an IPv6 client.

    Only `proxies` are believed if they name another address. It is the last one in X-Forwarded-For that does not belong to a proxy, because a
    client can write the others itself.
    """
    networks = tuple(proxies)
    host = "unknown" if request.client is None else request.client.host
    forwarded = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
    while is_within(host, networks) and forwarded:
        named = forwarded.pop().strip()
        if read_address(named) is None:
            break
        host = named
    address = read_address(host)
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, _OF_ONE_CLIENT), strict=False))
    return "unknown" if address is None else str(address)


def read_address(host: str) -> IPv4Address | IPv6Address | None:
    """Return an address, or None if the text is none. A server that listens on both kinds gets an IPv4 client as ::ffff:10.0.0.7."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def is_within(host: str, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    """Return whether an address belongs to one of these networks."""
    address = read_address(host)
    if address is None:
        return False
    return any(address.version == each.version and address in each for each in networks)
