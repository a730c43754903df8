"""Check a database URL and the name of a schema as a user gave them; nothing is opened."""

from __future__ import annotations

import re
from typing import Final, Literal, TypeAlias, cast, get_args

import psycopg
from psycopg import conninfo

from everbeat.domain.settings import refused, shown
from everbeat.errors import WrongDatabaseURL, nearest, redact_url

SCHEMA_SUBJECT: Final = "App.schema"
Pooler: TypeAlias = Literal["session", "transaction"]

_POOLER_IN_URL: Final = re.compile(r"(?P<before>[?&])pooler=(?P<value>[^&]*)(?P<after>&|$)")
_POOLER_IN_CONNINFO: Final = re.compile(r"(?P<before>^|\s)pooler\s*=\s*(?P<value>\S*)(?P<after>\s|$)")


def require_schema_name(schema: object) -> None:
    """Raises ConfigurationError for what cannot be the name of the schema."""
    if (
        not isinstance(schema, str)
        or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$]{0,62}", schema)
        or schema.lower().startswith("pg_")
    ):
        raise refused(
            schema,
            subject=SCHEMA_SUBJECT,
            code="WRONG_NAME",
            rule="a schema name is a letter or underscore, then up to 62 letters, digits or underscores, and does not begin with pg_",
            fix="choose a plain name such as 'everbeat'",
        )


def read_url(url: object) -> tuple[str, Pooler | None]:
    """The URL as libpq takes it, empty where it says nothing; and the pooler that it names. Raises WrongDatabaseURL."""
    if not isinstance(url, str):
        raise WrongDatabaseURL(
            f"The database URL {shown(url)} is of type {type(url).__name__}; a URL is a text.",
            fix="give one like 'postgresql://user@host:5432/database', or 'embedded'.",
        )
    if not url.strip():
        raise WrongDatabaseURL(
            f"The database URL {url!r} is empty.",
            fix="give one like 'postgresql://user@host:5432/database', or 'embedded'.",
        )
    if nearest(url.partition(":")[0], ["embedded"]) is not None:
        raise WrongDatabaseURL(
            f"The database URL {url!r} is not known.", fix="write 'embedded' or 'embedded:FOLDER'."
        )
    url, pooler = _without_pooler(url)
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme and scheme not in ("postgresql", "postgres"):
        raise WrongDatabaseURL(
            f"The database URL {redact_url(url)!r} begins with {scheme!r}; everbeat speaks to PostgreSQL only.",
            fix="begin it with 'postgresql://'"
            + (" (without a driver's name)." if scheme.startswith("postgres") else "."),
        )
    try:
        given = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError as problem:
        raise WrongDatabaseURL(
            f"The database URL {redact_url(url)!r} cannot be read: {str(problem).strip()}.",
            fix="write it as 'postgresql://user:password@host:5432/database'; special characters in a password are percent-encoded.",
        ) from None
    for port in str(given.get("port") or "").split(","):
        if port and not (port.isdecimal() and 1 <= int(port) <= 65_535):
            raise WrongDatabaseURL(
                f"The database URL {redact_url(url)!r} names the port {port!r}; a port is a number from 1 to 65535.",
                fix="write it as 'postgresql://user:password@host:5432/database'.",
            )
    return url if given else "", pooler


def with_pooler(url: str, pooler: Pooler) -> str:
    """The URL as `read_url` takes it."""
    if "://" not in url:
        return f"{url} pooler={pooler}"
    return f"{url}{'&' if '?' in url else '?'}pooler={pooler}"


def _without_pooler(url: str) -> tuple[str, Pooler | None]:
    pattern = _POOLER_IN_URL if "://" in url else _POOLER_IN_CONNINFO
    found = pattern.search(url)
    if found is None:
        return url, None
    value = found["value"]
    if value not in get_args(Pooler):
        raise WrongDatabaseURL(
            f"The database URL {redact_url(url)!r} names a pooler that everbeat does not know.",
            fix="write pooler=session or pooler=transaction, or leave it out: then any pooler is taken for one of transactions.",
        )
    rest = url[: found.start()] + (found["before"] if found["after"] else "") + url[found.end() :]
    return rest, cast(Pooler, value)
