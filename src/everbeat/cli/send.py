"""`everbeat send`: sends one task by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from traceback import walk_tb
from typing import Annotated, Any, Final, TypeAlias, cast

import msgspec
import typer
from msgspec.structs import replace

from everbeat.app import App
from everbeat.cli.failures import DEBUG_VARIABLE, ExitCode, Form, show_failure
from everbeat.cli.output import say, show_json
from everbeat.cli.selection import (
    AppOption,
    JsonOption,
    SchemaOption,
    UrlOption,
    labels_sought,
    selected_app,
    to_moment,
)
from everbeat.cli.tasks import wait_for
from everbeat.client.handle import Handle
from everbeat.client.options import SendOptions
from everbeat.client.send_call import outgoing
from everbeat.domain.documents import task_document
from everbeat.domain.inspection import TaskInfo
from everbeat.domain.settings.units import to_seconds
from everbeat.domain.task.definition import TaskDefinition
from everbeat.domain.task.states import TaskState
from everbeat.errors import (
    RESULT_NOT_AVAILABLE,
    ConfigurationError,
    EverbeatError,
    PayloadError,
    Problem,
    SendError,
    TaskError,
    TaskFailed,
    UnknownTask,
)
from everbeat.errors.wording import visible_json

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
_OPTIONS: Final = {"limits": "limit", "costs": "cost", "labels": "label"}
_MOST_DIGITS: Final = 18
"""More digits than any valid cost has. Python refuses to read thousands of digits."""
_WORDS_HELP: Final = "[LOCATOR] NAME, then arguments as parameter=value. A value that is not JSON is text."

KeyOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TEXT", help="At most one live task can have this key.")
]
UniqueForOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SCOPE", help="How long the key stays taken: live, waiting, kept, or 1h after the end."
    ),
]
OnDuplicateOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="ANSWER", help="If the key is taken: existing, replace, debounce or reject."),
]
AtLatestOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="The limit of a debounce, from the first send."),
]
SerialOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="KEY", help="Tasks with the same serial key run one at a time.")
]
DelayOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Run the task after this delay.")
]
GoodUntilOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Not after this time: 2030-01-31T12:00:00Z."),
]


LimitsOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="NAME[=KEY]", help="A limit with its key, instead of the argument."),
]
CostsOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--cost", metavar="NAME=N", help="The permits that it takes of a limit.")
]

LabelsOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="A label of the task; can be repeated."),
]


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
    queue: Annotated[str | None, typer.Option(metavar="QUEUE", help="Replaces the task's queue.")] = None,
    priority: Annotated[int | None, typer.Option(help="Lower numbers run first.")] = None,
    key: KeyOption = None,
    unique_for: UniqueForOption = None,
    on_duplicate: OnDuplicateOption = None,
    at_latest: AtLatestOption = None,
    serial: SerialOption = None,
    limits: LimitsOption = None,
    costs: CostsOption = None,
    labels: LabelsOption = None,
    delay: DelayOption = None,
    good_until: GoodUntilOption = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The time limit of each attempt.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the task ends and print its result.")
    ] = False,
    wait_timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Wait at most this long (exit code 5); implies --wait."),
    ] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send one task by name and print its id, or its result with --wait.

    With a LOCATOR (module:app), the app must have this task, and its arguments are checked. Without one, the database
    comes from --url or EVERBEAT_DATABASE_URL, and any worker that knows the name can run the task.

      everbeat send shop:app welcome user_id=42 locale=en --wait
    """
    locator, name, pairs = _read(words, located=url is not None or app is not None)
    options = _options(
        queue=queue, priority=priority, key=key, unique_for=unique_for, on_duplicate=on_duplicate, at_latest=at_latest,
        serial=serial, good_until=good_until, timeout=timeout, limits=_limits(limits or []), costs=_costs(costs or []),
        labels=_labels(labels),
    )  # fmt: skip
    wait_s = None if wait_timeout is None else to_seconds(wait_timeout, subject="--wait-timeout")
    when = None if delay is None else timedelta(seconds=to_seconds(delay, subject="--delay"))
    found = locator or app
    # A known app can create its schema, as its program would. Without an app, the schema must already exist.
    with selected_app(url=url, schema=schema, locator=found, may_make=found is not None) as chosen:
        if found is not None and name not in chosen.tasks:
            raise UnknownTask(name, known=chosen.tasks)
        arguments = _arguments(args, pairs)
        with _explained():
            handle = _sent(chosen, name, arguments, pairs=pairs, when=when, options=options)
        if not wait and wait_timeout is None:
            _show_sent(handle, as_json=as_json)
            return
        if not as_json:
            say(f"Sent {handle.id}.")
        task = wait_for(chosen, handle.id, timeout=wait_s)
    _show_end(task, as_json=as_json)


def _read(words: list[str], *, located: bool) -> tuple[str | None, str, list[str]]:
    """Return the locator, the name and the parameter=value pairs. If two words precede the pairs, the first is a locator."""
    given = next((place for place, word in enumerate(words) if "=" in word), len(words))
    leading, pairs = words[:given], words[given:]
    match leading, located:
        case [name], False if _is_locator(name):
            raise typer.BadParameter(
                f"{name!r} looks like a LOCATOR, and the NAME of a task is missing: write 'everbeat send {name} NAME'."
                " (If it is the NAME, give the database with --url or --app.)"
            )
        case [name], _:
            return None, name, pairs
        case [locator, name], False:
            return locator, name, pairs
        case [first, extra, *_], True if _is_locator(first):
            raise typer.BadParameter(
                f"the app is given twice: as the LOCATOR {first!r}, and by --app or --url."
                f" (If {first!r} is the NAME of a task, {extra!r} is not an argument: write it as parameter=value.)"
            )
        case [name, extra, *_], True:
            raise typer.BadParameter(
                f"{extra!r} is not an argument of {name!r}: write it as parameter=value."
                " (--app or --url gives the database, so the NAME has no LOCATOR before it.)"
            )
        case [locator, name, extra, *_], False if _is_locator(locator):
            raise typer.BadParameter(
                f"{extra!r} is not an argument of {name!r}: write it as parameter=value."
            )
        case _:
            raise typer.BadParameter(
                f"{' '.join(words)!r} is not understood: give [LOCATOR] NAME, then arguments as parameter=value."
            )


def _is_locator(word: str) -> bool:
    return ":" in word or word.endswith(".py")


def _options(**given: Any) -> SendOptions:
    options = {name: value for name, value in given.items() if value is not None and value != {}}
    if "good_until" in options:
        options["good_until"] = to_moment(options["good_until"], option="--good-until")
    return cast(SendOptions, options)


def _limits(given: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for each in given:
        name, equals, key = each.partition("=")
        _require_once(name, found, option="--limit")
        found[name] = key if equals else None
    return found


def _costs(given: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in given:
        name, _, number = each.partition("=")
        if not (number.isascii() and number.isdecimal()):
            raise typer.BadParameter(f"--cost {each!r} has no number: write it as {name or 'NAME'}=2.")
        _require_once(name, found, option="--cost")
        found[name] = int(number[:_MOST_DIGITS])
    return found


def _labels(given: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in labels_sought(given).items():
        if value is None:
            raise typer.BadParameter(f"--label {key!r} has no value: write it as {key or 'KEY'}=42.")
        found[key] = value
    return found


def _require_once(name: str, found: Mapping[str, object], *, option: str) -> None:
    if name in found:
        raise typer.BadParameter(f"{option} gives the limit {name!r} twice: a task takes a limit once.")


def _as_option(problem: Problem) -> Problem:
    owner, _, setting = problem.subject.partition(".")
    if owner != "SendSettings":
        return problem
    name, _, part = setting.partition("[")
    option = f"--{_OPTIONS.get(name, name).replace('_', '-')}"
    entry = part.removesuffix("]").strip("'\"")
    return replace(problem, subject=f"{option} {entry}" if entry and name != "labels" else option)


def _arguments(args: str | None, pairs: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if args is not None:
        try:
            arguments = msgspec.json.decode(args, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise typer.BadParameter(
                f"--args {args!r} is not a JSON object of arguments by parameter name: {error}."
            ) from None
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} is not an argument: write it as parameter=value.")
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
    """Send the task. An argument that its parameter rejects as JSON is sent as a string, as in `zip=01234` or `name=42`."""
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
                rejects_text = f"got `str` (at {parameter})" in error.message
                cause = as_json.get(parameter, error) if rejects_text else error
                raise PayloadError(cause.message, parameter=parameter, fix=_fix(cause, task)) from None
            as_json[parameter] = error
            arguments[parameter] = text


@contextmanager
def _explained() -> Iterator[None]:
    """Rename the settings in errors after their options, and report an exception of the app's own function around sends as a SendError."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError([_as_option(problem) for problem in error.problems]) from None
    except Exception as error:
        if (refused := _refusal(error)) is None:
            raise
        raise refused from error


def _refusal(error: Exception) -> SendError | None:
    """Return the error of a command for an exception of the app's own function around sends, or None for any other exception."""
    frames = [*walk_tb(error.__traceback__)]
    began = next(
        (place for place, (frame, _) in enumerate(frames) if frame.f_code is outgoing.__code__), None
    )
    if began is None or began + 1 == len(frames) or isinstance(error, EverbeatError):
        return None
    code = frames[began + 1][0].f_code
    return SendError(
        f"Nothing was sent: {code.co_name} ({code.co_filename}:{code.co_firstlineno}), a function around sends, raised"
        f" {type(error).__name__}: {error}",
        fix=f"change the arguments or the function; {DEBUG_VARIABLE}=1 shows the traceback.",
    )


def _fix(error: PayloadError, task: TaskDefinition) -> str:
    """Return a hint on how to write a value that its parameter accepts."""
    expected = _EXPECTED.search(error.message)
    example = _EXAMPLES.get(expected[1]) if expected and expected[2] == error.parameter else None
    such_as = "" if example is None else f", such as {error.parameter}={example}"
    return f"write {error.parameter} as JSON{such_as}; it is declared as {task.name}{task.codec.signature}."


def _show_sent(handle: Handle[Any], *, as_json: bool) -> None:
    if as_json:
        show_json({"id": handle.id, "name": handle.name, "existed": handle.existed})
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
            show_failure(TaskFailed(error, task_id=task.id), form=Form.TEXT)
        raise typer.Exit(ExitCode.FAILED)
