"""Who holds the locks that others wait for: the fact, what an examination thinks of it, and the reason that an explanation gives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.domain.explanation import Reason, ReasonCode

LONG_WAIT_MS: Final = 2_000
"""No statement of everbeat waits as long for another one."""
_WAITS: Final = {
    "SyncRep": "waits for a synchronous standby",
    "ClientWrite": "waits for its process to read an answer",
}
_OF_A_TREE: Final = re.compile(r"(?P<tree>everbeat-[0-9a-f]{16}) (?P<part>\S+)(?: (?P<pid>\d+)\.\d+)?")


class LockHolder(msgspec.Struct, frozen=True):
    """A session whose lock others wait for. `pid` is that of the backend; None for a prepared transaction.

    `hostname`: where the tree of the session runs. A role without pg_monitor sees no `state` of another role's session.
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
        """Whether the asking role cannot see what the session does."""
        return self.pid is not None and self.role is not None and self.state is None

    @property
    def who(self) -> str:
        """The session: of a tree with its part, process and host."""
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
            waits = "what it does is shown only to a role with pg_monitor"
        return f"{subject} (backend {self.pid}{'' if waits is None else f', {waits}'})"

    @property
    def text(self) -> str:
        """What it does to others."""
        others = "1 session waits" if self.waiters == 1 else f"{self.waiters} sessions wait"
        return f"{self.who} holds locks for which {others}, for {self.waited_s:.0f} s so far"

    @property
    def command(self) -> str:
        """What ends it, or shows what it waits for."""
        if self.pid is None:
            return "psql -c 'select * from pg_prepared_xacts', then rollback prepared"
        if self.wait_event == "SyncRep":
            return "psql -c 'select * from pg_stat_replication'"  # to end it would show what the standby might lose
        if self.is_hidden:  # it might wait for a standby
            return "psql -c 'table pg_stat_activity'"
        return f"psql -c 'select pg_terminate_backend({self.pid})'"


def judge_locks(found: Sequence[LockHolder]) -> Check:
    """Whether a session keeps others waiting for its locks."""
    if not found:
        return Check(CheckCode.LOCKS, Verdict.OK, "no session waits long for a lock")
    text = "; ".join(each.text for each in found)
    if any(each.wait_event == "SyncRep" for each in found):
        fix = "start the synchronous standby, or take it out of synchronous_standby_names."
    elif found[0].is_hidden:
        fix = f"look what the session does before you end it: {found[0].command}"
    else:
        fix = f"end the session, after which its work is repeated: {found[0].command}"
    return Check(CheckCode.LOCKS, Verdict.WARN, text, fix)


def why_locked(found: Sequence[LockHolder]) -> tuple[Reason, ...]:
    """What may keep a task or workflow from moving: whether its own rows are locked cannot be seen."""
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
