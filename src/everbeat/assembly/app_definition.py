"""The definition of an app: its settings and tasks. Workers and supervisors are built from it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import Final, TypeVar

from msgspec import Struct, field

from everbeat.assembly.programs import program
from everbeat.config import QueueConfig, RecoveryConfig, WorkerConfig
from everbeat.domain.metrics.meters import GuardedMeters, Meters
from everbeat.domain.recovery.hooks import HookSet
from everbeat.domain.schedule.model import Declared
from everbeat.domain.settings.checks import instance_of, optional, sequence_of
from everbeat.domain.settings.settings import make_or_gather, refused
from everbeat.domain.settings.units import Duration, milliseconds, span
from everbeat.domain.task.definition import TaskDefinition
from everbeat.domain.task.failure_handler import StoredHandler
from everbeat.domain.task.middleware import Middleware
from everbeat.domain.task.policy import LONGEST_TIMEOUT_S, SHORTEST_STALL_S, OnCrash
from everbeat.domain.task.retry import RetryPolicy
from everbeat.domain.tracing.model import Tracer
from everbeat.domain.tracing.tracing import Tracing
from everbeat.errors import ConfigurationError, WorkerError
from everbeat.nats.options import NatsConfig
from everbeat.runtime.installed_tracers import installed_tracers
from everbeat.runtime.resources import ResourceSet
from everbeat.runtime.sent_counter import SentCounter
from everbeat.runtime.tracing_log import log_meters_failure, log_tracer_failure
from everbeat.store.address import AutoMigrate, DatabaseAddress

_PROGRAM: Final = "__main__"


class AppDefinition(Struct, frozen=True, kw_only=True):
    """The settings and tasks of an app, from which workers and supervisors are built.

    `locator` specifies where a new process finds the app. If None, a new process cannot find the app, so process tasks cannot run.
    `modules` are the other modules that register tasks; a new task process imports them too. A worker process does not need them,
    because it knows only the tasks that are registered when the app is imported. `schedules` are those that the app's code declares, or
    None if it declares none. `failure_handlers` are those of the task functions, by the function's name. `sent` counts the sends of the app.
    """

    address: DatabaseAddress
    auto_migrate: AutoMigrate
    definitions: Mapping[str, TaskDefinition]
    exception_codes: Mapping[type[BaseException], str]
    on_crash: OnCrash
    stall_timeout_ms: int | None
    recovery: RecoveryConfig
    worker: WorkerConfig
    queue_priorities: Mapping[str, int]
    locator: str | None
    modules: tuple[str, ...] = ()
    hooks: HookSet = field(default_factory=HookSet)
    nats: NatsConfig | None = None
    schedules: Declared | None = None
    middleware: Middleware = Middleware()
    resources: ResourceSet = field(default_factory=ResourceSet)
    failure_handlers: Mapping[str, StoredHandler] = field(default_factory=dict)
    sent: SentCounter = field(default_factory=SentCounter)
    dashboard_url: str | None = None
    meters: Meters | None = None

    def check(self) -> None:
        """Raise WorkerError if the app has no tasks, or has process tasks that a worker of the app cannot run."""
        if not self.definitions:
            raise WorkerError(
                "The app has no tasks, so a worker has nothing to do.",
                fix="register functions with @app.task in the module that the locator names, or import their modules there.",
            )
        in_process = sorted(name for name, each in self.definitions.items() if each.run_in == "process")
        if in_process and self.worker.process_concurrency and self.locator is None:
            raise WorkerError(
                f"Tasks with run_in='process' ({', '.join(in_process)}) cannot run here: a new process cannot find this app.",
                fix="create the app at the top level of a module, or set process_concurrency=0 and let other workers run these tasks.",
            )
        of_program = [name for name in in_process if self.definitions[name].function.__module__ == _PROGRAM]
        if of_program and self.worker.process_concurrency and _PROGRAM in self.modules:
            raise WorkerError(
                f"Tasks with run_in='process' ({', '.join(of_program)}) cannot run here: they are registered in the program's main"
                " file. A new process imports only the modules of the app and of its tasks.",
                fix="move them to a module that the program imports, or set process_concurrency=0 and let other workers run these tasks.",
            )

    def check_in_process(self) -> None:
        """Raise ConfigurationError if a worker setting is not allowed for an in-process worker."""
        for name in ("max_tasks_per_process", "max_rss"):
            if (given := getattr(self.worker, name)) is not None:
                raise refused(
                    given,
                    subject=f"run_worker.{name}",
                    code="NOT_IN_PROCESS",
                    rule="cannot be set for an in-process worker, because no supervisor can replace it with a new process",
                    fix=f"pass {name}=None to run_worker, or run 'everbeat worker'",
                )

    def task_process_argv(self) -> tuple[str, ...]:
        """Return the command that starts a task process, or an empty tuple if a new process cannot find the app."""
        if self.locator is None:
            return ()
        return program("task_process", self.locator, *(each for each in self.modules if each != _PROGRAM))


def modules_of(definitions: Mapping[str, TaskDefinition], *, apart_from: str) -> tuple[str, ...]:
    """Return the names of the modules that define these task functions, except the module `apart_from`."""
    return tuple(sorted({each.function.__module__ for each in definitions.values()} - {apart_from}))


def locator_of(app: object, module_name: str) -> str | None:
    """Return the locator with which a new process can find the app in this module. Return None if the app is not a global variable
    of the module.
    """
    module = sys.modules.get(module_name)
    name = next((name for name, value in vars(module).items() if value is app), None) if module else None
    if name is None:
        return None
    if module_name != _PROGRAM:
        return f"{module_name}:{name}"
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    place = spec.name if spec is not None else file
    return None if place is None else f"{place}:{name}"


def owner_of(app: object, module_name: str) -> str:
    """Return the owner of the schedules that an unnamed app declares: the module and the variable of the app.

    The owner is the same if the module is the main program of one process and is imported by another.
    """
    locator = locator_of(app, module_name)
    if locator is None:
        return module_name
    place, _, name = locator.rpartition(":")
    return f"{PurePath(place).stem if place.endswith('.py') else place}:{name}"


S = TypeVar("S", RecoveryConfig, WorkerConfig)


_OTHER_NAMES: Final[Mapping[str, str]] = {
    "database": "url",
    "database_url": "url",
    "dsn": "url",
    "conninfo": "url",
    "nats": "wake",
}
"""Maps other systems' names for a parameter of `App` to the name of that parameter."""
_PARTS: Final = (("recovery", RecoveryConfig), ("worker", WorkerConfig))


def misplaced_setting(name: str) -> tuple[str, str] | None:
    """Return a rule and a fix if `name` is not a parameter of `App`, but a setting of RecoveryConfig, WorkerConfig or another system.

    Return None for any other name.
    """
    if name in _OTHER_NAMES:
        return "App has no argument of this name", f"use {_OTHER_NAMES[name]}"
    for parameter, kind in _PARTS:
        if name in {each.name for each in fields(kind)}:
            return f"is a setting of {kind.__name__}", f"write App({parameter}={kind.__name__}({name}=...))"
    return None


def settings_or_default(given: S | None, kind: type[S], *, subject: str) -> S:
    """Return the given settings, or the default settings if `given` is None.

    Raises ConfigurationError if the settings have the wrong type. While an `App` is being created, the error is collected instead.
    """
    default = kind()
    return (
        default
        if given is None
        else make_or_gather(lambda: instance_of(kind)(given, subject=subject), otherwise=default)
    )


def stall_timeout_ms_of(given: Duration | None) -> int | None:
    """Return the app's default stall timeout in milliseconds, or None if it has none. Raises ConfigurationError if it is invalid."""
    check = optional(span(SHORTEST_STALL_S, LONGEST_TIMEOUT_S), none="watches no progress")
    seconds = check(given, subject="App.stall_timeout")
    return None if seconds is None else milliseconds(seconds)


def retry_of(given: RetryPolicy | None) -> RetryPolicy | None:
    """Return the app's default retry policy, or None if it has none. Raises ConfigurationError if it is not a RetryPolicy."""
    check = optional(instance_of(RetryPolicy), none="never retries")
    found: RetryPolicy | None = check(given, subject="App.retry")
    return found


def nats_of(wake: str | NatsConfig | None, recovery: RecoveryConfig) -> NatsConfig | None:
    """Return the NATS settings, or None if `wake` is None. Raises ConfigurationError if they are invalid or contradict the recovery
    settings.
    """
    found = NatsConfig.parse(wake)
    if found is not None and (problems := found.problems(recovery)):
        raise ConfigurationError(list(problems))
    return found


def tracing_of(given: Tracer | Sequence[Tracer] | None, address: DatabaseAddress) -> Tracing | None:
    """Return the tracers of an app with this database, or None without any. Raises ConfigurationError if one of them is not a tracer."""
    fix = "pass everbeat.tracing.OpenTelemetry(), or an object of a class that inherits from everbeat.tracing.Tracer"
    tracers = [given] if isinstance(given, Tracer) else () if given is None else given
    if not isinstance(tracers, Sequence) or not all(isinstance(each, Tracer) for each in tracers):
        rule = f"must be a tracer or a sequence of tracers, not of type {type(given).__name__}"
        raise refused(given, subject="App.tracing", code="WRONG_TYPE", rule=rule, fix=fix)
    tracers = [*tracers, *installed_tracers()]
    if not tracers:
        return None
    tracing = Tracing(tracers, log_tracer_failure)
    if (server := address.server) is not None:
        tracing.database(*server)
    return tracing


def meters_of(given: Meters | None) -> Meters | None:
    """Return the recorder of an app whose errors are logged, or None without one. Raises ConfigurationError if it is not a recorder."""
    if given is None:
        return None
    if not isinstance(given, Meters):
        raise refused(
            given,
            subject="App.metrics",
            code="WRONG_TYPE",
            rule=f"must be a recorder of metrics, not of type {type(given).__name__}",
            fix="pass everbeat.metrics.OpenTelemetryMetrics(), or an object of a class that inherits from everbeat.metrics.Meters",
        )
    return GuardedMeters(given, log_meters_failure)


def distinct_queues(queues: Sequence[QueueConfig]) -> tuple[QueueConfig, ...]:
    """Return the declared queues as a tuple. Raises ConfigurationError if a queue is declared twice."""
    check = sequence_of(instance_of(QueueConfig), longest=1_000, example="QueueConfig('mail')")
    found: tuple[QueueConfig, ...] = check(queues, subject="App.queues")
    names = [queue.name for queue in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        rule = f"names {', '.join(twice)} more than once"
        raise refused(names, subject="App.queues", code="DUPLICATE", rule=rule, fix="declare each queue once")
    return found
