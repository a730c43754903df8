"""Recovery hooks: what an app may be asked about dead leases, what it may answer, and the functions it registered.

What lives here: answers, what hooks are given, and the set of an app's hooks. What may not: calling them, time limits, and
carrying answers out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias
from uuid import UUID

from msgspec import Struct, field
from msgspec.structs import force_setattr

from everbeat.domain.duration import When, to_when
from everbeat.domain.inspection import Progress
from everbeat.domain.settings import refused
from everbeat.domain.states import TaskState

MOST_ATTEMPTS: Final = 32_767
CALLS_AT_ONCE: Final = 16
"""So many hooks are called side by side; the limit of each counts from its own beginning."""

HookKind: TypeAlias = Literal["on_recovery", "on_interrupted", "on_recovered"]
Reason: TypeAlias = Literal["worker_crashed", "task_stalled"]


class Default(Struct, frozen=True):
    """Recover it by its policy, as without a hook."""


class Reschedule(Struct, frozen=True):
    """Run it again at `run_at` exactly (a moment that is past means now), whatever its policy says.

    `run_at` is an aware datetime, or a timedelta from the database's now. `attempts` replaces the count of its retries,
    0 to 32,767; None counts one more, as usual, if its code had started. The caps of crashes and losses still hold.
    Raises ConfigurationError.

        Reschedule(run_at=timedelta(minutes=10), attempts=0)
    """

    run_at: When
    attempts: int | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "run_at", to_when(self.run_at, subject="Reschedule.run_at"))
        given: object = self.attempts
        if given is not None and (type(given) is not int or not 0 <= given <= MOST_ATTEMPTS):
            raise refused(
                given,
                subject="Reschedule.attempts",
                code="OUT_OF_RANGE",
                rule=f"must be a whole number from 0 to {MOST_ATTEMPTS:,}, or None",
                fix="pass 0 for fresh retries, or leave it out",
            )


class FailWithBackoff(Struct, frozen=True):
    """Treat it as a failed attempt: one retry is used up, the next comes after the delay of its retry policy.

    A task without a retry policy has 25 retries, after e^n seconds each, at most e^10. Then it ends FAILED, WORKER_CRASHED.
    Code that had not started is put back with that delay and is charged nothing.
    """


class Skip(Struct, frozen=True):
    """Leave the lease as it is; it is offered again by later sweeps, at most once in a check interval."""


HookAnswer: TypeAlias = Default | Reschedule | FailWithBackoff | Skip
DEFAULT: Final = Default()


class NoAnswer(Struct, frozen=True):
    """In place of an answer, where a hook failed or could not be asked: counts as `Default`; `problem` is kept with the recovery."""

    problem: str


HookReply: TypeAlias = HookAnswer | NoAnswer


class RecoveryContext(Struct, frozen=True, kw_only=True):
    """A task that was taken from its holder, as a hook sees it; the counts are those before this recovery.

    `state` is CLAIMED or RUNNING. `sweeping_worker_id` is the supervisor, worker or sweep that recovers it, `previous_worker_id`
    the one that held the task. `cause` and `noticed_by` are those of its death certificate.
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
    reason: Reason
    cause: str
    noticed_by: str


class SweepSummary(Struct, frozen=True, kw_only=True):
    """One pass of recovery that recovered something: whose tasks, how many, which; and who did it."""

    worker_ids: tuple[str, ...]
    recovered_count: int
    task_ids: tuple[UUID, ...]
    sweeping_worker_id: str


class Hook(Struct, frozen=True, kw_only=True):
    """One registered function; `task` limits an `on_recovery` to the tasks of one name."""

    kind: HookKind
    function: Callable[[Any], Any]
    is_async: bool
    task: str | None = None
    where: str | None = None

    @property
    def name(self) -> str:
        """Its name for logs."""
        return str(getattr(self.function, "__qualname__", self.function))


class HookScopes(Struct, frozen=True, kw_only=True):
    """Which hooks exist, for whoever cannot call them itself."""

    every_task: bool = False
    tasks: tuple[str, ...] = ()
    interrupted: bool = False
    recovered: bool = False

    def decides(self, name: str) -> bool:
        """Whether a hook is to be asked about tasks of this name."""
        return self.every_task or name in self.tasks


class HookSet(Struct, frozen=True, kw_only=True):
    """The hooks of one app; a hook of one task goes before the one for all."""

    recovery: Mapping[str | None, Hook] = field(default_factory=dict)
    interrupted: Hook | None = None
    recovered: Hook | None = None

    def for_task(self, name: str) -> Hook | None:
        """The hook that decides on tasks of this name."""
        return self.recovery.get(name) or self.recovery.get(None)

    @property
    def scopes(self) -> HookScopes:
        """What a supervisor, which imports no user code, must know of them."""
        return HookScopes(
            every_task=None in self.recovery,
            tasks=tuple(sorted(name for name in self.recovery if name is not None)),
            interrupted=self.interrupted is not None,
            recovered=self.recovered is not None,
        )


class HooksUnreachable(Exception):
    """Nobody can be asked just now: a decision is to be put off, not to be taken without the hook."""


class HookRunner(Protocol):
    """Calls hooks, here or elsewhere. Whoever fails to answer in time has given `NoAnswer`."""

    @property
    def scopes(self) -> HookScopes:
        """Which hooks there are to call."""
        ...

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """The answers by task id; one is missing where no hook is to be asked. Raises HooksUnreachable."""
        ...

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Tells of tasks that were taken from their holders."""
        ...

    async def recovered(self, summary: SweepSummary) -> None:
        """Tells of a pass that recovered something."""
        ...


class NoHooks:
    """The runner of an app without hooks."""

    scopes: HookScopes = HookScopes()

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """Nothing is answered."""
        del contexts
        return {}

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Nobody is told."""

    async def recovered(self, summary: SweepSummary) -> None:
        """Nobody is told."""
