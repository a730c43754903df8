"""The tree of an `everbeat worker`: a supervisor that imports no user code, worker processes, task processes.

What lives here: the main of each kind of process, once the app is imported where it has to be. What may not: importing it,
and exit codes of the command line.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from everbeat.assembly.blueprint import Blueprint, worker_process_argv
from everbeat.assembly.parts import (
    Surroundings,
    local_hooks,
    make_supervision,
    make_worker,
    plan_of,
    take_tree_lock,
)
from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.store.address import DatabaseAddress, OpenDatabase
from everbeat.worker.farewell import leave
from everbeat.worker.hook_line import HookLine
from everbeat.worker.link import Link
from everbeat.worker.protocol import Hello, Welcome
from everbeat.worker.supervision import Supervision
from everbeat.worker.supervisor import Supervisor
from everbeat.worker.task_process import run_task_process as run_attempts
from everbeat.worker.worker import Worker
from everbeat.worker.worker_process import run_worker_process as serve


def supervise(locator: str, *, overrides: Mapping[str, Any] | None = None) -> None:
    """Runs the tree of the app that `locator` names until it is told to stop by SIGTERM or SIGINT; needs the main thread.

    `overrides` replace settings of the app's WorkerConfig. Raises ConfigurationError, WorkerError, a DatabaseError.
    """
    changed = dict(overrides or {})
    WorkerConfig(**changed)  # wrong ones are refused here, before any process is started
    around = Surroundings()
    opened: list[OpenDatabase] = []
    hooks = HookLine(events=around.events, clock=around.clock)
    lock = take_tree_lock()  # before the first process that is to inherit it

    def supervision(hello: Hello) -> Supervision:
        address = DatabaseAddress.parse(hello.url, schema=hello.schema, environment={})
        opened.append(address.open())
        recovery = RecoveryConfig.from_dict(hello.recovery)
        slot = WorkerConfig.from_dict(hello.worker).slot
        hooks.open(hello.hooks, timeout_s=recovery.hook_timeout_ms / 1_000)
        return make_supervision(opened[-1].target, recovery, around=around, lock=lock, slot=slot, hooks=hooks)

    async def run() -> None:
        supervisor = Supervisor(
            worker_process_argv(locator, changed),
            supervise=supervision,
            events=around.events,
            clock=around.clock,
            random=around.random,
            hooks=hooks,
        )
        await supervisor.run()

    try:
        asyncio.run(run())
    finally:
        if lock is not None:
            lock.release(remove=not opened)  # otherwise the supervision has, or its row needs the proof
        for each in opened:
            each.close()


def run_worker_process(sock: socket.socket, blueprint: Blueprint) -> NoReturn:
    """Works as a worker process until its supervisor says otherwise. Raises a DatabaseError or WorkerError before it begins."""
    blueprint.check()
    opened = blueprint.address.open()
    opened.prepare(auto_migrate=blueprint.auto_migrate)
    plan = plan_of(blueprint, opened.target)
    around = Surroundings()

    def worker(welcome: Welcome, link: Link) -> Worker:
        return make_worker(plan, welcome=welcome, link=link, around=around)

    code = serve(
        sock,
        hello=hello_of(blueprint),
        make_worker=worker,
        hooks=local_hooks(blueprint.hooks, blueprint.recovery, around=around),
    )
    opened.close()
    leave(code)


def run_task_process(sock: socket.socket, blueprint: Blueprint) -> NoReturn:
    """Runs attempts, one at a time, until its worker says otherwise."""
    run_attempts(sock, definitions=blueprint.definitions, exception_codes=blueprint.exception_codes)


def hello_of(blueprint: Blueprint) -> Hello:
    """What a supervisor must know of the app."""
    queues = blueprint.worker.queues
    return Hello(
        url=blueprint.address.portable,
        schema=blueprint.address.schema,
        recovery=blueprint.recovery.to_dict(),
        worker=blueprint.worker.to_dict(),
        queues=None if queues is None else list(queues),
        task_names=sorted(blueprint.definitions),
        on_loop=blueprint.on_loop(),
        hooks=blueprint.hooks.scopes,
        lanes=blueprint.lanes(),
    )
