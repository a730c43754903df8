"""The rights of the dashboard: roles, users, and three ways to find the user of a request."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import inspect
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct
from starlette.requests import HTTPConnection, Request

from everbeat.domain.settings.settings import refused
from everbeat.web.failed_logins import FailedLogins, address_of_client, is_within, read_address
from everbeat.web.refusals import RequestRefused


class Role(StrEnum):
    """The rights of a user. Each role includes those before it."""

    SEE = "see"
    """See states, names, keys, labels and times, but no payloads."""
    READ = "read"
    """Also read arguments, results, errors and other payloads, unless a rule hides them."""
    OPERATE = "operate"
    """Also retry, cancel, pause, resume, signal, answer, send tasks, and make tasks due."""
    ADMIN = "admin"
    """Also delete, move and reprioritise tasks, release workers, make, edit and delete schedules, and set limits."""

    @property
    def word(self) -> str:
        """Return the rights of this role in a word or two."""
        return "do everything" if self is Role.ADMIN else self.value

    def includes(self, other: Role) -> bool:
        """Return whether a user with this role may do what the other role allows."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class User(Struct, frozen=True):
    """A person or program that uses the dashboard. The audit log contains the name."""

    name: str
    role: Role = Role.READ


Authentication: TypeAlias = Callable[[Request], User | Awaitable[User | None] | None]
"""A function that returns the user of a request, or None to reject it. It can be async."""


class Basic:
    """Authentication by user name and password, as browsers ask for them. Use it over TLS only.

    `users` maps each name to a password and a role. After 10 failed logins of an address within a minute, its logins are refused until the
    first of them is a minute old. Each process counts for itself. `proxies` are the addresses and networks of the proxies that name the
    address of the client in X-Forwarded-For. Without them, all clients of a proxy count as one.
    """

    challenge: Final = 'Basic realm="everbeat", charset="UTF-8"'

    def __init__(self, users: Mapping[str, tuple[str, Role]], *, proxies: Sequence[str] = ()) -> None:
        if not users:
            rule, fix = "needs at least one user", "pass {'ann': ('a long password', Role.OPERATE)}"
            raise refused({}, subject="Basic.users", code="MISSING", rule=rule, fix=fix)
        for name, (password, _) in users.items():
            if len(password) < _SHORTEST_PASSWORD:
                raise refused(
                    "***",
                    subject=f"the password of {name!r}",
                    code="OUT_OF_RANGE",
                    rule=f"must have at least {_SHORTEST_PASSWORD} characters",
                    fix="use a longer one",
                )
        self._users = {name: (_digest(password), Role(role)) for name, (password, role) in users.items()}
        self._networks = _networks(proxies) if proxies else ()
        self._failed = FailedLogins()

    @classmethod
    def parse(cls, text: str, *, subject: str, proxies: Sequence[str] = ()) -> Basic:
        """Return the authentication for users that are written as `name:role:password`, separated by white space.

        Raises ConfigurationError if the text has another form. The error contains no password.
        """
        users: dict[str, tuple[str, Role]] = {}
        for number, entry in enumerate(text.split(), start=1):
            name, _, rest = entry.partition(":")
            role, _, password = rest.partition(":")
            if not name or role not in set(Role) or not password:
                raise refused(
                    f"entry {number}",
                    subject=subject,
                    code="WRONG_FORM",
                    rule=f"must be name:role:password with one of the roles {', '.join(Role)}",
                    fix="write ann:operate:PASSWORD, and separate users by spaces",
                )
            users[name] = (password, Role(role))
        return cls(users, proxies=proxies)

    def __call__(self, request: Request) -> User | None:
        """Return the user whose name and password the request contains. Raises RequestRefused if too many logins of its address failed."""
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return None
        address = address_of_client(request, self._networks)
        self._failed.require(address)
        user = self._user(encoded)
        if user is None:
            self._failed.note(address)
        return user

    def _user(self, encoded: str) -> User | None:
        try:
            name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        known, role = self._users.get(name, (_NO_PASSWORD, None))
        # Digests have one length, and the comparison also runs for unknown names. So its duration reveals neither a name nor a length.
        is_right = hmac.compare_digest(known, _digest(password))
        return User(name, role) if is_right and role is not None else None


def _digest(password: str) -> bytes:
    return hashlib.sha256(password.encode()).digest()


_NO_PASSWORD: Final = secrets.token_bytes(32)


class TrustedHeader:
    """Authentication by a proxy, which puts the user's name into a header. Requests from other addresses are rejected.

    `proxies` are addresses and networks such as "10.0.0.0/8". `roles` maps names to roles; other users get `role`, or are rejected if it
    is None. The proxy must remove the header from the requests of its clients.
    """

    def __init__(
        self,
        header: str,
        *,
        proxies: Sequence[str],
        role: Role | None = Role.READ,
        roles: Mapping[str, Role] | None = None,
    ) -> None:
        if not _TOKEN.fullmatch(header):
            rule, fix = "must be the name of a header", "write X-Forwarded-User, for example"
            raise refused(header, subject="header", code="WRONG_FORM", rule=rule, fix=fix)
        self._header = header
        self._networks = _networks(proxies)
        self._role = None if role is None else Role(role)
        self._roles = {name: Role(each) for name, each in (roles or {}).items()}

    def __call__(self, request: Request) -> User | None:
        """Return the user whom the proxy names."""
        if request.client is None or not is_within(request.client.host, self._networks):
            return None
        names = request.headers.getlist(self._header)
        if len(names) != 1 or not (name := names[0].strip()):
            return None
        role = self._roles.get(name, self._role)
        return None if role is None else User(name, role)


class Loopback:
    """No authentication, for a server that listens on this machine only. Every local user may do everything.

    A request from another machine is rejected, and so is one that a proxy forwarded. Its Host header must be a name of this machine. So a
    web page cannot reach the dashboard by a DNS name that points to this machine.
    """

    def __init__(self, *, name: str = "local") -> None:
        self._user = User(name, Role.ADMIN)

    def __call__(self, request: Request) -> User | None:
        """Return the local user."""
        if request.client is None or not is_loopback(request.client.host):
            return None
        if any(name in request.headers for name in _FORWARDED):
            return None
        return self._user if is_loopback(host_of(request)) else None


def host_of(request: HTTPConnection) -> str:
    """Return the host name of the request's Host header, without its port."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address is this machine itself."""
    if host in ("localhost", "localhost."):
        return True
    address = read_address(host)
    return address is not None and address.is_loopback


async def authenticated(authentication: Authentication, request: Request) -> User:
    """Return the user of a request. Raises RequestRefused if there is none."""
    found: Any = authentication(request)
    user = await found if inspect.isawaitable(found) else found
    if isinstance(user, User):
        return user
    if isinstance(authentication, Loopback):
        raise RequestRefused(
            403,
            "NOT_LOCAL",
            "The dashboard has no authentication, so it answers only requests from this machine.",
            fix="open it as http://localhost, or start it with authentication.",
        )
    challenge = getattr(authentication, "challenge", None)
    raise RequestRefused(
        403 if challenge is None else 401,
        "NOT_AUTHENTICATED",
        "The dashboard does not know who you are.",
        fix="log in where your organisation logs in." if challenge is None else "log in.",
        headers={} if challenge is None else {"www-authenticate": challenge},
    )


def require(user: User, role: Role, *, changes: bool, read_only: bool) -> None:
    """Raise RequestRefused unless the user may do what needs this role. `changes`: it changes something, which a read-only dashboard refuses.

    This is the only place that decides about rights. Pages and actions, HTML and JSON pass through it.
    """
    if changes and read_only:
        raise RequestRefused(
            403,
            "READ_ONLY",
            "This dashboard is read-only.",
            fix="use the command line, or another dashboard.",
        )
    if not user.role.includes(role):
        raise RequestRefused(
            403,
            "ROLE_TOO_LOW",
            f"This needs the role {role}, and {user.name} has the role {user.role}.",
            fix="ask an administrator of the dashboard.",
        )


def _networks(proxies: Iterable[str]) -> tuple[IPv4Network | IPv6Network, ...]:
    found: list[IPv4Network | IPv6Network] = []
    for each in proxies:
        try:
            found.append(ip_network(each, strict=False))
        except ValueError:
            rule, fix = "must be an IP address or network", "write 10.0.0.7 or 10.0.0.0/8"
            raise refused(each, subject="proxies", code="WRONG_FORM", rule=rule, fix=fix) from None
    if not found:
        rule, fix = "must name the proxies whose header is trusted", "pass proxies=['10.0.0.7']"
        raise refused([], subject="proxies", code="MISSING", rule=rule, fix=fix)
    return tuple(found)


_SHORTEST_PASSWORD: Final = 8
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}")
"""The name of a header, as HTTP defines it."""
_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
