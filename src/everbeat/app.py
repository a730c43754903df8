"""The `App` class, through which a program registers, sends, inspects and runs tasks."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload
from weakref import WeakSet

from everbeat import assembly
from everbeat.assembly.app_definition import (
    AppDefinition,
    distinct_queues,
    locator_of,
    meters_of,
    misplaced_setting,
    modules_of,
    nats_of,
    owner_of,
    retry_of,
    settings_or_default,
    stall_timeout_ms_of,
    tracing_of,
)
from everbeat.client.app_methods import OperatorMethods, TaskMethods
from everbeat.client.batches import BatchMethods
from everbeat.client.bulk_methods import BulkMethods
from everbeat.client.database_access import DatabaseAccess, refuse_in_loop
from everbeat.client.explaining import silence_rules
from everbeat.client.handle import Handle, TaskOperations
from everbeat.client.inspection import InspectionMethods
from everbeat.client.limit_methods import LimitMethods
from everbeat.client.limits import LimitBook
from everbeat.client.options import SendOptions, call_patience
from everbeat.client.registry import HookRegistry, OpenFirst, Registry, TaskDecorator, call_by_name
from everbeat.client.schedule_methods import ScheduleMethods
from everbeat.client.schedules import ScheduleRegistry
from everbeat.client.sender import CallSender
from everbeat.client.surrounding_methods import SurroundingMethods, Surroundings
from everbeat.client.task import AsyncTask, Call, SyncTask
from everbeat.client.workflow.definition import (
    WorkflowDefinition,
)
from everbeat.client.workflow.sender import WorkflowSender
from everbeat.client.workflow_methods import WorkflowMethods
from everbeat.config import QueueConfig, RecoveryConfig, WorkerConfig, WorkerSettings
from everbeat.domain.inspection import SweepResult
from everbeat.domain.labels import Labels
from everbeat.domain.limit.options import Limit
from everbeat.domain.metrics.meters import Meters
from everbeat.domain.settings.checks import exception_codes as checked_codes
from everbeat.domain.settings.checks import one_of, public, reporting_wrong_calls, switch_or
from everbeat.domain.settings.settings import make_or_gather, refused
from everbeat.domain.settings.units import DEFAULT_LIMIT, Duration, When
from everbeat.domain.settings.units import payload_limit as checked_limit
from everbeat.domain.task.captured_log import LogLevel
from everbeat.domain.task.context import Context
from everbeat.domain.task.definition import TaskDefinition
from everbeat.domain.task.policy import OnCrash, TaskOptions, with_retry_of_app
from everbeat.domain.task.retry import RetryPolicy
from everbeat.domain.task.uniqueness import OnDuplicate, UniqueFor
from everbeat.domain.tracing.model import Tracer
from everbeat.errors.wording import amount
from everbeat.nats.options import NatsConfig
from everbeat.runtime.task_links import dashboard_url_of
from everbeat.store.address import NOWHERE, AutoMigrate, DatabaseAddress
from everbeat.store.migrations import SchemaStatus
from everbeat.store.patience import DEFAULT_PATIENCE_S
from everbeat.store.plan import Plan

if TYPE_CHECKING:
    from everbeat.in_process import InProcessWorker

P = ParamSpec("P")
R = TypeVar("R")


@public
class App(
    TaskMethods,
    BatchMethods,
    BulkMethods,
    WorkflowMethods,
    ScheduleMethods,
    LimitMethods,
    SurroundingMethods,
    InspectionMethods,
    OperatorMethods,
):
    """A set of tasks and the database that stores them. An app can be shared by threads and event loops, and can be used after a fork.

    Most blocking methods have an async counterpart whose name begins with `a`. The app opens no connection before its first use.

    `url`: a libpq URL, or "embedded" for a PostgreSQL server in ./.everbeat. If None, EVERBEAT_DATABASE_URL applies.
    `limits`: the limits that tasks can name.
    `wake`: a URL such as "nats://host:4222" or a NatsConfig to notify workers through NATS JetStream. If None, PostgreSQL notifies
    them.
    `payload_limit`: the maximum JSON size of a task's arguments, and of its result.
    `patience`: how long a call waits for a database that does not respond.
    `tracing`: one or more tracers, such as `everbeat.tracing.OpenTelemetry()`. If None, nothing is traced.
    `metrics`: a recorder such as `everbeat.metrics.OpenTelemetryMetrics()`. If None, no library of metrics is called.
    `dashboard_url`: the address of the dashboard, for links in logs and errors. If None, EVERBEAT_DASHBOARD_URL applies.
    `retry`: the retry policy of tasks that are registered without `retry`. A task with `retry=None` never retries.

    Raises WrongDatabaseURL or ConfigurationError if an argument is invalid.

        app = App("postgresql://app@db.example.org/app")
    """

    @reporting_wrong_calls("App", elsewhere=misplaced_setting)
    def __init__(
        self,
        url: str | None = None,
        *,
        schema: str = "everbeat",
        recovery: RecoveryConfig | None = None,
        worker: WorkerConfig | None = None,
        queues: Sequence[QueueConfig] = (),
        limits: Sequence[Limit] = (),
        wake: str | NatsConfig | None = None,
        on_crash: OnCrash = "fail",
        stall_timeout: Duration | None = None,
        retry: RetryPolicy | None = None,
        exception_codes: Mapping[type[BaseException], str] | None = None,
        auto_migrate: AutoMigrate = "create",
        payload_limit: str | int = DEFAULT_LIMIT,
        patience: Duration = "5s",
        tracing: Tracer | Sequence[Tracer] | None = None,
        metrics: Meters | None = None,
        dashboard_url: str | None = None,
        name: str | None = None,
    ) -> None:
        self.recovery = settings_or_default(recovery, RecoveryConfig, subject="App.recovery")
        self.worker = settings_or_default(worker, WorkerConfig, subject="App.worker")
        self.queue_configs = make_or_gather(lambda: distinct_queues(queues), otherwise=())
        self.nats = make_or_gather(lambda: nats_of(wake, self.recovery), otherwise=None)
        self.on_crash: OnCrash = make_or_gather(
            lambda: one_of("fail", "retry")(on_crash, subject="App.on_crash"), otherwise="fail"
        )
        self.stall_timeout_ms = make_or_gather(lambda: stall_timeout_ms_of(stall_timeout), otherwise=None)
        self.default_retry: RetryPolicy | None = make_or_gather(lambda: retry_of(retry), otherwise=None)
        self.exception_codes = make_or_gather(
            lambda: checked_codes(exception_codes or {}, subject="App.exception_codes"), otherwise={}
        )
        address = make_or_gather(
            lambda: DatabaseAddress.parse(url, schema=schema, environment=os.environ), otherwise=NOWHERE
        )
        self.schema = schema
        self.name = name or "app"
        self._has_name = bool(name)
        self._module = _caller_module()
        self.auto_migrate: AutoMigrate = make_or_gather(
            lambda: switch_or("create")(auto_migrate, subject="App.auto_migrate"), otherwise=False
        )
        self.payload_limit = checked_limit(payload_limit)
        patience_s = make_or_gather(
            lambda: call_patience(patience, subject="App.patience"), otherwise=DEFAULT_PATIENCE_S
        )
        self.dashboard_url: str | None = make_or_gather(
            lambda: dashboard_url_of(dashboard_url, environment=os.environ), otherwise=None
        )
        self._workers_in_process: WeakSet[InProcessWorker] = WeakSet()
        self._tracing = make_or_gather(lambda: tracing_of(tracing, address), otherwise=None)
        self._meters = make_or_gather(lambda: meters_of(metrics), otherwise=None)
        self._hooks = HookRegistry(self._tracing)
        self._surroundings = Surroundings(self._tracing)
        self._alive_within_ms = self.recovery.claimed_stale_threshold_ms
        self._queue_priorities = {queue.name: queue.priority for queue in self.queue_configs}
        self._database = DatabaseAccess(address, auto_migrate=self.auto_migrate, patience_s=patience_s)
        self._operations = TaskOperations(
            self._database,
            alive_within_ms=self._alive_within_ms,
            silence=silence_rules(self.recovery),
            payload_limit=self.payload_limit,
        )
        self._sender = self._new_sender(limits)
        self._registry = Registry(self._sender)
        self._schedules = ScheduleRegistry(self._sender)
        self._workflow_sender = self._new_workflow_sender()
        self._workflows: dict[str, WorkflowDefinition[..., Any]] = {}

    def _new_workflow_sender(self) -> WorkflowSender:
        return WorkflowSender(self._operations, sender=self._sender, knows=self._registry.__contains__)

    def _new_sender(self, limits: Sequence[Limit]) -> CallSender:
        return CallSender(
            self._operations,
            on_crash=self.on_crash,
            stall_timeout_ms=self.stall_timeout_ms,
            queues=self.queue_configs,
            limits=LimitBook.of(limits, self.queue_configs),
            tracing=self._tracing,
            meters=self._meters,
        )

    def __repr__(self) -> str:
        return f"<App {self.name!r}, schema {self.schema!r}, {amount(len(self.tasks), 'task')}>"

    @property
    def tasks(self) -> Mapping[str, TaskDefinition]:
        """Return a mapping from the names of the registered tasks to their definitions."""
        return self._registry

    @overload
    def task(self, function: OpenFirst[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, function: OpenFirst[P, R], /) -> SyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: int = 0,
        timeout: Duration | None = None,
        retry: RetryPolicy | None = ...,
        run_in: Literal["async", "thread", "process"] | None = None,
        on_crash: Literal["fail", "retry"] | None = None,
        max_crashes: int | None = None,
        max_losses: int | None = None,
        max_retry_later: int = 100,
        ignore_result: bool = False,
        keep_result_for: Duration | None = None,
        stall_timeout: Duration | None = None,
        flags: Iterable[str] | Mapping[str, bool] = (),
        serial: bool = False,
        limits: Sequence[str] = (),
        costs: Mapping[str, int] = ...,
        concurrency: int | None = None,
        labels: Labels = ...,
        exception_codes: Mapping[type[BaseException], str] = ...,
        capture_logs: bool | LogLevel | None = None,
        on_failure: SyncTask[..., Any] | AsyncTask[..., Any] | str | None = ...,
        unique_for: UniqueFor = "live",
        on_duplicate: OnDuplicate = "existing",
        at_latest: Duration | None = None,
    ) -> TaskDecorator: ...
    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Register a function as a task. Use this method as a decorator, with or without options.

        Raises RegistrationError if the function cannot be a task, and ConfigurationError if an option is invalid.

        @app.task(queue="mail", timeout="30s")
        async def welcome(user_id: int) -> None: ...
        """
        given = {name: value for name, value in options.items() if (name, value) != ("exception_codes", None)}
        checked = TaskOptions(**with_retry_of_app(given, self.default_retry))
        if function is not None:
            return self._registry.register(function, checked)
        return lambda decorated: self._registry.register(decorated, checked)

    def patience(self, patience: Duration, /) -> AbstractContextManager[None]:
        """Return a context manager that overrides `App(patience=...)` for the calls within its `with` block.

        with app.patience("30s"):
            app.cancel(handle.id)
        """
        return self._database.patience(call_patience(patience, subject="patience"))

    def send_many(self, calls: Iterable[Call[R]], /) -> list[Handle[R]]:
        """Store many tasks in one statement: all of them, or none. Return their handles in the order of the calls.

        app.send_many(welcome.call(user) for user in users)
        """
        return self._sender.send_many(calls)

    async def asend_many(self, calls: Iterable[Call[R]] | AsyncIterable[Call[R]], /) -> list[Handle[R]]:
        """Async version of `send_many` that does not block the running event loop. Async iterables are also accepted."""
        return await self._sender.asend_many(calls)

    def send_by_name(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        /,
        *,
        when: When | None = None,
        **options: Unpack[SendOptions],
    ) -> Handle[Any]:
        """Store a task by the name of its function, which need not exist in this program. `arguments` maps parameter names to values.

        app.send_by_name("mail.welcome", {"user_id": 42}, queue="mail")
        """
        return self._sender.send(call_by_name(self._registry, name, arguments, when=when, options=options))

    async def asend_by_name(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        /,
        *,
        when: When | None = None,
        **options: Unpack[SendOptions],
    ) -> Handle[Any]:
        """Async version of `send_by_name` that does not block the running event loop."""
        call = call_by_name(self._registry, name, arguments, when=when, options=options)
        return await self._sender.asend(call)

    def sweep_stale_workers(
        self,
        *,
        dry_run: bool = False,
        sweep_threshold: Duration | None = None,
        recovery_delay: Duration | None = None,
        resilient_task_flags: Sequence[str] | None = None,
        resilient_sweep_threshold_multiplier: int | None = None,
    ) -> SweepResult:
        """Recover the tasks of workers that have stopped sending heartbeats, even if automatic recovery is off.

        Parameters that are None default to the values in the app's RecoveryConfig. If `dry_run` is set, return what a sweep would
        do, without changing anything or calling hooks. Only one sweep runs at a time. If another sweep is running, return a result
        with `skipped` set. Raises ConfigurationError if `sweep_threshold` is shorter than two heartbeat intervals, or if another
        argument is invalid.

        app.sweep_stale_workers(dry_run=True, sweep_threshold="60s")
        """
        plan = self._sweep(
            dry_run=dry_run,
            sweep_threshold=sweep_threshold,
            recovery_delay=recovery_delay,
            resilient_task_flags=resilient_task_flags,
            resilient_sweep_threshold_multiplier=resilient_sweep_threshold_multiplier,
        )
        return self._run("sweep_stale_workers", plan)

    async def asweep_stale_workers(
        self,
        *,
        dry_run: bool = False,
        sweep_threshold: Duration | None = None,
        recovery_delay: Duration | None = None,
        resilient_task_flags: Sequence[str] | None = None,
        resilient_sweep_threshold_multiplier: int | None = None,
    ) -> SweepResult:
        """Async version of `sweep_stale_workers` that does not block the running event loop."""
        plan = self._sweep(
            dry_run=dry_run,
            sweep_threshold=sweep_threshold,
            recovery_delay=recovery_delay,
            resilient_task_flags=resilient_task_flags,
            resilient_sweep_threshold_multiplier=resilient_sweep_threshold_multiplier,
        )
        return await self._arun(plan)

    def _sweep(self, **settings: Any) -> Plan[SweepResult]:
        channel, hooks = self._database.channel, self._hooks.hooks()
        return assembly.sweep_plan(self.recovery, channel=channel, hooks=hooks, **settings)

    def release_workers(self, worker_ids: Sequence[str], /) -> SweepResult:
        """Declare these workers dead, even if they are alive, and recover their tasks at once.

        Raises UnknownName, without changing anything, if a worker does not exist.

        app.release_workers(["web-1-4711-9f8e7d6c"])
        """
        return self._run("release_workers", self._release(worker_ids))

    async def arelease_workers(self, worker_ids: Sequence[str], /) -> SweepResult:
        """Async version of `release_workers` that does not block the running event loop."""
        return await self._arun(self._release(worker_ids))

    def _release(self, worker_ids: Sequence[str]) -> Plan[SweepResult]:
        channel, hooks = self._database.channel, self._hooks.hooks()
        return assembly.release_plan(self.recovery, worker_ids, channel=channel, hooks=hooks)

    def run_worker(self, **settings: Unpack[WorkerSettings]) -> None:
        """Run a worker in this thread until `stop_worker` is called or, in the main thread, SIGTERM or SIGINT arrives.

        The worker then drains before it shuts down. A second call or signal stops it immediately. `settings` override the app's
        WorkerConfig; `processes` cannot be overridden. Raises WorkerError or a DatabaseError if the worker cannot run.
        """
        refuse_in_loop("App.run_worker", twin="App.arun_worker")
        self._new_worker(settings).run_blocking()

    async def arun_worker(self, **settings: Unpack[WorkerSettings]) -> None:
        """Run a worker on the running event loop until `stop_worker` is called or this coroutine is cancelled.

        The worker drains before the coroutine ends. The `settings` are those of `run_worker`.

        async with asyncio.TaskGroup() as group:
            worker = group.create_task(app.arun_worker(queues=["mail"]))
        """
        await self._new_worker(settings).run()

    def stop_worker(self) -> None:
        """Stop the workers that this app is running in this process. This method can be called from any thread.

        The workers drain before they shut down. A second call stops them immediately.
        """
        for worker in list(self._workers_in_process):
            worker.stop()

    def _new_worker(self, settings: WorkerSettings) -> InProcessWorker:
        if "processes" in settings:
            raise refused(
                dict(settings)["processes"],
                subject="run_worker.processes",
                code="UNKNOWN_NAME",
                rule="cannot be set for an in-process worker, which is a single process",
                fix="leave it out, or run 'everbeat worker --processes N'",
            )
        definition = definition_of(self, **settings)
        definition.check_in_process()
        worker = assembly.in_process_worker(definition)
        self._workers_in_process.add(worker)
        return worker

    def migrate(self, *, to: int | None = None) -> tuple[int, ...]:
        """Apply pending migrations, up to version `to` if given, and return the versions applied. Only one process migrates at a time."""
        refuse_in_loop("App.migrate", instead="await asyncio.to_thread(app.migrate)")
        return self._database.migrate(to=to)

    def schema_status(self) -> SchemaStatus:
        """Return the applied and the known migrations, and whether the schema is compatible with this version of everbeat."""
        refuse_in_loop("App.schema_status", instead="await asyncio.to_thread(app.schema_status)")
        return self._database.status()

    def close(self) -> None:
        """Close this process's connections and release its embedded PostgreSQL server, if any. The next call on the app reopens them."""
        self._database.close()

    async def aclose(self) -> None:
        """Async version of `close` that does not block the running event loop. Also closes the connections of this loop."""
        await self._database.aclose()


def definition_of(
    app: App, *, locator: str | None = None, **settings: Unpack[WorkerSettings]
) -> AppDefinition:
    """Return the definition from which workers of the app are built. `settings` override the app's WorkerConfig.

    `locator` specifies where a new process finds the app. By default, this is the module that created the app.
    """
    worker = app.worker.replace(**settings)
    for queue in worker.queues or ():
        app._sender.require_queue(queue, subject="WorkerConfig.queues (--queues)")
    return AppDefinition(
        address=app._database.address,
        auto_migrate=app.auto_migrate,
        definitions=app.tasks,
        exception_codes=app.exception_codes,
        on_crash=app.on_crash,
        stall_timeout_ms=app.stall_timeout_ms,
        recovery=app.recovery,
        worker=worker,
        queue_priorities=app._queue_priorities,
        locator=locator or locator_of(app, app._module),
        modules=() if locator else modules_of(app.tasks, apart_from=app._module),
        hooks=app._hooks.hooks(),
        nats=app.nats,
        middleware=app._surroundings.middleware,
        resources=app._surroundings.resources,
        failure_handlers=app._registry.failure_handlers(),
        sent=app._sender.sent,
        dashboard_url=app.dashboard_url,
        meters=app._meters,
        schedules=app._schedules.declared(app.name if app._has_name else owner_of(app, app._module)),
    )


def _caller_module() -> str:
    """Return the name of the module that is creating the app. Task processes import the app from this module."""
    # Skip the frames of this function, of App.__init__ and of `reporting_wrong_calls`.
    return str(sys._getframe(3).f_globals.get("__name__", "__main__"))
