"""Telling a task or a workflow of an event.

What lives here: the plan of a signal, and to whom it goes. What may not: waiting for one, which running code does (`domain.durable`).
"""

from __future__ import annotations

from uuid import UUID

from everbeat.client.control import to_task_id
from everbeat.client.door import Door
from everbeat.domain.step_book import checked_event, encode_signal
from everbeat.errors import SignalRefused, TaskNotFound
from everbeat.store.plan import Plan, ask
from everbeat.store.signals import send_signal


def to_target(value: object) -> UUID:
    """The id of a task or a workflow: given itself, as text, or by a handle; raises ConfigurationError for anything else."""
    found = getattr(value, "id", None)
    return found if isinstance(found, UUID) else to_task_id(value)


def signalled(door: Door, target: UUID, name: str, value: object, *, signal_id: UUID) -> Plan[None]:
    """Stores a signal. Raises SignalRefused, TaskNotFound, PayloadError."""
    event = checked_event(name)
    data = encode_signal(value, event=event)
    statement = send_signal(signal_id, target=target, name=event, value=data, channel=door.channel)
    found = yield from ask(statement)
    match found.verdict:
        case "ended":
            raise SignalRefused(target, kind=found.kind or "task", state=found.state or "", name=event)
        case "unknown":
            raise TaskNotFound(target)
        case _:
            return
