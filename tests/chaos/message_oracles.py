"""Oracles about messages: they were delivered, and no message is left after its task has finished. No side effects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.chaos.evidence import Breach, Evidence


def messages_were_delivered(evidence: Evidence) -> Iterator[Breach]:
    """N1: NATS delivered messages to workers."""
    seen = evidence.timeline.messages
    if seen is not None and seen.delivered == 0:
        yield Breach("N1", "NATS delivered no message")


def the_outbox_is_empty(evidence: Evidence) -> Iterator[Breach]:
    """N2: after all tasks have finished, the outbox contains no due or published row."""
    seen = evidence.timeline.messages
    if seen is not None and seen.in_outbox:
        yield Breach("N2", f"{seen.in_outbox} rows are left in the outbox though every task has ended")


def the_stream_is_empty(evidence: Evidence) -> Iterator[Breach]:
    """N3: after all tasks have finished, every message has been acknowledged."""
    seen = evidence.timeline.messages
    if seen is not None and seen.in_stream:
        what = (
            "there is no stream"
            if seen.in_stream < 0
            else f"{seen.in_stream} messages are left in the stream"
        )
        yield Breach("N3", f"{what} though every task has ended and NATS is well")


def every_worker_is_connected_to_nats(evidence: Evidence) -> Iterator[Breach]:
    """N4: after the recovery, every worker is connected to NATS."""
    seen = evidence.timeline.messages
    if seen is not None and seen.workers_away:
        yield Breach("N4", f"{seen.workers_away} living workers say that NATS is away, which it is not")


def a_lost_message_loses_no_task(evidence: Evidence) -> Iterator[Breach]:
    """N5: tasks whose messages are lost are announced again, long before a poll would find them."""
    seen = evidence.timeline.messages
    if seen is not None and seen.found_after_s is None and evidence.timeline.quiet is not None:
        yield Breach("N5", "tasks whose messages were destroyed did not end in time")


MESSAGE_ORACLES: Final = (
    messages_were_delivered,
    the_outbox_is_empty,
    the_stream_is_empty,
    every_worker_is_connected_to_nats,
    a_lost_message_loses_no_task,
)
