"""Builds the supervisor of a tree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.protocol import Hello
from everbeat.runtime.environment import logging_environment
from everbeat.runtime.identity import TreeLock
from everbeat.runtime.processes import ChildProcess
from everbeat.store.address import DatabaseAddress, OpenDatabase
from everbeat.supervisor.registration import Supervision
from everbeat.supervisor.remote_hooks import RemoteHooks
from everbeat.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from everbeat.supervisor.probes import Probes


def run_supervisor(
    argv: Sequence[str],
    *,
    lock: TreeLock | None,
    first: ChildProcess | None,
    probes: Probes | None = None,
    version: str = "",
) -> None:
    """Supervise worker processes, which `argv` starts, until SIGTERM or SIGINT arrives. Call this function in the main thread.

    `first` is a worker process that is already running. `lock` is released and `probes` are closed at the end. `version` is that of
    everbeat. Raises WorkerError or DatabaseError if the workers cannot run.
    """
    environment = logging_environment()
    opened: list[OpenDatabase] = []
    hooks = RemoteHooks(environment)

    def supervision(hello: Hello) -> Supervision:
        address = DatabaseAddress.parse(hello.url, schema=hello.schema, environment={})
        opened.append(address.open())
        recovery = RecoveryConfig.from_dict(hello.recovery)
        slot = WorkerConfig.from_dict(hello.worker).slot
        hooks.open(hello.hooks, timeout_s=recovery.hook_timeout_ms / 1_000)
        return Supervision(
            opened[-1].target, recovery, environment=environment, lock=lock, slot=slot, hooks=hooks
        )

    async def run() -> None:
        supervisor = Supervisor(
            argv, supervise=supervision, environment=environment, hooks=hooks, first=first
        )
        if probes is not None:
            watching = probes.watch(supervisor, version=version)
            supervisor.scope.start(watching, name="probes", critical=True)
        await supervisor.run()

    try:
        if probes is not None:
            probes.start()
        asyncio.run(run())
    finally:
        if probes is not None:
            probes.close()
        if lock is not None:
            # If a database was opened, the supervision has already released the lock, or its row still needs the lock file
            # as proof.
            lock.release(remove=not opened)
        for each in opened:
            each.close()
