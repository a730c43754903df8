"""What an error of a statement says: about its data, its time and its connection."""

from __future__ import annotations

import re
from typing import Final

import psycopg

from everbeat.errors import DatabaseError

_CONNECTION: Final = re.compile(r"connection to server ")
_REFUSED_LOGIN: Final = re.compile(
    r"authentication failed|no password supplied|is not permitted to log in|(?:role|database) \".*\" does not exist"
    r"|no pg_hba\.conf entry|pg_hba\.conf rejects|no such (?:user|database)"
)

# The server's states in which the same statement may be sent again: lost connections, shutdown, too many connections, no
# resources (a full disk, memory), serialisation, deadlock, lock, statement and transaction timeouts. A server that accepts no
# write (25006) is an outage too: a managed server with a full disk, or a former primary.
_REPEATABLE: Final = re.compile(r"08...|57P0[1-5]|57014|53...|58...|40001|40P01|55P03|25006|25P0[234]")

# Two sessions can race for a slot that at most one live row has: the head of a serial line, or a key that an operator's retry brings
# back. The statement looks for a rival first, so the loser's repetition sees the winner.
_RACED: Final = frozenset({"tasks_serial_held", "tasks_key", "workflows_key"})


def is_refused_hint(problem: BaseException) -> bool:
    """Whether the commit was refused because PostgreSQL's queue of notifications is full, and not for what it carried.

    Limits of the data have the same SQLSTATE. The name of the server's source file tells them apart in every language.
    """
    cause = problem.__cause__ if isinstance(problem, DatabaseError) else problem
    return (
        isinstance(cause, psycopg.Error) and cause.sqlstate == "54000" and cause.diag.source_file == "async.c"
    )


def is_refused_data(problem: BaseException) -> bool:
    """Whether the statement was refused for what it carried: the same data will be refused again, other data will not."""
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
    """Whether the data itself was refused, and not by an internal error of the server, which may pass."""
    cause = problem.__cause__ if isinstance(problem, DatabaseError) else None
    return is_refused_data(problem) and not str(getattr(cause, "sqlstate", None) or "").startswith("XX")


def is_refused_row(problem: BaseException) -> bool:
    """Whether the server refused this statement for its rows, with any error code: not for an outage or a missing right.

    A trigger or a constraint of the operator counts, too.
    """
    is_of_the_server = isinstance(problem.__cause__, psycopg.Error)
    return is_refused_data(problem) or (type(problem) is DatabaseError and is_of_the_server)


def may_be_gone(problem: psycopg.Error) -> bool:
    """Whether the schema may be gone: a table, or the schema of a function, does not exist."""
    return problem.sqlstate in ("3F000", "42P01")


def is_repeatable(problem: psycopg.Error) -> bool:
    """Whether the same statement may be sent again: the connection was lost, or the server could not just now."""
    if problem.sqlstate is None:
        return isinstance(problem, psycopg.OperationalError | psycopg.InterfaceError)
    return (
        _REPEATABLE.fullmatch(problem.sqlstate) is not None
        or problem.diag.constraint_name in _RACED
        or is_refused_hint(problem)
    )


def is_refused_login(problem: BaseException) -> bool:
    """Whether each server that was reached refuses the user, the password or the database.

    libpq gives such an error no SQLSTATE. A server that speaks another language than English is not understood.
    """
    reached = _CONNECTION.split(str(problem))[1:]
    return bool(reached) and all(_REFUSED_LOGIN.search(each) for each in reached)


def is_timeout(problem: BaseException) -> bool:
    """Whether the server ended a statement because it took too long."""
    return isinstance(problem, DatabaseError) and isinstance(problem.__cause__, psycopg.errors.QueryCanceled)


def is_alive(problem: BaseException) -> bool:
    """Whether the connection is usable after this error: a refused statement leaves it usable, a server without writes (25006) does not."""
    return (
        isinstance(problem, psycopg.Error)
        and problem.sqlstate is not None
        and not problem.sqlstate.startswith(("08", "57P", "25006", "25P03", "25P04"))
    )


def is_outage(problem: BaseException) -> bool:
    """Whether a server that writes could not be reached, or has no resources. Another error is its answer, so it is reachable."""
    if not isinstance(problem, psycopg.Error):
        return True
    return is_repeatable(problem) and (not is_alive(problem) or str(problem.sqlstate).startswith("53"))
