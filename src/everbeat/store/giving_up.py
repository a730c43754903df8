"""When a client stops repeating, and what it raises then."""

from __future__ import annotations

from typing import Final

import psycopg

from everbeat.errors import DatabaseError, DatabaseReadOnly, DatabaseUnreachable
from everbeat.store.patience import Patience
from everbeat.store.refusals import is_refused_login
from everbeat.store.target import Target, is_repeatable

_FIX: Final = (
    "check the server and its standbys; patience=... of App or of one call sets how long a call goes on."
)


def require_repeatable(
    problem: psycopg.Error | DatabaseError,
    target: Target,
    patience: Patience,
    *,
    delay_s: float,
    has_connected: bool,
) -> None:
    """Raise what the call raises, unless the problem is an outage and the patience lasts longer than this delay.

    A refused login is an outage once these settings have worked: the password is being changed.
    """
    is_outage = isinstance(problem, DatabaseError) or is_repeatable(problem)
    is_outage = is_outage and (has_connected or not is_refused_login(problem))
    if is_outage and patience.remaining_s > delay_s:
        return
    if is_outage and patience.reason is not None and not isinstance(problem, DatabaseReadOnly):
        raise DatabaseUnreachable(
            f"The database at {target.shown!r} gave no answer for {patience.seconds:g} s: {patience.reason}. "
            "The statement may take effect later.",
            fix=_FIX,
        ) from problem
    if isinstance(problem, DatabaseError):
        raise problem
    raise target.explain(problem) from problem


def all_busy(target: Target, patience: Patience, *, connections: int) -> DatabaseUnreachable:
    """The error of a call that got no connection."""
    return DatabaseUnreachable(
        f"All {connections} connections of this process to {target.shown!r} have waited for an answer for"
        f" {patience.seconds:g} s.",
        fix=_FIX,
    )
