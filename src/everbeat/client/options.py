"""The options for sending a task and for starting a workflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Final, TypedDict, cast

from msgspec import Struct

from everbeat.domain.labels import NO_LABELS, checked_labels
from everbeat.domain.limit.options import costs as limit_costs
from everbeat.domain.limit.options import keys as limit_keys
from everbeat.domain.settings.checks import instance_of, optional, queue_name, whole
from everbeat.domain.settings.settings import Settings, by, checked, refused
from everbeat.domain.settings.units import Duration, milliseconds, span, to_utc
from everbeat.domain.task.policy import HIGHEST_PRIORITY, LONGEST_TIMEOUT_S, LOWEST_PRIORITY, TaskOptions
from everbeat.domain.task.retry import RetryPolicy
from everbeat.domain.task.uniqueness import (
    EXISTING,
    LIVE,
    OnDuplicate,
    UniqueFor,
    at_latest,
    contradictions,
    on_duplicate,
    unique_for,
)
from everbeat.errors import Problem
from everbeat.store.patience import LONGEST_PATIENCE_S

_LONGEST_KEY_BYTES = 500
_ELSEWHERE: Final[Mapping[str, str]] = {
    "idempotency_key": "use key",
    "run_at": "write task.schedule(when, ...)",
    "delay": "write task.schedule(timedelta(...), ...)",
    "countdown": "write task.schedule(timedelta(seconds=...), ...)",
    "eta": "write task.schedule(when, ...)",
    "delay_seconds": "write task.schedule(timedelta(seconds=...), ...)",
    "max_attempts": "use retry=RetryPolicy(max_retries=...)",
}
"""Maps option names from other task queues to hints about the corresponding everbeat options."""
_REGISTERED = frozenset(each.name for each in fields(TaskOptions))


def require_connection(connection: object) -> None:
    """Raise ConfigurationError if `connection` is None, which most likely means that the connection was never opened."""
    if connection is None:
        raise refused(
            None,
            subject="connection",
            code="WRONG_TYPE",
            rule="is not a connection, so the task would be sent outside your transaction",
            fix="pass the connection, or leave it out for a separate transaction",
        )


class SendOptions(TypedDict, total=False):
    """The options of `Task.with_options`. Omitted options keep the values with which the task was registered."""

    queue: str
    priority: int
    key: str | None
    good_until: datetime | None
    timeout: Duration | None
    retry: RetryPolicy | None
    serial: str | bool
    limits: Mapping[str, str | int | None]
    """The keys of limits with `key`, by the names of the limits, instead of the arguments. See docs/limits.md."""
    costs: Mapping[str, int]
    labels: Mapping[str, str]
    """Labels of the tasks, in addition to those of the task function. A label with the same key is replaced. See docs/labels.md."""
    unique_for: UniqueFor
    on_duplicate: OnDuplicate
    at_latest: Duration | None
    connection: object
    """Send the task inside the transaction of this connection, which must not be None. See docs/tasks.md."""
    patience: Duration
    """How long to wait for a database that does not respond. Ignored if `connection` is set."""


call_patience = span(0.1, LONGEST_PATIENCE_S)
"""Validates how long a call may wait for a database that does not respond. Returns the duration in seconds."""


def key_of(value: object, /, *, subject: str) -> str:
    """Return the key if it is valid. Raises ConfigurationError if it is not."""
    rule = f"must be a string of 1 to {_LONGEST_KEY_BYTES} bytes without NUL characters or lone surrogates"
    if isinstance(value, str) and "\x00" not in value:
        encoded = value.encode("utf-8", errors="replace")
        if 0 < len(encoded) <= _LONGEST_KEY_BYTES and encoded.decode() == value:
            return value
    raise refused(value, subject=subject, code="WRONG_KEY", rule=rule, fix='use a key such as "user-42"')


def patience_of(options: SendOptions) -> float | None:
    """Return the send's patience in seconds, or None to use the app's patience. Raises ConfigurationError if the patience is invalid."""
    if "patience" not in options:
        return None
    seconds: float = call_patience(options["patience"], subject="with_options.patience")
    return seconds


def _serial(value: object, /, *, subject: str) -> str | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return key_of(value, subject=subject)
    rule = 'must be a key such as "customer-42", True for the task function\'s own line, or False for none'
    raise refused(value, subject=subject, code="WRONG_SERIAL", rule=rule, fix='use serial="customer-42"')


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class SendSettings(Settings):
    """The validated options of one send. Raises ConfigurationError, which lists all problems, if an option is invalid.

    - `priority`: tasks with lower numbers run first.
    - `key`: at most one live task can have this key.
    - `unique_for`: the key is taken until the task ends ("live"), until a worker claims it ("waiting"), or until its record is deleted
      ("kept"). With a number of seconds, the key is taken until that long after the end of the task.
    - `on_duplicate`: what a send does if the key is taken. It returns the "existing" task, can "replace" or "debounce" that task while it
      waits, or can "reject" the send.
    - `at_latest`: a debounced task is due at most this many seconds after its first send.
    - `good_until`: the latest start time, in UTC.
    - `timeout`: a number of seconds, or None for no limit.
    - `serial`: tasks with the same serial key run one at a time, in the order they were sent. True applies this rule to all tasks of the
      function.
    - `limits`: the keys of limits, by name.
    - `costs`: the permits that the task takes, by limit.
    - `labels`: texts by key, by which the task can be found.
    """

    queue: str = field(default="default", metadata=by(queue_name))
    priority: int = field(default=0, metadata=by(whole(LOWEST_PRIORITY, HIGHEST_PRIORITY)))
    key: str | None = field(default=None, metadata=by(optional(key_of, none="sets no key")))
    good_until: datetime | None = field(default=None, metadata=by(optional(to_utc, none="sets no deadline")))
    timeout: Duration | None = field(
        default=None, metadata=by(optional(span(0.1, LONGEST_TIMEOUT_S), none="sets no limit"))
    )
    retry: RetryPolicy | None = field(
        default=None, metadata=by(optional(instance_of(RetryPolicy), none="never retries"))
    )
    serial: str | bool = field(default=False, metadata=by(_serial))
    limits: Mapping[str, str | int | None] = field(default_factory=dict, metadata=by(limit_keys), hash=False)
    costs: Mapping[str, int] = field(default_factory=dict, metadata=by(limit_costs), hash=False)
    labels: Mapping[str, str] = field(default_factory=dict, metadata=by(checked_labels), hash=False)
    unique_for: UniqueFor = field(default=LIVE, metadata=by(unique_for))
    on_duplicate: OnDuplicate = field(default=EXISTING, metadata=by(on_duplicate))
    at_latest: Duration | None = field(default=None, metadata=by(optional(at_latest, none="sets no limit")))

    @classmethod
    def of_task(cls, options: TaskOptions) -> SendSettings:
        """Return the send options that correspond to the options of a registered task."""
        return cls(
            queue=options.queue,
            priority=options.priority,
            timeout=options.timeout,
            retry=options.retry,
            serial=options.serial,
            labels=options.labels,
            unique_for=options.unique_for,
            on_duplicate=options.on_duplicate,
            at_latest=options.at_latest,
        )

    @classmethod
    def of_options(cls, options: SendOptions, registered: SendSettings) -> SendSettings:
        """Return the registered options, overridden by the send's own options. Raises ConfigurationError if an option is invalid."""
        if "connection" in options:
            require_connection(options["connection"])
        patience_of(options)
        own = {name: value for name, value in options.items() if name not in ("connection", "patience")}
        if isinstance(given := own.get("labels"), Mapping):
            own["labels"] = {**registered.labels, **given}
        if own.get("on_duplicate", "debounce") != "debounce":
            own.setdefault("at_latest", None)  # the limit of the registered debounce
        return registered.replace(**own) if own else registered

    @classmethod
    def _decided_elsewhere(cls, name: str) -> tuple[str, str] | None:
        if (fix := _ELSEWHERE.get(name)) is not None:
            return "is not an option of a send", fix
        if name not in _REGISTERED:
            return None
        rule = "is set for all tasks of a function when it is registered, not for a single send"
        return rule, f"write @app.task({name}=...)"

    def _contradictions(self) -> Iterator[Problem]:
        yield from contradictions("SendSettings", on_duplicate=self.on_duplicate, at_latest=self.at_latest)

    @property
    def is_plain(self) -> bool:
        """Return whether the key, if any, has the default scope and the default answer to a duplicate."""
        return self.unique_for == LIVE and self.on_duplicate == EXISTING

    @property
    def timeout_ms(self) -> int | None:
        """Return the timeout in milliseconds, or None if it is unlimited."""
        return None if self.timeout is None else milliseconds(cast(float, self.timeout))


OWN_TRANSACTION: Final = object()
"""The default value of `connection`, which starts the workflow in a separate transaction."""


class StartOptions(TypedDict, total=False):
    """The options of `Workflow.start` and `WorkflowDefinition.with_options`."""

    key: str | None
    """At most one workflow with this name and key can be live at a time. Starting another one returns the live workflow."""
    connection: object
    """Start the workflow inside the transaction of this connection, which must not be None."""
    patience: Duration | None
    """How long to wait for a database that does not respond. Ignored if `connection` is set."""
    labels: Mapping[str, str]
    """Labels of this workflow, in addition to those of its definition. A label with the same key is replaced."""


class StartSettings(Struct, frozen=True, kw_only=True):
    """The validated options for starting a workflow.

    If `connection` is None, the workflow starts in a separate transaction. If `patience_s` is None, the app's patience applies.
    """

    key: str | None = None
    connection: object = None
    patience_s: float | None = None
    labels: Mapping[str, str] = NO_LABELS

    @classmethod
    def checked(
        cls,
        *,
        key: str | None,
        connection: object,
        patience: Duration | None,
        labels: Mapping[str, str] = NO_LABELS,
    ) -> StartSettings:
        """Return the validated options for a start. Raises ConfigurationError if an option is invalid, or if `connection` is None."""
        if connection is not OWN_TRANSACTION:
            require_connection(connection)
        return cls(
            key=None if key is None else key_of(key, subject="key of the workflow"),
            connection=None if connection is OWN_TRANSACTION else connection,
            patience_s=None if patience is None else call_patience(patience, subject="patience of the start"),
            labels=checked_labels(labels, subject="Workflow.labels"),
        )
