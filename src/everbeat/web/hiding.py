"""Which payloads the server leaves out of a page: all of them for the role `see`, and some by rule for everyone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from msgspec import structs

from everbeat.domain.hiding import HIDDEN, HideRule
from everbeat.domain.inspection import AttemptInfo, Progress, TaskInfo, TaskSummary
from everbeat.domain.recovery.decision import DeathCertificate, StallCertificate
from everbeat.domain.task.context_backend import FailedTry
from everbeat.errors import TaskError
from everbeat.store import rows


class Hiding:
    """The rules of a dashboard, for one user.

    A payload is an argument, a result, a checkpoint, a recorded step, an item of a stream, or a question. The texts of the task's code are
    payloads, too: the messages and tracebacks of errors, and its progress. Names, keys, labels, states and times are not hidden.
    """

    def __init__(self, rules: Sequence[HideRule], *, everything: bool) -> None:
        self._rules = rules
        self.everything = everything
        """Whether this user sees no payloads at all."""

    @property
    def has_rules(self) -> bool:
        """Return whether there is any rule. A search in arguments could then reveal what the rules hide."""
        return self.everything or bool(self._rules)

    def touches(self, task: str) -> bool:
        """Return whether the task's texts and results must be left out: a hidden argument can be a part of any of them."""
        return self.everything or any(fnmatchcase(task, rule.task) for rule in self._rules)

    def arguments(self, task: str, arguments: Mapping[str, Any]) -> Any:
        """Return the arguments with the hidden ones replaced, at any depth. Return "hidden" if all of them are, or if they cannot be read."""
        matching = [rule.parameter for rule in self._rules if fnmatchcase(task, rule.task)]
        if self.everything or None in matching:
            return HIDDEN
        if not self._rules:
            return arguments
        if rows.is_marker(arguments):  # it contains the beginning of the text
            return HIDDEN
        patterns = [each for each in matching if each is not None]
        try:
            return _without({name: self._failure(one) for name, one in arguments.items()}, patterns)
        except RecursionError:
            return HIDDEN

    def _failure(self, argument: Any) -> Any:
        """Return an argument. If it is the failure that a handler gets, it lacks what is hidden of the failed task."""
        if not (isinstance(argument, Mapping) and argument.keys() >= _OF_FAILURES):
            return argument
        name, error, arguments = str(argument["name"]), argument["error"], argument.get("arguments")
        if not self.touches(name):
            return argument
        known = error if isinstance(error, Mapping) else {}
        return {
            **argument,
            "error": {"code": known.get("code"), "message": HIDDEN, "type": known.get("type")},
            "arguments": self.arguments(name, arguments)
            if isinstance(arguments, Mapping)
            else blanked(arguments),
        }

    def payload(self, task: str, value: Any) -> Any:
        """Return another payload of the task, or "hidden" if the task has a rule. None stays None."""
        return blanked(value) if self.touches(task) else value

    def text(self, task: str, text: str) -> str:
        """Return a text that the task's code has written, or "hidden"."""
        return HIDDEN if text and self.touches(task) else text

    def error(self, task: str, error: TaskError | None) -> TaskError | None:
        """Return an error. A hidden one keeps its code and its class."""
        return concealed(error) if self.touches(task) else error

    def summary(self, task: TaskSummary) -> TaskSummary:
        """Return a task of a list without its hidden texts."""
        if not self.touches(task.name):
            return task
        return structs.replace(
            task,
            progress=self._progress(task.progress),
            error=self.error(task.name, task.error),
            failed_try=self._failed_try(task),
        )

    def info(self, task: TaskInfo) -> TaskInfo:
        """Return all details of a task without its hidden payloads."""
        task = structs.replace(task, arguments=self.arguments(task.name, task.arguments))
        if not self.touches(task.name):
            return task
        attempts: tuple[AttemptInfo, ...] = tuple(
            structs.replace(each, error=self.error(task.name, each.error)) for each in task.attempts
        )
        recoveries = tuple(
            structs.replace(each, certificate=plain_part(each.certificate), hook=_hidden(each.hook))
            for each in task.recoveries
        )
        return structs.replace(
            task,
            result=self.payload(task.name, task.result),
            progress=self._progress(task.progress),
            error=self.error(task.name, task.error),
            failed_try=self._failed_try(task),
            attempts=attempts,
            recoveries=recoveries,
            waiting_because=_hidden(task.waiting_because),
        )

    def _progress(self, progress: Progress | None) -> Progress | None:
        if progress is None:
            return None
        return structs.replace(
            progress, stage=_hidden(progress.stage) or "", message=_hidden(progress.message) or ""
        )

    def _failed_try(self, task: TaskSummary) -> FailedTry | None:
        tried = task.failed_try
        if tried is None:
            return None
        return structs.replace(tried, message=HIDDEN)


def concealed(error: TaskError | None) -> TaskError | None:
    """Return an error with its code and its class only."""
    return None if error is None else TaskError(error.code, HIDDEN, type=error.type)


def blanked(value: Any) -> Any:
    """Return "hidden" in place of a value. None stays None."""
    return None if value is None else HIDDEN


def _without(value: Any, patterns: Sequence[str]) -> Any:
    match value:
        case Mapping():
            return {
                key: HIDDEN
                if any(fnmatchcase(str(key), each) for each in patterns)
                else _without(one, patterns)
                for key, one in value.items()
            }
        case list() | tuple():
            return [_without(one, patterns) for one in value]
        case _:
            return value


def _hidden(text: str | None) -> str | None:
    return HIDDEN if text else text


_OF_FAILURES: Final = frozenset(
    {"task_id", "name", "queue", "state", "error", "attempt", "fence", "failed_at"}
)
"""The fields of each FinalFailure, also of those that an earlier version has stored."""
_OF_USER_CODE: Final = frozenset({"last_progress", "stage", "message"})
_OF_DEATHS: Final = frozenset(DeathCertificate.__struct_fields__ + StallCertificate.__struct_fields__)


def plain_part(certificate: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a certificate without the texts of the task's code, and without fields that this version does not know."""
    if certificate is None:
        return None
    shown = _OF_DEATHS - _OF_USER_CODE
    return {key: value if key in shown else blanked(value) for key, value in certificate.items()}
