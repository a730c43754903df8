"""What a user can do about a refusal of the server or of libpq: the fix that an error names.

A failed connection has no SQLSTATE, so its English text decides. For a text that is not known the fix is general.
"""

from __future__ import annotations

import re
from typing import Any, Final

from psycopg import AsyncConnection, Connection

GENERAL: Final = "check the URL and that the server runs and accepts this user and password."
_PRIMARY: Final = (
    "point the URL to the primary, or list all hosts: 'postgresql://a,b/database' finds the one that writes"
)
_SETTING: Final = "set default_transaction_read_only to off again where it was set: for the server, the database or the role"
_READ_ONLY: Final = f"if the server is a standby, {_PRIMARY}. If not, {_SETTING}."
_OF_CONNECTIONS: Final = (
    (
        r"too many clients already|remaining connection slots|too many connections|no more connections allowed",
        "end idle clients, run fewer worker processes (3 connections each), or raise max_connections or the connection limit of the role"
        " or database.",
    ),
    (
        r"password authentication failed|no password supplied",
        "correct the password: in the URL, PGPASSWORD or the password file.",
    ),
    (r'database ".*" does not exist|no such database', "create this database, or correct its name in the URL."),
    (r'role ".*" does not exist|no such user', "create this role, or correct the user in the URL."),
    (r"is not permitted to log in", "allow it: 'alter role <role> login', or correct the user in the URL."),
    (r"pg_hba\.conf", "allow this user, database and host in pg_hba.conf of the server, or correct the URL."),
    (r"authentication failed", "check the user of the URL and how pg_hba.conf lets it log in."),
    (
        r"session is read-only",
        f"{_SETTING}; no host of the URL accepts writes.",
    ),
    (r"server is in hot standby mode", "promote a host, or add the primary to the URL; no host of it is one."),
    (r"could not translate host name", "correct the host in the URL, or the name service of this machine."),
)  # fmt: skip
_DENIED: Final = re.compile(r"permission denied for (?P<kind>\w+)")
_RIGHTS: Final = {
    "schema": "usage on schema",
    "sequence": "usage on all sequences in schema",
    "function": "execute on all functions in schema",
}


def remedy_of_connection(said: str) -> str:
    """The fix for a database that cannot be reached. Where hosts refuse for different reasons, it is that of the first known one."""
    return next((fix for pattern, fix in _OF_CONNECTIONS if re.search(pattern, said)), GENERAL)


def remedy_of_right(said: str, *, schema: str) -> str:
    """The fix for a role that lacks a right."""
    found = _DENIED.search(said)
    kind = None if found is None else found["kind"]
    if kind == "database":
        return f"let it own its schema: 'create schema {quoted(schema)} authorization <role>'."
    if kind in _RIGHTS:
        return f"use the role that owns the schema, or have it run 'grant {_RIGHTS[kind]} {quoted(schema)} to <role>'."
    if kind in ("table", "view"):
        return (
            "use the role that owns the schema, or have it run 'grant select, insert, update, delete on all tables in schema"
            f" {quoted(schema)} to <role>'; with select alone a role can only read."
        )
    return "use the role that owns the schema."


def read_only(connection: Connection[Any] | AsyncConnection[Any] | None) -> tuple[str, str]:
    """What refuses writes, as the server of the connection said last, and the fix."""
    status = None if connection is None or connection.closed else connection.info.parameter_status
    if status is not None and status("in_hot_standby") == "on":
        return "is a standby", f"{_PRIMARY}."
    if status is not None and status("default_transaction_read_only") == "on":
        return "is read-only, because default_transaction_read_only is on", f"{_SETTING}."
    return "is a standby or read-only", _READ_ONLY


def quoted(name: str) -> str:
    """The name of a schema as SQL takes it: quoted, so that its case is kept and a word of SQL is allowed."""
    return f'"{name}"'
