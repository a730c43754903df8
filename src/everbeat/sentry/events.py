"""The events that are reported to Sentry: final failures of tasks, and deaths of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import sentry_sdk
from sentry_sdk.types import Event, Hint
from sentry_sdk.utils import current_stacktrace, event_from_exception

from everbeat.domain.hiding import HIDDEN, HideRule
from everbeat.domain.tracing.model import TracedAttempt, TracedEnd, TracedRecovery
from everbeat.runtime.task_links import task_url

MECHANISM: Final = "everbeat"
MOST_TASKS: Final = 20
"""How many tasks the event of an incident lists."""
_MOST_REMEMBERED: Final = 1_000
MOST_EXCEPTIONS: Final = 50
"""How many exceptions of a chain are reported: the last ones, which end with the one that the code raised."""
ORIGIN: Final = "auto.queue.everbeat"
"""The origin of everbeat's spans."""
_OWN: Final = "everbeat."
_PROCESSORS: Final = "everbeat.sentry."
_UNSTARTED: Final = frozenset({"requeue"})


def about(attempt: TracedAttempt, hide: Sequence[HideRule]) -> Callable[[Event, Hint], Event | None]:
    """Return the processor that adds the task to all events of an attempt, and takes out what is hidden.

    The processor of all events has already run.
    """

    def process(event: Event, hint: Hint) -> Event | None:
        del hint
        tags = event.setdefault("tags", {})
        tags |= {"everbeat.task": attempt.name, "everbeat.queue": attempt.queue}  # type: ignore[operator]
        event.setdefault("contexts", {})["everbeat"] = _context(attempt)
        return without_payloads(event) if _is_hidden(attempt.name, hide) else event

    return process


def _context(attempt: TracedAttempt) -> dict[str, object]:
    found: dict[str, object] = {
        "task_id": str(attempt.task_id),
        "task": attempt.name,
        "queue": attempt.queue,
        "attempt": attempt.attempt,
        "worker_id": attempt.worker_id,
        "task_url": task_url(attempt.task_id),
        "workflow_id": None if attempt.workflow_id is None else str(attempt.workflow_id),
        "schedule": attempt.schedule,
    }
    return {name: value for name, value in found.items() if value is not None}


def _is_hidden(task: str, rules: Sequence[HideRule]) -> bool:
    return any(fnmatchcase(task, rule.task) for rule in rules)


def without_own_variables(event: Event) -> Event:
    """Return any event of the process without the variables of everbeat's own frames, which contain arguments.

    With `attach_stacktrace`, the SDK adds the stack of a message after all processors. So the stack is added here, without variables.
    """
    options = sentry_sdk.get_client().options
    has_stack = any(name in event for name in ("exception", "stacktrace", "threads"))
    if options["attach_stacktrace"] and not has_stack and event.get("type") is None:
        stack = current_stacktrace(
            include_local_variables=options["include_local_variables"],
            max_value_length=options["max_value_length"],
        )
        stack["frames"] = [each for each in stack["frames"] if not _module(each).startswith(_PROCESSORS)]
        event["threads"] = {"values": [{"stacktrace": stack, "crashed": False, "current": True}]}
    for frame in _frames(event):
        if _module(frame).startswith(_OWN):
            frame.pop("vars", None)
    return event


def without_payloads(event: Event) -> Event:
    """Return an event of a task that a rule hides: without all variables and texts, because any of them might contain its arguments."""
    for frame in _frames(event):
        frame.pop("vars", None)
    for one in _values(event.get("exception")):
        one["value"] = HIDDEN
    spans: Any = event.get("spans")
    for span in spans if isinstance(spans, list) else ():
        if span.get("origin") != ORIGIN:
            span.pop("description", None)
            span.pop("data", None)
    for name in ("logentry", "message", "extra", "breadcrumbs"):
        event.pop(name, None)  # type: ignore[misc]
    return event


def _frames(event: Event) -> Iterator[dict[str, Any]]:
    holders = (event, *_values(event.get("exception")), *_values(event.get("threads")))
    for holder in holders:
        yield from (holder.get("stacktrace") or {}).get("frames", ())


def _module(frame: dict[str, Any]) -> str:
    return str(frame.get("module"))


def _values(part: Any) -> list[dict[str, Any]]:
    values = part.get("values", ()) if isinstance(part, dict) else ()
    return [one for one in values if isinstance(one, dict)]


def capture_failure(attempt: TracedAttempt, end: TracedEnd) -> None:
    """Report a failed attempt, with its exception if this process has it."""
    if end.exception is not None:
        options = sentry_sdk.get_client().options
        mechanism = {"type": MECHANISM, "handled": False}
        event, hint = event_from_exception(end.exception, client_options=options, mechanism=mechanism)
        chain = event["exception"]["values"]
        chain[:-MOST_EXCEPTIONS] = []  # Sentry drops an event that is too large
    else:
        error = {
            "type": end.code or end.type or "failed",
            "value": end.message,
            "mechanism": {"type": MECHANISM, "handled": False},
        }
        event, hint = {"level": "error", "exception": {"values": [error]}}, {}
    event.setdefault("transaction", attempt.name)
    if end.code is not None:
        event["tags"] = {"everbeat.code": end.code}
    sentry_sdk.capture_event(event, hint=hint)


class Incidents:
    """Reports deaths of workers, each of them once, although their tasks can be recovered in several parts."""

    def __init__(self) -> None:
        self._reported: deque[str] = deque(maxlen=_MOST_REMEMBERED)

    def capture(self, recoveries: Sequence[TracedRecovery]) -> None:
        """Report one event for each cause of deaths that were not reported yet."""
        causes: dict[tuple[str | None, str, str], list[TracedRecovery]] = {}
        for each in recoveries:
            if _place(each) not in self._reported:
                causes.setdefault((each.hostname, each.noticed_by, each.cause), []).append(each)
        for (hostname, noticed_by, cause), some in causes.items():
            self._reported.extend({_place(each) for each in some})
            sentry_sdk.capture_event(_incident(some, hostname=hostname, noticed_by=noticed_by, cause=cause))


def _place(recovery: TracedRecovery) -> str:
    return f"{recovery.worker_id} {recovery.pid} {recovery.cause}"


def _incident(
    recoveries: Sequence[TracedRecovery], *, hostname: str | None, noticed_by: str, cause: str
) -> Event:
    workers = sorted({each.worker_id for each in recoveries})
    names = sorted({each.name for each in recoveries})
    has_started = any(each.action not in _UNSTARTED for each in recoveries)
    tasks = [
        {
            "task_id": str(each.task_id),
            "task": each.name,
            "attempt": each.attempt,
            "action": each.action,
            "task_url": task_url(each.task_id),
        }
        for each in recoveries[:MOST_TASKS]
    ]
    return {
        "level": "error" if has_started else "warning",
        "logger": "everbeat.recovering",
        "message": f"A worker died while it held {names[0]}: {cause}"
        if len(names) == 1
        else f"A worker died: {cause}",
        "fingerprint": ["everbeat", "death", cause, *names[:1]],
        "tags": {"everbeat.noticed_by": noticed_by, "everbeat.hostname": hostname or "unknown"},
        "contexts": {
            "everbeat": {"workers": workers, "cause": cause, "recovered": len(recoveries), "tasks": tasks},
        },
    }
