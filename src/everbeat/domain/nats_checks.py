"""What an examination thinks of NATS: whether it can be used, and whether messages get through.

What lives here: the facts, the judgement and its limits. What may not: reading the facts, from the database or from NATS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.domain.explanation import counted

BEHIND_S: Final = 10.0
"""So long a message may be due and not published: a change of the relay takes less."""


MESSAGE_BYTES: Final = 512
"""What a message takes in a stream, generously."""
NAMED: Final = 5


class StreamFacts(Struct, frozen=True, kw_only=True):
    """What a NATS server says of the stream. Messages that wait, are delivered and not ended, came more than once; None: there is no stream.

    `published_at`: when the last message came, by the server's clock. `undeliverable`: messages that no consumer delivers any more.
    `foreign`: consumers that everbeat did not make. `altered`: consumers of everbeat that somebody changed, and what in them.
    """

    server: str
    stream: str
    exists: bool = True
    waiting: int = 0
    unended: int = 0
    redelivered: int = 0
    published_at: datetime | None = None
    bytes: int = 0
    max_bytes: int | None = None
    undeliverable: int = 0
    foreign: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for a message of usual size."""
        return self.max_bytes is not None and self.max_bytes - self.bytes < MESSAGE_BYTES


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
    """Live workers by what their last snapshots say: NATS tells them of tasks, or would if it were not away.

    `refusal`: why the stream has no room for messages. `refused`: queues whose consumer NATS refuses, with the reason. `not_taken`: queues
    whose messages no worker takes.
    """

    up: int
    away: int
    refusal: str | None = None
    refused: Mapping[str, str] = {}
    not_taken: tuple[str, ...] = ()

    @classmethod
    def of(cls, snapshots: Sequence[Mapping[str, Any] | None]) -> Told:
        """Counted from the messages of snapshots."""
        known = [each for each in snapshots if each is not None and each.get("up") is not None]
        up = sum(bool(each["up"]) for each in known)
        return cls(
            up=up,
            away=len(known) - up,
            refusal=next((each["refusal"] for each in known if each.get("refusal")), None),
            refused={queue: why for each in known for queue, why in (each.get("refused") or {}).items()},
            not_taken=tuple(sorted({queue for each in known for queue in each.get("not_taken") or ()})),
        )


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
    answers = f"NATS answers at {found.server}"
    behind = [*_behind(outbox)]
    complaints = [*behind, *_of_facts(found), *_of_snapshots(told, is_full=found.is_full)]
    if complaints:
        return _complained("" if behind else f"{answers}; ", complaints)
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
    complaints = [*_of_facts(found), *_of_snapshots(told, is_full=found.is_full)]
    if complaints:
        return _complained(answers, complaints)
    text = f"{answers}: {_of_stream(found)}{_of_not_taken(told)}; {outbox.holder} publishes, NATS tells {counted(told.up, 'worker')}"
    return Check(CheckCode.NATS, Verdict.OK, text)


def _unseen(outbox: Outbox | None, told: Told) -> Check:
    """Without servers to ask, only the database can be."""
    if outbox is None:
        text = "messages are not in use: PostgreSQL tells workers of tasks"
        return Check(CheckCode.NATS, Verdict.OK, text)
    if outbox.holder is None and not told.up:
        text = "messages were in use, and are not now: PostgreSQL tells workers of tasks"
        return Check(CheckCode.NATS, Verdict.OK, text)
    complaints = [*_behind(outbox), *_of_snapshots(told, is_full=False)]
    if complaints:
        return _complained("", complaints)
    text = (
        f"NATS tells {counted(told.up, 'worker')} of tasks, {outbox.holder or 'nobody'} publishes; NATS itself was not asked,"
        " which takes an app with wake="
    )
    return Check(CheckCode.NATS, Verdict.OK, text)


def _behind(outbox: Outbox) -> Iterator[tuple[str, str]]:
    """Whether messages are not published in time, and what helps."""
    if outbox.failing and outbox.holder is not None:
        yield (
            f"the stream takes none of the messages of {outbox.holder}: PostgreSQL tells workers of tasks in its place",
            "see whether the stream has a leader, and the user the rights that the page on NATS lists",
        )
        return
    if outbox.oldest_s is None or outbox.oldest_s <= BEHIND_S:
        return
    waiting = "10,000 messages or more" if outbox.waiting >= 10_000 else counted(outbox.waiting, "message")
    text = f"{waiting} due and not published, for up to {outbox.oldest_s:.0f} s: workers find those tasks by looking"
    if outbox.holder is None:
        fix = "start a worker whose App has wake=: everbeat worker MODULE:APP"
        yield f"{text}, and no worker publishes", fix
    else:
        fix = f"see the log of {outbox.holder}; tasks of a queue of which as many are out as may be wait for those, which is no fault"
        yield f"{text}; {outbox.holder} publishes", fix


def _complained(begins: str, complaints: Sequence[tuple[str, str]]) -> Check:
    text = "; ".join(text for text, _ in complaints)
    return Check(
        CheckCode.NATS, Verdict.WARN, f"{begins}{text}", "; ".join(fix for _, fix in complaints) + "."
    )


def _of_facts(found: StreamFacts) -> Iterator[tuple[str, str]]:
    """Each thing that is wrong with the stream, and what helps."""
    if found.is_full:
        yield (
            f"stream {found.stream!r} is full ({found.bytes:,} of {found.max_bytes:,} bytes): messages without room are not carried, and"
            " PostgreSQL tells workers of their tasks",
            "set NatsConfig.max_bytes higher, or start workers that take what waits",
        )
    if found.foreign:
        yield (
            f"stream {found.stream!r} has consumers that everbeat did not make: {named(found.foreign)}; their queues are not carried, and"
            " PostgreSQL tells workers of those tasks",
            f"delete them: nats consumer rm {found.stream} NAME",
        )
    if found.altered:
        yield (
            f"consumers of everbeat were changed: {named(found.altered)}",
            "restart a worker, which sets them back, and find out who changes them",
        )
    if found.undeliverable:
        yield (
            f"no consumer delivers {counted(found.undeliverable, 'message')} of the stream, for example because a max_deliver is used up:"
            " PostgreSQL tells workers of their tasks, and they are removed when those have ended",
            "keep max_deliver of the consumers at -1",
        )


def _of_snapshots(told: Told, *, is_full: bool) -> Iterator[tuple[str, str]]:
    if told.refusal is not None and not is_full:
        yield (
            f"the stream had no room for messages at the last snapshot of the worker that publishes ({told.refusal}): PostgreSQL tells workers"
            " of their tasks",
            "give the account or the stream more room (NatsConfig.max_bytes)",
        )
    if told.refused:
        refused = [f"{queue!r} ({why})" for queue, why in sorted(told.refused.items())]
        yield (
            f"NATS refuses the consumers of these queues, of whose tasks PostgreSQL tells workers: {named(refused)}",
            "see the consumers of the stream (nats consumer ls), the limits of the account, and the rights that the page on NATS lists",
        )


def _of_not_taken(told: Told) -> str:
    if not told.not_taken:
        return ""
    queues = named([repr(queue) for queue in told.not_taken])
    return f"; PostgreSQL tells workers of tasks in queues whose messages nobody takes: {queues}"


def named(items: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    rest = len(items) - NAMED
    return ", ".join(items[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


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
