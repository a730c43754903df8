"""When a client stops repeating, and what it raises then."""

from __future__ import annotations

from typing import Final

import psycopg

from everbeat.errors import DatabaseError, DatabaseReadOnly, DatabaseUnreachable
from everbeat.store.patience import LastProblem, Patience
from everbeat.store.refusals import is_refused_login, is_repeatable
from everbeat.store.target import Target

_FIX: Final = (
    "check the server and its standbys; patience=... of App or of one call sets how long a call goes on."
)


def pause_before_repeat(
    problem: psycopg.Error | DatabaseError,
    target: Target,
    patience: Patience,
    *,
    delay_s: float,
    has_connected: bool,
) -> float:
    """Return after how many seconds the call is repeated, `delay_s` at most: the last try begins when the patience ends.

    Raises what the call raises if the problem is no outage, or the patience is over.
    A refused login is an outage once these settings have worked: the password is being changed.
    """
    is_outage = isinstance(problem, DatabaseError) or is_repeatable(problem)
    is_outage = is_outage and (has_connected or not is_refused_login(problem))
    if is_outage:
        known = problem if isinstance(problem, DatabaseError) else target.explain(problem)
        patience.failed(LastProblem(known.message, known.fix))
    if is_outage and not patience.is_over:
        return min(delay_s, patience.remaining_s)
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
    """The error of a call that got no connection. It names the last problem of the calls that have one, if that is known."""
    text = f"All {connections} connections of this process to {target.shown!r} have waited for an answer for {patience.seconds:g} s."
    return unreachable(text, fix=_FIX, last=patience.last_problem)


def unreachable(text: str, *, fix: str, last: LastProblem | None) -> DatabaseUnreachable:
    """The error of a call that waited for others. It names their last problem, and its fix, if that is known."""
    if last is None:
        return DatabaseUnreachable(text, fix=fix)
    return DatabaseUnreachable(f"{text} The last problem was: {last.message}", fix=last.fix or fix)


def given_up(problem: BaseException, target: Target) -> DatabaseError:
    """What a session raises when it repeats no more after this problem."""
    if isinstance(problem, DatabaseError):
        return problem
    if isinstance(problem, psycopg.Error):
        return target.explain(problem)
    return DatabaseUnreachable(
        f"The database at {target.shown!r} did not answer in time.",
        fix="check the network and the server's load.",
    )
