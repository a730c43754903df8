"""Which failure handler a task has, and the task that is stored with it to be sent when it fails."""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

from msgspec import UNSET

from everbeat.client.task import Call, Task
from everbeat.client.unique_sending import require_plain
from everbeat.domain.settings.settings import refused, shown
from everbeat.domain.task.failure_handler import FinalFailure, StoredHandler
from everbeat.domain.task.policy import TaskOptions
from everbeat.domain.workflow.graph import TaskSpec
from everbeat.errors import RegistrationError
from everbeat.errors.wording import nearest

WHAT: Final = "a failure handler"
_UNFIT: Final = "one parameter that is annotated as FinalFailure, and no other parameter without a default"
T = TypeVar("T", bound=Task[..., Any])


class MakeSpec(Protocol):
    """Returns the task that a call sends, without a failure handler. `what` names the kind of task in errors."""

    def __call__(self, call: Call[Any], *, what: str, handler: StoredHandler | None) -> TaskSpec: ...


class FailureHandlers:
    """The failure handlers of an app. `tasks` contains its registered tasks, and `make_spec` makes the task that is stored."""

    def __init__(self, make_spec: MakeSpec) -> None:
        self.tasks: dict[str, Task[..., Any]] = {}
        self.default: Task[..., Any] | None = None
        self._make_spec = make_spec
        self._stored: WeakKeyDictionary[Task[..., Any], StoredHandler] = WeakKeyDictionary()

    def set_default(self, handler: T) -> T:
        """Make a task the handler of all tasks that set none. Raises RegistrationError if it is unsuitable, or another one is set."""
        subject = "App.on_failure"
        if not isinstance(handler, Task):
            raise _unsuitable(subject, shown(handler), fix="write @app.on_failure above @app.task")
        if self.default is not None and self.default is not handler:
            raise RegistrationError(
                f"The app already has a default failure handler: {self.default.name!r}.",
                fix="let one task handle the failures, or give functions their own: @app.task(on_failure=...).",
                where=handler._definition.where or None,
            )
        self.stored(handler, subject=subject)
        self.default = handler
        return handler

    def of(self, name: str, options: TaskOptions) -> StoredHandler | None:
        """Return the handler of a task function with these options, or None if it has none.

        Raises ConfigurationError if its name is not registered, and RegistrationError or ConfigurationError if it is unsuitable.
        """
        given: Any = self.default if options.on_failure is UNSET else options.on_failure
        if given is None:
            return None
        subject = f"on_failure of task {name!r}"
        if isinstance(given, str):
            found = self.tasks.get(given)
            if found is None:
                guess = nearest(given, self.tasks)
                raise refused(
                    given,
                    subject=subject,
                    code="UNKNOWN_TASK",
                    rule="is not a registered task",
                    fix=f"use {guess!r}"
                    if guess
                    else "register the handler with @app.task before tasks are sent",
                )
            given = found
        if not isinstance(given, Task):
            raise _unsuitable(subject, shown(given), fix="pass a task that @app.task returned")
        return self.stored(given, subject=subject)

    def stored(self, handler: Task[..., Any], *, subject: str) -> StoredHandler:
        """Return the form in which the handler is stored with the tasks whose failures it handles."""
        known = self._stored.get(handler)
        if known is None:
            known = self._stored[handler] = self._made(handler, subject=subject)
        return known

    def _made(self, handler: Task[..., Any], *, subject: str) -> StoredHandler:
        if self.tasks.get(handler.name) is None or self.tasks[handler.name]._sender is not handler._sender:
            raise _unsuitable(subject, repr(handler.name), fix="use a task of the same app")
        codec, settings = handler._definition.codec, handler._settings
        parameter = next(iter(codec.parameters), None)
        if (
            parameter is None
            or codec.annotations[parameter] is not FinalFailure
            or not codec.accepts.fits([parameter])
        ):
            raise RegistrationError(
                f"Task {handler.name!r} cannot be the {subject}: a failure handler must have {_UNFIT}.",
                fix=f"write def {handler.name}(failure: FinalFailure).",
                where=handler._definition.where or None,
            )
        require_plain(handler.name, settings, what=WHAT)
        given = {
            "key": settings.key,
            "good_until": settings.good_until,
            "connection": handler._options.get("connection"),
        }
        for option, value in given.items():
            if value is not None:
                raise refused(
                    value,
                    subject=f"{option} of task {handler.name!r}",
                    code="CONTRADICTION",
                    rule=f"cannot be set for {WHAT}, because each failure sends its own task",
                    fix=f"omit {option}",
                )
        spec = self._make_spec(handler._call_of(b"", when=None), what=WHAT, handler=None)
        return StoredHandler(
            name=spec.name,
            parameter=parameter,
            queue=spec.queue,
            priority=spec.priority,
            policy=spec.policy
            or "{}",  # without a policy, a worker would store its own, with the app's default handler
            flags=spec.flags,
            serial=spec.serial,
            gates=spec.gates,
            costs=spec.costs,
        )


def _unsuitable(subject: str, value: str, *, fix: str) -> RegistrationError:
    return RegistrationError(f"{value} cannot be the {subject}: it is not a task of this app.", fix=f"{fix}.")
