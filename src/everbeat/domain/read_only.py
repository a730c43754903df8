"""A server whose transactions are read-only by default: what an examination thinks of it, and the reason that an explanation gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.domain.explanation import Reason, ReasonCode

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
    """Transactions are read-only by default: where that was set (`pg_settings.source`), and whether it holds for workers too."""

    source: str
    for_workers: bool

    @property
    def place(self) -> str:
        """Where it was set, in words."""
        return _PLACES.get(self.source, "elsewhere")


def judge_read_only(found: ReadOnly, *, server: str) -> Check:
    """What a read-only server means: nothing works, or only this role and session cannot write. `server` answers."""
    text = f"{server}; transactions are read-only by default, set {found.place}"
    if found.for_workers:
        text = f"{text}: no task is sent, claimed, started or settled"
        fix = "set default_transaction_read_only to off there; everbeat then continues by itself."
        return Check(CheckCode.DATABASE, Verdict.FAIL, text, fix)
    fix = "none for a role that only looks; for workers and senders set default_transaction_read_only to off there."
    return Check(CheckCode.DATABASE, Verdict.WARN, f"{text}, so everbeat writes nothing with it", fix)


def why_read_only(found: ReadOnly | None) -> tuple[Reason, ...]:
    """The reason of a task or workflow that has not ended; none where workers can write."""
    if found is None or not found.for_workers:
        return ()
    text = (
        f"transactions of this database are read-only by default (default_transaction_read_only is on, set {found.place}): until"
        " it is off, no task is claimed, started or settled, and beats are not recorded"
    )
    return (Reason(code=ReasonCode.DATABASE_READ_ONLY, text=text, command="everbeat doctor"),)
