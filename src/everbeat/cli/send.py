"""`everbeat send`."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Annotated, Any, Final, cast

import msgspec
import typer
from msgspec.structs import replace

from everbeat.app import App
from everbeat.cli.exit_codes import ExitCode
from everbeat.cli.failures import show_failure
from everbeat.cli.moments import to_moment
from everbeat.cli.output import say, show_json
from everbeat.cli.selection import AppOption, JsonOption, SchemaOption, UrlOption, selected_app
from everbeat.cli.task_page import task_document
from everbeat.cli.waiting import wait_for
from everbeat.client.handle import Handle
from everbeat.client.options import SendOptions
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.duration import to_seconds
from everbeat.domain.inspection import TaskInfo
from everbeat.domain.outcome import RESULT_NOT_AVAILABLE, TaskError, TaskFailed
from everbeat.domain.states import TaskState
from everbeat.errors import ConfigurationError, PayloadError, Problem, UnknownTask
from everbeat.errors.visible import visible_json

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_EXPECTED: Final = re.compile(r"expected `(\w+)(?: \| null)?`, got .* \(at (\w+)\)")
_EXAMPLES: Final = {
    "int": "42",
    "float": "1.5",
    "bool": "true",
    "str": "text",
    "array": "'[1, 2]'",
    "object": "'{\"a\": 1}'",
}
_WORDS_HELP: Final = "[LOCATOR] NAME, then arguments as parameter=value; values are JSON, or else text."


@commands.command()
def send(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[LOCATOR] NAME [KEY=VALUE]...", help=_WORDS_HELP, show_default=False),
    ],
    *,
    args: Annotated[
        str | None, typer.Option("--args", metavar="JSON", help='All arguments: {"user_id": 42}.')
    ] = None,
    queue: Annotated[str | None, typer.Option(metavar="QUEUE", help="Instead of the task's own.")] = None,
    priority: Annotated[int | None, typer.Option(help="The lower number runs first.")] = None,
    key: Annotated[str | None, typer.Option(metavar="TEXT", help="At most one waiting task has it.")] = None,
    serial: Annotated[
        str | None, typer.Option(metavar="KEY", help="Of the tasks with this key one runs at a time.")
    ] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="Run it that much later.")] = None,
    good_until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Do not start it after 2030-01-31T12:00:00Z, with its time zone."),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Let an attempt run so long.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and print the result.")] = False,
    wait_timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Wait at most so long (exit code 5); implies --wait."),
    ] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send one task by name; prints its id, or its result with --wait.

    With a LOCATOR (module:app) the task must be registered there and its arguments are checked; without one the
    database is that of --url or EVERBEAT_DATABASE_URL, and whatever worker knows the name will run it.

      everbeat send shop:app welcome user_id=42 locale=en --wait
    """
    locator, name, pairs = _read(words, located=url is not None or app is not None)
    options = _options(
        queue=queue, priority=priority, key=key, serial=serial, good_until=good_until, timeout=timeout
    )
    wait_s = None if wait_timeout is None else to_seconds(wait_timeout, subject="--wait-timeout")
    when = None if delay is None else timedelta(seconds=to_seconds(delay, subject="--delay"))
    found = locator or app
    # An app that is known creates its schema as its program does; whatever name is sent elsewhere needs a schema that is there.
    with selected_app(url=url, schema=schema, locator=found, may_make=found is not None) as chosen:
        if found is not None and name not in chosen.tasks:
            raise UnknownTask(name, known=chosen.tasks)
        arguments = _arguments(args, pairs)
        try:
            handle = _sent(chosen, name, arguments, pairs=pairs, when=when, options=options)
        except ConfigurationError as error:
            raise ConfigurationError([_as_option(problem) for problem in error.problems]) from None
        if not wait and wait_timeout is None:
            _show_sent(handle, as_json=as_json)
            return
        if not as_json:
            say(f"Sent {handle.id}.")
        task = wait_for(chosen, handle.id, timeout=wait_s)
    _show_end(task, as_json=as_json)


def _read(words: list[str], *, located: bool) -> tuple[str | None, str, list[str]]:
    """The locator, the name, and the parameter=value pairs: two words before the pairs are a locator and a name."""
    given = next((place for place, word in enumerate(words) if "=" in word), len(words))
    leading, pairs = words[:given], words[given:]
    match leading, located:
        case [name], False if ":" in name or name.endswith(".py"):
            raise typer.BadParameter(
                f"{name!r} looks like a LOCATOR, and the NAME of a task is missing: write 'everbeat send {name} NAME'."
                " (Of a task that is really called so, say the database by --url or --app.)"
            )
        case [name], _:
            return None, name, pairs
        case [locator, name], False:
            return locator, name, pairs
        case [_, _], True:
            raise typer.BadParameter("the app is given twice: as LOCATOR, and by --app or --url.")
        case _:
            raise typer.BadParameter(
                f"{' '.join(words)!r} is not understood: give [LOCATOR] NAME, then arguments as parameter=value."
            )


def _options(**given: Any) -> SendOptions:
    options = {name: value for name, value in given.items() if value is not None}
    if "good_until" in options:
        options["good_until"] = to_moment(options["good_until"], option="--good-until")
    return cast(SendOptions, options)


def _as_option(problem: Problem) -> Problem:
    owner, _, setting = problem.subject.rpartition(".")
    return replace(problem, subject=f"--{setting}") if owner == "SendSettings" else problem


def _arguments(args: str | None, pairs: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if args is not None:
        try:
            arguments = msgspec.json.decode(args, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise typer.BadParameter(
                f"--args {args!r} is no JSON object of arguments by parameter name: {error}."
            ) from None
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} is no argument: write it as parameter=value.")
        if name in arguments:
            raise typer.BadParameter(f"the argument {name!r} is given twice.")
        arguments[name] = _value(text)
    return arguments


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError):
        return text


def _sent(
    app: App,
    name: str,
    arguments: dict[str, Any],
    *,
    pairs: list[str],
    when: timedelta | None,
    options: SendOptions,
) -> Handle[Any]:
    """Sends. An argument that its parameter refuses as JSON is taken as the text it was typed as: zip=01234, name=42."""
    typed = dict(pair.split("=", 1) for pair in pairs)
    task = app.tasks.get(name)
    as_json: dict[str, PayloadError] = {}
    while True:
        try:
            return app.send_by_name(name, arguments, when=when, **options)
        except PayloadError as error:
            parameter = error.parameter
            if task is None or parameter not in task.codec.parameters or parameter not in arguments:
                raise
            text = typed.pop(parameter, None)
            if text is None or arguments[parameter] == text:
                wants_no_text = f"got `str` (at {parameter})" in error.message
                told = as_json.get(parameter, error) if wants_no_text else error
                raise PayloadError(told.message, parameter=parameter, fix=_typed(told, task)) from None
            as_json[parameter] = error
            arguments[parameter] = text


def _typed(error: PayloadError, task: TaskDefinition) -> str:
    """How to type a value that fits its parameter."""
    expected = _EXPECTED.search(error.message)
    example = _EXAMPLES.get(expected[1]) if expected and expected[2] == error.parameter else None
    such_as = "" if example is None else f", such as {error.parameter}={example}"
    return f"write {error.parameter} as JSON{such_as}; it is declared as {task.name}{task.codec.signature}."


def _show_sent(handle: Handle[Any], *, as_json: bool) -> None:
    if as_json:
        show_json({"id": handle.id, "name": handle.name})
    else:
        print(handle.id)


def _show_end(task: TaskInfo, *, as_json: bool) -> None:
    completed = task.state is TaskState.COMPLETED
    if as_json:
        show_json(task_document(task))
    elif completed:
        print(visible_json(json.dumps(task.result, indent=2, ensure_ascii=False)))
    if not completed:
        if not as_json:
            error = task.error or TaskError(RESULT_NOT_AVAILABLE, f"The task is {task.state}.")
            show_failure(TaskFailed(error, task_id=task.id), as_json=False)
        raise typer.Exit(ExitCode.FAILED)
