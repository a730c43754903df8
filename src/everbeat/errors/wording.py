"""What messages need: the nearest right name, a short list, a database URL without its passwords."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` was most likely meant to be, or None when nothing is close."""
    by_lowered = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), by_lowered, n=1, cutoff=0.6)
    return by_lowered[matches[0]] if matches else None


def some(names: Sequence[str], *, limit: int = 10) -> str:
    """The first names of a list, and how many more there are."""
    if not names:
        return "none"
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


_SECRET_SETTING = re.compile(
    r"((?:password|sslpassword|oauth_client_secret)\s*=\s*)('(?:\\.|[^'\\])*'?|(?:\\.|[^\s&\\])+)",
    re.IGNORECASE | re.DOTALL,
)
_QUERY = re.compile(r"\?(?=\w+=)")


def redact_url(url: str) -> str:
    """The database URL or conninfo with every password as `***`; hides too much rather than too little."""
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme.isalnum():
        return _SECRET_SETTING.sub(r"\1***", url)
    head, *query = _QUERY.split(rest, maxsplit=1)
    userinfo, at, address = head.rpartition(
        "@"
    )  # the last one: an unescaped password may itself hold @, / or ?
    if not at and ":" in head and any("@" in part for part in query):
        return f"{scheme}://***"
    user, colon, _ = userinfo.partition(":")
    shown = f"{scheme}://{user}{colon and ':***'}{at}{address}"
    return "?".join([shown, *(_SECRET_SETTING.sub(r"\1***", part) for part in query)])
