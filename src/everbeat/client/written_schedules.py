"""Schedules that a person writes into a form. The task is known by its name, and an edit keeps what the form does not contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from msgspec import UNSET, Struct, structs

from everbeat.client.options import SendOptions
from everbeat.client.registry import call_by_name
from everbeat.client.schedule_methods import ScheduleMethods, next_ticks_of
from everbeat.client.schedules import Schedule, definition_of
from everbeat.client.task import Call
from everbeat.domain.schedule.inspection import ScheduleInfo
from everbeat.domain.schedule.model import Definition, ScheduledCall
from everbeat.domain.schedule.ticks import rule_ticks
from everbeat.errors import ConfigurationError, PayloadError
from everbeat.store.schedules import StoredCall


class KeptOptions(Struct, frozen=True, kw_only=True):
    """The options of a stored call that an edited schedule keeps.

    `replaced` are words for those that it cannot keep: saving replaces them by the options that the app declares for the task.
    """

    send: SendOptions
    replaced: tuple[str, ...]


def named_call(
    owner: ScheduleMethods, task: str, arguments: Mapping[str, Any] | None, options: SendOptions
) -> Call[Any]:
    """Return a call of a task that is known by its name, as `App.send_by_name` makes it. Raises PayloadError or ConfigurationError."""
    return call_by_name(owner._registry, task, arguments, when=None, options=options)


def stored_definition(owner: ScheduleMethods, schedule: Schedule) -> Definition:
    """Return what `App.put_schedule` would store. Raises ConfigurationError in the same cases."""
    return definition_of(schedule, owner._sender)


def kept_options(owner: ScheduleMethods, found: ScheduleInfo, stored: StoredCall) -> KeptOptions:
    """Return the options of a schedule's call, and which of them the app no longer declares in the same way."""
    send: SendOptions = {"queue": found.queue, "priority": found.priority, "key": found.key}
    if stored.labels:
        send["labels"] = stored.labels
    try:
        now = _call_now(owner, found, send)
        if now.serial != found.serial:
            send["serial"] = _serial_option(found.serial)
            now = _call_now(owner, found, send)
    except (ConfigurationError, PayloadError):
        return KeptOptions(send=send, replaced=("options that the form does not contain",))
    replaced = []
    if now.serial != found.serial:
        replaced.append("serial line")
    if (now.policy, now.flags) != (stored.policy, stored.flags):
        replaced.append("retries, timeouts and crash rules")
    gates = () if now.gates is UNSET else now.gates
    costs = None if now.costs is UNSET else now.costs
    if (gates, costs) != (stored.gates, stored.costs):
        replaced.append("limits")
    return KeptOptions(send=send, replaced=tuple(replaced))


def _call_now(owner: ScheduleMethods, found: ScheduleInfo, send: SendOptions) -> ScheduledCall:
    return owner._sender.scheduled_call(named_call(owner, found.task, found.arguments, send))


def _serial_option(stored: str | None) -> str | bool:
    """Return the option that puts a call into the stored serial line, which is that of a key, of the task, or none."""
    if stored is None or stored.startswith("task:"):
        return stored is not None
    return stored.removeprefix("key:")


def begins_anew(definition: Definition, found: ScheduleInfo | None) -> bool:
    """Return whether a schedule decides its ticks from now on. Otherwise, it continues where the stored one was."""
    return (
        found is None
        or found.rule is None
        or found.state == "ENDED"
        or found.rule.timing != definition.rule.timing
    )


def coming_ticks(definition: Definition, found: ScheduleInfo | None, *, now: datetime) -> Iterator[datetime]:
    """Yield the ticks that are to come if the definition replaces the stored schedule, or None, in order."""
    rule = definition.rule
    if found is None:
        yield from islice(rule_ticks(rule, after=now), rule.most_runs)
        return
    replaced = structs.replace(
        found,
        rule=rule,
        state="ACTIVE" if found.paused_at is None else "PAUSED",
        decided_to=now if begins_anew(definition, found) else found.decided_to,
    )
    yield from next_ticks_of(replaced)
