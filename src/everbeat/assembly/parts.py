"""The parts that are made alike wherever a worker runs: the worker itself, its supervision, its hints.

What lives here: their making. What may not: processes, threads and loops.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from uuid import UUID

from everbeat.assembly.blueprint import Blueprint
from everbeat.config import RecoveryConfig
from everbeat.runtime.clock import Clock, SystemClock
from everbeat.runtime.events import EventBus, log_event
from everbeat.runtime.exit_report import ExitReport
from everbeat.runtime.nursery import end_process
from everbeat.services.caretakers import Caretakers
from everbeat.services.recovery import Recoverer
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.wake import Wake
from everbeat.wake.postgres import PostgresWake
from everbeat.worker.conductor import RecoverCrashed
from everbeat.worker.link import Link
from everbeat.worker.plan import WorkerPlan
from everbeat.worker.protocol import Welcome
from everbeat.worker.supervision import Supervision
from everbeat.worker.worker import Worker

OnFatal = Callable[[str, BaseException], None]


class Surroundings:
    """What all parts of one process share: the clock, the dice, and where events go (to the log)."""

    def __init__(self) -> None:
        self.clock: Clock = SystemClock()
        self.random = Random()
        self.events = EventBus()
        self.events.subscribe(log_event)


def plan_of(blueprint: Blueprint, target: Target) -> WorkerPlan:
    """What a worker of this app is to do."""
    return WorkerPlan(
        target=target,
        definitions=blueprint.definitions,
        config=blueprint.worker,
        recovery=blueprint.recovery,
        queue_priorities=blueprint.queue_priorities,
        exception_codes=blueprint.exception_codes,
        on_crash=blueprint.on_crash,
        task_process_argv=blueprint.task_process_argv(),
    )


def make_worker(
    plan: WorkerPlan,
    *,
    welcome: Welcome,
    link: Link,
    around: Surroundings,
    on_fatal: OnFatal = end_process,
) -> Worker:
    """A worker; called in the loop it will run on."""

    def wake(application_name: str) -> Wake:
        def connect() -> Any:
            return plan.target.aconnect(application_name)

        return PostgresWake(connect, plan.target.channel, random=around.random)

    return Worker(
        plan,
        welcome=welcome,
        link=link,
        make_wake=wake,
        recover_crashed=crash_recovery(plan, welcome=welcome, around=around),
        events=around.events,
        clock=around.clock,
        random=around.random,
        on_fatal=on_fatal,
    )


def crash_recovery(plan: WorkerPlan, *, welcome: Welcome, around: Surroundings) -> RecoverCrashed:
    """Settles an attempt whose task process died, as a supervisor would; a connection is open only meanwhile."""

    async def recover(task_id: UUID, claim_id: UUID, report: ExitReport) -> object:
        session = Session(plan.target, f"{welcome.session_name} worker", random=around.random)
        recoverer = Recoverer(
            session,
            plan.recovery,
            channel=plan.target.channel,
            observer_id=lambda: welcome.worker_id,
            events=around.events,
            clock=around.clock,
            random=around.random,
        )
        try:
            return await recoverer.recover_lease(task_id, claim_id, report)
        finally:
            await session.drop()

    return recover


def make_supervision(
    target: Target, recovery: RecoveryConfig, *, around: Surroundings, on_fatal: OnFatal = end_process
) -> Supervision:
    """A supervision with all its caretakers; called in the loop it will run on."""

    def care(supervision: Supervision) -> Caretakers:
        return Caretakers(
            supervision.session,
            supervision.config,
            channel=target.channel,
            observer=supervision,
            states=supervision.states,
            identity=supervision.identity,
            events=around.events,
            clock=around.clock,
            random=around.random,
        )

    return Supervision(
        target,
        recovery,
        care=care,
        events=around.events,
        clock=around.clock,
        random=around.random,
        on_fatal=on_fatal,
    )
