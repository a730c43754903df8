"""The app: where tasks are registered, sent, watched and run; the one object that a user's program makes.

What lives here: `App`, which gives each of its wishes to the part that grants it. What may not: logic of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack, cast
from weakref import WeakSet

from everbeat import assembly
from everbeat.assembly.app_settings import distinct_queues, nats_of, settings_or_default
from everbeat.assembly.blueprint import Blueprint
from everbeat.client.control import Control
from everbeat.client.decorator import TaskFactory
from everbeat.client.desk import Desk
from everbeat.client.door import Door, refuse_in_loop
from everbeat.client.explaining import silence_rules
from everbeat.client.hooks import HookRegistry, InterruptedHook, RecoveredHook, RecoveryDecorator
from everbeat.client.options import call_patience
from everbeat.client.registry import Registry
from everbeat.client.sender import CallSender, TaskIds
from everbeat.client.twins import awaiting, blocking
from everbeat.config import QueueConfig, RecoveryConfig, WorkerConfig, WorkerSettings
from everbeat.domain.checks import exception_codes as checked_codes
from everbeat.domain.checks import one_of, switch_or
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.duration import Duration
from everbeat.domain.gathering import attempt
from everbeat.domain.inspection import SweepResult
from everbeat.domain.payload_limit import DEFAULT_LIMIT
from everbeat.domain.payload_limit import payload_limit as checked_limit
from everbeat.domain.policy import OnCrash, TaskOptions
from everbeat.domain.settings import refused
from everbeat.runtime.clock import SystemClock
from everbeat.store.address import NOWHERE, AutoMigrate, DatabaseAddress
from everbeat.store.migrations import SchemaStatus
from everbeat.store.patience import DEFAULT_PATIENCE_S
from everbeat.store.plan import Plan
from everbeat.wake.options import NatsConfig

InterruptedT = TypeVar("InterruptedT", bound=InterruptedHook)
RecoveredT = TypeVar("RecoveredT", bound=RecoveredHook)


class App(Desk):
    """Tasks and the database they are kept in; safe to use from many threads and event loops, and after a fork.

    `url` is a libpq URL, or "embedded" for a PostgreSQL in ./.everbeat; None reads EVERBEAT_DATABASE_URL. `wake`: workers are
    told of tasks by NATS JetStream there, "nats://host:4222" or a NatsConfig; None: by PostgreSQL. Nothing is opened before the
    first use. `payload_limit`: the most that the arguments, or the result, of a task take as JSON. Raises WrongDatabaseURL and
    ConfigurationError.

        app = App("postgresql://app@db.example.org/app")
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        schema: str = "everbeat",
        recovery: RecoveryConfig | None = None,
        worker: WorkerConfig | None = None,
        queues: Sequence[QueueConfig] = (),
        wake: str | NatsConfig | None = None,
        on_crash: OnCrash = "fail",
        exception_codes: Mapping[type[BaseException], str] | None = None,
        auto_migrate: AutoMigrate = "create",
        payload_limit: str | int = DEFAULT_LIMIT,
        patience: Duration = "5s",
        name: str | None = None,
    ) -> None:
        self.recovery = settings_or_default(recovery, RecoveryConfig, subject="App.recovery")
        self.worker = settings_or_default(worker, WorkerConfig, subject="App.worker")
        self.queue_configs = attempt(lambda: distinct_queues(queues), otherwise=())
        self.nats = attempt(lambda: nats_of(wake, self.recovery), otherwise=None)
        self.on_crash: OnCrash = attempt(
            lambda: one_of("fail", "retry")(on_crash, subject="App.on_crash"), otherwise="fail"
        )
        self.exception_codes = attempt(
            lambda: checked_codes(exception_codes or {}, subject="App.exception_codes"), otherwise={}
        )
        address = attempt(
            lambda: DatabaseAddress.parse(url, schema=schema, environment=os.environ),
            otherwise=NOWHERE,
        )
        self.schema = schema
        self.name = name or "app"
        self.module = _caller_module()
        self.auto_migrate: AutoMigrate = attempt(
            lambda: switch_or("create")(auto_migrate, subject="App.auto_migrate"), otherwise=False
        )
        self.payload_limit = checked_limit(payload_limit)
        self._guests: WeakSet[assembly.Guest] = WeakSet()
        self._hooks = HookRegistry()
        patience_s = attempt(
            lambda: call_patience(patience, subject="App.patience"), otherwise=DEFAULT_PATIENCE_S
        )
        door = Door(address, auto_migrate=self.auto_migrate, patience_s=patience_s)
        priorities = {queue.name: queue.priority for queue in self.queue_configs}
        control = Control(
            door,
            alive_within_ms=self.recovery.claimed_stale_threshold_ms,
            silence=silence_rules(self.recovery),
            payload_limit=self.payload_limit,
        )
        sender = CallSender(
            control,
            ids=TaskIds(SystemClock()),
            on_crash=self.on_crash,
            queues={"default", *priorities} if priorities else (),
            serial_queues={queue.name for queue in self.queue_configs if queue.serial},
            payload_limit=self.payload_limit,
        )
        super().__init__(control, sender=sender, registry=Registry(sender), queue_priorities=priorities)

    def __repr__(self) -> str:
        return f"<App {self.name!r}, schema {self.schema!r}, {len(self.tasks)} tasks>"

    @property
    def tasks(self) -> Mapping[str, TaskDefinition]:
        """The registered task functions by name."""
        return self._registry

    @property
    def task(self) -> TaskFactory:
        """The decorator that makes a task of a function, with or without options.

        @app.task(queue="mail", timeout="30s")
        async def welcome(user_id: int) -> None: ...
        """
        return cast(TaskFactory, self._task)

    def _task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        given = {name: value for name, value in options.items() if (name, value) != ("exception_codes", None)}
        checked = TaskOptions(**given)
        if function is not None:
            return self._registry.register(function, checked)
        return lambda decorated: self._registry.register(decorated, checked)

    def _sweep_stale_workers(
        self,
        *,
        dry_run: bool = False,
        sweep_threshold: Duration | None = None,
        recovery_delay: Duration | None = None,
        resilient_task_flags: Sequence[str] | None = None,
        resilient_sweep_threshold_multiplier: int | None = None,
    ) -> Plan[SweepResult]:
        """Recovers what silent workers hold, now and on the caller's word; None takes the app's RecoveryConfig.

        A dry run names the dead, changes nothing and asks no hook. Works with automatic recovery switched off; one sweep at a
        time, a second one at that moment is `skipped`. Raises ConfigurationError for a threshold below two heartbeats.

        app.sweep_stale_workers(dry_run=True, sweep_threshold="60s")
        """
        return assembly.sweep_plan(
            self.recovery,
            channel=self.door.channel,
            hooks=self._hooks.hooks(),
            dry_run=dry_run,
            sweep_threshold=sweep_threshold,
            recovery_delay=recovery_delay,
            resilient_task_flags=resilient_task_flags,
            resilient_sweep_threshold_multiplier=resilient_sweep_threshold_multiplier,
        )

    sweep_stale_workers = blocking(_sweep_stale_workers)
    asweep_stale_workers = awaiting(_sweep_stale_workers)

    def _release_workers(self, worker_ids: Sequence[str], /) -> Plan[SweepResult]:
        """Ends these workers, dead or alive, and recovers what they hold at once; raises UnknownName before anything is done.

        app.release_workers(["web-1-4711-9f8e7d6c"])
        """
        return assembly.release_plan(
            self.recovery, worker_ids, channel=self.door.channel, hooks=self._hooks.hooks()
        )

    release_workers = blocking(_release_workers)
    arelease_workers = awaiting(_release_workers)

    @property
    def on_recovery(self) -> RecoveryDecorator:
        """The decorator of the function that decides what becomes of a dead worker's task, of all tasks or of one name.

        @app.on_recovery(task="render")
        def later(context: RecoveryContext) -> Reschedule:
            return Reschedule(run_at=timedelta(minutes=10))
        """
        return cast(RecoveryDecorator, self._hooks.deciding)

    def on_interrupted(self, function: InterruptedT, /) -> InterruptedT:
        """Registers the function that is told of each task that was taken from a dead worker, after that landed."""
        return self._hooks.other("on_interrupted", function)

    def on_recovered(self, function: RecoveredT, /) -> RecoveredT:
        """Registers the function that is told of each pass that recovered something."""
        return self._hooks.other("on_recovered", function)

    def run_worker(self, **settings: Unpack[WorkerSettings]) -> None:
        """Works in this thread until `stop_worker` or, in the main thread, SIGTERM or SIGINT; drains first, a second one ends at once.

        `settings` replace those of the app's WorkerConfig; `processes` is not for a guest. Raises WorkerError, a DatabaseError.
        """
        refuse_in_loop("App.run_worker", twin="App.arun_worker")
        assembly.run_guest(self._new_guest(settings))

    async def arun_worker(self, **settings: Unpack[WorkerSettings]) -> None:
        """Works on the running loop until `stop_worker` or cancelled, which drains first.

        async with asyncio.TaskGroup() as group:
            worker = group.create_task(app.arun_worker(queues=["mail"]))
        """
        guest = self._new_guest(settings)
        await guest.run()

    def stop_worker(self) -> None:
        """Asks the workers that this app runs in this process to leave, from any thread: in good order, the second time at once."""
        for guest in list(self._guests):
            guest.stop()

    def _new_guest(self, settings: WorkerSettings) -> assembly.Guest:
        if "processes" in settings:
            raise refused(
                dict(settings)["processes"],
                subject="run_worker.processes",
                code="UNKNOWN_NAME",
                rule="is not for a worker in another program, which is one process",
                fix="leave it out, or run 'everbeat worker --processes N'",
            )
        blueprint = self.blueprint(**settings)
        blueprint.check_guest()
        guest = assembly.Guest(blueprint)
        self._guests.add(guest)
        return guest

    def blueprint(self, *, locator: str | None = None, **settings: Unpack[WorkerSettings]) -> Blueprint:
        """What the app is to its workers; `locator` is how a new process finds it, by default where it was made."""
        worker = self.worker.replace(**settings)
        for queue in worker.queues or ():
            self._sender.require_queue(queue, subject="WorkerConfig.queues (--queues)")
        return Blueprint(
            address=self.door.address,
            auto_migrate=self.auto_migrate,
            definitions=self.tasks,
            exception_codes=self.exception_codes,
            on_crash=self.on_crash,
            recovery=self.recovery,
            worker=worker,
            queue_priorities={queue.name: queue.priority for queue in self.queue_configs},
            locator=locator or self._locator(),
            hooks=self._hooks.hooks(),
            nats=self.nats,
        )

    def _locator(self) -> str | None:
        module = sys.modules.get(self.module)
        name = next((name for name, value in vars(module).items() if value is self), None) if module else None
        if name is None:
            return None
        if self.module != "__main__":
            return f"{self.module}:{name}"
        spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
        place = spec.name if spec is not None else file
        return None if place is None else f"{place}:{name}"

    def migrate(self, *, to: int | None = None) -> tuple[int, ...]:
        """Applies pending migrations (up to version `to`) and answers the versions applied; one process does it."""
        refuse_in_loop("App.migrate", twin="asyncio.to_thread(app.migrate)")
        return self.door.migrate(to=to)

    def schema_status(self) -> SchemaStatus:
        """Which migrations are applied, which this code knows, and whether it works with the schema."""
        refuse_in_loop("App.schema_status", twin="asyncio.to_thread(app.schema_status)")
        return self.door.status()

    def close(self) -> None:
        """Closes this process's connections and its use of an embedded PostgreSQL; the next use opens anew."""
        self.door.close()

    async def aclose(self) -> None:
        """As `close`, to await; closes the running loop's connections as well."""
        await self.door.aclose()


def _caller_module() -> str:
    """The module that makes the app: where its task processes will look for it."""
    return str(sys._getframe(2).f_globals.get("__name__", "__main__"))
