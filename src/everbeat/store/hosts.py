"""The hosts of one URL in the order in which they are tried: the one that answered last first, those that failed last."""

from __future__ import annotations

import threading
from typing import Any

from msgspec import Struct
from psycopg import AsyncConnection, Connection


class Host(Struct, frozen=True):
    """One entry of the lists `host`, `hostaddr` and `port` of a conninfo; None where the list is not there."""

    host: str | None = None
    hostaddr: str | None = None
    port: str | None = None

    def settings(self) -> dict[str, str]:
        """The settings of a conninfo that lead to this host alone."""
        given = {"host": self.host, "hostaddr": self.hostaddr, "port": self.port}
        return {key: value for key, value in given.items() if value is not None}

    def is_of(self, connection: Connection[Any] | AsyncConnection[Any]) -> bool:
        """Whether this open connection leads there."""
        info = connection.info
        same_place = self.host in (info.host, None) and self.hostaddr in (info.hostaddr, None)
        return same_place and str(info.port) == (self.port or "5432")


class Hosts:
    """Safe for many threads."""

    def __init__(self, given: dict[str, Any]) -> None:
        lists = [str(given.get(key) or "").split(",") for key in ("host", "hostaddr", "port")]
        count = max(len(lists[0]), len(lists[1]))
        if len(lists[2]) not in (1, count):
            count = 1  # libpq refuses such a URL in its own words
        self._order = [Host(*(_entry(each, number) for each in lists)) for number in range(count)]
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._order)

    def settings(self) -> dict[str, str]:
        """The settings of a conninfo that name the hosts in the present order; none where there is but one."""
        order = self._order
        if len(order) == 1:
            return {}
        columns = {
            "host": [each.host for each in order],
            "hostaddr": [each.hostaddr for each in order],
            "port": [each.port for each in order],
        }
        return {
            key: ",".join(entry or "" for entry in column)
            for key, column in columns.items()
            if any(entry is not None for entry in column)
        }

    def answered(self, connection: Connection[Any] | AsyncConnection[Any]) -> Host | None:
        """Try the host of this open connection first from now on, and return it; None where it is none of them."""
        found = next((each for each in self._order if each.is_of(connection)), None)
        if found is not None:
            self._move(found, last=False)
        return found

    def failed(self, host: Host) -> None:
        """Try this host last from now on."""
        self._move(host, last=True)

    def _move(self, host: Host, *, last: bool) -> None:
        with self._guard:
            others = [each for each in self._order if each != host]
            there = [each for each in self._order if each == host]
            self._order = [*others, *there] if last else [*there, *others]


def _entry(entries: list[str], number: int) -> str | None:
    return (entries[0] if len(entries) == 1 else entries[number]) or None
