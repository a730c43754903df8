"""What an app is to its workers: data, gathered once, from which everything that runs tasks is made."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.hooks import HookSet
from everbeat.domain.policy import OnCrash
from everbeat.domain.settings import refused
from everbeat.errors import WorkerError
from everbeat.store.address import AutoMigrate, DatabaseAddress
from everbeat.wake.options import NatsConfig


class Blueprint(Struct, frozen=True, kw_only=True):
    """`locator` is how a new process finds the app; None where none was found, so that process tasks cannot run."""

    address: DatabaseAddress
    auto_migrate: AutoMigrate
    definitions: Mapping[str, TaskDefinition]
    exception_codes: Mapping[type[BaseException], str]
    on_crash: OnCrash
    recovery: RecoveryConfig
    worker: WorkerConfig
    queue_priorities: Mapping[str, int]
    locator: str | None
    hooks: HookSet = field(default_factory=HookSet)
    nats: NatsConfig | None = None

    def check(self) -> None:
        """Raises WorkerError for an app that a worker can do nothing with."""
        if not self.definitions:
            raise WorkerError(
                "The app has no tasks, so a worker has nothing to do.",
                fix="register functions with @app.task in the module that the locator names, or import there those that do.",
            )
        in_process = sorted(name for name, each in self.definitions.items() if each.run_in == "process")
        if in_process and self.worker.process_concurrency and self.locator is None:
            raise WorkerError(
                f"Tasks with run_in='process' ({', '.join(in_process)}) cannot run here: a new process would not find this app.",
                fix="make the app at the top level of a module, or run it with process_concurrency=0 and leave them to others.",
            )

    def check_guest(self) -> None:
        """Raises ConfigurationError for settings that a worker in another program cannot have."""
        for name in ("max_tasks_per_process", "max_rss"):
            if (given := getattr(self.worker, name)) is not None:
                raise refused(
                    given,
                    subject=f"run_worker.{name}",
                    code="NOT_FOR_A_GUEST",
                    rule="is not for a worker in another program, which nobody could replace by a fresh one",
                    fix=f"pass {name}=None to run_worker, or run 'everbeat worker'",
                )

    def on_loop(self) -> list[str]:
        """The tasks whose code runs on the event loop of a worker."""
        return sorted(name for name, each in self.definitions.items() if each.run_in == "async")

    def parameters(self) -> dict[str, object]:
        """By task name, the argument names that its function takes and requires."""
        return {name: each.codec.accepts.to_json() for name, each in sorted(self.definitions.items())}

    def lanes(self) -> dict[str, dict[str, object]]:
        """By kind, the slots of a worker and the tasks that run in them: what tells a busy kind from an idle worker."""
        names: dict[str, list[str]] = {}
        for name, each in sorted(self.definitions.items()):
            names.setdefault(each.run_in, []).append(name)
        return {
            kind: {"slots": getattr(self.worker, f"{kind}_concurrency"), "tasks": tasks}
            for kind, tasks in names.items()
        }

    def task_process_argv(self) -> tuple[str, ...]:
        """What starts a task process; empty where none can be started."""
        return () if self.locator is None else program("task_process", self.locator)


def worker_process_argv(locator: str, overrides: Mapping[str, object]) -> tuple[str, ...]:
    """What starts a worker process of an app, with some of its worker settings replaced."""
    return program("worker_process", locator, msgspec.json.encode(overrides).decode())


def program(name: str, *arguments: str) -> tuple[str, ...]:
    """A program of this package, run by this Python."""
    return (sys.executable, "-m", f"everbeat.cli.{name}", *arguments)
