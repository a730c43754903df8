"""What an examination thinks of NATS: whether it can be used, and whether messages get through.

What lives here: the facts, the judgement and its limits. What may not: reading the facts, from the database or from NATS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.domain.explanation import counted

BEHIND_S: Final = 10.0
"""So long a message may be due and not published: a change of the relay takes less."""


class StreamFacts(Struct, frozen=True, kw_only=True):
    """What a NATS server says of the stream. Messages that wait, are delivered and not ended, came more than once; None: there is no stream.

    `published_at`: when the last message came, by the server's clock.
    """

    server: str
    stream: str
    exists: bool = True
    waiting: int = 0
    unended: int = 0
    redelivered: int = 0
    published_at: datetime | None = None


class NatsTrouble(Struct, frozen=True, kw_only=True):
    """NATS could not be looked at. `refused`: it answered, or cannot be asked at all, and will not do so by itself."""

    refused: bool
    text: str
    fix: str | None


class Outbox(Struct, frozen=True, kw_only=True):
    """Who has the turn to publish, if anybody; messages that are due and not published, the oldest for so many seconds.

    `failing`: the stream takes nothing.
    """

    holder: str | None
    waiting: int
    oldest_s: float | None
    failing: bool = False


class Told(Struct, frozen=True, kw_only=True):
    """Live workers by what their last snapshots say: NATS tells them of tasks, or would if it were not away."""

    up: int
    away: int

    @classmethod
    def of(cls, snapshots: Sequence[Mapping[str, Any] | None]) -> Told:
        """Counted from the messages of snapshots."""
        using = [each["up"] for each in snapshots if each is not None and each.get("up") is not None]
        return cls(up=sum(using), away=len(using) - sum(using))


def judge_nats(found: StreamFacts | NatsTrouble | None, outbox: Outbox | None, told: Told) -> Check:
    """Whether messages reach workers. `found` is None for an app without `wake`, `outbox` where no worker of this schema ever had one."""
    if found is None:
        return _unseen(outbox, told)
    if isinstance(found, NatsTrouble):
        if found.refused:
            return Check(CheckCode.NATS, Verdict.FAIL, found.text, found.fix)
        if outbox is None:
            return Check(
                CheckCode.NATS,
                Verdict.FAIL,
                f"{found.text} No worker of this schema has used NATS yet, and none starts.",
                found.fix,
            )
        text = f"{found.text} Until it does, PostgreSQL tells workers of tasks, as it does without NATS."
        return Check(CheckCode.NATS, Verdict.WARN, text, found.fix)
    if outbox is None:
        text = f"NATS answers at {found.server}; no worker has used it for this schema yet"
        return Check(CheckCode.NATS, Verdict.OK, text)
    behind = _behind(outbox)
    if behind is not None:
        return behind
    answers = f"NATS answers at {found.server}"
    if outbox.holder is None:
        return Check(
            CheckCode.NATS,
            Verdict.WARN,
            f"{answers}, and no worker publishes messages: workers find tasks by looking, or PostgreSQL tells them",
            "start a worker whose App has this wake=, or see its log for nats_away: everbeat worker MODULE:APP.",
        )
    if not found.exists:
        text = f"{answers}, and stream {found.stream!r} is gone: a worker makes it again within seconds"
        return Check(CheckCode.NATS, Verdict.WARN, text, "find out who deleted it, if it goes again.")
    if told.away:
        everybody = counted(told.up + told.away, "worker")
        text = f"{answers}, and {told.away} of {everybody} said at their last snapshots that it does not"
        return Check(
            CheckCode.NATS,
            Verdict.WARN,
            text,
            "see 'everbeat workers', and the network between those workers and NATS.",
        )
    text = (
        f"{answers}: {_of_stream(found)}; {outbox.holder} publishes, NATS tells {counted(told.up, 'worker')}"
    )
    return Check(CheckCode.NATS, Verdict.OK, text)


def _unseen(outbox: Outbox | None, told: Told) -> Check:
    """Without servers to ask, only the database can be."""
    if outbox is None:
        text = "messages are not in use: PostgreSQL tells workers of tasks"
        return Check(CheckCode.NATS, Verdict.OK, text)
    if outbox.holder is None and not told.up:
        text = "messages were in use, and are not now: PostgreSQL tells workers of tasks"
        return Check(CheckCode.NATS, Verdict.OK, text)
    behind = _behind(outbox)
    if behind is not None:
        return behind
    text = (
        f"NATS tells {counted(told.up, 'worker')} of tasks, {outbox.holder or 'nobody'} publishes; NATS itself was not asked,"
        " which takes an app with wake="
    )
    return Check(CheckCode.NATS, Verdict.OK, text)


def _behind(outbox: Outbox) -> Check | None:
    if outbox.failing and outbox.holder is not None:
        return Check(
            CheckCode.NATS,
            Verdict.WARN,
            f"the stream takes none of the messages of {outbox.holder}: PostgreSQL tells workers of tasks in its place",
            "see whether the stream is full (NatsConfig.max_bytes), has a leader, and the user the rights that the page on NATS lists.",
        )
    if outbox.oldest_s is None or outbox.oldest_s <= BEHIND_S:
        return None
    waiting = "10,000 messages or more" if outbox.waiting >= 10_000 else counted(outbox.waiting, "message")
    text = f"{waiting} due and not published, for up to {outbox.oldest_s:.0f} s: workers find those tasks by looking"
    if outbox.holder is None:
        return Check(
            CheckCode.NATS,
            Verdict.WARN,
            f"{text}, and no worker publishes",
            "start a worker whose App has wake=: everbeat worker MODULE:APP.",
        )
    return Check(
        CheckCode.NATS,
        Verdict.WARN,
        f"{text}; {outbox.holder} publishes",
        f"see the log of {outbox.holder}; tasks of a queue of which 1,000 are out wait for those, which is no fault.",
    )


def _of_stream(found: StreamFacts) -> str:
    last = (
        "nothing was published yet"
        if found.published_at is None
        else f"the last one came at {found.published_at.isoformat(timespec='seconds')}"
    )
    return (
        f"stream {found.stream!r} holds {counted(found.waiting, 'message')} not delivered and {found.unended} under way,"
        f" {found.redelivered} of them delivered more than once, {last}"
    )
