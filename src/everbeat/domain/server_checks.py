"""What an examination thinks of the server: rights, notifications, clocks, connections, transactions, dead rows.

What lives here: the judgements and their limits. What may not: reading the facts, and judging everbeat's own work (`work_checks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from everbeat.domain.diagnosis import (
    Check,
    CheckCode,
    Clocks,
    Connections,
    LongTransactions,
    NotifyQueue,
    Right,
    Rows,
    Standing,
    Verdict,
)
from everbeat.domain.read_only import ReadOnly, judge_read_only

_ALL_WRITES: Final = ("INSERT", "UPDATE", "DELETE")
_SKEW_S: Final = 2.0
_MANY_DEAD_ROWS: Final = 50_000
_TIGHT: Final = 0.8
_FULL: Final = 0.95
_HALF: Final = 0.5
_QUEUE_FULL: Final = 0.9


def judge_server(standing: Standing, read_only: ReadOnly | None, *, name: str, where: str) -> Check:
    """Whether the server writes; `name` says which PostgreSQL it is, `where` its URL."""
    if standing.is_standby:
        age = (
            ""
            if standing.replayed_s is None
            else f"; the last commit it replayed is {standing.replayed_s:.1f} s old"
        )
        text = f"{name} at {where!r} is a standby{age}: liveness is unknown here"
        return Check(CheckCode.DATABASE, Verdict.WARN, text, "ask the primary; workers and senders need it.")
    if read_only is not None:
        return judge_read_only(read_only, server=f"{name} answers at {where!r}")
    return Check(CheckCode.DATABASE, Verdict.OK, f"{name} answers at {where!r}")


def judge_unknown(code: CheckCode) -> Check:
    """A check that a standby cannot answer."""
    if code in (CheckCode.LISTEN, CheckCode.NOTIFY_QUEUE):
        text = "unknown here: this server is a standby, which takes no LISTEN; who waits for results here polls for them"
        return Check(code, Verdict.WARN, text, "ask the primary.")
    text = "unknown here: this server is a standby, and beats reach it with the delay of replication"
    return Check(code, Verdict.WARN, text, "ask the primary.")


def judge_rights(missing: Sequence[Right]) -> Check:
    """Whether the role may use every table."""
    if not missing:
        return Check(CheckCode.RIGHTS, Verdict.OK, "the role may read and write every table")
    if len(missing) == missing[0].tables and all(right.missing == _ALL_WRITES for right in missing):
        text = (
            f"the role may read every table and write none: it lacks {', '.join(_ALL_WRITES)} on all of them, so it can look, and cannot"
            " send, work or act"
        )
        return Check(
            CheckCode.RIGHTS, Verdict.WARN, text, "use a role that owns the schema for senders and workers."
        )
    told = "; ".join(
        f"{', '.join(right.missing)} on {right.table or 'the schema itself'}" for right in missing[:5]
    )
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    fix = "let the role own the schema, or grant it usage on the schema and select, insert, update, delete on all its tables."
    return Check(CheckCode.RIGHTS, Verdict.FAIL, f"the role lacks {told}{more}", fix)


def judge_pooler(*, is_pooled: bool) -> Check:
    """Whether sessions reach the server themselves."""
    if not is_pooled:
        return Check(CheckCode.POOLER, Verdict.OK, "sessions are the server's own")
    text = "a transaction pooler stands before the server: no notifications, no deaths noticed by session"
    return Check(
        CheckCode.POOLER,
        Verdict.WARN,
        text,
        "give workers a direct URL, or add pooler=session to it if the pooler is in session mode.",
    )


def judge_listen(heard_after_s: float | None, *, is_pooled: bool) -> Check:
    """Whether notifications arrive."""
    if heard_after_s is not None:
        text = f"a notification came through in {heard_after_s * 1_000:.1f} ms"
        return Check(CheckCode.LISTEN, Verdict.OK, text)
    text = "no notification came through: workers look for work and for cancels once a second instead"
    fix = (
        "give workers a direct URL instead of the pooler's."
        if is_pooled
        else "look at NOTIFY_QUEUE below, and for a proxy that swallows NOTIFY."
    )
    return Check(CheckCode.LISTEN, Verdict.WARN, text, fix)


def judge_notify_queue(queue: NotifyQueue) -> Check:
    """Whether PostgreSQL's queue of notifications has room."""
    text = f"PostgreSQL's queue of notifications is {queue.used:.0%} full"
    if queue.used < _HALF:
        return Check(CheckCode.NOTIFY_QUEUE, Verdict.OK, text)
    text += ", so everbeat sends none and workers look for work once a second"
    verdict = Verdict.WARN
    if queue.used >= _QUEUE_FULL:
        verdict = Verdict.FAIL
        text += "; once it is full, every other program that notifies is refused"
    told = "; ".join(
        f"pid {each.pid}, {each.who}" + ("" if each.age_s is None else f", {each.age_s:.0f} s")
        for each in queue.holders
    )
    if not told:
        fix = (
            "end the session that listens and does not read; the server's log names it after 'NOTIFY queue'."
        )
        return Check(CheckCode.NOTIFY_QUEUE, verdict, text, fix)
    text += f"; {'it is kept by' if queue.is_named else 'the oldest transactions are'}: {told}"
    which = "it" if queue.is_named else "the one that listens"
    fix = (
        f"end {which} in its program, or: select pg_terminate_backend({queue.holders[0].pid});"
        " and limit what the role may do."
    )
    return Check(CheckCode.NOTIFY_QUEUE, verdict, text, fix)


def judge_clock(clocks: Clocks, *, asked_at: datetime, answered_at: datetime) -> Check:
    """Whether this machine's clock agrees with the database's, and the database's with itself."""
    if clocks.ahead:
        text = (
            f"the last beats of {len(clocks.ahead)} supervisors ({', '.join(clocks.ahead[:3])}) lie up to {clocks.ahead_s:.1f} s"
            " ahead of the database's clock, which was set back"
        )
        fix = "nothing is declared dead by it, but ages are shown too short until then; keep the server's clock by NTP."
        return Check(CheckCode.CLOCK, Verdict.WARN, text, fix)
    middle = asked_at + (answered_at - asked_at) / 2
    unsure_s = (answered_at - asked_at).total_seconds() / 2
    skew_s = (middle - clocks.now).total_seconds()
    if abs(skew_s) - unsure_s <= _SKEW_S:
        text = f"this machine's clock is within {abs(skew_s) + unsure_s:.2f} s of the database's"
        return Check(CheckCode.CLOCK, Verdict.OK, text)
    word = "ahead of" if skew_s > 0 else "behind"
    text = f"this machine's clock is {abs(skew_s):.1f} s {word} the database's: moments given to schedule() and good_until shift by that"
    return Check(
        CheckCode.CLOCK, Verdict.WARN, text, "keep both by NTP; give delays (timedelta) instead of moments."
    )


def judge_connections(connections: Connections) -> Check:
    """Whether there is room for more connections."""
    share = connections.used / max(1, connections.most)
    text = f"{connections.used} of {connections.most} connections are in use, {connections.ours} of them by everbeat"
    if share < _TIGHT:
        return Check(CheckCode.CONNECTIONS, Verdict.OK, text)
    fix = "raise max_connections, end idle clients, or run fewer worker processes (3 connections each)."
    if share < _FULL:
        return Check(CheckCode.CONNECTIONS, Verdict.WARN, text, fix)
    text += "; while the server refuses connections, a silent tree without one is not declared dead"
    return Check(CheckCode.CONNECTIONS, Verdict.FAIL, text, fix)


def judge_transactions(seen: LongTransactions, *, limit: str) -> Check:
    """Whether somebody's transaction keeps dead rows alive."""
    found = seen.found
    if not found:
        which = "transaction that this role can see" if seen.hides else "transaction"
        return Check(CheckCode.TRANSACTIONS, Verdict.OK, f"no {which} is older than {limit}")
    told = "; ".join(
        f"{each.who}, {each.age_s:.0f} s{'' if each.pid is None else f', pid {each.pid}'}" for each in found
    )
    text = (
        f"transactions older than {limit} keep dead rows from being removed, which slows every claim: {told}"
    )
    pid = next((each.pid for each in found if each.pid is not None), None)
    fix = (
        "end it: rollback prepared '...'."
        if pid is None
        else f"end it in its program, or: select pg_terminate_backend({pid});"
    )
    return Check(CheckCode.TRANSACTIONS, Verdict.WARN, text, fix)


def judge_dead_rows(rows: Rows | None) -> Check:
    """Whether vacuum keeps up with the table of tasks."""
    if rows is None:
        return Check(CheckCode.DEAD_ROWS, Verdict.OK, "the server keeps no statistics of the table of tasks")
    last = "never" if rows.vacuumed_at is None else f"last {rows.vacuumed_at:%Y-%m-%d %H:%M}"
    text = f"the table of tasks has {rows.live:,} live and {rows.dead:,} dead rows (vacuumed {last})"
    if rows.dead <= max(_MANY_DEAD_ROWS, rows.live):
        return Check(CheckCode.DEAD_ROWS, Verdict.OK, text)
    fix = "look for long transactions, let autovacuum run more often (autovacuum_vacuum_scale_factor of the table), or vacuum it now."
    return Check(CheckCode.DEAD_ROWS, Verdict.WARN, text, fix)
