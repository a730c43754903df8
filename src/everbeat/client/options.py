"""What a single send may decide for itself, over what its task function was registered with.

What lives here: `SendOptions`, as users write it, and `SendSettings`, checked and complete, as a sender
reads it. What may not: sending.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TypedDict, cast

from everbeat.domain.checks import instance_of, optional, queue_name, whole
from everbeat.domain.duration import Duration, milliseconds, span, to_utc
from everbeat.domain.policy import HIGHEST_PRIORITY, LONGEST_TIMEOUT_S, LOWEST_PRIORITY, TaskOptions
from everbeat.domain.retry import RetryPolicy
from everbeat.domain.settings import Settings, by, checked, refused

_LONGEST_KEY_BYTES = 500
_REGISTERED = frozenset(each.name for each in fields(TaskOptions))


def require_connection(connection: object) -> None:
    """Raises ConfigurationError for None: most likely a connection that was never opened, outside whose transaction all would run."""
    if connection is None:
        raise refused(
            None,
            subject="connection",
            code="WRONG_TYPE",
            rule="is no connection, and it would be sent outside your transaction",
            fix="pass the connection, or leave it out for a transaction of its own",
        )


class SendOptions(TypedDict, total=False):
    """The options of `Task.with_options`; what is left out stays as the task function was registered."""

    queue: str
    priority: int
    key: str | None
    good_until: datetime | None
    timeout: Duration | None
    retry: RetryPolicy | None
    serial: str | bool
    connection: object
    """The task is sent inside the transaction of this connection, which must not be None; see docs/tasks.md."""
    patience: Duration
    """How long the send goes on without a sign of life from the database; has no effect together with `connection`."""


call_patience = span(0.1, 86_400)
"""The check of how long a call goes on without a sign of life from the database."""


def key_of(value: object, /, *, subject: str) -> str:
    """A key; raises ConfigurationError for what cannot be one."""
    rule = f"must be a text of 1 to {_LONGEST_KEY_BYTES} bytes without NUL and lone surrogates"
    if isinstance(value, str) and "\x00" not in value:
        encoded = value.encode("utf-8", errors="replace")
        if 0 < len(encoded) <= _LONGEST_KEY_BYTES and encoded.decode() == value:
            return value
    raise refused(value, subject=subject, code="WRONG_KEY", rule=rule, fix='use a key such as "user-42"')


def patience_of(options: SendOptions) -> float | None:
    """The patience of a send in seconds, None for the app's. Raises ConfigurationError."""
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
    """Everything one send decides. Raises ConfigurationError with every problem.

    `priority`: the lower number runs first. `key`: at most one waiting task has it. `good_until`: the task
    does not start later, in UTC. `timeout`: seconds, None for no limit. `serial`: of the tasks with the same
    key one runs at a time, in the order they were sent; True: of the tasks of this function.
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

    @classmethod
    def of_task(cls, options: TaskOptions) -> SendSettings:
        """What a send uses that decides nothing itself."""
        return cls(
            queue=options.queue,
            priority=options.priority,
            timeout=options.timeout,
            retry=options.retry,
            serial=options.serial,
        )

    @classmethod
    def of_options(cls, options: SendOptions, registered: SendSettings) -> SendSettings:
        """What a send uses that decides this much itself."""
        if "connection" in options:
            require_connection(options["connection"])
        patience_of(options)
        own = {name: value for name, value in options.items() if name not in ("connection", "patience")}
        return registered.replace(**own) if own else registered

    @classmethod
    def _decided_elsewhere(cls, name: str) -> tuple[str, str] | None:
        if name not in _REGISTERED:
            return None
        rule = "is decided for all tasks of a function where it is registered, not by a single send"
        return rule, f"write @app.task({name}=...)"

    @property
    def timeout_ms(self) -> int | None:
        """The timeout in milliseconds."""
        return None if self.timeout is None else milliseconds(cast(float, self.timeout))
