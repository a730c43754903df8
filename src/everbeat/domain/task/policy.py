"""The options of a task function (TaskOptions), and the policy that is stored with its tasks (StoredPolicy)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal, cast

import msgspec
import msgspec.structs
from msgspec import UNSET

from everbeat.domain.labels import checked_labels
from everbeat.domain.limit.options import concurrency, costs, limit_names
from everbeat.domain.settings.checks import (
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
from everbeat.domain.settings.settings import Settings, by, checked, shown
from everbeat.domain.settings.units import (
    NEVER,
    Duration,
    milliseconds,
    respelled,
    span,
    span_or_never,
    spelled_duration,
)
from everbeat.domain.task.captured_log import LogLevel, capture_level
from everbeat.domain.task.failure_handler import OnFailure, StoredHandler, on_failure
from everbeat.domain.task.retry import BackoffStrategy, RetryPolicy, delay_seconds
from everbeat.domain.task.uniqueness import (
    OnDuplicate,
    UniqueFor,
    at_latest,
    contradictions,
    on_duplicate,
    unique_for,
)
from everbeat.errors import TASK_STALLED, WORKER_CRASHED, WORKER_STOPPED, PayloadError, Problem
from everbeat.errors.wording import amount

OnCrash = Literal["fail", "retry"]
OnStop = Literal["fail", "retry"]
RunIn = Literal["async", "thread", "process"]

LOWEST_PRIORITY: Final = -32_768
HIGHEST_PRIORITY: Final = 32_767
MOST_CRASHES: Final = 100
MOST_LOSSES: Final = 1_000
MOST_RETRY_LATER: Final = 10_000
SHORTEST_KEEP_S: Final = 1.0
LONGEST_TIMEOUT_S: Final = 365 * 86_400.0
SHORTEST_STALL_S: Final = 1.0
_ELSEWHERE: Final[Mapping[str, str]] = {
    "good_until": "write task.with_options(good_until=...)",
    "key": "write task.with_options(key=...)",
    "job_key": "write task.with_options(key=...)",
    "run_at": "write task.schedule(when, ...)",
    "retry_policy": "use retry",
    "max_attempts": "use retry=RetryPolicy(max_retries=...)",
}
"""Maps the options of a send, and option names from other task queues, to hints about what to write instead."""
_stall_span = span_or_never(SHORTEST_STALL_S, LONGEST_TIMEOUT_S, never="watches no progress")
_FAILS: Final = (("on_crash", WORKER_CRASHED), ("on_stop", WORKER_STOPPED))
"""The options whose value "fail" contradicts a retry policy that lists the code."""
LOSSES_OF_WORKER: Final = (WORKER_CRASHED, WORKER_STOPPED, TASK_STALLED)
"""Error codes of failures that the code cannot observe. Whether to run the code again after them depends on the code, not on the send."""


class StoredPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that is stored with a task, so that any process can recover the task.

    If `max_crashes` or `max_losses` is None, the limit of the recovering app applies. `retries_bound` means that `on_crash` is the
    app's default. A failure that `retry_for` lists is then retried at most `max_retries` times. `on_failure` is the task that PostgreSQL
    sends when this task fails for good.
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
    max_retry_later: int = 100
    ignore_result: bool = False
    keep_result_ms: int | None = None
    on_failure: StoredHandler | None = None

    def lists(self, reasons: Iterable[str]) -> bool:
        """Return whether the policy retries a failure with one of these reasons."""
        return not set(self.retry_for).isdisjoint(reasons)

    @property
    def retries_stop(self) -> bool:
        """Return whether started code may run again if its worker was stopped before the code finished.

        `on_stop` decides. If it is None, `on_crash="retry"` or a listed `WORKER_STOPPED` allows another run.
        """
        if self.on_stop is not None:
            return self.on_stop == "retry"
        return self.on_crash == "retry" or WORKER_STOPPED in self.retry_for

    def delay(self, retry_number: int, random: Random) -> float:
        """Return the delay in seconds before retry `retry_number`, which counts from 1. Without a retry policy, the delay is 0."""
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
        """Return the values that differ from the defaults as JSON, or None if all values are defaults."""
        given = {
            name: getattr(self, name) for name, default in _DEFAULTS.items() if getattr(self, name) != default
        }
        return msgspec.json.encode(given) if given else None

    def default_json(self) -> bytes | None:
        """Return the result of `to_json`, marked as a default policy.

        A worker stores this policy at a task's first start if the sender gave none. If the worker does not accept the task's
        arguments, `task/decline_tasks` removes only a policy that has this mark.
        """
        plain = self.to_json()
        return None if plain is None else plain[:-1] + b',"is_default":true}'

    @classmethod
    def from_json(cls, data: bytes | str | None) -> StoredPolicy:
        """Return the policy, decoded from its stored form. Unknown names are ignored. Raises PayloadError if the data cannot be read."""
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
    """The options of `@app.task`. Raises ConfigurationError, which lists all problems, if an option is invalid.

    - `priority`: tasks with lower numbers run first.
    - `timeout`: None sets no limit.
    - `stall_timeout`: a duration, or "never".
    - `run_in`: None runs async functions on the event loop and other functions in a thread.
    - `on_crash`, `stall_timeout`, `max_crashes` and `max_losses`: None uses the app's default.
    - `serial`: if True, tasks of this function run one at a time, in the order they were sent.
    - `limits`: the names of up to three limits of `App(limits=...)`. `costs` maps some of them to the permits that a task takes (default: 1).
    - `concurrency`: at most this many tasks of this function run at the same time, in all processes.
    - `on_stop`: applies to code that does not finish within the grace period when its worker shuts down. "retry" releases
      the task without charging it; "fail" fails it with WORKER_STOPPED. None leaves the decision to `on_crash` and `auto_retry_for`.
    - `max_retry_later`: how many attempts can raise RetryLater without costing a retry.
    - `ignore_result`: do not store the function's return value.
    - `keep_result_for`: how long to store the result after the task completed. None keeps it as long as the task's record.
    - `labels`: texts by key, by which the tasks can be found. A send adds its own labels.
    - `exception_codes`: a mapping from exception classes to error codes.
    - `capture_logs`: the lowest level of the log records that are stored with each attempt, True for "info", or False. None uses the
      worker's setting.
    - `on_failure`: the task, or the name of a task, that runs when a task of this function fails for good. Its only argument is a
      `FinalFailure`. None sends no such task. If omitted, the handler of `App.on_failure` applies.
    - `unique_for`, `on_duplicate` and `at_latest`: apply to sends with a key. See `SendSettings`.
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
    max_retry_later: int = field(default=100, metadata=by(whole(0, MOST_RETRY_LATER)))
    ignore_result: bool = field(default=False, metadata=by(switch))
    keep_result_for: Duration | None = field(
        default=None,
        metadata=by(
            optional(span(SHORTEST_KEEP_S, LONGEST_TIMEOUT_S), none="keeps it as long as the task's record")
        ),
    )
    stall_timeout: Duration | None = field(
        default=None,
        metadata=by(optional(_stall_span, none="takes the app's default")),
    )
    flags: Iterable[str] | Mapping[str, bool] = field(default=(), metadata=by(flags), hash=False)
    serial: bool = field(default=False, metadata=by(switch))
    limits: Sequence[str] = field(default=(), metadata=by(limit_names))
    costs: Mapping[str, int] = field(default_factory=dict, metadata=by(costs), hash=False)
    concurrency: int | None = field(default=None, metadata=by(concurrency))
    labels: Mapping[str, str] = field(default_factory=dict, metadata=by(checked_labels), hash=False)
    exception_codes: Mapping[type[BaseException], str] = field(
        default_factory=dict, metadata=by(exception_codes), hash=False
    )
    capture_logs: bool | LogLevel | None = field(
        default=None, metadata=by(optional(capture_level, none="takes the worker's setting"))
    )
    on_failure: OnFailure = field(default=UNSET, metadata=by(on_failure), hash=False)
    unique_for: UniqueFor = field(default="live", metadata=by(unique_for))
    on_duplicate: OnDuplicate = field(default="existing", metadata=by(on_duplicate))
    at_latest: Duration | None = field(default=None, metadata=by(optional(at_latest, none="sets no limit")))

    @property
    def timeout_ms(self) -> int | None:
        """Return the timeout in milliseconds, or None if there is no timeout."""
        return _milliseconds(self.timeout)

    @property
    def stall_timeout_ms(self) -> int | None:
        """Return the task's own stall timeout in milliseconds, or None if it has none."""
        return None if self.stall_timeout == NEVER else _milliseconds(self.stall_timeout)

    @property
    def own_capture_level(self) -> LogLevel | Literal[False] | None:
        """Return the lowest level of log records to capture, False for none, or None for the worker's setting."""
        return cast("LogLevel | Literal[False] | None", self.capture_logs)

    @property
    def flag_values(self) -> Mapping[str, bool]:
        """Return the flags as a mapping from names to values."""
        return cast(Mapping[str, bool], self.flags)

    def given(self, *, timeout: Duration | None, retry: RetryPolicy | None) -> TaskOptions:
        """Return the options for one send that sets its own timeout and retry policy.

        The send's retry policy replaces the registered policy, but keeps the registered policy's codes for a lost worker.
        """
        if retry is not None and self.retry is not None and retry != self.retry:
            kept = [code for code in self.retry.reasons if code in LOSSES_OF_WORKER]
            retry = retry.replace(auto_retry_for=tuple(dict.fromkeys((*retry.auto_retry_for, *kept))))
        return self.replace(timeout=timeout, retry=retry)

    def _derived(self, default_retry: RetryPolicy) -> RetryPolicy | None:
        """Return the policy that a task function with these options gets from the app's default retry policy."""
        own = {name: getattr(self, name) for name, _ in _FAILS}
        return cast(RetryPolicy | None, with_retry_of_app(own, default_retry)["retry"])

    def _listed_losses(self) -> tuple[str, ...]:
        listed = () if self.retry is None else self.retry.reasons
        return tuple(code for code in (WORKER_CRASHED, TASK_STALLED) if code in listed)

    def stored(
        self,
        *,
        on_crash: OnCrash,
        stall_timeout_ms: int | None = None,
        handler: StoredHandler | None = None,
    ) -> StoredPolicy:
        """Return the policy to store with each task, with its failure handler. The other arguments are the app's defaults."""
        retry = self.retry
        chosen = self.on_crash or on_crash
        caps = {
            "on_crash": chosen,
            "on_stop": self.on_stop,
            "retries_bound": self.on_crash is None and chosen == "retry" and bool(self._listed_losses()),
            "max_crashes": self.max_crashes,
            "max_losses": self.max_losses,
            "max_retry_later": self.max_retry_later,
            "ignore_result": self.ignore_result,
            "keep_result_ms": _milliseconds(self.keep_result_for),
            "timeout_ms": self.timeout_ms,
            "stall_timeout_ms": stall_timeout_ms if self.stall_timeout is None else self.stall_timeout_ms,
            "on_failure": handler,
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

    def warnings(self, *, default_retry: RetryPolicy | None = None) -> list[str]:
        """Return warnings about options that are valid but probably mistakes. The app's default retry policy has its own warnings."""
        found: list[str] = []
        is_own = self.retry not in (
            default_retry,
            None if default_retry is None else self._derived(default_retry),
        )
        if self.retry is not None and is_own and not self.retry.auto_retry_for and self.on_crash != "retry":
            found += self.retry.warnings()
        limit_ms, stall_ms = self.timeout_ms, self.stall_timeout_ms
        if limit_ms is not None and stall_ms is not None and stall_ms >= limit_ms:
            limit = spelled_duration(limit_ms / 1_000)
            found.append(
                f"TaskOptions.stall_timeout is never reached: timeout ends the attempt after {limit}."
            )
        return found

    def several_policies(self, *, on_crash: OnCrash) -> tuple[str, str] | None:
        """Return how `on_crash="retry"` interacts with a listed loss of the worker, and a fix. Return None unless both are set."""
        if not (listed := self._listed_losses()) or (self.on_crash or on_crash) != "retry":
            return None
        codes, retries = " and ".join(listed), cast(RetryPolicy, self.retry).max_retries
        if self.on_crash is None:
            text = f"auto_retry_for lists {codes}, so it runs again at most {amount(retries, 'time')}: the app's on_crash='retry' adds none"
            return text, "to run it again until max_crashes, write on_crash='retry' here."
        after = amount(retries, "retry", plural="retries")
        text = f"auto_retry_for lists {codes}, and on_crash='retry' continues after {after}, until max_crashes or max_losses"
        return text, "omit on_crash to stop after max_retries, or remove the code from auto_retry_for."

    def outlasts(self, grace_s: float) -> str | None:
        """Return why a worker's shutdown might unexpectedly fail the task, or None. `grace_s` is the grace period in seconds."""
        can_run_again = self.on_stop is not None or (
            self.retry is not None and self.retry.matches(WORKER_STOPPED, None)
        )
        if self.on_crash != "fail" or can_run_again:
            return None
        if (limit_ms := self.timeout_ms) is None:
            return "it has no timeout"
        return (
            f"its timeout is longer than the grace of {spelled_duration(grace_s)}"
            if limit_ms > grace_s * 1_000
            else None
        )

    @classmethod
    def _decided_elsewhere(cls, name: str) -> tuple[str, str] | None:
        fix = _ELSEWHERE.get(name)
        return None if fix is None else ("is not an option of a task function", fix)

    def _contradictions(self) -> Iterator[Problem]:
        yield from contradictions("TaskOptions", on_duplicate=self.on_duplicate, at_latest=self.at_latest)
        retry: object = self.retry
        if self.ignore_result is True and self.keep_result_for is not None:
            yield Problem(
                code="CONTRADICTION",
                subject="TaskOptions.keep_result_for",
                value=shown(respelled(self.keep_result_for)),
                rule="is how long to store the result, and ignore_result=True stores none",
                fix="omit one of them",
            )
        if self.serial is True and self.concurrency is not None:
            yield Problem(
                code="CONTRADICTION",
                subject="TaskOptions.concurrency",
                value=shown(self.concurrency),
                rule="has no effect with serial=True, which runs the tasks of the function one at a time",
                fix="omit concurrency, or serial",
            )
        for option, code in _FAILS:
            if (
                getattr(self, option) == "fail"
                and isinstance(retry, RetryPolicy)
                and retry.matches(code, None)
            ):
                yield Problem(
                    code="CONTRADICTION",
                    subject=f"TaskOptions.{option}",
                    value="'fail'",
                    rule=f"contradicts {code} in auto_retry_for, which runs the task again",
                    fix=f"omit {option}, or remove {code} from auto_retry_for",
                )


def with_retry_of_app(options: Mapping[str, Any], retry: RetryPolicy | None) -> dict[str, Any]:
    """Return the options of a task function, completed by the app's default retry policy. An explicit `retry`, even None, is kept.

    If the task's own `on_crash` or `on_stop` is "fail", the app's policy applies without the matching code: the task's option takes
    precedence.
    """
    if retry is None or "retry" in options:
        return dict(options)
    removed = [code for name, code in _FAILS if options.get(name) == "fail" and retry.matches(code, None)]
    if removed:
        kept = tuple(each for each in retry.auto_retry_for if each not in removed)
        retry = retry.replace(auto_retry_for=kept)
    return {**options, "retry": retry}


def _milliseconds(seconds: Duration | None) -> int | None:
    return None if seconds is None else milliseconds(cast(float, seconds))
