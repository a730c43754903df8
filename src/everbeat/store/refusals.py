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


def is_refused_data(problem: BaseException) -> bool:
    """Whether the statement was refused for what it carried: the same data will be refused again, other data will not."""
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
    """Whether the server refused this statement for its rows, whatever it says of them: no outage and no missing right.

    A trigger or a constraint of the operator counts, too.
    """
    is_of_the_server = isinstance(problem.__cause__, psycopg.Error)
    return is_refused_data(problem) or (type(problem) is DatabaseError and is_of_the_server)


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
