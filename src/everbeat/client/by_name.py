"""Calls by a task's name, with arguments by parameter name: for programs that do not have the function, and for the CLI.

What lives here: making such a call. What may not: sending it (`sender`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everbeat.client.options import SendOptions, SendSettings, patience_of
from everbeat.client.task import Call, Task
from everbeat.domain.checks import task_name
from everbeat.domain.codec import encode_any
from everbeat.domain.duration import When, to_when
from everbeat.domain.settings import shown
from everbeat.domain.typed_json import encode_json
from everbeat.errors import PayloadError, nearest


def call_by_name(
    name: str,
    arguments: Mapping[str, Any] | None,
    *,
    task: Task[..., Any] | None,
    largest: int,
    when: When | None,
    options: SendOptions,
) -> Call[Any]:
    """A call of the task of this name; `task`, where this program knows it, checks the arguments. `largest`: bytes of them.

    Raises PayloadError and ConfigurationError.
    """
    given = {} if arguments is None else arguments
    if not isinstance(given, Mapping):
        raise PayloadError(
            f"The arguments {shown(given)} of task {name!r} are a {type(given).__name__}, not a mapping.",
            fix='name them by parameter: {"user_id": 42}.',
        )
    moment = None if when is None else to_when(when, subject="when")
    connection = options.get("connection")
    if task is not None:
        chosen = task.with_options(**options) if options else task
        payload = _checked(chosen, given)
        return Call(
            name=task.name,
            payload=payload,
            settings=chosen.settings,
            when=moment,
            task=chosen,
            connection=connection,
            patience_s=patience_of(options),
        )
    checked_name = task_name(name, subject="name of the task")
    payload = encode_any(given, task_name=checked_name, largest=largest)
    settings = SendSettings.of_options(options, SendSettings())
    return Call(
        name=checked_name,
        payload=payload,
        settings=settings,
        when=moment,
        connection=connection,
        patience_s=patience_of(options),
    )


def _checked(task: Task[..., Any], arguments: Mapping[str, Any]) -> bytes:
    """Read as a worker will read them, so that JSON and Python values are taken alike, then written as `send` does."""
    try:
        plain = encode_json(dict(arguments))
    except Exception:  # noqa: BLE001 - any class may refuse in its own way; encode_any says which argument it was
        plain = encode_any(arguments, task_name=task.name)
    codec = task.definition.codec
    try:
        args, kwargs = codec.decode(plain)
    except PayloadError as error:
        # The codec speaks of what a worker finds stored; here it is what is about to be.
        guilty, rest = error.parameter, error.message.partition(" do not fit its signature")[2]
        subject, fits = "The arguments", "do"
        if guilty is not None and guilty in arguments:
            subject, fits = f"Argument {guilty!r} = {shown(arguments[guilty])}", "does"
        message = f"{subject} of task {task.name!r} {fits} not fit its signature{rest}"
        if guilty in arguments and guilty in codec.parameters:
            fix = f"pass {guilty} as it is declared: {task.name}{codec.signature}."
            raise PayloadError(message, parameter=guilty, fix=fix) from None
        takes = ", ".join(codec.parameters) or "none"
        fix = f"name them by parameter; {task.name} takes: {takes}."
        if guilty is not None and guilty not in codec.parameters:
            guess = nearest(guilty, codec.parameters)
            fix = fix if guess is None else f"did you mean {guess!r}?"
        raise PayloadError(message, parameter=guilty, fix=fix) from None
    return codec.encode(args, kwargs)
