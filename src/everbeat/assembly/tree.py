"""The tree of an `everbeat worker`: a supervisor that imports no user code, and starts the processes that do.

What lives here: the main of the supervisor. What may not: that of its processes (`processes`), half of which it has no use for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from everbeat.assembly.blueprint import worker_process_argv
from everbeat.assembly.parts import Surroundings, make_supervision, take_tree_lock
from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.store.address import DatabaseAddress, OpenDatabase
from everbeat.worker.hook_line import HookLine
from everbeat.worker.protocol import Hello
from everbeat.worker.supervision import Supervision
from everbeat.worker.supervisor import Supervisor


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
