"""Builds workers and supervisors from an app definition."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from everbeat import assembly
from everbeat.assembly.app_definition import AppDefinition
from everbeat.domain.metrics.meters import MeteredRates
from everbeat.domain.series import RateCounter
from everbeat.hints import HintSource
from everbeat.hints.postgres import PostgresHintSource
from everbeat.protocol import Hello, Welcome
from everbeat.recovering.hooks import LocalHooks
from everbeat.runtime.environment import ProcessEnvironment, logging_environment
from everbeat.runtime.main_loop import leave
from everbeat.runtime.task_links import link_tasks
from everbeat.runtime.task_scope import end_process
from everbeat.store.target import Target
from everbeat.worker.attempt_recovery import AttemptRecovery
from everbeat.worker.environment import SupervisorLink, WorkerPlan
from everbeat.worker.executors.task_process import run_task_process as run_attempts
from everbeat.worker.process import PreparedWorker
from everbeat.worker.process import run_worker_process as serve
from everbeat.worker.worker import MakeMessenger, Worker, no_messages


def plan_of(definition: AppDefinition, target: Target) -> WorkerPlan:
    """Return the task functions and settings that a worker of this app uses."""
    return WorkerPlan(
        target=target,
        definitions=definition.definitions,
        config=definition.worker,
        recovery=definition.recovery,
        queue_priorities=definition.queue_priorities,
        exception_codes=definition.exception_codes,
        on_crash=definition.on_crash,
        stall_timeout_ms=definition.stall_timeout_ms,
        task_process_argv=definition.task_process_argv(),
        hooks=definition.hooks,
        schedules=definition.schedules,
        middleware=definition.middleware,
        resources=definition.resources,
        failure_handlers=definition.failure_handlers,
        sent=definition.sent,
        meters=definition.meters,
    )


def prepare(definition: AppDefinition, *, is_replacement: bool = False) -> PreparedWorker:
    """Open the database, prepare its schema and, if configured, NATS. Return the prepared worker.

    Do not call this function in a thread whose event loop is running. Raises WorkerError if the app has no usable tasks, and
    DatabaseError or NatsError if the database or NATS cannot be prepared.
    """
    definition.check()
    link_tasks(definition.dashboard_url)
    opened = definition.address.open()
    try:
        opened.prepare(auto_migrate=definition.auto_migrate)
        make_messenger: MakeMessenger = no_messages
        if definition.nats is not None:
            make_messenger = assembly.prepare_nats(
                definition.nats, definition.recovery, opened, is_replacement=is_replacement
            )
    except BaseException:
        opened.close()
        raise
    environment = logging_environment()
    return PreparedWorker(
        plan=plan_of(definition, opened.target),
        environment=environment,
        make=partial(make_worker, environment=environment, make_messenger=make_messenger),
        close=opened.close,
    )


def make_worker(
    plan: WorkerPlan,
    *,
    welcome: Welcome,
    link: SupervisorLink,
    environment: ProcessEnvironment,
    on_fatal: Callable[[str, BaseException], None] = end_process,
    make_messenger: MakeMessenger = no_messages,
) -> Worker:
    """Return a new worker. Call this function on the event loop on which the worker will run."""

    def hint_source(application_name: str) -> HintSource:
        def connect() -> Any:
            return plan.target.aconnect(application_name)

        return PostgresHintSource(connect, plan.target.channel, ignores_ends=True, random=environment.random)

    rates = RateCounter() if plan.meters is None else MeteredRates(plan.meters)
    return Worker(
        plan,
        welcome=welcome,
        link=link,
        make_hint_source=hint_source,
        recover=AttemptRecovery(plan, welcome=welcome, environment=environment, rates=rates).recover,
        events=environment.events,
        clock=environment.clock,
        random=environment.random,
        on_fatal=on_fatal,
        make_messenger=make_messenger,
        rates=rates,
    )


def run_worker_process(
    sock: socket.socket, definition: AppDefinition, *, is_replacement: bool = False
) -> NoReturn:
    """Run a worker process until its supervisor stops it. Raises WorkerError, DatabaseError or NatsError if the worker cannot start.

    If `is_replacement` is true, a worker of the same supervisor has started before, so this worker starts even without NATS.
    """
    prepared = prepare(definition, is_replacement=is_replacement)
    plan = prepared.plan

    def worker(welcome: Welcome, link: SupervisorLink) -> Worker:
        return prepared.make(plan, welcome=welcome, link=link)

    code = serve(
        sock,
        hello=hello_of(definition, plan),
        make_worker=worker,
        resources=plan.resources,
        hooks=LocalHooks(
            plan.hooks,
            timeout_s=plan.recovery.hook_timeout_ms / 1_000,
            events=prepared.environment.events,
        ),
    )
    prepared.close()
    leave(code)


def run_task_process(sock: socket.socket, definition: AppDefinition) -> NoReturn:
    """Run attempts in this task process, one at a time, until the worker stops the process."""
    link_tasks(definition.dashboard_url)
    run_attempts(
        sock,
        definitions=definition.definitions,
        exception_codes=definition.exception_codes,
        middleware=definition.middleware,
        resources=definition.resources,
    )


def hello_of(definition: AppDefinition, plan: WorkerPlan) -> Hello:
    """Return a worker process's first message to its supervisor, which contains the facts about the app that the supervisor needs."""
    return Hello(
        url=definition.address.portable,
        schema=definition.address.schema,
        recovery=plan.recovery.to_dict(),
        worker=plan.config.to_dict(),
        queues=None if plan.queues is None else list(plan.queues),
        task_names=sorted(plan.definitions),
        on_loop=list(plan.names("async")),
        hooks=plan.hooks.scopes,
        executors=plan.executors(),
        parameters=plan.parameters(),
        schedules=plan.schedules,
        dashboard_url=definition.dashboard_url,
    )
