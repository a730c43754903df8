"""What the embedded PostgreSQL is configured with, as the text of one included configuration file.

What lives here: defaults, rendering, comparing. What may not: files and processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from everbeat.errors import ConfigurationError, Problem

DEFAULT_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "listen_addresses": "",
        "port": "5432",  # names the socket file even without TCP
        "unix_socket_permissions": "0700",
        "max_connections": "200",
        "shared_buffers": "128MB",
        "jit": "off",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_line_prefix": "%m [%p] ",
        "cluster_name": "everbeat",
        # A query whose client was killed ends, and frees its locks, without waiting for its last row.
        "client_connection_check_interval": "1s",
    }
)

_NAME = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)?", re.IGNORECASE)
_LINE = re.compile(r"(\S+) = '((?:[^']|'')*)'")


def requested(settings: Mapping[str, str], *, tcp_port: int | None) -> dict[str, str]:
    """The settings a caller asked for, names in lower case; raises ConfigurationError listing every
    impossible one.
    """
    problems = [
        Problem(
            code="EMBEDDED_SETTING_INVALID",
            subject=f"embedded setting {name!r}",
            value=repr(value),
            rule="a setting is a name of letters, digits and _, with a value of one line",
            fix="use a name and value from the PostgreSQL manual",
        )
        for name, value in settings.items()
        if _NAME.fullmatch(name) is None or "\n" in value or "\0" in value
    ]
    if tcp_port is not None and not 1 <= tcp_port <= 65535:
        problems.append(
            Problem(
                code="EMBEDDED_SETTING_INVALID",
                subject="tcp_port",
                value=repr(tcp_port),
                rule="a port is between 1 and 65535",
                fix="use a free port above 1023, or leave it out: the server then has a Unix socket only",
            )
        )
    if problems:
        raise ConfigurationError(problems)
    wanted = {name.lower(): value for name, value in settings.items()}
    if tcp_port is not None:
        wanted |= {"listen_addresses": "127.0.0.1", "port": str(tcp_port)}
    return wanted


def rendered(settings: Mapping[str, str]) -> str:
    """The settings as PostgreSQL's configuration text."""
    return "".join(f"{name} = '{_quoted(value)}'\n" for name, value in settings.items())


def parsed(text: str) -> dict[str, str]:
    """The settings of a text made by `rendered`."""
    return {name: value.replace("''", "'").replace("\\\\", "\\") for name, value in _LINE.findall(text)}


def differences(wanted: Mapping[str, str], *, actual: Mapping[str, str]) -> str:
    """Where `actual` is not what is `wanted`, in words; empty when it is."""
    other = {name: value for name, value in wanted.items() if actual.get(name) != value}
    return ", ".join(
        f"{name} is {actual.get(name, 'the default')!r}, not {value!r}" for name, value in other.items()
    )


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "''")
