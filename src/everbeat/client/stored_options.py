"""The policy and the flags that are stored with each task, so that recovery does not need the user's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import msgspec

from everbeat.client.failure_handlers import FailureHandlers
from everbeat.client.task import Call, Task
from everbeat.domain.task.failure_handler import StoredHandler
from everbeat.domain.task.policy import OnCrash, TaskOptions

StoredOptions: TypeAlias = tuple[bytes | None, bytes | None]
"""A policy and flags as JSON text."""


class StoredOptionsOfTasks:
    """The stored options of an app's tasks. They are encoded once for each task."""

    def __init__(self, handlers: FailureHandlers, *, on_crash: OnCrash, stall_timeout_ms: int | None) -> None:
        self._handlers = handlers
        self._on_crash: OnCrash = on_crash
        self._stall_timeout_ms = stall_timeout_ms
        self._known: WeakKeyDictionary[Task[..., Any], tuple[Task[..., Any] | None, StoredOptions]] = (
            WeakKeyDictionary()
        )

    def of(self, call: Call[Any]) -> StoredOptions:
        """Return the policy and flags to store for a call, with the failure handler of its task."""
        if call.task is None:
            return self.with_handler(None, call)
        default = self._handlers.default  # it can be set after the first send
        known = self._known.get(call.task)
        if known is None or known[0] is not default:
            handler = self._handlers.of(call.name, call.task._definition.options)
            known = self._known[call.task] = (default, self.with_handler(handler, call))
        return known[1]

    def with_handler(self, handler: StoredHandler | None, call: Call[Any]) -> StoredOptions:
        """Return the policy and flags to store for a call, with this failure handler."""
        plain = TaskOptions() if call.task is None else call.task._definition.options
        options = plain.given(timeout=call.settings.timeout, retry=call.settings.retry)
        if options == plain:
            options = plain  # nothing is stored, so the worker uses the options of its own definition
        flags: Mapping[str, bool] = options.flag_values
        # A send by name without options must not replace the registered policy with one that contains only the app's stall_timeout.
        decides = call.task is not None or options is not plain or self._on_crash != "fail"
        policy = options.stored(
            on_crash=self._on_crash,
            stall_timeout_ms=self._stall_timeout_ms if decides else None,
            handler=handler,
        )
        return (
            policy.to_json() or (None if options is plain else b"{}"),
            msgspec.json.encode(dict(flags)) if flags else None,
        )
