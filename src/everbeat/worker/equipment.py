"""The executors and lanes of a worker, made from its plan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from everbeat.runtime.events import EventBus
from everbeat.runtime.lag import LoopWatch, name_of
from everbeat.worker.async_executor import AsyncExecutor
from everbeat.worker.attempt import Attempt, LaneName, OnEnded
from everbeat.worker.executor import Executor
from everbeat.worker.invocation import Invoker
from everbeat.worker.lane import Lane
from everbeat.worker.plan import MODES, WorkerPlan
from everbeat.worker.process_executor import ProcessExecutor
from everbeat.worker.recycling import Limits, ProcessRecycled
from everbeat.worker.thread_executor import ThreadExecutor

LOOP_BLOCKED_AFTER_S: Final = 1.0

SOLO_LINGER_S: Final = 60.0
"""Suspects are rare: the process that is kept ready for the next one does not stay for long."""

ONE_SUSPECT: Final = Limits(tasks=1)
"""What one suspect left behind in its process must not break it under the next."""

_log = logging.getLogger("everbeat.worker")


def make_executors(
    plan: WorkerPlan,
    *,
    worker_id: Callable[[], str],
    on_ended: OnEnded,
    on_free: Callable[[LaneName], None],
    on_broken: Callable[[LaneName, str], None],
    on_progress: Callable[[Attempt], None],
    on_recycled: Callable[[ProcessRecycled], None],
) -> dict[LaneName, Executor]:
    """An executor for each mode that has slots and task functions, and one for suspects of the modes that share a process."""
    invoker = Invoker(plan.exception_codes)

    def of_processes(lane: LaneName, slots: int) -> ProcessExecutor:
        return ProcessExecutor(
            slots=slots,
            argv=plan.task_process_argv,
            stop_grace_s=plan.stop_grace_s,
            worker_id=worker_id,
            on_ended=on_ended,
            on_free=lambda: on_free(lane),
            on_broken=lambda reason: on_broken(lane, reason),
            on_progress=on_progress,
            limits=ONE_SUSPECT if lane == "solo" else Limits.of(plan.config),
            on_recycled=_no_news if lane == "solo" else on_recycled,
            linger_s=SOLO_LINGER_S if lane == "solo" else None,
            on_loop_ending=plan.on_loop_ending,
        )

    made: dict[LaneName, Executor] = {}
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
                    on_loop_ending=plan.on_loop_ending,
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
                made[mode] = of_processes(mode, slots)
    if plan.task_process_argv and ("async" in made or "thread" in made):
        made["solo"] = of_processes("solo", plan.solo_slots)
    return made


def make_loop_watch(
    plan: WorkerPlan, executors: Mapping[LaneName, Executor], *, events: EventBus
) -> LoopWatch:
    """The watch on the running loop, which names task functions: those on the loop, and those in threads that may hold the GIL."""
    threads, coroutines = executors.get("thread"), executors.get("async")

    def in_threads() -> tuple[str, ...]:
        return threads.names if isinstance(threads, ThreadExecutor) else ()

    return LoopWatch(
        asyncio.get_running_loop(),
        threshold_s=LOOP_BLOCKED_AFTER_S,
        emit=events.emit,
        describe=coroutines.describe if isinstance(coroutines, AsyncExecutor) else name_of,
        in_threads=in_threads,
        is_code=lambda task: task.get_name().partition(" ")[0] in plan.definitions,
    )


def _no_news(_: ProcessRecycled) -> None:
    """A process of the solo lane makes room after each suspect: that is no news."""


def make_lanes(
    plan: WorkerPlan, executors: Mapping[LaneName, Executor], *, unsettled: Callable[[LaneName], int]
) -> dict[LaneName, Lane]:
    """A lane for each executor. Where suspects have one of their own, the lanes whose tasks share a process leave them to it."""
    names = {mode: plan.names(mode) if mode in executors else () for mode in MODES}
    has_solo = "solo" in executors
    if not plan.task_process_argv:
        _log.info("no_solo_lane reason=%r", "a new process would not find the app: suspects run among others")

    def lane(name: LaneName, executor: Executor) -> Lane:
        is_solo = name == "solo"
        return Lane(
            name=name,
            names=(*names["async"], *names["thread"]) if name == "solo" else names[name],
            executor=executor,
            prefetch=0 if is_solo else plan.config.prefetch,
            queue_priorities=plan.queue_priorities,
            unsettled=lambda: unsettled(name),
            suspects=None if name == "process" or not has_solo else is_solo,
        )

    return {name: lane(name, executor) for name, executor in executors.items()}
