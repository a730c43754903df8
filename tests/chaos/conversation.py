"""The part of the PostgreSQL wire protocol that is needed to lose a reply after its COMMIT."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from everbeat.store.statement import source

_PROTOCOL_3: Final = 3
_FILES: Final = {
    "claim": ("task/claim_tasks",),
    "start": ("task/start_tasks",),
    "settle": ("task/settle_attempts", "task/complete_attempts"),
    "release": ("task/release_leases",),
    "recover": ("task/recover_leases",),
    "beat": ("worker/record_beat",),
    "send": ("task/insert_task", "task/insert_tasks"),
    "cancel": ("task/cancel_task",),
}
BEGINNINGS: Final[Mapping[bytes, str]] = {
    source(name).splitlines()[0].encode(): verb for verb, names in _FILES.items() for name in names
}
"""The first line of each statement, which is the comment at the top of its file, and the statement's verb."""


def verb_of(statement: bytes) -> str:
    """Return the verb of one of everbeat's statements, or an empty string for other statements."""
    return BEGINNINGS.get(statement.split(b"\n", 1)[0], "")


@dataclass(slots=True)
class Messages:
    """Splits a stream into messages. If `greets` is true, the first message has no type, like a client's startup message."""

    greets: bool = False
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the type and bytes of each message that `data` completes."""
        self._rest += data
        while True:
            head = 0 if self.greets else 1
            if len(self._rest) < head + 4:
                return
            (length,) = struct.unpack_from("!I", self._rest, head)
            if len(self._rest) < head + length:
                return
            whole = bytes(self._rest[: head + length])
            del self._rest[: head + length]
            if self.greets:
                # Encryption and cancel requests have their own numbers. After the real startup message, messages have types.
                self.greets = struct.unpack_from("!H", whole, 4)[0] != _PROTOCOL_3
                yield b"", whole
            else:
                yield whole[:1], whole


@dataclass(slots=True)
class Conversation:
    """Follows one connection: which verbs are executed, and how many other replies precede the reply to each verb."""

    _requests: Messages = field(default_factory=lambda: Messages(greets=True))
    _replies: Messages = field(default_factory=Messages)
    _prepared: dict[bytes, str] = field(default_factory=dict)
    _bound: dict[bytes, str] = field(default_factory=dict)
    _unanswered: int = 1  # the server also replies to the startup message

    def asked(self, data: bytes) -> Iterator[tuple[str, int]]:
        """Yield the verbs that the client executes with this data, each with the number of replies that precede its own."""
        for kind, message in self._requests.feed(data):
            body = message[5:]
            match kind:
                case b"P":
                    name, text = body.split(b"\0", 2)[:2]
                    self._prepared[name] = verb_of(text)
                case b"B":
                    portal, name = body.split(b"\0", 2)[:2]
                    self._bound[portal] = self._prepared.get(name, "")
                case b"E":
                    if verb := self._bound.get(body.split(b"\0", 1)[0], ""):
                        yield verb, self._unanswered
                case b"Q":
                    if verb := verb_of(body.rstrip(b"\0")):
                        yield verb, self._unanswered
                    self._unanswered += 1
                case b"S":
                    self._unanswered += 1
                case _:
                    pass

    def answered(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the messages in this data from the server. A message of type "Z" ends a reply."""
        for kind, message in self._replies.feed(data):
            if kind == b"Z":
                self._unanswered -= 1
            yield kind, message


def is_outside_transaction(ready: bytes) -> bool:
    """Return whether the server is outside a transaction, according to a "Z" message."""
    return ready[5:6] == b"I"
