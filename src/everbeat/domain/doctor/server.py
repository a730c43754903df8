"""The server checks: privileges, notifications, clocks, connections, transactions, locks and dead rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from everbeat.domain.doctor.findings import (
    Check,
    CheckCode,
    CheckVerdict,
    Clocks,
    Connections,
    LongTransactions,
    NotifyQueue,
    Right,
    Rows,
    Standing,
)
from everbeat.domain.explain.reasons import Reason, ReasonCode
from everbeat.errors.wording import amount

LONG_WAIT_MS: Final = 2_000
"""In milliseconds: everbeat's own statements never wait this long for each other."""
_WAITS: Final = {
    "SyncRep": "waits for a synchronous standby",
    "ClientWrite": "waits for its process to read an answer",
}
_OF_A_TREE: Final = re.compile(r"(?P<tree>everbeat-[0-9a-f]{16}) (?P<part>\S+)(?: (?P<pid>\d+)\.\d+)?")


class LockHolder(msgspec.Struct, frozen=True):
    """A session that holds a lock that other sessions are waiting for.

    `pid` is the process id of the backend, or None for a prepared transaction. `hostname` is the host of the session's tree. A
    role without pg_monitor cannot see the `state` of other roles' sessions.
    """

    pid: int | None
    session: str | None
    role: str | None
    state: str | None
    wait_event: str | None
    waiters: int
    since: datetime
    waited_s: float
    hostname: str | None

    @property
    def is_hidden(self) -> bool:
        """Return whether the current role cannot see what the session is doing."""
        return self.pid is not None and self.role is not None and self.state is None

    @property
    def who(self) -> str:
        """Return a description of the session. For an everbeat session, it names the session's part of its tree, its process and its host."""
        if self.pid is None:
            return "a prepared transaction"
        named = _OF_A_TREE.fullmatch(self.session or "")
        if named is None:
            subject = f"session {self.session or 'without a name'} of role {self.role}"
        else:
            process = "" if named["pid"] is None else f", process {named['pid']}"
            host = "" if self.hostname is None else f" on host {self.hostname}"
            subject = f"the {named['part']} of tree {named['tree']}{process}{host}"
        waits = _WAITS.get(self.wait_event or "", self.state)
        if self.is_hidden:
            waits = "only a role with pg_monitor can see what it is doing"
        return f"{subject} (backend {self.pid}{'' if waits is None else f', {waits}'})"

    @property
    def text(self) -> str:
        """Return a text that describes the session, and says how many sessions are waiting for it and for how long."""
        others = amount(self.waiters, "session waits", plural="sessions wait")
        return f"{self.who} holds locks that {others} for; the longest wait so far is {self.waited_s:.0f} s"

    @property
    def command(self) -> str:
        """Return a command that terminates the session, or a command that shows what the session is waiting for."""
        if self.pid is None:
            return "psql -c 'select * from pg_prepared_xacts', then rollback prepared"
        if self.wait_event == "SyncRep":
            # Terminating the session would make a commit visible that the standby does not have.
            return "psql -c 'select * from pg_stat_replication'"
        if self.is_hidden:  # the session might be waiting for a standby
            return "psql -c 'table pg_stat_activity'"
        return f"psql -c 'select pg_terminate_backend({self.pid})'"


def judge_locks(found: Sequence[LockHolder]) -> Check:
    """Judge whether sessions have been waiting too long for locks that other sessions hold."""
    if not found:
        return CheckCode.LOCKS.ok("no session waits long for a lock")
    text = "; ".join(each.text for each in found)
    if any(each.wait_event == "SyncRep" for each in found):
        fix = "start the synchronous standby, or remove it from synchronous_standby_names."
    elif found[0].is_hidden:
        fix = f"check what the session does before you end it: {found[0].command}"
    else:
        fix = f"end the session; its work is then repeated: {found[0].command}"
    return CheckCode.LOCKS.warn(text, fix)


def why_locked(found: Sequence[LockHolder]) -> tuple[Reason, ...]:
    """Return a reason for each lock that might block a task or workflow. Whether the task's own rows are locked is unknown."""
    return tuple(
        Reason(
            code=ReasonCode.LOCKED,
            text=each.text,
            since=each.since,
            blocked_by=each.session,
            command=each.command,
        )
        for each in found
    )


_PLACES: Final[Mapping[str, str]] = {
    "configuration file": "in the configuration of the server",
    "command line": "on the command line of the server",
    "database": "for the database",
    "user": "for the role",
    "database user": "for the role in this database",
    "client": "by this client",
    "session": "by this session",
}


class ReadOnly(msgspec.Struct, frozen=True):
    """Where read-only transactions were set as the default (`pg_settings.source`), and whether the default applies to workers."""

    source: str
    for_workers: bool

    @property
    def place(self) -> str:
        """Return a phrase that says where the default was set."""
        return _PLACES.get(self.source, "elsewhere")


def judge_read_only(found: ReadOnly, *, server: str) -> Check:
    """Return the check for a read-only default. The check fails if workers cannot write, and warns if only this role or session cannot write."""
    text = f"{server}; transactions are read-only by default, set {found.place}"
    if found.for_workers:
        text = f"{text}: no task is sent, claimed, started or settled"
        fix = "set default_transaction_read_only to off there; everbeat then continues by itself."
        return CheckCode.DATABASE.fail(text, fix)
    fix = "for a role that only reads, nothing; for workers and senders set default_transaction_read_only to off there."
    return CheckCode.DATABASE.warn(f"{text}, so everbeat writes nothing with it", fix)


def why_read_only(found: ReadOnly | None) -> tuple[Reason, ...]:
    """Return the reason that a read-only database is blocking a task or workflow, or an empty tuple if workers can write."""
    if found is None or not found.for_workers:
        return ()
    text = (
        f"transactions of this database are read-only by default (default_transaction_read_only is on, set {found.place}): until"
        " it is off, no task is claimed, started or settled, and beats are not recorded"
    )
    return (Reason(code=ReasonCode.DATABASE_READ_ONLY, text=text, command="everbeat doctor"),)


class DoneStep(msgspec.Struct, frozen=True):
    """A completed step of a schema version that has not been fully applied."""

    version: int
    name: str


class UnfinishedUpgrade(msgspec.Struct, frozen=True):
    """The completed steps of partially applied schema versions, the unfinished indexes, and the session that is migrating."""

    schema: str
    steps: tuple[DoneStep, ...]
    invalid_indexes: tuple[str, ...]
    migrator: LockHolder | None

    @property
    def is_under_way(self) -> bool:
        """Return whether a session is migrating."""
        return self.migrator is not None

    @property
    def text(self) -> str | None:
        """Return a description of the incomplete upgrade, or None if the upgrade is complete."""
        parts = []
        if self.steps:
            last = self.steps[-1]
            parts.append(
                f"the upgrade to version {last.version} is incomplete: {len(self.steps)} of its steps are done, {last.name} was the last"
            )
        if self.invalid_indexes:
            parts.append(
                f"the build of {_listed(self.invalid_indexes)} did not finish: PostgreSQL writes to an invalid index but does not read it"
            )
        if self.migrator is not None:
            parts.append(f"a migration is in progress: {self.migrator.who}")
        return "; ".join(parts) or None

    def fix(self, *, newest_known: int) -> str | None:
        """Return instructions for finishing the upgrade, or None while a session is migrating."""
        if self.migrator is not None or not (self.steps or self.invalid_indexes):
            return None
        if self.steps:
            is_newer = self.steps[-1].version > newest_known
            whose = " of the newer everbeat that started it" if is_newer else ""
            return f"run 'everbeat migrate'{whose}, which continues after the last step."
        return (
            "run 'everbeat migrate' of the everbeat that started the build, or rebuild the index:"
            f' reindex index concurrently "{self.schema}"."{self.invalid_indexes[0]}"'
        )


def judge_upgrade(found: UnfinishedUpgrade, *, newest_known: int) -> Check:
    """Judge whether a schema upgrade was left incomplete. An upgrade in progress is OK."""
    if found.text is None:
        return CheckCode.UPGRADE.ok("no upgrade of the schema is in progress or incomplete")
    verdict = CheckVerdict.OK if found.is_under_way else CheckVerdict.WARN
    return Check(CheckCode.UPGRADE, verdict, found.text, found.fix(newest_known=newest_known))


def _listed(names: Sequence[str]) -> str:
    return f"the index {names[0]}" if len(names) == 1 else f"the indexes {', '.join(names)}"


_ALL_WRITES: Final = ("INSERT", "UPDATE", "DELETE")
_SKEW_S: Final = 2.0
_MANY_DEAD_ROWS: Final = 50_000
_TIGHT: Final = 0.8
_FULL: Final = 0.95
_HALF: Final = 0.5
_QUEUE_FULL: Final = 0.9


def judge_server(standing: Standing, read_only: ReadOnly | None, *, name: str, where: str) -> Check:
    """Judge whether the server accepts writes. `name` is the server's version, and `where` its URL."""
    if standing.is_standby:
        age = (
            ""
            if standing.replayed_s is None
            else f"; the last commit it replayed is {standing.replayed_s:.1f} s old"
        )
        text = f"{name} at {where!r} is a standby{age}: liveness is unknown here"
        return CheckCode.DATABASE.warn(text, "ask the primary; workers and senders need it.")
    if read_only is not None:
        return judge_read_only(read_only, server=f"{name} answers at {where!r}")
    return CheckCode.DATABASE.ok(f"{name} answers at {where!r}")


def judge_unknown(code: CheckCode) -> Check:
    """Return the result of a check that cannot be performed on a standby."""
    if code in (CheckCode.LISTEN, CheckCode.NOTIFY_QUEUE):
        text = "unknown here: this server is a standby, which rejects LISTEN; clients here poll for results"
        return code.warn(text, "ask the primary.")
    text = "unknown here: this server is a standby, and replication delays the heartbeats"
    return code.warn(text, "ask the primary.")


def judge_rights(missing: Sequence[Right]) -> Check:
    """Judge whether the role has the required privileges on every table."""
    if not missing:
        return CheckCode.RIGHTS.ok("the role can read and write every table")
    if len(missing) == missing[0].tables and all(right.missing == _ALL_WRITES for right in missing):
        text = (
            f"the role can read every table but write none: it lacks {', '.join(_ALL_WRITES)} on all of them, so it can inspect but not"
            " send, work or change anything"
        )
        return CheckCode.RIGHTS.warn(text, "use a role that owns the schema for senders and workers.")
    lacks = "; ".join(
        f"{', '.join(right.missing)} on {right.table or 'the schema itself'}" for right in missing[:5]
    )
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    fix = "let the role own the schema, or grant it usage on the schema and select, insert, update, delete on all its tables."
    return CheckCode.RIGHTS.fail(f"the role lacks {lacks}{more}", fix)


def judge_pooler(*, is_pooled: bool) -> Check:
    """Judge whether sessions connect to the server directly, without a connection pooler."""
    if not is_pooled:
        return CheckCode.POOLER.ok("sessions reach the server directly")
    text = "a transaction pooler is in front of the server: no notifications arrive, and no death is noticed by its session"
    return CheckCode.POOLER.warn(
        text, "give workers a direct URL, or add pooler=session to it if the pooler is in session mode."
    )


def judge_listen(heard_after_s: float | None, *, is_pooled: bool) -> Check:
    """Judge whether notifications arrive."""
    if heard_after_s is not None:
        text = f"a notification arrived in {heard_after_s * 1_000:.1f} ms"
        return CheckCode.LISTEN.ok(text)
    text = "no notification arrived: workers poll for tasks and cancels once a second instead"
    fix = (
        "give workers a direct URL instead of the pooler's."
        if is_pooled
        else "see NOTIFY_QUEUE below, and look for a proxy that drops NOTIFY."
    )
    return CheckCode.LISTEN.warn(text, fix)


def judge_notify_queue(queue: NotifyQueue) -> Check:
    """Judge whether PostgreSQL's notification queue has room."""
    text = f"PostgreSQL's notification queue is {queue.used:.0%} full"
    if queue.used < _HALF:
        return CheckCode.NOTIFY_QUEUE.ok(text)
    text += ", so everbeat sends no notifications and workers poll once a second"
    verdict = CheckVerdict.WARN
    if queue.used >= _QUEUE_FULL:
        verdict = CheckVerdict.FAIL
        text += "; once it is full, NOTIFY fails in every program"
    holders = "; ".join(
        f"pid {each.pid}, {each.who}" + ("" if each.age_s is None else f", {each.age_s:.0f} s")
        for each in queue.holders
    )
    if not holders:
        fix = (
            "end the session that listens but does not read; the server's log names it after 'NOTIFY queue'."
        )
        return Check(CheckCode.NOTIFY_QUEUE, verdict, text, fix)
    text += f"; {'it is held by' if queue.is_named else 'the oldest transactions are'}: {holders}"
    which = "it" if queue.is_named else "the one that listens"
    fix = (
        f"end {which} in its program, or: select pg_terminate_backend({queue.holders[0].pid});"
        " and restrict its role."
    )
    return Check(CheckCode.NOTIFY_QUEUE, verdict, text, fix)


def judge_clock(clocks: Clocks, *, asked_at: datetime, answered_at: datetime) -> Check:
    """Judge whether this machine's clock agrees with the database's clock, and whether the database's clock was set back."""
    if clocks.ahead:
        text = (
            f"the last beats of {amount(len(clocks.ahead), 'supervisor')} ({', '.join(clocks.ahead[:3])}) are up to {clocks.ahead_s:.1f} s"
            " ahead of the database's clock, which was set back"
        )
        fix = "synchronize the server's clock by NTP. No worker is declared dead by this, but ages are shown too short until then."
        return CheckCode.CLOCK.warn(text, fix)
    middle = asked_at + (answered_at - asked_at) / 2
    unsure_s = (answered_at - asked_at).total_seconds() / 2
    skew_s = (middle - clocks.now).total_seconds()
    if abs(skew_s) - unsure_s <= _SKEW_S:
        text = f"this machine's clock is within {abs(skew_s) + unsure_s:.2f} s of the database's"
        return CheckCode.CLOCK.ok(text)
    side = "ahead of" if skew_s > 0 else "behind"
    text = f"this machine's clock is {abs(skew_s):.1f} s {side} the database's, which shifts the times passed to schedule() and good_until"
    return CheckCode.CLOCK.warn(
        text, "synchronize both by NTP, or give delays (timedelta) instead of moments."
    )


def judge_connections(connections: Connections) -> Check:
    """Judge whether the server can accept more connections."""
    share = connections.used / max(1, connections.most)
    text = f"{connections.used} of {connections.most} connections are in use, {connections.ours} of them by everbeat"
    if share < _TIGHT:
        return CheckCode.CONNECTIONS.ok(text)
    fix = "raise max_connections, end idle clients, or run fewer worker processes (3 connections each)."
    if share < _FULL:
        return CheckCode.CONNECTIONS.warn(text, fix)
    text += "; while the server refuses connections, a silent tree without one is not declared dead"
    return CheckCode.CONNECTIONS.fail(text, fix)


def judge_transactions(seen: LongTransactions, *, limit: str) -> Check:
    """Judge whether a long transaction prevents the removal of dead rows."""
    found = seen.found
    if not found:
        which = "transaction that this role can see" if seen.hides else "transaction"
        return CheckCode.TRANSACTIONS.ok(f"no {which} is older than {limit}")
    holders = "; ".join(
        f"{each.who}, {each.age_s:.0f} s{'' if each.pid is None else f', pid {each.pid}'}" for each in found
    )
    text = f"transactions older than {limit} prevent the removal of dead rows, which slows every claim: {holders}"
    pid = next((each.pid for each in found if each.pid is not None), None)
    fix = (
        "end it: rollback prepared '...'."
        if pid is None
        else f"end it in its program, or: select pg_terminate_backend({pid});"
    )
    return CheckCode.TRANSACTIONS.warn(text, fix)


def judge_dead_rows(rows: Rows | None) -> Check:
    """Judge whether vacuum keeps up with the tasks table."""
    if rows is None:
        return CheckCode.DEAD_ROWS.ok("the server has no statistics of the table of tasks")
    last = "never" if rows.vacuumed_at is None else f"last {rows.vacuumed_at:%Y-%m-%d %H:%M}"
    text = f"the table of tasks has {rows.live:,} live and {amount(rows.dead, 'dead row')} (vacuumed {last})"
    if rows.dead <= max(_MANY_DEAD_ROWS, rows.live):
        return CheckCode.DEAD_ROWS.ok(text)
    fix = "end long transactions, let autovacuum run more often (autovacuum_vacuum_scale_factor of the table), or vacuum it now."
    return CheckCode.DEAD_ROWS.warn(text, fix)
