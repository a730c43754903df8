"""Checks of a request before its action runs: where it comes from, and how large its form is. Keeps no state."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import msgspec
from starlette.requests import ClientDisconnect, Request

from everbeat.errors.wording import amount
from everbeat.web.refusals import RequestRefused

MOST_BYTES: Final = 64 * 1024
"""The maximum size of a form or JSON body."""
MOST_FIELDS: Final = 1_000
BODY_WITHIN_S: Final = 10.0
"""How long a client may take to send a form or a JSON body."""
LONGEST_QUERY: Final = 8 * 1024
_PORTS: Final = {"http": 80, "https": 443}


def wants_json(request: Request) -> bool:
    """Return whether the client prefers JSON to HTML."""
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted


def require_same_origin(request: Request) -> None:
    """Raise RequestRefused if another site's page could have caused this request, or if it has no sign of where it comes from.

    A browser sends Sec-Fetch-Site or Origin with every form. A program sends JSON with an Authorization header instead, which no form can.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    if site is not None:
        is_own = site == "same-origin"
    elif origin is not None:
        is_own = _is_same_host(origin, request)
    else:
        is_own = "authorization" in request.headers and is_json(request)
    if not is_own:
        raise RequestRefused(
            403,
            "CROSS_SITE",
            "This request does not come from a page of the dashboard, so nothing was changed.",
            fix="use the dashboard's own form; a program sends JSON with an Authorization header.",
        )


def _is_same_host(origin: str, request: Request) -> bool:
    try:
        sent, host = urlsplit(origin), urlsplit(f"//{request.headers.get('host', '')}")
        default = _PORTS.get(sent.scheme)
        return bool(sent.hostname) and (sent.hostname, sent.port or default) == (
            host.hostname,
            host.port or default,
        )
    except ValueError:
        return False


def is_json(request: Request) -> bool:
    """Return whether the body of a request is JSON, as programs send it."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


class FormFields:
    """The fields of a form, or of a JSON object. A field can have several values."""

    def __init__(self, fields: Mapping[str, list[str]]) -> None:
        self._fields = fields

    def get(self, name: str) -> str | None:
        """Return the last value of a field without white space around it, or None if it is missing or empty."""
        values = self._fields.get(name)
        return (values[-1].strip() or None) if values else None

    def all(self, name: str) -> list[str]:
        """Return all values of a field that are not empty."""
        return [value for value in self._fields.get(name, []) if value]

    def require(self, name: str) -> str:
        """Return the value of a field. Raises RequestRefused if it is missing."""
        if (value := self.get(name)) is None:
            raise RequestRefused(400, "MISSING", f"The field {name!r} is missing.", fix="fill it in.")
        return value

    def parameter(self, name: str, *, example: str) -> str:
        """Return the value of a parameter without which an address means nothing. Raises RequestRefused if it is missing or repeated."""
        values = [value for value in self.all(name) if value.strip()]
        if not values:
            raise RequestRefused(
                400, "MISSING", f"The parameter {name!r} is missing.", fix=f"write {example}."
            )
        if len(values) > 1:
            said = f"The parameter {name!r} is given {amount(len(values), 'time')}."
            raise RequestRefused(400, "REPEATED", said, fix=f"give it once: {example}.")
        return values[0].strip()

    def key(self) -> Hashable:
        """Return a value that is the same for forms with the same fields."""
        return tuple(sorted((name, tuple(values)) for name, values in self._fields.items()))

    def names(self) -> list[str]:
        """Return the names of the fields."""
        return list(self._fields)


async def read_form(request: Request) -> FormFields:
    """Return the form of a request. Raises RequestRefused if it is too large or not a form."""
    body = await _body(request)
    if is_json(request):
        return FormFields(_json_fields(body))
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise RequestRefused(
            400, "WRONG_FORM", "The form cannot be read.", fix=f"send at most {MOST_FIELDS:,} fields."
        ) from None
    return FormFields(_gathered(pairs))


def read_query(request: Request) -> FormFields:
    """Return the parameters of the address. Raises RequestRefused if they are too long."""
    text = request.scope.get("query_string", b"").decode("latin-1")
    try:
        if len(text) > LONGEST_QUERY:
            raise ValueError
        return FormFields(_gathered(parse_qsl(text, max_num_fields=MOST_FIELDS)))
    except ValueError:
        fix = f"use at most {LONGEST_QUERY:,} characters."
        raise RequestRefused(
            414, "QUERY_TOO_LONG", "The parameters of this address are too long.", fix=fix
        ) from None


def _gathered(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return fields


async def _body(request: Request) -> bytes:
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for part in request.stream():
                found += part
                if len(found) > MOST_BYTES:
                    fix = f"send at most {MOST_BYTES // 1024} kB."
                    raise RequestRefused(413, "FORM_TOO_LARGE", "The form is too large.", fix=fix)
    except TimeoutError:
        fix = f"send it within {BODY_WITHIN_S:.0f} s."
        raise RequestRefused(408, "TOO_SLOW", "The form did not arrive in time.", fix=fix) from None
    except ClientDisconnect:
        raise RequestRefused(400, "DISCONNECTED", "The client closed the connection.") from None
    return bytes(found)


def _json_fields(body: bytes) -> dict[str, list[str]]:
    try:
        decoded: Any = msgspec.json.decode(body or b"{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        raise RequestRefused(
            400, "WRONG_FORM", "The body is not a JSON object.", fix="send the fields as an object."
        )
    fields: dict[str, list[str]] = {}
    for name, value in decoded.items():
        values = value if isinstance(value, list) else [value]
        fields[name] = [_as_field(each) for each in values if each is not None]
    return fields


def _as_field(value: object) -> str:
    match value:
        case str():
            return value
        case _:
            return msgspec.json.encode(value).decode()
