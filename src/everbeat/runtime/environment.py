"""The objects that all parts of one process share: its clock, random number generator and event bus."""

from __future__ import annotations

from random import Random

from msgspec import Struct, field

from everbeat.runtime.clock import Clock, SystemClock
from everbeat.runtime.events import EventBus, is_logged
from everbeat.runtime.failure_log import LOG


class ProcessEnvironment(Struct, frozen=True, kw_only=True):
    """The clock, the random number generator and the event bus of a process."""

    events: EventBus = field(default_factory=EventBus)
    clock: Clock = field(default_factory=SystemClock)
    random: Random = field(default_factory=Random)


def logging_environment() -> ProcessEnvironment:
    """Return the environment of a process that logs its events."""
    environment = ProcessEnvironment()
    environment.events.subscribe(LOG, listens=is_logged)
    return environment
