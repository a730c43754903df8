"""Oracles about messages: that they travelled, and that nothing of them is left where nobody needs it; pure.

What lives here: one function a promise, each yielding what breaks it. What may not: runs without NATS, which break none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.chaos.evidence import Breach, Evidence


def messages_travelled(evidence: Evidence) -> Iterator[Breach]:
    """N1: workers were really told by NATS."""
    seen = evidence.course.messages
    if seen is not None and seen.delivered == 0:
        yield Breach("N1", "NATS delivered no message")


def the_outbox_is_empty(evidence: Evidence) -> Iterator[Breach]:
    """N2: once all tasks have ended nothing waits to be published, and nothing is taken for published."""
    seen = evidence.course.messages
    if seen is not None and seen.in_outbox:
        yield Breach("N2", f"{seen.in_outbox} rows are left in the outbox though every task has ended")


def the_stream_is_empty(evidence: Evidence) -> Iterator[Breach]:
    """N3: once all tasks have ended every message is acknowledged."""
    seen = evidence.course.messages
    if seen is not None and seen.in_stream:
        what = (
            "there is no stream"
            if seen.in_stream < 0
            else f"{seen.in_stream} messages are left in the stream"
        )
        yield Breach("N3", f"{what} though every task has ended and NATS is well")


def everybody_hears_nats_again(evidence: Evidence) -> Iterator[Breach]:
    """N4: when all is healed no worker is without NATS."""
    seen = evidence.course.messages
    if seen is not None and seen.workers_away:
        yield Breach("N4", f"{seen.workers_away} living workers say that NATS is away, which it is not")


def a_lost_message_loses_no_task(evidence: Evidence) -> Iterator[Breach]:
    """N5: tasks whose messages are gone are told of again, long before the poll finds them."""
    seen = evidence.course.messages
    if seen is not None and seen.found_after_s is None and evidence.course.quiet is not None:
        yield Breach("N5", "tasks whose messages were destroyed did not end in time")


MESSAGE_ORACLES: Final = (
    messages_travelled,
    the_outbox_is_empty,
    the_stream_is_empty,
    everybody_hears_nats_again,
    a_lost_message_loses_no_task,
)
