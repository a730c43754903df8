"""What a worker is to do: its database, its task functions, its settings. No behaviour; it is the same after an adoption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct, field

from everbeat.config import RecoveryConfig, WorkerConfig, processors
from everbeat.domain.definition import RunIn, TaskDefinition
from everbeat.domain.hooks import HookSet
from everbeat.domain.policy import OnCrash, StoredPolicy
from everbeat.store.target import Target

MODES: Final[tuple[RunIn, ...]] = ("async", "thread", "process")


class WorkerPlan(Struct, frozen=True, kw_only=True):
    """`task_process_argv` starts a task process; `stop_grace_s` is what its code gets between a stop and SIGKILL.

    `on_loop_ending`: who is told that the program ends the worker's loop, for a worker that outlives this (see `Nursery`).
    """

    target: Target
    definitions: Mapping[str, TaskDefinition]
    config: WorkerConfig
    recovery: RecoveryConfig
    queue_priorities: Mapping[str, int] = field(default_factory=dict)
    exception_codes: Mapping[type[BaseException], str] = field(default_factory=dict)
    on_crash: OnCrash = "fail"
    task_process_argv: Sequence[str] = ()
    stop_grace_s: float = 0.5
    hooks: HookSet = field(default_factory=HookSet)
    on_loop_ending: Callable[[], None] | None = None

    def slots(self, mode: RunIn) -> int:
        """How many attempts of this mode run at once."""
        match mode:
            case "async":
                return self.config.async_concurrency
            case "thread":
                return self.config.thread_concurrency
            case "process":
                return self.config.process_concurrency

    @property
    def solo_slots(self) -> int:
        """How many suspects run at once, each alone in a process: together with the worker's siblings one per processor."""
        return max(1, processors() // self.config.processes)

    def policies(self) -> dict[str, StoredPolicy]:
        """By name, the policy of tasks that were sent without one, by programs that do not know the function."""
        return {name: each.options.stored(on_crash=self.on_crash) for name, each in self.definitions.items()}

    def names(self, mode: RunIn) -> tuple[str, ...]:
        """The task functions that run in this mode."""
        return tuple(sorted(name for name, each in self.definitions.items() if each.run_in == mode))
