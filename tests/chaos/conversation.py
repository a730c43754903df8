"""What a client and PostgreSQL say to each other, as far as one must know it to lose a reply after its COMMIT.

What lives here: splitting both streams into messages, and following which statement is being executed; pure. What may
not: sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from everbeat.store.statement import source

_PROTOCOL_3: Final = 3
_FILES: Final = {
    "claim": ("task/claim",),
    "start": ("task/start",),
    "settle": ("task/settle", "task/complete"),
    "release": ("task/release",),
    "recover": ("task/recover",),
    "beat": ("worker/beat",),
    "send": ("task/insert_task", "task/insert_tasks"),
    "cancel": ("task/cancel",),
}
BEGINNINGS: Final[Mapping[bytes, str]] = {
    source(name).splitlines()[0].encode(): verb for verb, names in _FILES.items() for name in names
}
"""Each statement begins with the comment of its file."""


def verb_of(statement: bytes) -> str:
    """Which of the protocol's verbs a statement is; empty for any other."""
    return BEGINNINGS.get(statement.split(b"\n", 1)[0], "")


@dataclass(slots=True)
class Messages:
    """Whole messages out of a stream; `greets`: it begins with one that bears no type, as a client's does."""

    greets: bool = False
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The type and the whole bytes of each message that is complete by now."""
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
                # Requests for encryption and cancels have numbers of their own; after the true greeting messages have types.
                self.greets = struct.unpack_from("!H", whole, 4)[0] != _PROTOCOL_3
                yield b"", whole
            else:
                yield whole[:1], whole


@dataclass(slots=True)
class Conversation:
    """Follows one connection: which verb is executed, and how many answers must come before the one to it."""

    _requests: Messages = field(default_factory=lambda: Messages(greets=True))
    _replies: Messages = field(default_factory=Messages)
    _prepared: dict[bytes, str] = field(default_factory=dict)
    _bound: dict[bytes, str] = field(default_factory=dict)
    _unanswered: int = 1  # the greeting is answered as well

    def asked(self, data: bytes) -> Iterator[tuple[str, int]]:
        """The verbs that these bytes of the client execute, each with the number of answers that come before its own."""
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
        """The messages in these bytes of the server; "Z" ends an answer."""
        for kind, message in self._replies.feed(data):
            if kind == b"Z":
                self._unanswered -= 1
            yield kind, message


def is_outside_transaction(ready: bytes) -> bool:
    """Whether the server, by this "Z" message, has nothing left to commit."""
    return ready[5:6] == b"I"
