"""Statements of an examination: the server, the role, the beats, what nobody recovers or takes. They only look."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import monotonic
from typing import Final

import psycopg
from psycopg import sql

from everbeat.domain.diagnosis import (
    BadRow,
    Clocks,
    Connections,
    Crew,
    Gaps,
    LongTransaction,
    LongTransactions,
    Oldest,
    Right,
    Rows,
    SilentTrees,
    Standing,
    Suspects,
    Unresponsive,
    Unserved,
    Unswept,
)
from everbeat.domain.explanation import SilenceRules
from everbeat.domain.needs import Knowing, Marked, Needs, Registered, read_needs, read_parameters
from everbeat.domain.recent_failures import RecentFailures
from everbeat.domain.silence import UNRESPONSIVE_S
from everbeat.store.readable import names
from everbeat.store.statement import Row, Statement
from everbeat.store.target import Target

_CHANNEL: Final = "everbeat_doctor"


def standing() -> Statement[Standing]:
    """Whether the server is a standby."""
    return Statement("inspect/standby", {}, lambda found: Standing(*found[0]))


def rights(schema: str) -> Statement[list[Right]]:
    """What this role may not do with the tables of a schema."""
    return Statement(
        "inspect/rights",
        {"schema": schema},
        lambda found: [Right(row[0], tuple(row[1]), row[2]) for row in found],
    )


def clocks() -> Statement[Clocks]:
    """The database's clock, and who has beaten ahead of it."""
    return Statement("inspect/clocks", {}, lambda found: Clocks(found[0][0], tuple(found[0][1]), found[0][2]))


def connections() -> Statement[Connections]:
    """Connections of clients."""
    return Statement("inspect/connections", {}, lambda found: Connections(*found[0]))


def long_transactions(*, older_than_ms: int) -> Statement[LongTransactions]:
    """The oldest transactions that keep dead rows from being removed, at most five."""
    return Statement(
        "inspect/long_transactions",
        {"older_than_ms": older_than_ms},
        lambda found: LongTransactions(
            tuple(LongTransaction(*row[:3]) for row in found if row[1] is not None), found[0][3]
        ),
    )


def dead_rows(schema: str) -> Statement[Rows | None]:
    """Live and dead rows of the table of tasks; None where the server counts none."""
    return Statement(
        "inspect/dead_rows", {"schema": schema}, lambda found: Rows(*found[0]) if found else None
    )


def crew(*, stale_ms: int) -> Statement[Crew]:
    """Who lives; whoever has not beaten for `stale_ms` does not."""
    return Statement("inspect/crew", {"stale_ms": stale_ms}, lambda found: Crew(*found[0]))


def unresponsive() -> Statement[list[Unresponsive]]:
    """Live workers whose processes did not respond to their supervisors at their last snapshot, the longest first."""
    return Statement(
        "inspect/unresponsive",
        {"lag_ms": UNRESPONSIVE_S * 1_000},
        lambda found: [Unresponsive(*row) for row in found],
    )


def silent_trees(*, silent_ms: int, stale_ms: int) -> Statement[SilentTrees]:
    """How many supervisors are silent with their whole tree for `silent_ms`, which have no session, and who lives."""

    def read(found: Sequence[Row]) -> SilentTrees:
        known, silent, held, living, lost, held_by_lost = found[0]
        return SilentTrees(known, silent, held, living, tuple(lost or ()), held_by_lost)

    return Statement("inspect/silent_trees", {"silent_ms": silent_ms, "stale_ms": stale_ms}, read)


def beat_gaps() -> Statement[Gaps]:
    """The time between beats in the last day."""
    return Statement("inspect/beat_gaps", {}, lambda found: Gaps(*found[0]))


def unswept(rules: SilenceRules, *, margin_ms: int, stale_ms: int) -> Statement[Unswept]:
    """Leases that are overdue by these rules for more than `margin_ms`. A supervisor without a beat for `stale_ms` does not live."""
    parameters = {
        "claimed_ms": rules.claimed_ms, "running_ms": rules.running_ms, "multiplier": rules.multiplier,
        "resilient_flags": list(rules.resilient_flags), "margin_ms": margin_ms, "stale_ms": stale_ms,
    }  # fmt: skip
    return Statement("inspect/unswept", parameters, lambda found: Unswept(*found[0]))


def unserved(*, stale_ms: int) -> Statement[list[Unserved]]:
    """PENDING tasks that no live worker takes, at most 50 names; the first 100,000 tasks are looked at."""
    return Statement(
        "inspect/unserved", {"stale_ms": stale_ms}, lambda found: [Unserved(*row) for row in found]
    )


def marked() -> Statement[list[Marked]]:
    """PENDING tasks that need something of a worker's code, at most 200 groups; the first 200,000 such tasks are looked at."""

    def read(found: Sequence[Row]) -> list[Marked]:
        return [
            Marked(name, queue, read_needs(needs) or Needs(), *rest) for name, queue, needs, *rest in found
        ]

    return Statement("inspect/marked", {}, read)


def knowing(task_names: Collection[str], *, stale_ms: int) -> Statement[list[Knowing]]:
    """The live workers that know these task functions, by what they registered. A worker without a beat for `stale_ms` does not live."""

    def read(found: Sequence[Row]) -> list[Knowing]:
        return [
            Knowing(name, names(queues), Registered(read_parameters(told), tuple(workers)))
            for name, queues, told, workers in found
        ]

    return Statement("inspect/knowing", {"names": sorted(task_names), "stale_ms": stale_ms}, read)


def suspects() -> Statement[Suspects]:
    """Tasks that may kill their worker."""
    return Statement("inspect/suspects", {}, lambda found: Suspects(*found[0]))


def failures(*, within_s: int, most: int) -> Statement[list[RecentFailures]]:
    """Return the tasks that failed in the last `within_s` seconds, by name, code and class; the newest `most` are counted."""
    parameters = {"within_ms": within_s * 1_000, "most": most}
    return Statement("inspect/failures", parameters, lambda found: [RecentFailures(*row) for row in found])


def oldest_records() -> Statement[Oldest]:
    """How old the oldest records are that retention takes."""

    def read(found: Sequence[Row]) -> Oldest:
        return Oldest(*found[0])

    return Statement("inspect/oldest_records", {}, read)


def bad_rows(*, most: int) -> Statement[list[BadRow]]:
    """Rows with a value that everbeat never writes and cannot use, at most `most`; live tasks and the newest rows are looked at."""
    return Statement("inspect/bad_rows", {"most": most}, lambda found: [BadRow(*row) for row in found])


def hear(target: Target, *, within_s: float) -> float | None:
    """Seconds from a notification to its arrival on another connection; None when it does not come in time. Raises a DatabaseError."""
    try:
        with target.connect("everbeat doctor") as listener, target.connect("everbeat doctor") as sender:
            listener.execute(sql.SQL("listen {}").format(sql.Identifier(_CHANNEL)))
            sent_at = monotonic()
            sender.execute("select pg_notify(%s, '') where pg_notification_queue_usage() < 0.5", [_CHANNEL])
            for _ in listener.notifies(timeout=within_s, stop_after=1):
                return monotonic() - sent_at
            return None
    except psycopg.Error as problem:
        raise target.explain(problem) from problem
