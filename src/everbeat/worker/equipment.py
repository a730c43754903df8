"""The executors and lanes of a worker, made from its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everbeat.domain.definition import RunIn
from everbeat.worker.async_executor import AsyncExecutor
from everbeat.worker.attempt import Attempt, OnEnded
from everbeat.worker.executor import Executor
from everbeat.worker.invocation import Invoker
from everbeat.worker.lane import Lane
from everbeat.worker.plan import MODES, WorkerPlan
from everbeat.worker.process_executor import ProcessExecutor
from everbeat.worker.thread_executor import ThreadExecutor


def make_executors(
    plan: WorkerPlan,
    *,
    worker_id: Callable[[], str],
    on_ended: OnEnded,
    on_free: Callable[[RunIn], None],
    on_broken: Callable[[RunIn, str], None],
    on_progress: Callable[[Attempt], None],
) -> dict[RunIn, Executor]:
    """An executor for each mode that has slots and task functions."""
    invoker = Invoker(plan.exception_codes)
    made: dict[RunIn, Executor] = {}
    for mode in MODES:
        slots = plan.slots(mode)
        if slots == 0 or not plan.names(mode):
            continue
        match mode:
            case "async":
                made[mode] = AsyncExecutor(
                    slots=slots,
                    invoker=invoker,
                    worker_id=worker_id,
                    on_ended=on_ended,
                    on_free=lambda: on_free("async"),
                )
            case "thread":
                made[mode] = ThreadExecutor(
                    slots=slots,
                    invoker=invoker,
                    worker_id=worker_id,
                    on_ended=on_ended,
                    on_free=lambda: on_free("thread"),
                )
            case "process":
                made[mode] = ProcessExecutor(
                    slots=slots,
                    argv=plan.task_process_argv,
                    stop_grace_s=plan.stop_grace_s,
                    worker_id=worker_id,
                    on_ended=on_ended,
                    on_free=lambda: on_free("process"),
                    on_broken=lambda reason: on_broken("process", reason),
                    on_progress=on_progress,
                )
    return made


def make_lanes(
    plan: WorkerPlan, executors: Mapping[RunIn, Executor], *, unsettled: Callable[[RunIn], int]
) -> dict[RunIn, Lane]:
    """A lane for each executor."""
    return {
        mode: Lane(
            mode=mode,
            names=plan.names(mode),
            executor=executor,
            prefetch=plan.config.prefetch,
            queue_priorities=plan.queue_priorities,
            unsettled=lambda mode=mode: unsettled(mode),  # type: ignore[misc]
        )
        for mode, executor in executors.items()
    }
