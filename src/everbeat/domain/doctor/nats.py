"""The NATS checks: whether NATS works, and whether messages reach the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from everbeat.domain.doctor.findings import Check, CheckCode
from everbeat.domain.explain.reasons import counted
from everbeat.errors.wording import some

BEHIND_S: Final = 10.0
"""A message counts as late if it is still unpublished this many seconds after it was due. Replacing the relay takes less time."""


MESSAGE_BYTES: Final = 512
"""A generous estimate of a message's size in the stream, in bytes."""
_MOST_NAMED: Final = 5


class StreamFacts(Struct, frozen=True, kw_only=True):
    """The state of the stream, as reported by a NATS server.

    `waiting` messages have not been delivered yet; `unended` messages have been delivered but not acknowledged. `published_at`
    is when the last message arrived, by the server's clock. No consumer delivers the `undeliverable` messages. `foreign`
    consumers were not created by everbeat. `altered` lists everbeat's consumers that were changed, with the changes.
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
        """Return whether the stream has no room for a message of typical size."""
        return self.max_bytes is not None and self.max_bytes - self.bytes < MESSAGE_BYTES


class NatsTrouble(Struct, frozen=True, kw_only=True):
    """Why NATS could not be checked. `refused` means that the problem will not go away by itself."""

    refused: bool
    text: str
    fix: str | None


class Outbox(Struct, frozen=True, kw_only=True):
    """The state of the outbox.

    `holder` is the worker that publishes messages, if any. `waiting` counts the messages that are due but not published. The
    oldest of these messages has been due for `oldest_s` seconds. `failing` means that the stream rejects all messages.
    """

    holder: str | None
    waiting: int
    oldest_s: float | None
    failing: bool = False


class NatsConnections(Struct, frozen=True, kw_only=True):
    """The NATS connections of live workers, from their last snapshots.

    `up` counts the connected workers, and `away` the disconnected workers. `refusal` is why the stream has no room for
    messages. `refused` maps each queue to the reason why NATS rejects its consumer. No worker takes messages from the
    `not_taken` queues. `denied` lists missing NATS permissions.
    """

    up: int
    away: int
    refusal: str | None = None
    refused: Mapping[str, str] = {}
    not_taken: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    @classmethod
    def of(cls, snapshots: Sequence[Mapping[str, Any] | None]) -> NatsConnections:
        """Count the NATS connections in the `messages` entries of worker snapshots."""
        known = [each for each in snapshots if each is not None and each.get("up") is not None]
        up = sum(bool(each["up"]) for each in known)
        return cls(
            up=up,
            away=len(known) - up,
            refusal=next((each["refusal"] for each in known if each.get("refusal")), None),
            refused={queue: why for each in known for queue, why in (each.get("refused") or {}).items()},
            not_taken=tuple(sorted({queue for each in known for queue in each.get("not_taken") or ()})),
            denied=tuple(sorted({right for each in known for right in each.get("denied") or ()})),
        )


def judge_nats(
    found: StreamFacts | NatsTrouble | None, outbox: Outbox | None, connections: NatsConnections
) -> Check:
    """Judge whether messages reach the workers.

    `found` is None for an app without `wake`. `outbox` is None if no worker of this schema has ever used NATS.
    """
    if found is None:
        return _unseen(outbox, connections)
    if isinstance(found, NatsTrouble):
        if found.refused:
            return CheckCode.NATS.fail(found.text, found.fix)
        if outbox is None:
            return CheckCode.NATS.fail(
                f"{found.text} No worker of this schema has used NATS yet, and none starts.", found.fix
            )
        text = f"{found.text} Until it does, PostgreSQL notifies workers of tasks, as it does without NATS."
        return CheckCode.NATS.warn(text, found.fix)
    if outbox is None:
        text = f"NATS answers at {found.server}; no worker has used it for this schema yet"
        return CheckCode.NATS.ok(text)
    answers = f"NATS answers at {found.server}"
    behind = [*_behind(outbox)]
    complaints = [
        *behind,
        *_of_facts(found),
        *_of_snapshots(connections, is_full=found.is_full),
        *_of_rights(connections),
    ]
    if complaints:
        return _complained("" if behind else f"{answers}; ", complaints)
    if outbox.holder is None:
        return CheckCode.NATS.warn(
            f"{answers}, and no worker publishes messages: workers poll for tasks, or PostgreSQL notifies them",
            "start a worker whose App has this wake=, or see its log for nats_away: everbeat worker MODULE:APP.",
        )
    if not found.exists:
        text = (
            f"{answers}, but stream {found.stream!r} does not exist: a worker creates it again within seconds"
        )
        return CheckCode.NATS.warn(text, "if it disappears again, find out who deletes it.")
    if connections.away:
        workers = counted(connections.up + connections.away, "worker")
        text = f"{answers}, but {connections.away} of {workers} could not reach it at their last snapshots"
        return CheckCode.NATS.warn(
            text, "run 'everbeat workers', and check the network between those workers and NATS."
        )
    text = f"{answers}: {_of_stream(found)}{_of_not_taken(connections)}; {outbox.holder} publishes, NATS notifies {counted(connections.up, 'worker')}"
    return CheckCode.NATS.ok(text)


def _unseen(outbox: Outbox | None, connections: NatsConnections) -> Check:
    """Judge NATS from the database alone, because the app does not configure any NATS servers."""
    if outbox is None:
        text = "NATS is not in use: PostgreSQL notifies workers of tasks"
        return CheckCode.NATS.ok(text)
    if outbox.holder is None and not connections.up:
        text = "NATS is no longer in use: PostgreSQL notifies workers of tasks"
        return CheckCode.NATS.ok(text)
    complaints = [*_behind(outbox), *_of_snapshots(connections, is_full=False), *_of_rights(connections)]
    if complaints:
        return _complained("", complaints)
    text = (
        f"NATS notifies {counted(connections.up, 'worker')} of tasks, {outbox.holder or 'no worker'} publishes; to check NATS itself,"
        " give an app with wake="
    )
    return CheckCode.NATS.ok(text)


def _behind(outbox: Outbox) -> Iterator[tuple[str, str]]:
    """Yield each reason why messages are not being published in time, with its fix."""
    if outbox.failing and outbox.holder is not None:
        yield (
            f"the stream rejects all messages of {outbox.holder}: PostgreSQL notifies workers of tasks instead",
            "check that the stream has a leader, and that the user has the permissions that the page on NATS lists",
        )
        return
    if outbox.oldest_s is None or outbox.oldest_s <= BEHIND_S:
        return
    waiting = "10,000 messages or more" if outbox.waiting >= 10_000 else counted(outbox.waiting, "message")
    text = f"{waiting} due and not published, for up to {outbox.oldest_s:.0f} s: workers poll for those tasks"
    if outbox.holder is None:
        fix = "start a worker whose App has wake=: everbeat worker MODULE:APP"
        yield f"{text}, and no worker publishes", fix
    else:
        fix = f"see the log of {outbox.holder}; if a queue has reached its share of unfinished messages, waiting is normal"
        yield f"{text}; {outbox.holder} publishes", fix


def _complained(begins: str, complaints: Sequence[tuple[str, str]]) -> Check:
    text = "; ".join(text for text, _ in complaints)
    return CheckCode.NATS.warn(f"{begins}{text}", "; ".join(fix for _, fix in complaints) + ".")


def _of_facts(found: StreamFacts) -> Iterator[tuple[str, str]]:
    """Yield each problem of the stream, with its fix."""
    if found.is_full:
        yield (
            f"stream {found.stream!r} is full ({found.bytes:,} of {found.max_bytes:,} bytes): it rejects further messages, and"
            " PostgreSQL notifies workers of those tasks",
            "raise NatsConfig.max_bytes, or start workers that take the waiting tasks",
        )
    if found.foreign:
        yield (
            f"stream {found.stream!r} has consumers that everbeat did not create: {some(found.foreign, limit=_MOST_NAMED)}; NATS does not carry their"
            " queues, and PostgreSQL notifies workers of those tasks",
            f"delete them: nats consumer rm {found.stream} NAME",
        )
    if found.altered:
        yield (
            f"consumers of everbeat were changed: {some(found.altered, limit=_MOST_NAMED)}",
            "restart a worker, which resets them (or for a paused one: nats consumer resume), and find out who changes them",
        )
    if found.undeliverable:
        yield (
            f"no consumer delivers {counted(found.undeliverable, 'message')} of the stream, for example because max_deliver is reached:"
            " PostgreSQL notifies workers of their tasks, and the messages are removed when the tasks have ended",
            "keep max_deliver of the consumers at -1",
        )


def _of_snapshots(connections: NatsConnections, *, is_full: bool) -> Iterator[tuple[str, str]]:
    if connections.refusal is not None and not is_full:
        yield (
            f"the stream had no room for messages at the last snapshot of the worker that publishes ({connections.refusal}): PostgreSQL notifies"
            " workers of their tasks",
            "give the account or the stream more room (NatsConfig.max_bytes)",
        )
    if connections.refused:
        refused = [f"{queue!r} ({why})" for queue, why in sorted(connections.refused.items())]
        yield (
            f"NATS refuses the consumers of these queues, so PostgreSQL notifies workers of their tasks: {some(refused, limit=_MOST_NAMED)}",
            "check the consumers of the stream (nats consumer ls), the limits of the account, and the permissions that the page on NATS lists",
        )


def _of_rights(connections: NatsConnections) -> Iterator[tuple[str, str]]:
    if connections.denied:
        yield (
            f"workers lack permissions at NATS: {some(connections.denied, limit=_MOST_NAMED)}",
            "give the user the permissions that the page on NATS lists, and restart the workers",
        )


def _of_not_taken(connections: NatsConnections) -> str:
    if not connections.not_taken:
        return ""
    queues = some([repr(queue) for queue in connections.not_taken], limit=_MOST_NAMED)
    return (
        f"; no worker takes messages of these queues, so PostgreSQL notifies workers of their tasks: {queues}"
    )


def _of_stream(found: StreamFacts) -> str:
    last = (
        "no message was published yet"
        if found.published_at is None
        else f"the last one came at {found.published_at.isoformat(timespec='seconds')}"
    )
    return (
        f"stream {found.stream!r} holds {counted(found.waiting, 'message')} not delivered and {found.unended} in progress,"
        f" {found.redelivered} of them delivered more than once, {last}"
    )
