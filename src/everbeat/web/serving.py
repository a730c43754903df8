"""Serves the dashboard in its own process: the authentication that its address needs, the socket, and the server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

from everbeat.domain.settings.checks import one_of
from everbeat.domain.settings.settings import refused
from everbeat.errors import AddressInUse
from everbeat.web.application import Web as Web
from everbeat.web.http_protocol import BoundedProtocol, BoundedWarnings
from everbeat.web.rights import Authentication, Basic, Loopback, Role, TrustedHeader, is_loopback

_STOPS_WITHIN_S: Final = 3
MOST_CONNECTIONS: Final = 500
"""How many connections may be open: more than the streams of live pages, and fewer than the 1,024 files that a process may usually open."""
_role: Final = one_of(*Role)


def chosen_authentication(
    host: str,
    *,
    users: str | None,
    header: str | None,
    proxies: Sequence[str],
    role: str | None,
    roles: Mapping[str, str],
) -> Authentication:
    """Return the authentication of a server that listens on `host`. Only a server on this machine needs none.

    Raises ConfigurationError if another one has none, or if the settings contradict each other.
    """
    of_proxy = {
        "--proxy": () if users else proxies,
        "--role": role,
        "--role-of": [f"{name}={each}" for name, each in roles.items()],
    }
    if header is None and any(of_proxy.values()):
        subject, value = next((name, given) for name, given in of_proxy.items() if given)
        rule, fix = "is only for users whom a proxy names", "also give --trusted-header HEADER"
        raise refused(value, subject=subject, code="CONTRADICTION", rule=rule, fix=fix)
    if header is not None and not proxies:
        rule, fix = "needs the address of the proxy that sets the header", "also give --proxy 10.0.0.7"
        raise refused(header, subject="--trusted-header", code="MISSING", rule=rule, fix=fix)
    if header is not None and users:
        rule, fix = "excludes EVERBEAT_WEB_USERS", "use one of the two"
        raise refused(header, subject="--trusted-header", code="CONTRADICTION", rule=rule, fix=fix)
    if header is not None:
        return TrustedHeader(
            header,
            proxies=proxies,
            role=Role(_role(role or Role.READ, subject="--role")),
            roles={name: Role(_role(each, subject=f"--role-of {name}")) for name, each in roles.items()},
        )
    if users:
        return Basic.parse(users, subject="EVERBEAT_WEB_USERS", proxies=proxies)
    if not is_loopback(host):
        raise refused(
            host,
            subject="--host",
            code="NOT_AUTHENTICATED",
            rule="is reachable from other machines, so the dashboard needs authentication there",
            fix="set EVERBEAT_WEB_USERS='ann:operate:PASSWORD', or use --trusted-header, or listen on 127.0.0.1",
        )
    return Loopback()


def check_root_path(root_path: str) -> None:
    """Raise ConfigurationError unless a path is empty or begins with a slash. Otherwise, no request of the proxy would match."""
    if root_path and not root_path.startswith("/"):
        rule, fix = "must begin with a slash", f"write --root-path /{root_path}"
        raise refused(root_path, subject="--root-path", code="WRONG_FORM", rule=rule, fix=fix)


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Provide a socket that listens on this address. Raises AddressInUse if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family)
    except OSError as problem:
        raise AddressInUse(f"{host}:{port}", problem.strerror or str(problem)) from None
    with made:
        yield made


def address_of(listener: socket.socket, root_path: str) -> str:
    """Return the URL of the dashboard on this socket."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}{root_path}"


def below(dashboard: ASGIApp, root_path: str) -> ASGIApp:
    """Return the dashboard below a path, whether the proxy removes the path from its requests or not."""
    if not root_path:
        return dashboard

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            is_whole = path == root_path or path.startswith(f"{root_path}/")
            scope = {**scope, "root_path": root_path, "path": path if is_whole else f"{root_path}{path}"}
        await dashboard(scope, receive, send)

    return served


def configuration(
    dashboard: ASGIApp, *, root_path: str, connections: int = MOST_CONNECTIONS
) -> uvicorn.Config:
    """Return how the server serves. Requests are not logged: an address can contain a key or a name.

    More than `connections` open ones get the status 503.
    """
    handlers: dict[str, dict[str, Any]] = LOGGING_CONFIG["handlers"]
    return uvicorn.Config(
        below(dashboard, root_path.rstrip("/")),
        http=BoundedProtocol,
        log_config={
            **LOGGING_CONFIG,
            "filters": {"bounded": {"()": BoundedWarnings}},
            "handlers": {**handlers, "default": {**handlers["default"], "filters": ["bounded"]}},
        },
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the address of the proxy decides whether its header is trusted
        ws="none",
        timeout_graceful_shutdown=_STOPS_WITHIN_S,
        # uvicorn refuses the request of the connection that reaches this number.
        limit_concurrency=connections + 1,
    )


def serve(dashboard: Web, listener: socket.socket, *, root_path: str, connections: int) -> None:
    """Serve until a signal ends the process."""
    config = configuration(dashboard, root_path=root_path, connections=connections)
    # After its shutdown, uvicorn raises the signal again. SIGTERM is the usual end of a service, so the exit code must be 0.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
