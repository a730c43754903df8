"""Recovery hooks: the facts about dead leases that they receive, their replies, and the functions that an app registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as setting
from typing import Any, Final, Literal, Protocol, TypeAlias
from uuid import UUID

from msgspec import Struct, field

from everbeat.domain.inspection import Progress
from everbeat.domain.settings.checks import optional, whole
from everbeat.domain.settings.settings import Settings, by, checked
from everbeat.domain.settings.units import When, to_when
from everbeat.domain.task.states import TaskState
from everbeat.domain.tracing.model import TracedRecovery
from everbeat.domain.tracing.tracing import Tracing

MOST_ATTEMPTS: Final = 32_767
CALLS_AT_ONCE: Final = 16
"""The maximum number of hooks that run at the same time. The time limit of each hook is measured from its own start."""

HookKind: TypeAlias = Literal["on_recovery", "on_interrupted", "on_recovered"]
"""The kinds of hooks that an app can register."""
CallKind: TypeAlias = Literal["on_recovery", "on_interrupted", "on_recovered", "tracing"]
"""The subject of an event about a call in a recovery: a hook of this kind, or the tracers."""
InterruptionReason: TypeAlias = Literal["worker_crashed", "task_stalled"]


class Default(Struct, frozen=True):
    """Recover the task according to its policy, as if there were no hook."""


@checked
@dataclass(frozen=True, slots=True)
class Reschedule(Settings):
    """Run the task again at exactly `run_at`, regardless of its policy. A time in the past means now.

    `run_at` is an aware datetime, or a timedelta from the database's current time. `attempts` (0 to 32,767) replaces the task's
    retry count. If `attempts` is None and the code had started, the count increases by one as usual. The caps on crashes and
    losses still apply. Raises ConfigurationError if a value is invalid.

        Reschedule(run_at=timedelta(minutes=10), attempts=0)
    """

    run_at: When = setting(metadata=by(to_when))
    attempts: int | None = setting(
        default=None, metadata=by(optional(whole(0, MOST_ATTEMPTS), none="counts one more"))
    )


class FailWithBackoff(Struct, frozen=True):
    """Treat the death as a failed attempt: the task uses up one retry, after the delay of its retry policy.

    A task without a retry policy gets 25 retries. The delay before retry n is e^n seconds, up to e^10 seconds. After the last
    retry, the task becomes FAILED with the code WORKER_CRASHED. A task whose code had not started returns to its queue after
    the delay and is not charged.
    """


class Skip(Struct, frozen=True):
    """Leave the lease unchanged. Later sweeps call the hook again, at most once per check interval."""


HookAnswer: TypeAlias = Default | Reschedule | FailWithBackoff | Skip
DEFAULT: Final = Default()


class NoAnswer(Struct, frozen=True):
    """A hook failed or could not be called. The reply counts as `Default`, and `problem` is stored with the recovery."""

    problem: str


HookReply: TypeAlias = HookAnswer | NoAnswer


class RecoveryContext(Struct, frozen=True, kw_only=True):
    """The facts about a task under recovery that a hook receives. The counts do not include this recovery.

    `state` is CLAIMED or RUNNING. `sweeping_worker_id` is the supervisor, worker or sweep that is recovering the task.
    `previous_worker_id` is the worker that held the task. `cause` and `noticed_by` are taken from the death certificate.
    """

    task_id: UUID
    name: str
    queue: str
    state: TaskState
    attempt: int
    retry_count: int
    crash_count: int
    loss_count: int
    flags: Mapping[str, bool]
    progress: Progress | None
    sweeping_worker_id: str
    previous_worker_id: str
    hostname: str | None
    reason: InterruptionReason
    cause: str
    noticed_by: str
    _traced: TracedRecovery | None = None


class SweepSummary(Struct, frozen=True, kw_only=True):
    """A summary of one recovery pass: the former holders, the number and ids of the recovered tasks, and the process that recovered them."""

    worker_ids: tuple[str, ...]
    recovered_count: int
    task_ids: tuple[UUID, ...]
    sweeping_worker_id: str


class Hook(Struct, frozen=True, kw_only=True):
    """A registered hook function, or the tracers. `task` limits an `on_recovery` hook to tasks with that name."""

    kind: CallKind
    function: Callable[[Any], Any]
    is_async: bool
    task: str | None = None
    where: str | None = None

    @property
    def name(self) -> str:
        """Return the hook's name for logs."""
        return str(getattr(self.function, "__qualname__", self.function))


class HookScopes(Struct, frozen=True, kw_only=True):
    """Which hooks the app has registered, and whether it has tracers, which also get the calls of the `on_interrupted` hooks.

    `interrupted` is set for tracers, too. `has_interrupted_hook` is set only if the app has registered such a hook.
    This information is sent to processes that cannot call the hooks, such as the supervisor.
    """

    every_task: bool = False
    tasks: tuple[str, ...] = ()
    interrupted: bool = False
    recovered: bool = False
    traced: bool = False
    has_interrupted_hook: bool = False

    def decides(self, name: str) -> bool:
        """Return whether a hook decides about tasks with this name."""
        return self.every_task or name in self.tasks


class HookSet(Struct, frozen=True, kw_only=True):
    """The hooks and the tracers of one app. A hook for one task function overrides the hook for all tasks."""

    recovery: Mapping[str | None, Hook] = field(default_factory=dict)
    interrupted: Hook | None = None
    recovered: Hook | None = None
    tracing: Tracing | None = None

    def for_task(self, name: str) -> Hook | None:
        """Return the hook that decides about tasks with this name, or None."""
        return self.recovery.get(name) or self.recovery.get(None)

    @property
    def scopes(self) -> HookScopes:
        """Return which hooks exist. A supervisor needs this because it does not import user code."""
        return HookScopes(
            every_task=None in self.recovery,
            tasks=tuple(sorted(name for name in self.recovery if name is not None)),
            interrupted=self.interrupted is not None or self.tracing is not None,
            traced=self.tracing is not None,
            recovered=self.recovered is not None,
            has_interrupted_hook=self.interrupted is not None,
        )


class HooksUnreachable(Exception):
    """Raised if no process can currently call the hook. The decision must then wait for the hook."""


class HookRunner(Protocol):
    """Calls hooks in this process or in another one. A hook that does not reply in time yields `NoAnswer`."""

    @property
    def scopes(self) -> HookScopes:
        """Return which hooks exist."""
        ...

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """Return the replies by task id, omitting tasks without a hook. Raises HooksUnreachable if no process can call the hooks."""
        ...

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Call the `on_interrupted` hooks for tasks that were taken from their holders."""
        ...

    async def recovered(self, summary: SweepSummary) -> None:
        """Call the `on_recovered` hooks after a pass that recovered tasks."""
        ...


class NoHooks:
    """The hook runner of an app without hooks."""

    scopes: HookScopes = HookScopes()

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """Return no replies."""
        del contexts
        return {}

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Do nothing."""

    async def recovered(self, summary: SweepSummary) -> None:
        """Do nothing."""
