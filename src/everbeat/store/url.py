"""Validate a user's database URL and schema name, and show URLs without their secrets. No connection is opened."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Final, Literal, TypeAlias, cast, get_args

import psycopg
from psycopg import conninfo

from everbeat.domain.settings.settings import refused
from everbeat.errors import WrongDatabaseURL
from everbeat.errors.wording import nearest

SCHEMA_SUBJECT: Final = "App.schema"
Pooler: TypeAlias = Literal["session", "transaction"]

_FORM: Final = "write it as 'postgresql://user:password@host:5432/database'"
_ENCODED: Final = (
    f"{_FORM}; in a password, write @ as %40, / as %2F, ? as %3F, : as %3A, % as %25 and a space as %20."
)
_SCHEMA: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TAKEN: Final = ("public", "information_schema")
_SCHEME: Final = re.compile(r"\s*(?P<name>[^\s:/@=]*)://")
_POSTGRESQL: Final = re.compile(r"postgres(ql)?(\+[a-z0-9_]+)?")
_OTHERS: Final = (
    "mysql",
    "mariadb",
    "sqlite",
    "mssql",
    "oracle",
    "mongodb",
    "redis",
    "nats",
    "amqp",
    "http",
    "https",
    "jdbc",
)
_ALMOST: Final = 0.75
"""An unknown option is shown in an error only if its similarity to a known option is at least this high."""
_WORD: Final = re.compile(r"[A-Za-z_-]{1,20}")
_PARAMETER: Final = re.compile(r"\?\w+=")
_UNKNOWN_OPTION: Final = re.compile(r'invalid (?:connection option|URI query parameter:?) "(.*)"', re.DOTALL)
_POOLER_IN_URL: Final = re.compile(r"(?P<before>[?&])pooler=(?P<value>[^&]*)(?P<after>&|$)")
_POOLER_IN_CONNINFO: Final = re.compile(r"(?P<before>^|\s)pooler\s*=\s*(?P<value>\S*)(?P<after>\s|$)")

_SECRETS: Final = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
_PLAIN: Final = {
    "user": re.compile(r"[\w.+-]+(@[\w.-]+)?"),
    "host": re.compile(r"[A-Za-z0-9_.:%-]*|[/@][^,@]*"),
    "hostaddr": re.compile(r"[0-9A-Fa-f.:]*"),
    "port": re.compile(r"\d{0,5}"),
    "dbname": re.compile(r"[\w.$ +-]+"),
}
_SHORTEST_SECRET: Final = 3


def require_schema_name(schema: object) -> None:
    """Raise ConfigurationError if the value is not a valid schema name."""
    if isinstance(schema, str) and _SCHEMA.fullmatch(schema):
        if schema.lower() not in _TAKEN and not schema.lower().startswith("pg_"):
            return
        rule = "everbeat needs its own schema; public, information_schema and names that begin with pg_ are PostgreSQL's"
    else:
        rule = "a schema name is a letter or underscore, then up to 62 letters, digits or underscores"
    raise refused(
        schema,
        subject=SCHEMA_SUBJECT,
        code="WRONG_NAME",
        rule=rule,
        fix="choose a plain name such as 'everbeat'",
    )


def read_url(given: object) -> tuple[str, Pooler | None]:
    """Return the URL for libpq (empty if it sets nothing), and the pooler that it names, if any.

    Raises WrongDatabaseURL if the URL is invalid. Errors never show a part of the URL that could not be parsed, because that part may
    belong to a password.
    """
    if not isinstance(given, str):
        raise WrongDatabaseURL(
            f"The database URL is of type {type(given).__name__}; a URL is a text.",
            fix=f"{_FORM}, or 'embedded'.",
        )
    text = given.strip()
    if not text:
        raise WrongDatabaseURL("The database URL is empty.", fix=f"{_FORM}, or 'embedded'.")
    if nearest(text.partition(":")[0], ["embedded"]) is not None:
        raise WrongDatabaseURL(
            "The database URL is almost 'embedded', but not quite.",
            fix="write 'embedded' or 'embedded:FOLDER'.",
        )
    url, pooler = _without_pooler(_with_plain_scheme(text))
    _require_one_reading(url)
    try:
        read = conninfo.conninfo_to_dict(url)
    except psycopg.Error as problem:
        raise _unreadable(str(problem)) from None
    ports = str(read.get("port") or "").split(",")
    for number, port in enumerate(ports, 1):
        if not _is_port(port):
            of_host = f" for host {number} of {len(ports)}" if len(ports) > 1 else ""
            raise WrongDatabaseURL(
                f"The database URL names a port that is not a number from 1 to 65535{of_host}.", fix=_ENCODED
            )
    return url if read else "", pooler


def shown_url(url: str) -> str:
    """Return the URL without its secrets. It contains the hosts, the user and the database as libpq reads them."""
    try:
        read = conninfo.conninfo_to_dict(_without_pooler(url)[0])
    except (psycopg.Error, WrongDatabaseURL):
        return "***"
    found = {key: _shown_list(key, str(read[key])) for key in _PLAIN if read.get(key)}
    hosts = found.get("host") or found.get("hostaddr") or ""
    ports = found.get("port", "")
    user = f"{found['user']}@" if "user" in found else ""
    database = found.get("dbname", "")
    if hosts.startswith(("/", "@")):
        port = f"&port={ports}" if ports else ""
        return f"postgresql://{user}/{database}?host={hosts}{port}"
    return f"postgresql://{user}{_places(hosts.split(','), ports.split(','))}/{database}"


def without_secrets(text: str, url: str) -> str:
    """Return a message of the server or libpq without the URL's secrets and without possible pieces of these secrets."""
    try:
        read = conninfo.conninfo_to_dict(url)
    except psycopg.Error:
        return "***"
    hidden = {str(read[key]) for key in _SECRETS if read.get(key)}
    for key in _PLAIN:
        parts = _parts(key, str(read.get(key) or ""))
        if not _is_plain(key, parts):
            hidden |= {*parts}
    for secret in sorted(hidden, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def _with_plain_scheme(text: str) -> str:
    """Return the URL with a scheme that libpq knows and without SQLAlchemy's driver name.

    Raises WrongDatabaseURL if the scheme is not one of PostgreSQL's.
    """
    found = _SCHEME.match(text)
    if found is None:
        return text
    name = found["name"].lower()
    if _POSTGRESQL.fullmatch(name):
        return f"postgresql://{text[found.end() :]}"
    said = (
        f"begins with '{name}://'" if name.partition("+")[0] in _OTHERS else "begins with an unknown scheme"
    )
    raise WrongDatabaseURL(
        f"The database URL {said}; everbeat supports only PostgreSQL.", fix="begin it with 'postgresql://'."
    )


def _require_one_reading(url: str) -> None:
    """Raise WrongDatabaseURL if an unescaped special character splits the password. libpq would read the rest as a host or database."""
    if not url.startswith("postgresql://"):
        return
    rest = url.removeprefix("postgresql://")
    place = rest.partition("?")[0]
    user_info, at, after = rest.partition("@")
    if at and "/" not in user_info:
        # libpq reads everything before the @ as user and password, even if it looks like parameters.
        place = "@" if _PARAMETER.search(user_info) else after.partition("?")[0]
    if "@" in place:
        raise WrongDatabaseURL(
            "The database URL contains an extra '@' or '/', perhaps in its password.", fix=_ENCODED
        )


def _unreadable(said: str) -> WrongDatabaseURL:
    unknown = _UNKNOWN_OPTION.search(said)
    if unknown is None:
        return WrongDatabaseURL("The database URL cannot be read.", fix=_ENCODED)
    known = [each.keyword.decode() for each in psycopg.pq.Conninfo.get_defaults()]
    guess = nearest(unknown[1], known)
    if guess is None or SequenceMatcher(None, unknown[1], guess).ratio() < _ALMOST:
        return WrongDatabaseURL(
            "The database URL cannot be read: it has an option that libpq does not know. It is not shown, because it may belong to a"
            " password.",
            fix=_ENCODED if guess is None else f"did you mean {guess!r}?",
        )
    return WrongDatabaseURL(
        f"The database URL cannot be read: libpq does not know its option {unknown[1]!r}.",
        fix=f"did you mean {guess!r}?",
    )


def _is_port(text: str) -> bool:
    return not text or (text.isdecimal() and 1 <= int(text) <= 65_535)


def _shown_list(key: str, value: str) -> str:
    parts = _parts(key, value)
    return ",".join(parts) if _is_plain(key, parts) else "***"


def _parts(key: str, value: str) -> list[str]:
    return [value] if key in ("user", "dbname") else value.split(",")


def _is_plain(key: str, parts: list[str]) -> bool:
    """Return whether the parts have the usual form of this setting. If not, any of them might be a piece of a password."""
    return all(_PLAIN[key].fullmatch(part) for part in parts)


def _places(hosts: list[str], ports: list[str]) -> str:
    if len(ports) == 1:
        ports = ports * len(hosts)
    named = [f"[{host}]" if ":" in host else host for host in hosts]
    return ",".join(f"{host}:{port}" if port else host for host, port in zip(named, ports, strict=False))


def with_pooler(url: str, pooler: Pooler) -> str:
    """Return the URL with the pooler added, in the form that `read_url` reads."""
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
        named = f"pooler={value}" if _WORD.fullmatch(value) else "a pooler"
        raise WrongDatabaseURL(
            f"The database URL names {named}, which everbeat does not know."
            if value
            else "The database URL has an empty option 'pooler='.",
            fix="write pooler=session or pooler=transaction, or omit it; everbeat then assumes that a pooler is a transaction pooler.",
        )
    rest = url[: found.start()] + (found["before"] if found["after"] else "") + url[found.end() :]
    return rest, cast(Pooler, value)
