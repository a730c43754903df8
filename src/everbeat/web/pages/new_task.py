"""Sends a new task from a form: one field for each parameter of a function of the app, with JSON as its value."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from shlex import quote
from typing import Any, Final

import msgspec
from msgspec import Struct

from everbeat.client.options import SendOptions
from everbeat.domain.documents import plain_value
from everbeat.domain.settings.units import When
from everbeat.domain.task.definition import TaskDefinition
from everbeat.errors import DatabaseError, EverbeatError
from everbeat.errors.wording import amount
from everbeat.web.filters import to_moment_or_age
from everbeat.web.page import Page, PageResult, Visit
from everbeat.web.pages.sending import decoded_arguments, send_noted
from everbeat.web.refusals import RequestRefused, status_of
from everbeat.web.requests import wants_json

_PREFIX: Final = "argument."
"""The name of a field is this and the name of its parameter."""
_LONGEST_TYPE: Final = 200


class ParameterField(Struct, frozen=True, kw_only=True):
    """A field of the form. `default` is JSON, or None if the parameter has no default or one that JSON cannot represent."""

    name: str
    type: str
    is_required: bool
    default: str | None


async def show(visit: Visit) -> PageResult:
    """Return the form for the function that the parameter `name` names, or the list of functions."""
    name = visit.query.get("name")
    return _form(visit, None if name is None else _known(visit, name), values={})


async def send(visit: Visit) -> PageResult:
    """Send a task. If a browser's form is refused, it is shown again with the reason. Raises PayloadError, ConfigurationError or SendError."""
    definition = _known(visit, visit.form.require("name"))
    try:
        return await send_noted(
            visit,
            definition.name,
            _arguments(visit),
            note=f"{definition.name}, from a form",
            says="The task is sent. This is its page.",
            when=_when(visit.form.get("delay")),
            options=_options(visit),
        )
    except DatabaseError:
        raise
    except (EverbeatError, RequestRefused) as problem:
        if wants_json(visit.request):
            raise
        return _form(visit, definition, values=_typed(visit), problem=problem)


def _known(visit: Visit, name: str) -> TaskDefinition:
    definition = visit.app.tasks.get(name)
    if definition is None:
        raise RequestRefused(
            404,
            "UNKNOWN_TASK",
            "The app of this dashboard has no task function with this name.",
            fix="choose one of the list, or start the dashboard with the app that declares it: everbeat web shop:app.",
        )
    return definition


def _form(
    visit: Visit,
    definition: TaskDefinition | None,
    *,
    values: Mapping[str, str],
    problem: EverbeatError | RequestRefused | None = None,
) -> Page:
    names = sorted(visit.app.tasks)
    queues = {each.name for each in visit.app.queue_configs} | {
        each.options.queue for each in visit.app.tasks.values()
    }
    fields = [] if definition is None else parameters_of(definition)
    chosen = (
        None
        if definition is None
        else {"name": definition.name, "queue": definition.options.queue, "parameters": fields}
    )
    return Page(
        template="new_task.html",
        title="Send a task",
        says=_sentence(names, definition, problem),
        data={"tasks": names, "task": chosen},
        more={
            "signatures": [(name, visit.app.tasks[name].codec.signature) for name in names],
            "fields": fields,
            "options": None if definition is None else definition.options,
            "signature": None if definition is None else f"{definition.name}{definition.codec.signature}",
            "values": values,
            "prefix": _PREFIX,
            "problem": problem,
            "queues": sorted(queues),
        },
        command=None if definition is None else f"everbeat send {quote(definition.name)}",
        status=200
        if problem is None
        else problem.status
        if isinstance(problem, RequestRefused)
        else status_of(problem),
    )


def _sentence(
    names: list[str], definition: TaskDefinition | None, problem: EverbeatError | RequestRefused | None
) -> str:
    if problem is not None:
        return "Nothing was sent"
    if definition is not None:
        return f"Send {definition.name}"
    if not names:
        return "This dashboard does not know the app, so it cannot send a task"
    return f"The app has {amount(len(names), 'function')} whose tasks can be sent"


def parameters_of(definition: TaskDefinition) -> list[ParameterField]:
    """Return the fields of a function's parameters, in their order."""
    codec, declared = definition.codec, inspect.signature(definition.function).parameters
    return [
        ParameterField(
            name=name,
            type=inspect.formatannotation(codec.annotations[name])[:_LONGEST_TYPE],
            is_required=name in codec.accepts.requires,
            default=_json_or_none(declared[name].default),
        )
        for name in codec.parameters
    ]


def _json_or_none(value: object) -> str | None:
    if value is inspect.Parameter.empty:
        return None
    try:
        return msgspec.json.encode(value, enc_hook=plain_value).decode()
    except (TypeError, ValueError, RecursionError):
        return None


def _arguments(visit: Visit) -> dict[str, Any]:
    """Return the arguments: those of the field `arguments`, which is an object, and those of the fields of single parameters."""
    text = visit.form.get("arguments")
    arguments: Any = {} if text is None else decoded_arguments(text)
    if not isinstance(arguments, dict):
        raise RequestRefused(
            400,
            "WRONG_FORM",
            "The arguments are not a JSON object, so nothing was sent.",
            fix='write {"order": 7}.',
        )
    for field in visit.form.names():
        parameter, value = field.removeprefix(_PREFIX), visit.form.get(field)
        if parameter == field or value is None:
            continue
        try:
            arguments[parameter] = msgspec.json.decode(value)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            message = f"The argument {parameter[:200]!r} is not JSON, so nothing was sent."
            raise RequestRefused(
                400, "WRONG_FORM", message, fix='write 7, true, ["a"], or a text in quotes: "o-1".'
            ) from None
    return arguments


def _options(visit: Visit) -> SendOptions:
    options: SendOptions = {}
    if (queue := visit.form.get("queue")) is not None:
        options["queue"] = queue
    if (text := visit.form.get("priority")) is not None:
        try:
            options["priority"] = int(text)
        except ValueError:
            raise RequestRefused(
                400, "WRONG_FORM", "The priority is not a whole number.", fix="write 10, for example."
            ) from None
    return options


def _when(text: str | None) -> When | None:
    if text is None:
        return None
    when = to_moment_or_age(text, subject="delay")
    return when if when != timedelta() else None


def _typed(visit: Visit) -> dict[str, str]:
    return {name: visit.form.get(name) or "" for name in visit.form.names()}
