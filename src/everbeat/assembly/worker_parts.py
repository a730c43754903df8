"""A worker put together from an app's blueprint, with its hints, and how it recovers what it lost itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from everbeat import assembly
from everbeat.assembly.blueprint import Blueprint
from everbeat.assembly.parts import OnFatal, Surroundings, local_hooks
from everbeat.domain.stall import Stall
from everbeat.runtime.exit_report import ExitReport
from everbeat.runtime.nursery import end_process
from everbeat.services.recovery import Recoverer
from everbeat.store.address import OpenDatabase
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.wake import Wake
from everbeat.wake.postgres import PostgresWake
from everbeat.worker.conductor import OnLeft
from everbeat.worker.link import Link
from everbeat.worker.messenger import MakeMessenger, NoMessenger
from everbeat.worker.plan import WorkerPlan
from everbeat.worker.protocol import Welcome
from everbeat.worker.worker import Worker


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
        hooks=blueprint.hooks,
    )


def prepare(blueprint: Blueprint, opened: OpenDatabase, *, again: bool = False) -> MakeMessenger:
    """Makes the schema, and the stream of messages if the app wants one, fit for a worker; answers what tells it of tasks.

    Not to be called where an event loop runs. Raises a DatabaseError, a NatsError.
    """
    opened.prepare(auto_migrate=blueprint.auto_migrate)
    if blueprint.nats is None:
        return NoMessenger
    assembly.prepare_nats(blueprint, blueprint.nats, opened, again=again)
    return assembly.messenger_of(blueprint, blueprint.nats)


def make_worker(
    plan: WorkerPlan,
    *,
    welcome: Welcome,
    link: Link,
    around: Surroundings,
    on_fatal: OnFatal = end_process,
    make_messenger: MakeMessenger = NoMessenger,
) -> Worker:
    """A worker; called in the loop it will run on."""

    def wake(application_name: str) -> Wake:
        def connect() -> Any:
            return plan.target.aconnect(application_name)

        return PostgresWake(connect, plan.target.channel, tells_ends=False, random=around.random)

    own_recovery = OwnRecovery(plan, welcome=welcome, around=around)
    return Worker(
        plan,
        welcome=welcome,
        link=link,
        make_wake=wake,
        recover_crashed=own_recovery.crashed,
        recover_stalled=own_recovery.stalled,
        events=around.events,
        clock=around.clock,
        random=around.random,
        on_fatal=on_fatal,
        make_messenger=make_messenger,
    )


class OwnRecovery:
    """How a worker settles what it lost itself, as a supervisor would; one connection is open while there is anything."""

    def __init__(self, plan: WorkerPlan, *, welcome: Welcome, around: Surroundings) -> None:
        self._session = Session(plan.target, f"{welcome.session_name} worker", random=around.random)
        self._recoverer = Recoverer(
            self._session,
            plan.recovery,
            channel=plan.target.channel,
            observer_id=lambda: welcome.worker_id,
            events=around.events,
            clock=around.clock,
            random=around.random,
            hooks=local_hooks(plan.hooks, plan.recovery, around=around),
        )
        self._clock = around.clock
        self._users = 0

    async def crashed(self, task_id: UUID, claim_id: UUID, report: ExitReport, on_left: OnLeft) -> object:
        """An attempt whose task process died; `on_left` is called whenever a hook lets it be."""
        died_at = self._clock.monotonic()
        async with self._connected():
            return await self._recoverer.recover_lease(task_id, claim_id, report, on_left, died_at=died_at)

    async def stalled(self, task_id: UUID, claim_id: UUID, stall: Stall, on_left: OnLeft) -> object:
        """An attempt whose code fell silent."""
        async with self._connected():
            return await self._recoverer.recover_stalled(task_id, claim_id, stall, on_left)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                await self._session.drop()
