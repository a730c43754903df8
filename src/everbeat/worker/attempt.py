"""One lease and what becomes of it: from the claim, through the code that runs under it, to the settled row.

What lives here: `Attempt`, which is also what a task's Context talks to, and the ways in which code ends. What may
not: who runs the code (the executors) and what is written (`settlement`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from datetime import datetime, timedelta
from enum import Enum, auto
from functools import cached_property
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from everbeat.domain.checkpoint import PartialWork
from everbeat.domain.codec import CallCodec
from everbeat.domain.context import Context, StopReason, TaskStopped
from everbeat.domain.definition import RunIn, TaskDefinition
from everbeat.domain.policy import StoredPolicy
from everbeat.domain.stored_text import storable
from everbeat.errors import PayloadError
from everbeat.runtime.exit_report import ExitReport
from everbeat.store.leases import Claimed
from everbeat.worker.code_side import CodeSide
from everbeat.worker.protocol import Answer, Lease, Request

LaneName: TypeAlias = RunIn | Literal["solo"]
"""Where tasks wait and run: by their mode, but for suspects, which run alone in a process whatever their mode is."""

ALONE: Final[frozenset[LaneName]] = frozenset(("process", "solo"))
"""The lanes whose code runs one task at a time in a process of its own: it can always be ended, and dies alone."""

_TEXT_BYTES: Final = 8_192
_LONGEST_MS: Final = 100 * 365 * 24 * 3_600 * 1_000
"""A limit that was stored by hand may be longer than any date can hold."""


class Stage(Enum):
    """Where an attempt stands in this worker's memory."""

    CLAIMED = auto()
    STARTING = auto()
    RUNNING = auto()
    SETTLING = auto()
    LEFT = auto()
    """A recovery hook lets it be: it is held, asked about again and again, and nothing here waits for the answer."""
    GONE = auto()
    """Not held any more: settled, given back, expired or lost. Nothing is written for it from here on."""


class Succeeded(Struct, frozen=True):
    """The code returned; `result` is JSON text."""

    result: bytes


class Failed(Struct, frozen=True):
    """The code raised, or could not be run; `error` is JSON text, `reasons` all that a policy may list it by.

    `exception`: for the log, if it was raised in this process.
    """

    error: bytes
    reasons: tuple[str, ...]
    exception: BaseException | None = None


class Suspended(Struct, frozen=True):
    """The code gave its slot back until it is time."""


class Declined(Struct, frozen=True):
    """The function does not understand the arguments: it does not know the `unknown` names, or it requires the `missing` ones.

    No code ran. `failed` is how the attempt ends if the task cannot be left to other code.
    """

    failed: Failed
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


class Died(Struct, frozen=True):
    """The task process ended under the code."""

    report: ExitReport


Ended: TypeAlias = Succeeded | Failed | Suspended | Declined | Died
OnEnded: TypeAlias = Callable[["Attempt", Ended], None]


class Clerk(Protocol):
    """Whoever answers requests of code."""

    def submit(self, attempt: Attempt, request: Request) -> Future[Answer]: ...

    async def answer(self, attempt: Attempt, request: Request) -> Answer: ...


class Attempt(CodeSide):
    """A held lease. Changed in the loop's thread only, but for `progress`; task code reads it from any thread.

    What begins alike for all is said by the class: making one is part of what each task costs.
    """

    stage: Stage = Stage.CLAIMED
    number: int = 0
    started_at: datetime | None = None
    launched_at: float = 0.0
    ended: Ended | None = None
    """How its code ended, told by the thread in which it ran: also after its worker has left."""
    stopped: StopReason | None = None
    cancel_asked: bool = False
    self_fenced: bool = False
    progress: bytes | None = None
    progress_noted: bool = False
    spoke_at: float = 0.0
    """When its code last said anything, or began, by the worker's monotonic clock."""
    settling_since: float = 0.0
    unanswered: int = 0
    """Requests of its code that this worker has not answered: whoever waits for us is not silent."""
    rests: int = 0
    """Durable sleeps in which its code keeps its slot: a stop suspends them."""
    timers: Sequence[asyncio.TimerHandle] = ()
    clerk: Clerk | None = None
    """Who answers requests of its code."""
    checkpoint_number: int = 0
    holds_progress: bool = False
    """What its code says of itself is kept, and not written for now."""
    is_committing: bool = False
    """Its code settles it this very moment: what happens to it meanwhile waits in `after_commit`."""
    is_committed: bool = False
    exception: BaseException | None = None
    """What its code raised, for the log, until it is settled."""
    may_suspend: bool = False
    """Its code was told to give its slot back; the row says until when."""
    after_commit: Sequence[Callable[[], None]] = ()

    def __init__(
        self,
        *,
        task: Claimed,
        lane: LaneName,
        definition: TaskDefinition,
        policy: StoredPolicy,
        on_progress: Callable[[Attempt], None],
    ) -> None:
        self.task = task
        self.id: Final = task.id
        self.claim_id: Final = task.claim_id
        """What every write of this attempt names."""
        self.lane = lane
        self.definition = definition
        self.policy = policy
        self.on_progress = on_progress

    @cached_property
    def checkpoint_turn(self) -> asyncio.Lock:
        """Held by whoever writes a checkpoint."""
        return asyncio.Lock()

    @cached_property
    def wait_turn(self) -> asyncio.Lock:
        """Held by whoever takes a signal: two waits of one code must not both take the same."""
        return asyncio.Lock()

    @property
    def lease(self) -> Lease:
        """(task id, claim_id)."""
        return self.task.id, self.task.claim_id

    @property
    def timeout_s(self) -> float | None:
        """How long its code may run, by the policy; None without a limit."""
        limit_ms = self.policy.timeout_ms
        return None if limit_ms is None else min(limit_ms, _LONGEST_MS) / 1_000

    @property
    def stall_timeout_s(self) -> float | None:
        """How long its code may say nothing, by the policy; None without a limit."""
        limit_ms = self.policy.stall_timeout_ms
        return None if limit_ms is None else min(limit_ms, _LONGEST_MS) / 1_000

    @property
    def deadline(self) -> datetime | None:
        """When the limit is reached, by the database's clock."""
        if self.started_at is None or (limit_s := self.timeout_s) is None:
            return None
        return self.started_at + timedelta(seconds=limit_s)

    def context(self, *, worker_id: str) -> Context:
        """What its code may know of it."""
        return Context(
            task_id=self.task.id,
            name=self.task.name,
            queue=self.task.queue,
            attempt=self.number,
            fence=self.task.fence,
            claim_id=self.task.claim_id,
            worker_id=worker_id,
            deadline=self.deadline,
            backend=self,
            work=PartialWork.from_json(self.task.checkpoint),
        )

    def stop_reason(self) -> StopReason | None:
        """Why the code should stop, if it should; for its Context."""
        return self.stopped

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        """Keep what the code says of itself, the last word only; for its Context, from any thread."""
        self.progress = progress_json(stage=stage, fraction=fraction, message=message)
        self.on_progress(self)

    def release_progress(self) -> None:
        """Write again what its code says of itself, first what was kept."""
        if self.holds_progress:
            self.holds_progress = self.progress_noted = False
            if self.progress is not None:
                self.on_progress(self)

    @property
    def codec(self) -> CallCodec:
        """Of its task function."""
        return self.definition.codec

    def ask(self, request: Request) -> Answer:
        """Have a request of its code answered, and wait; in any thread but the loop's."""
        try:
            return self._submit(request).result()
        except CancelledError:
            raise TaskStopped("shutting_down", task_id=self.id) from None

    async def aask(self, request: Request) -> Answer:
        """The twin of `ask`, on any loop."""
        # Shielded: the code may be cancelled, what it asked for goes on.
        return await asyncio.shield(asyncio.wrap_future(self._submit(request)))

    def _submit(self, request: Request) -> Future[Answer]:
        assert self.clerk is not None
        try:
            return self.clerk.submit(self, request)
        except RuntimeError:  # the loop is closed: the worker has left
            raise TaskStopped("shutting_down", task_id=self.id) from None

    def cancel_timers(self) -> None:
        """Nothing that was due for this attempt happens any more."""
        for timer in self.timers:
            timer.cancel()
        self.timers = ()


def progress_json(*, stage: str, fraction: float | None, message: str) -> bytes:
    """Progress as it is stored; text that JSON cannot hold is escaped, long text is cut at 8 kB."""
    clean = (storable(text, limit=_TEXT_BYTES) for text in (stage, message))
    return msgspec.json.encode({"stage": next(clean), "fraction": fraction, "message": next(clean)})


def attempt_of(
    task: Claimed,
    lane: LaneName,
    definitions: Mapping[str, TaskDefinition],
    policies: Mapping[str, StoredPolicy],
    on_progress: Callable[[Attempt], None],
) -> Attempt:
    """The attempt of what was claimed, by its own policy, or its function's where it has none or one damaged by hand."""
    try:
        policy = None if task.policy is None else StoredPolicy.from_json(task.policy)
    except PayloadError:
        policy = None
    return Attempt(
        task=task,
        lane=lane,
        definition=definitions[task.name],
        policy=policies[task.name] if policy is None else policy,
        on_progress=on_progress,
    )
