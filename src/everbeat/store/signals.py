"""The statement of whoever signals a task or a workflow."""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from msgspec import Struct

from everbeat.store.statement import Statement


class SignalVerdict(Struct, frozen=True):
    """What became of a signal: "stored", or refused because its target has "ended" or is "unknown"."""

    verdict: Literal["stored", "ended", "unknown"]
    kind: Literal["task", "workflow"] | None
    state: str | None


def send_signal(
    signal_id: UUID, *, target: UUID, name: str, value: bytes, channel: str
) -> Statement[SignalVerdict]:
    """Stores a signal and makes due whoever waits for it; repeatable by its id."""
    parameters = {
        "id": signal_id,
        "target": target,
        "name": name,
        "value": value.decode(),
        "channel": channel,
    }
    return Statement("signal/send", parameters, lambda found: SignalVerdict(*found[0]))
