"""The view of one send that an app's functions around sends get, and the order in which these functions are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, Unpack, cast, final

import msgspec
from msgspec import Struct, structs

from everbeat.client.options import SendOptions, SendSettings
from everbeat.client.task import Call
from everbeat.domain.settings.checks import public
from everbeat.domain.settings.settings import refused

_NOT_HERE: Final = ("connection", "patience")
"""Options that say how a send reaches the database. The code that sends has already chosen them."""


@public
@final
class SendCall(Struct, frozen=True):
    """A task that is about to be stored: its name, options and arguments. A function around sends returns a changed copy or None."""

    _call: Call[Any]

    def __repr__(self) -> str:
        return f"<SendCall {self.name!r} to queue {self.queue!r}>"

    @property
    def name(self) -> str:
        """Return the name of the task function."""
        return self._call.name

    @property
    def queue(self) -> str:
        """Return the queue to which the task goes."""
        return self._call.settings.queue

    @property
    def priority(self) -> int:
        """Return the priority of the task. Lower numbers run first."""
        return self._call.settings.priority

    @property
    def key(self) -> str | None:
        """Return the key of the task, or None if it has no key."""
        return self._call.settings.key

    @property
    def labels(self) -> Mapping[str, str]:
        """Return the labels of the task, without those that it inherits."""
        return self._call.settings.labels

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Return the arguments by the names of their parameters, as plain JSON values. They cannot be changed."""
        return cast("Mapping[str, Any]", msgspec.json.decode(self._call.payload))

    def with_options(self, **options: Unpack[SendOptions]) -> SendCall:
        """Return a copy with different send options, except `connection` and `patience`. Raises ConfigurationError if one is invalid.

        return call.with_options(queue="eu", priority=-10)
        """
        for name in _NOT_HERE:
            if name in options:
                raise refused(
                    dict(options)[name],
                    subject=f"SendCall.with_options.{name}",
                    code="UNKNOWN_NAME",
                    rule="cannot be changed around a send, because the code that sends has chosen it",
                    fix="leave it out, and pass it to task.with_options(...) where the task is sent",
                )
        call = self._call
        if call.task is None:
            changed = structs.replace(call, settings=SendSettings.of_options(options, call.settings))
        else:
            changed = structs.replace(
                call.task.with_options(**options)._call_of(call.payload, when=call.when),
                connection=call.connection,
                patience_s=call.patience_s,
            )
        return SendCall(changed)


AroundSend: TypeAlias = Callable[[SendCall], SendCall | None]


def outgoing(call: Call[Any], functions: Sequence[AroundSend]) -> Call[Any]:
    """Return the call to store after the functions have seen it, in the order of their declaration.

    Raises any exception of a function, and ConfigurationError if a function returns neither a SendCall nor None.
    """
    sent = SendCall(call)
    for function in functions:
        changed: object = function(sent)
        if isinstance(changed, SendCall):
            sent = changed
        elif changed is not None:
            raise refused(
                changed,
                subject=f"result of {getattr(function, '__name__', 'a function')}, a function around sends",
                code="WRONG_TYPE",
                rule=f"must be a SendCall or None, not of type {type(changed).__name__}",
                fix="return call.with_options(...), or None to leave the call unchanged",
            )
    return sent._call
