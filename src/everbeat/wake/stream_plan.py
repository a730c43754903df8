"""How the stream of one schema and its consumers are called and set: the same for all programs of that schema.

What lives here: names and settings, as JetStream's own JSON. What may not: nats, and asking anybody.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from everbeat.wake.options import NatsConfig

DUPLICATE_WINDOW_S: Final = 120
"""How long the stream remembers the id of a message."""
LONGEST_TOKEN: Final = 120
MOST_UNENDED: Final = 100_000
"""Deliveries of one queue that may be under way, over all workers together."""
MOST_QUEUES: Final = 100_000
"""Consumers that a stream may have, where the server's own limit proves too low."""
MOST_REQUESTS: Final = 16_384
"""Open requests for deliveries of one queue, over all workers together."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]+")
_SPECIAL: Final = re.compile(rb"[^A-Za-z0-9_-]")
_OF_QUEUE: Final = "everbeat: queue "
_NS: Final = 1_000_000_000


def token(name: str) -> str:
    """A name as one token of a subject: other characters as %XX of UTF-8, long ones as a hash; two names never get the same."""
    if _PLAIN.fullmatch(name) and len(name) <= LONGEST_TOKEN:
        return name
    spelt = name.encode(errors="surrogatepass")
    escaped = _SPECIAL.sub(lambda found: b"%%%02X" % found[0][0], spelt).decode()
    if 0 < len(escaped) <= LONGEST_TOKEN:
        return escaped
    return f"%h{hashlib.sha256(spelt).hexdigest()}"  # h is no hexadecimal digit: no escaped name begins so


class StreamPlan(Struct, frozen=True):
    """The stream of a schema. `ack_wait_s` is the acknowledgement wait of its consumers in seconds."""

    schema: str
    config: NatsConfig
    ack_wait_s: float

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self.config.stream or f"EVERBEAT_{token(self.schema)}"

    @property
    def subjects(self) -> str:
        """The subjects of all queues, as a wildcard."""
        return f"{self._head}.*"

    def subject(self, queue: str) -> str:
        """Where messages of a queue are published."""
        return f"{self._head}.{token(queue)}"

    def consumer(self, queue: str) -> str:
        """The durable name of a queue's consumer."""
        return token(queue)

    def message_id(self, message_id: str) -> str:
        """What the stream knows a message by for as long as its window is."""
        return f"{self.schema}.{message_id}"

    def stream_settings(self) -> dict[str, Any]:
        """The stream as STREAM.CREATE and STREAM.UPDATE take it."""
        return {
            "name": self.stream,
            "description": self._description,
            "subjects": [self.subjects],
            "retention": "workqueue",
            "storage": "file",
            "discard": "new",
            "max_bytes": self.config.max_bytes or -1,
            "num_replicas": self.config.replicas,
            "duplicate_window": DUPLICATE_WINDOW_S * _NS,
            "metadata": {"everbeat": "hints", "everbeat.schema": self.schema},
        }

    def consumer_settings(self, queue: str) -> dict[str, Any]:
        """The consumer of a queue as CONSUMER.CREATE takes it, to make it or to change it."""
        return {
            "stream_name": self.stream,
            "config": {
                "durable_name": self.consumer(queue),
                "name": self.consumer(queue),
                "description": f"{_OF_QUEUE}{queue}"[:500],
                "deliver_policy": "all",
                "ack_policy": "explicit",
                "ack_wait": round(self.ack_wait_s * _NS),
                "max_deliver": -1,  # how often is enough is for the database to say
                "max_ack_pending": MOST_UNENDED,
                "max_waiting": MOST_REQUESTS,
                "filter_subject": self.subject(queue),
                "replay_policy": "instant",
            },
        }

    def is_own_consumer(self, found: Mapping[str, Any]) -> bool:
        """Return whether everbeat made the consumer with these settings."""
        return str(found.get("description", "")).startswith(_OF_QUEUE)

    def altered(self, info: Mapping[str, Any]) -> Iterator[str]:
        """Say what somebody changed in a consumer of ours so that it delivers less than it should."""
        settings = info.get("config") or {}
        planned = self.consumer_settings("")["config"]
        for name in ("max_deliver", "max_ack_pending", "max_waiting"):
            if name in settings and settings[name] != planned[name]:
                yield f"{name} is {settings[name]}, not {planned[name]}"
        if settings.get("backoff"):
            yield "it has a backoff"
        if info.get("paused"):
            yield "it is paused"

    def foreign(self, found: Mapping[str, Any]) -> str | None:
        """Why a stream with these settings is not ours to use, None where it is."""
        metadata = found.get("metadata") or {}
        owner = metadata.get("everbeat.schema")
        # Servers before 2.10 keep no metadata.
        if owner is None and found.get("description") != self._description:
            return "it was not made by everbeat"
        if owner not in (None, self.schema):
            return f"it belongs to the schema {owner!r}"
        if found.get("retention") != "workqueue":
            return f"its retention is {found.get('retention')!r}, not 'workqueue', and cannot be changed"
        if list(found.get("subjects") or ()) != [self.subjects]:
            return f"its subjects are {found.get('subjects')!r}, not {[self.subjects]!r}"
        return None

    def differs(self, found: Mapping[str, Any]) -> bool:
        """Whether a stream of ours is set otherwise than planned."""
        planned = self.stream_settings()
        # A server adds entries of its own to the metadata.
        metadata = found.get("metadata")
        if metadata is not None and not planned.pop("metadata").items() <= metadata.items():
            return True
        planned.pop("metadata", None)
        return any(found.get(name) != value for name, value in planned.items())

    @property
    def _head(self) -> str:
        own = self.config.stream
        # @ is in no token: a stream of another name takes nothing from that of the default one.
        return f"everbeat.{token(self.schema)}" + ("" if own is None else f"@{token(own)}")

    @property
    def _description(self) -> str:
        return f"everbeat: hints of the schema {self.schema}"
