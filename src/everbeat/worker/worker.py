"""The worker: claims, runs and settles tasks. It knows nothing of pipes, and nothing of how its supervisor beats.

What lives here: putting the parts together, obeying the supervisor, and leaving. What may not: any of the parts' work.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.domain.definition import RunIn, TaskDefinition
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus, WorkerStarted
from everbeat.runtime.lag import LoopWatch
from everbeat.runtime.nursery import Nursery, end_process
from everbeat.runtime.service import Service, ServiceRunner
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.wake import Wake
from everbeat.wake.topics import Everything, Hint, TasksReady
from everbeat.worker.async_executor import AsyncExecutor
from everbeat.worker.attempt import Attempt, Stage
from everbeat.worker.claimer import Claimer, ClaimRules
from everbeat.worker.conductor import Conductor, RecoverCrashed
from everbeat.worker.executor import Executor
from everbeat.worker.farewell import EXIT_ORDERLY, EXIT_THREADS_LEAKED, EXIT_UNSETTLED
from everbeat.worker.invocation import Invoker
from everbeat.worker.lane import Lane
from everbeat.worker.lease_watch import LeaseWatch
from everbeat.worker.leases import LeaseTable
from everbeat.worker.link import Link
from everbeat.worker.process_executor import ProcessExecutor
from everbeat.worker.progress import ProgressRecorder
from everbeat.worker.protocol import (
    Adopt,
    Beaten,
    Cancel,
    Drain,
    FromSupervisor,
    Leaving,
    Lost,
    Phantoms,
    Ready,
    Stop,
    Welcome,
)
from everbeat.worker.reporter import Reporter
from everbeat.worker.settler import Settler
from everbeat.worker.thread_executor import ThreadExecutor
from everbeat.worker.vitality import Silence, Vitality

LEAK_PATIENCE_S: Final = 5.0
"""Given-up threads that end within this time are no reason to replace the process."""
STOP_PATIENCE_S: Final = 5.0
"""How long a worker that was told to leave at once tries to settle."""
LOOP_BLOCKED_AFTER_S: Final = 1.0

_log = logging.getLogger("everbeat.worker")
