"""Check what an app is given besides its database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from everbeat.config import QueueConfig, RecoveryConfig, WorkerConfig
from everbeat.domain.checks import instance_of, sequence_of
from everbeat.domain.gathering import attempt
from everbeat.domain.settings import refused
from everbeat.errors import ConfigurationError
from everbeat.wake.options import NatsConfig

S = TypeVar("S", RecoveryConfig, WorkerConfig)


def settings_or_default(given: S | None, kind: type[S], *, subject: str) -> S:
    """The settings that were given, or the defaults. Raises ConfigurationError, or gathers it."""
    default = kind()
    return (
        default
        if given is None
        else attempt(lambda: instance_of(kind)(given, subject=subject), otherwise=default)
    )


def nats_of(wake: str | NatsConfig | None, recovery: RecoveryConfig) -> NatsConfig | None:
    """The NATS settings, checked against those of recovery. Raises ConfigurationError."""
    found = NatsConfig.parse(wake)
    if found is not None and (problems := found.problems(recovery)):
        raise ConfigurationError(list(problems))
    return found


def distinct_queues(queues: Sequence[QueueConfig]) -> tuple[QueueConfig, ...]:
    """The declared queues. Raises ConfigurationError if one is declared twice."""
    found: tuple[QueueConfig, ...] = sequence_of(instance_of(QueueConfig), longest=1_000)(
        queues, subject="App.queues"
    )
    names = [queue.name for queue in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        rule = f"names {', '.join(twice)} more than once"
        raise refused(names, subject="App.queues", code="DUPLICATE", rule=rule, fix="declare each queue once")
    return found
