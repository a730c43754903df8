"""The planned stream of one schema, its consumers and its messages. This module does not require the nats-py package."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.nats.options import NatsConfig

DUPLICATE_WINDOW_S: Final = 120
"""How many seconds the stream remembers the id of a message."""
LONGEST_TOKEN: Final = 120
MOST_UNENDED: Final = 100_000
"""The maximum number of unacknowledged messages of one queue, across all workers."""
MOST_QUEUES: Final = 100_000
"""The consumer limit of a stream, which is set if the server's default proves too low."""
MOST_REQUESTS: Final = 16_384
"""The maximum number of open requests for messages of one queue, across all workers."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]+")
_SPECIAL: Final = re.compile(rb"[^A-Za-z0-9_-]")
_OF_QUEUE: Final = "everbeat: queue "
_NS: Final = 1_000_000_000


def token(name: str) -> str:
    """Return a name as one unique subject token. Characters other than A-Z, a-z, 0-9, _ and - become %XX; long names become a hash."""
    if _PLAIN.fullmatch(name) and len(name) <= LONGEST_TOKEN:
        return name
    spelt = name.encode(errors="surrogatepass")
    escaped = _SPECIAL.sub(lambda found: b"%%%02X" % found[0][0], spelt).decode()
    if 0 < len(escaped) <= LONGEST_TOKEN:
        return escaped
    return f"%h{hashlib.sha256(spelt).hexdigest()}"  # h is not a hexadecimal digit, so no escaped name starts like this


class StreamPlan(Struct, frozen=True):
    """The stream of a schema. `ack_wait_s` is the acknowledgement wait of its consumers in seconds."""

    schema: str
    config: NatsConfig
    ack_wait_s: float

    @property
    def stream(self) -> str:
        """Return the stream's name."""
        return self.config.stream or f"EVERBEAT_{token(self.schema)}"

    @property
    def subjects(self) -> str:
        """Return a wildcard that matches the subjects of all queues."""
        return f"{self._head}.*"

    def subject(self, queue: str) -> str:
        """Return the subject of a queue's messages."""
        return f"{self._head}.{token(queue)}"

    def consumer(self, queue: str) -> str:
        """Return the durable name of a queue's consumer."""
        return token(queue)

    def message_id(self, message_id: str) -> str:
        """Return the id by which the stream detects duplicates within its duplicate window."""
        return f"{self.schema}.{message_id}"

    def stream_settings(self) -> dict[str, Any]:
        """Return the settings for STREAM.CREATE and STREAM.UPDATE."""
        return {
            "name": self.stream,
            "description": self._description,
            "subjects": [self.subjects],
            "retention": "workqueue",
            "storage": "file",
            "discard": "new",
            "max_bytes": self.config.max_bytes or -1,
            # With other values, the stream would drop or reject messages, prevent replies, or contradict the duplicate window.
            "no_ack": False,
            "max_msgs": -1,
            "max_msgs_per_subject": -1,
            "max_msg_size": -1,
            "max_age": 0,
            "discard_new_per_subject": False,
            "num_replicas": self.config.replicas,
            "duplicate_window": DUPLICATE_WINDOW_S * _NS,
            "metadata": {"everbeat": "hints", "everbeat.schema": self.schema},
        }

    def consumer_settings(self, queue: str) -> dict[str, Any]:
        """Return the settings for CONSUMER.CREATE, which creates or updates a queue's consumer."""
        return {
            "stream_name": self.stream,
            "config": {
                "durable_name": self.consumer(queue),
                "name": self.consumer(queue),
                "description": f"{_OF_QUEUE}{queue}"[:500],
                "deliver_policy": "all",
                "ack_policy": "explicit",
                "ack_wait": round(self.ack_wait_s * _NS),
                "max_deliver": -1,  # the database decides about attempts
                "max_ack_pending": MOST_UNENDED,
                "max_waiting": MOST_REQUESTS,
                "filter_subject": self.subject(queue),
                "replay_policy": "instant",
            },
        }

    def is_own_consumer(self, found: Mapping[str, Any]) -> bool:
        """Return whether everbeat created the consumer with these settings."""
        return str(found.get("description", "")).startswith(_OF_QUEUE)

    def altered(self, info: Mapping[str, Any]) -> Iterator[str]:
        """Yield a description of each changed setting that makes everbeat's consumer deliver too little."""
        settings = info.get("config") or {}
        planned = self.consumer_settings("")["config"]
        for name in ("max_deliver", "max_ack_pending", "max_waiting"):
            if name in settings and settings[name] != planned[name]:
                yield f"{name} is {settings[name]}, not {planned[name]}"
        for name in ("headers_only", "max_batch", "max_expires", "inactive_threshold"):
            if settings.get(name):
                yield f"{name} is set"
        if settings.get("filter_subject") != f"{self._head}.{info.get('name')}":
            yield f"it takes {settings.get('filter_subject') or 'all subjects'}"
        if settings.get("backoff"):
            yield "it has a backoff"
        if info.get("paused"):
            yield "it is paused"

    def foreign(self, found: Mapping[str, Any]) -> str | None:
        """Return why everbeat must not use a stream with these settings, or None if it may use the stream."""
        metadata = found.get("metadata") or {}
        owner = metadata.get("everbeat.schema")
        # Servers before 2.10 do not store metadata.
        if owner is None and found.get("description") != self._description:
            return "everbeat did not create it"
        if owner not in (None, self.schema):
            return f"it belongs to the schema {owner!r}"
        if found.get("retention") != "workqueue":
            return f"its retention is {found.get('retention')!r}, not 'workqueue', and cannot be changed"
        if list(found.get("subjects") or ()) != [self.subjects]:
            return f"its subjects are {found.get('subjects')!r}, not {[self.subjects]!r}"
        return None

    def differs(self, found: Mapping[str, Any]) -> bool:
        """Return whether the settings of everbeat's stream differ from the plan."""
        planned = self.stream_settings()
        # A server adds its own entries to the metadata.
        metadata = found.get("metadata")
        if metadata is not None and not planned.pop("metadata").items() <= metadata.items():
            return True
        planned.pop("metadata", None)
        # A server omits false and zero values.
        return any((found.get(name) or None) != (value or None) for name, value in planned.items())

    @property
    def _head(self) -> str:
        own = self.config.stream
        # No token contains @, so a stream with another name gets no messages of the default stream.
        return f"everbeat.{token(self.schema)}" + ("" if own is None else f"@{token(own)}")

    @property
    def _description(self) -> str:
        return f"everbeat: hints of the schema {self.schema}"


NOT_CARRIED: Final = 0
"""The place that is reported for a message that is not in the stream.

Either its queue has no consumer, no worker requests its messages, the user cannot publish it, or the stream is full. PostgreSQL notifies
workers of its task.
"""


class TaskMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that a task might be claimable. `number` identifies its row in the outbox, and `times` counts earlier publications of that row.

    `cleared` means that the task was recovered from a dead worker, for the given `reason`. `fence` is the fencing token of the task's last
    claim, or 0 before the first claim.
    """

    task_id: UUID
    queue: str
    number: int
    times: int = 0
    fence: int = 0
    cleared: bool = False
    reason: str | None = None

    @property
    def id(self) -> str:
        """Return the id that makes repeated publication idempotent. The id contains the task's id, because a new schema reuses row numbers."""
        return f"{self.task_id}.{self.number}.{self.times}"


class Stored(Struct, frozen=True, kw_only=True):
    """One message in the stream. `message` is None if the message is unreadable."""

    place: int
    message: TaskMessage | None


def encode(message: TaskMessage) -> bytes:
    """Return the message as bytes."""
    return msgspec.json.encode(message)


_decoder = msgspec.json.Decoder(TaskMessage)


def decode(data: bytes) -> TaskMessage | None:
    """Return the message in `data`, or None if `data` is unreadable."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return None
