"""What a task function asks for (TaskOptions), and what of it is stored with every task (StoredPolicy).

What lives here: both objects and the way from one to the other. The stored part is what a reaper needs to
decide about a dead attempt without importing user code. What may not: that decision, which is `recovery`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, cast

import msgspec
import msgspec.structs

from everbeat.domain.checks import (
    exception_codes,
    flags,
    instance_of,
    one_of,
    optional,
    queue_name,
    switch,
    task_name,
    whole,
)
from everbeat.domain.duration import Duration, milliseconds, span, spelled
from everbeat.domain.outcome import TASK_STALLED, WORKER_CRASHED, WORKER_STOPPED
from everbeat.domain.retry import BackoffStrategy, RetryPolicy, delay_seconds
from everbeat.domain.settings import Settings, by, checked
from everbeat.errors import PayloadError, Problem

OnCrash = Literal["fail", "retry"]
OnStop = Literal["fail", "retry"]
RunIn = Literal["async", "thread", "process"]

LOWEST_PRIORITY: Final = -32_768
HIGHEST_PRIORITY: Final = 32_767
MOST_CRASHES: Final = 100
MOST_LOSSES: Final = 1_000
LONGEST_TIMEOUT_S: Final = 365 * 86_400.0
LOSSES_OF_WORKER: Final = (WORKER_CRASHED, WORKER_STOPPED, TASK_STALLED)
"""Ends that the code cannot see. Whether it may run again after them is a property of the code, not of a send."""


class StoredPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored with a task for whoever finds it dead; caps of None mean the finder's configuration.

    `retries_bound`: `on_crash` is the app's default, so an end that `retry_for` lists runs again at most `max_retries` times.
    """

    max_retries: int = 0
    strategy: BackoffStrategy = "fixed"
    intervals: tuple[float, ...] = ()
    jitter: float = 0.0
    max_delay: float | None = None
    retry_for: tuple[str, ...] = ()
    on_crash: OnCrash = "fail"
    on_stop: OnStop | None = None
    retries_bound: bool = False
    max_crashes: int | None = None
    max_losses: int | None = None
    timeout_ms: int | None = None
    stall_timeout_ms: int | None = None

    def lists(self, reasons: Iterable[str]) -> bool:
        """Whether a failure with one of these reasons is one to retry; for whoever knows how an attempt ended."""
        return not set(self.retry_for).isdisjoint(reasons)

    @property
    def retries_crash(self) -> bool:
        """Whether the death of its worker is one of the reasons to retry."""
        return WORKER_CRASHED in self.retry_for

    @property
    def retries_stall(self) -> bool:
        """Whether code that stopped making progress is one of the reasons to retry."""
        return TASK_STALLED in self.retry_for

    @property
    def retries_stop(self) -> bool:
        """Whether started code may run again after its worker was stopped before the code ended.

        `on_stop` decides; without it, `on_crash="retry"` or `WORKER_STOPPED` among the listed errors allows it.
        """
        if self.on_stop is not None:
            return self.on_stop == "retry"
        return self.on_crash == "retry" or WORKER_STOPPED in self.retry_for

    def delay(self, retry_number: int, random: Random) -> float:
        """Seconds to wait before retry `retry_number`, which counts from 1; 0 without a retry policy."""
        if not self.intervals:
            return 0.0
        return delay_seconds(
            retry_number,
            strategy=self.strategy,
            intervals=self.intervals,
            jitter=self.jitter,
            max_delay=self.max_delay,
            random=random,
        )

    def to_json(self) -> bytes | None:
        """What differs from the defaults, as JSON; None when nothing does."""
        given = {
            name: getattr(self, name) for name, default in _DEFAULTS.items() if getattr(self, name) != default
        }
        return msgspec.json.encode(given) if given else None

    def default_json(self) -> bytes | None:
        """`to_json`, for the policy that a worker stores at the first start because the sender gave none.

        If that worker does not understand the arguments, `task/decline` takes the policy back, and no other one.
        """
        plain = self.to_json()
        return None if plain is None else plain[:-1] + b',"is_default":true}'

    @classmethod
    def from_json(cls, data: bytes | str | None) -> StoredPolicy:
        """The policy from its stored form, unknown names ignored; raises PayloadError when it is damaged."""
        if data is None:
            return _PLAIN
        try:
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            fix = "restore the column from the task function's options, or set it to null for the defaults."
            raise PayloadError(f"The stored policy of a task cannot be read: {error}.", fix=fix) from error


_PLAIN: Final = StoredPolicy()
_DEFAULTS: Final = msgspec.structs.asdict(_PLAIN)
_DECODER: Final = msgspec.json.Decoder(StoredPolicy)


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(Settings):
    """Everything that `@app.task` takes besides the function. Raises ConfigurationError with every problem.

    `priority`: the lower number runs first. `timeout` and `stall_timeout` are durations, None for no limit.
    `run_in`: None lets async functions run on the loop and others in a thread. `on_crash`, `max_crashes` and
    `max_losses`: None takes the app's default. `serial`: one run of this task function at a time, in the
    order they were sent. `on_stop`: what becomes of started code that does not end within the grace of a worker
    that is told to stop, "retry" (handed back at no cost) or "fail" (WORKER_STOPPED); None decides by `on_crash` and
    `auto_retry_for`. `exception_codes` gives exceptions an error code by class.
    """

    name: str | None = field(default=None, metadata=by(optional(task_name, none="takes the function's name")))
    queue: str = field(default="default", metadata=by(queue_name))
    priority: int = field(default=0, metadata=by(whole(LOWEST_PRIORITY, HIGHEST_PRIORITY)))
    timeout: Duration | None = field(
        default=None, metadata=by(optional(span(0.1, LONGEST_TIMEOUT_S), none="sets no limit"))
    )
    retry: RetryPolicy | None = field(
        default=None, metadata=by(optional(instance_of(RetryPolicy), none="never retries"))
    )
    run_in: RunIn | None = field(
        default=None, metadata=by(optional(one_of("async", "thread", "process"), none="suits the function"))
    )
    on_crash: OnCrash | None = field(
        default=None, metadata=by(optional(one_of("fail", "retry"), none="takes the app's default"))
    )
    on_stop: OnStop | None = field(
        default=None,
        metadata=by(optional(one_of("fail", "retry"), none="decides by on_crash and auto_retry_for")),
    )
    max_crashes: int | None = field(
        default=None, metadata=by(optional(whole(1, MOST_CRASHES), none="takes the app's default"))
    )
    max_losses: int | None = field(
        default=None, metadata=by(optional(whole(1, MOST_LOSSES), none="takes the app's default"))
    )
    stall_timeout: Duration | None = field(
        default=None, metadata=by(optional(span(1.0, LONGEST_TIMEOUT_S), none="watches no progress"))
    )
    flags: Iterable[str] | Mapping[str, bool] = field(default=(), metadata=by(flags), hash=False)
    serial: bool = field(default=False, metadata=by(switch))
    exception_codes: Mapping[type[BaseException], str] = field(
        default_factory=dict, metadata=by(exception_codes), hash=False
    )

    @property
    def timeout_ms(self) -> int | None:
        """The timeout in milliseconds."""
        return _milliseconds(self.timeout)

    @property
    def stall_timeout_ms(self) -> int | None:
        """The stall timeout in milliseconds."""
        return _milliseconds(self.stall_timeout)

    @property
    def flag_values(self) -> Mapping[str, bool]:
        """The flags by name."""
        return cast(Mapping[str, bool], self.flags)

    def is_resilient(self, resilient_flags: Collection[str]) -> bool:
        """Whether one of these flags is set on the task."""
        return any(self.flag_values.get(name, False) for name in resilient_flags)

    def given(self, *, timeout: Duration | None, retry: RetryPolicy | None) -> TaskOptions:
        """Return the options of one send, which decides these two itself.

        Its policy replaces the registered one, but the codes of a lost worker that are registered stay listed.
        """
        if retry is not None and self.retry is not None and retry != self.retry:
            kept = [code for code in self.retry.reasons if code in LOSSES_OF_WORKER]
            retry = retry.replace(auto_retry_for=tuple(dict.fromkeys((*retry.auto_retry_for, *kept))))
        return self.replace(timeout=timeout, retry=retry)

    def _listed_losses(self) -> tuple[str, ...]:
        listed = () if self.retry is None else self.retry.reasons
        return tuple(code for code in (WORKER_CRASHED, TASK_STALLED) if code in listed)

    def stored(self, *, on_crash: OnCrash) -> StoredPolicy:
        """What is stored with each task; `on_crash` is the app's default for tasks that say nothing."""
        retry = self.retry
        chosen = self.on_crash or on_crash
        caps = {
            "on_crash": chosen,
            "on_stop": self.on_stop,
            "retries_bound": self.on_crash is None and chosen == "retry" and bool(self._listed_losses()),
            "max_crashes": self.max_crashes,
            "max_losses": self.max_losses,
            "timeout_ms": self.timeout_ms,
            "stall_timeout_ms": self.stall_timeout_ms,
        }
        if retry is None:
            return StoredPolicy(**caps)  # type: ignore[arg-type]
        return StoredPolicy(
            max_retries=retry.max_retries,
            strategy=retry.backoff_strategy,
            intervals=retry.intervals_s,
            jitter=float(retry.jitter),
            max_delay=retry.max_delay_s,
            retry_for=retry.reasons,
            **caps,  # type: ignore[arg-type]
        )

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant."""
        found: list[str] = []
        if self.retry is not None and not self.retry.auto_retry_for and self.on_crash != "retry":
            found += self.retry.warnings()
        limit_ms, stall_ms = self.timeout_ms, self.stall_timeout_ms
        if limit_ms is not None and stall_ms is not None and stall_ms >= limit_ms:
            limit = spelled(limit_ms / 1_000)
            found.append(
                f"TaskOptions.stall_timeout is never reached: timeout ends the attempt after {limit}."
            )
        return found

    def several_policies(self, *, on_crash: OnCrash) -> tuple[str, str] | None:
        """Return what `on_crash`, its own or the app's default, means beside a listed loss of the worker, and the fix. None without both."""
        if not (listed := self._listed_losses()) or (self.on_crash or on_crash) != "retry":
            return None
        codes, retries = " and ".join(listed), cast(RetryPolicy, self.retry).max_retries
        if self.on_crash is None:
            text = f"auto_retry_for lists {codes}, so it runs again no more than {retries} times: on_crash='retry' of the app adds none"
            return text, "to have it run again until max_crashes, write on_crash='retry' here."
        text = f"auto_retry_for lists {codes}, and on_crash='retry' goes on after its {retries} retries, until max_crashes or max_losses"
        return text, "leave out on_crash to stop after max_retries, or take the code out of auto_retry_for."

    def outlasts(self, grace_s: float) -> str | None:
        """Return why a worker's stop can fail the task: an explicit `on_crash="fail"`, and code that may outlast the grace (in seconds)."""
        may_run_again = self.on_stop is not None or (
            self.retry is not None and self.retry.matches(WORKER_STOPPED, None)
        )
        if self.on_crash != "fail" or may_run_again:
            return None
        if (limit_ms := self.timeout_ms) is None:
            return "it has no timeout"
        return (
            f"its timeout is longer than the grace of {spelled(grace_s)}"
            if limit_ms > grace_s * 1_000
            else None
        )

    def _contradictions(self) -> Iterator[Problem]:
        retry: object = self.retry
        if self.on_crash == "fail" and isinstance(retry, RetryPolicy) and retry.matches(WORKER_CRASHED, None):
            yield Problem(
                code="CONTRADICTION",
                subject="TaskOptions.on_crash",
                value="'fail'",
                rule=f"contradicts {WORKER_CRASHED} in auto_retry_for, which runs the task again",
                fix=f"leave out on_crash, or take {WORKER_CRASHED} out of auto_retry_for",
            )
        if self.on_stop == "fail" and isinstance(retry, RetryPolicy) and retry.matches(WORKER_STOPPED, None):
            yield Problem(
                code="CONTRADICTION",
                subject="TaskOptions.on_stop",
                value="'fail'",
                rule=f"contradicts {WORKER_STOPPED} in auto_retry_for, which runs the task again",
                fix=f"leave out on_stop, or take {WORKER_STOPPED} out of auto_retry_for",
            )


def _milliseconds(seconds: Duration | None) -> int | None:
    return None if seconds is None else milliseconds(cast(float, seconds))
