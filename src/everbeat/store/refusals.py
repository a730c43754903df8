"""Interpret database errors: whether to repeat the statement, what the cause is, and how a user can fix it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection

from everbeat.errors import DatabaseError

_CONNECTION: Final = re.compile(r"connection to server ")
_REFUSED_LOGIN: Final = re.compile(
    r"authentication failed|no password supplied|is not permitted to log in|(?:role|database) \".*\" does not exist"
    r"|no pg_hba\.conf entry|pg_hba\.conf rejects|no such (?:user|database)"
)

# The same statement can be sent again after these errors. The server was lost, was shut down, or ran out of connections, disk space or
# memory. Or the statement failed with a serialization failure, a deadlock, or a lock, statement or transaction timeout. A server that
# accepts no writes (25006) also counts as an outage: for example a managed server with a full disk, or a former primary.
_REPEATABLE: Final = re.compile(r"08...|57P0[1-5]|57014|53...|58...|40001|40P01|55P03|25006|25P0[234]")

# Two sessions can compete for a position that only one live row can have: the head of a serial line or a retried task's key. The statement
# checks for a rival first, so the loser sees the winner when it repeats the statement.
_RACED: Final = frozenset({"tasks_serial_held", "tasks_key", "unique_keys_pkey", "workflows_key"})


def is_refused_hint(problem: BaseException) -> bool:
    """Return whether a commit was refused because PostgreSQL's notification queue is full, not because of the data.

    Exceeded limits on data have the same SQLSTATE. The name of the server's source file distinguishes the two cases in every language.
    """
    cause = problem.__cause__ if isinstance(problem, DatabaseError) else problem
    return (
        isinstance(cause, psycopg.Error) and cause.sqlstate == "54000" and cause.diag.source_file == "async.c"
    )


def is_refused_data(problem: BaseException) -> bool:
    """Return whether a statement was refused because of its data. The same data would be refused again, but other data might be accepted."""
    if is_refused_hint(problem):
        return False
    match problem:
        case psycopg.DataError() | UnicodeError():
            return True
        case DatabaseError(__cause__=psycopg.Error(sqlstate=str(state))):
            return state.startswith(
                ("22", "54", "XX")
            )  # data exception, limit exceeded, internal (out of address space)
        case _:
            return False


def is_refused_value(problem: BaseException) -> bool:
    """Return whether the data itself was refused. An internal error of the server does not count, because it may be temporary."""
    cause = problem.__cause__ if isinstance(problem, DatabaseError) else None
    return is_refused_data(problem) and not str(getattr(cause, "sqlstate", None) or "").startswith("XX")


def is_refused_row(problem: BaseException) -> bool:
    """Return whether the server refused the statement because of its rows, regardless of the error code.

    A refusal by the operator's own trigger or constraint counts. An outage or a missing privilege does not.
    """
    is_of_the_server = isinstance(problem.__cause__, psycopg.Error)
    return is_refused_data(problem) or (type(problem) is DatabaseError and is_of_the_server)


def may_be_gone(problem: psycopg.Error) -> bool:
    """Return whether the error suggests that the schema is gone: a table, or the schema of a function, does not exist."""
    return problem.sqlstate in ("3F000", "42P01")


def is_repeatable(problem: psycopg.Error) -> bool:
    """Return whether the same statement can be sent again, because the connection was lost or the server had a temporary problem."""
    if problem.sqlstate is None:
        return isinstance(problem, psycopg.OperationalError | psycopg.InterfaceError)
    return (
        _REPEATABLE.fullmatch(problem.sqlstate) is not None
        or problem.diag.constraint_name in _RACED
        or is_refused_hint(problem)
    )


def is_refused_login(problem: BaseException) -> bool:
    """Return whether every server that was reached rejected the user, the password or the database.

    libpq gives such an error no SQLSTATE, so only messages in English are recognized.
    """
    reached = _CONNECTION.split(str(problem))[1:]
    return bool(reached) and all(_REFUSED_LOGIN.search(each) for each in reached)


def is_timeout(problem: BaseException) -> bool:
    """Return whether the server cancelled a statement because it took too long."""
    return isinstance(problem, DatabaseError) and isinstance(problem.__cause__, psycopg.errors.QueryCanceled)


def is_alive(problem: BaseException) -> bool:
    """Return whether the connection is still usable after this error.

    It is still usable after a refused statement, unless the server accepts no writes (25006).
    """
    return (
        isinstance(problem, psycopg.Error)
        and problem.sqlstate is not None
        and not problem.sqlstate.startswith(("08", "57P", "25006", "25P03", "25P04"))
    )


def is_outage(problem: BaseException) -> bool:
    """Return whether no server that accepts writes could be reached, or the server lacked resources.

    Any other error proves that such a server is reachable.
    """
    if not isinstance(problem, psycopg.Error):
        return True
    return is_repeatable(problem) and (not is_alive(problem) or str(problem.sqlstate).startswith("53"))


GENERAL: Final = "check the URL, and make sure that the server is running and accepts this user and password."
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
    (r"server is in hot standby mode", "promote a host, or add the primary to the URL; none of its hosts is a primary."),
    (r"could not translate host name", "correct the host in the URL, or the name service of this machine."),
)  # fmt: skip
_DENIED: Final = re.compile(r"permission denied for (?P<kind>\w+)")
_RIGHTS: Final = {
    "schema": "usage on schema",
    "sequence": "usage on all sequences in schema",
    "function": "execute on all functions in schema",
}


def remedy_of_connection(said: str) -> str:
    """Return the fix for a database that cannot be reached.

    If the hosts refuse the connection for different reasons, the fix is for the first known reason.
    """
    return next((fix for pattern, fix in _OF_CONNECTIONS if re.search(pattern, said)), GENERAL)


def remedy_of_right(said: str, *, schema: str) -> str:
    """Return the fix for a role that lacks a privilege."""
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
    """Return the reason why the connection's server refuses writes, as the server last reported it, and the fix."""
    status = None if connection is None or connection.closed else connection.info.parameter_status
    if status is not None and status("in_hot_standby") == "on":
        return "is a standby", f"{_PRIMARY}."
    if status is not None and status("default_transaction_read_only") == "on":
        return "is read-only, because default_transaction_read_only is on", f"{_SETTING}."
    return "is a standby or read-only", _READ_ONLY


def quoted(name: str) -> str:
    """Return a schema's name quoted for SQL. Quoting preserves upper case and allows keywords."""
    return f'"{name}"'


RowT = TypeVar("RowT")
WrittenT = TypeVar("WrittenT")


async def divided(
    batch: Sequence[RowT],
    write: Callable[[Sequence[RowT]], Awaitable[list[WrittenT]]],
    refused: Callable[[RowT, Exception], Awaitable[list[WrittenT]]],
    *,
    is_refused: Callable[[BaseException], bool] = is_refused_data,
) -> list[WrittenT]:
    """Write a batch. If it is refused, divide it until each refused row is alone, and pass that row to `refused`.

    Return the results of all calls of `write` and `refused`. `is_refused` decides which errors are about the rows. Any other error is
    raised.
    """
    try:
        return await write(batch)
    except Exception as problem:
        if not is_refused(problem):
            raise
        if len(batch) == 1:
            return await refused(batch[0], problem)
    middle = len(batch) // 2
    first = await divided(batch[:middle], write, refused, is_refused=is_refused)
    return first + await divided(batch[middle:], write, refused, is_refused=is_refused)
