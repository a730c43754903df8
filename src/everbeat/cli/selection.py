"""Options that commands share: the database, times and durations, shortened ids, and multiple names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Final, NoReturn, TypeAlias, TypeVar
from uuid import UUID

import typer
from msgspec import Struct
from msgspec.structs import replace

from everbeat.app import App
from everbeat.cli.failures import (
    ExitCode,
    Form,
    exit_code_of,
    named_as_options,
    show_failure,
)
from everbeat.cli.locate import locate
from everbeat.cli.output import Id, show_json, stdout_is_terminal
from everbeat.cli.streams import user_output_to_stderr
from everbeat.client.acting import user_at_host
from everbeat.client.database_access import database_of
from everbeat.domain.bulk_actions import Operator
from everbeat.domain.documents import failure_document
from everbeat.domain.identifiers import SHORTEST_TYPED, bounds, shortest_prefix, stem
from everbeat.domain.settings.checks import remark, sought
from everbeat.domain.settings.units import When, to_seconds, to_utc
from everbeat.errors import (
    AmbiguousId,
    BatchNotFound,
    ConfigurationError,
    EverbeatError,
    TaskNotFound,
    WorkflowNotFound,
    WrongDatabaseURL,
)
from everbeat.errors.wording import on_one_line
from everbeat.runtime.clock import SystemClock
from everbeat.store.address import URL_VARIABLE
from everbeat.store.batches import batches_between
from everbeat.store.inspection import (
    LIVE,
    Candidate,
    neighbours,
    parties_alike,
    parties_named,
    tasks_between,
    workflows_between,
)
from everbeat.store.plan import ask
from everbeat.store.statement import Statement
from everbeat.store.url import SCHEMA_SUBJECT

SCHEMA_VARIABLE: Final = "EVERBEAT_SCHEMA"
ACTOR_VARIABLE: Final = "EVERBEAT_ACTOR"

UrlOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="PostgreSQL URL, or 'embedded'.  [env: EVERBEAT_DATABASE_URL, which keeps passwords out of ps]",
    ),
]
OwnUrlOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--url",
        metavar="URL",
        help="PostgreSQL URL, or 'embedded' for one in ./.everbeat; EVERBEAT_DATABASE_URL is ignored.",
    ),
]
"""The --url option of commands that create a temporary schema. Such a command uses a database only if the user names it."""
SchemaOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--schema", metavar="NAME", help="Schema.  [env: EVERBEAT_SCHEMA; default: everbeat]"),
]
AppOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--app", metavar="LOCATOR", help="Take database and schema from an app: module:app."),
]
JsonOption: TypeAlias = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document: results on stdout, errors on stderr."),
]
LimitOption: TypeAlias = Annotated[
    int, typer.Option("--limit", min=1, max=100_000, help="List at most this many rows.")
]
SmallLimitOption: TypeAlias = Annotated[
    int, typer.Option("--limit", min=1, max=10_000, help="List at most this many rows.")
]
SinceOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--since", metavar="WHEN", help="Since 2030-01-31T12:00:00Z, or within the last 10m."),
]
UntilOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--until", metavar="WHEN", help="Before 2030-01-31T12:00:00Z, or earlier than 10m ago."),
]
LabelFilterOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY[=VALUE]", help="With this label; can be repeated."),
]
TaskIdArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="ID", help="The task's id.", show_default=False)
]
NamesArgument: TypeAlias = Annotated[list[str], typer.Argument(metavar="NAME...", show_default=False)]
LocatorArgument: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="LOCATOR", help="The app: package.module:app or file.py:app.", show_default=False),
]
_SHARED: Final[dict[str, tuple[Any, Any]]] = {
    "url": (UrlOption, None),
    "schema": (SchemaOption, None),
    "app": (AppOption, None),
    "as_json": (JsonOption, False),
}


def with_app(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options --url, --schema, --app and --json to a command, and pass the selected app and `as_json` to it.

    The app is the first argument of the decorated function, and is closed when the function returns.
    """
    declared = signature(command, eval_str=True)
    own = [each for each in [*declared.parameters.values()][1:] if each.name not in _SHARED]
    shared = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=option, default=default)
        for name, (option, default) in _SHARED.items()
    ]

    @wraps(command)
    def run(*, url: str | None, schema: str | None, app: str | None, **options: Any) -> None:
        with selected_app(url=url, schema=schema, locator=app) as chosen:
            command(chosen, **options)

    run.__signature__ = declared.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    return run


@contextmanager
def selected_app(
    *, url: str | None, schema: str | None, locator: str | None, may_make: bool = False
) -> Iterator[App]:
    """Provide the app for a command and close it afterward. An app without a locator has no tasks and never migrates.

    An embedded server that does not exist yet is created only if `may_make` is set.

    Raises:
        typer.BadParameter: The options contradict each other.
        EverbeatError: Under the same conditions as in `load_app` and `App`.
    """
    if locator is not None and (url is not None or schema is not None):
        raise typer.BadParameter(
            "an app has its own database and schema: give either --app, or --url and --schema."
        )
    app = _plain_app(url, schema) if locator is None else load_app(locator)
    try:
        if not may_make:
            database_of(app).address.require_there()
        with acting_as(app, None):
            yield app
    finally:
        app.close()


@contextmanager
def acting_as(app: App, name: str | None) -> Iterator[None]:
    """Note the actions of a command under this name, or under EVERBEAT_ACTOR, or under the user and the host."""
    given = name or os.environ.get(ACTOR_VARIABLE) or user_at_host()
    with (
        named_as_options({"actor": "--as" if name else ACTOR_VARIABLE}),
        database_of(app).acting_as(Operator(remark(given, subject="actor"), "cli")),
    ):
        yield


def _plain_app(url: str | None, schema: str | None) -> App:
    if url is None and URL_VARIABLE not in os.environ:
        raise WrongDatabaseURL(
            f"No database was given: --url is missing and {URL_VARIABLE} is not set.",
            fix="give --url postgresql://user@host/database, or --app module:app; 'embedded' is the PostgreSQL in ./.everbeat.",
        )
    with schema_as_typed(schema):
        return App(url, schema=chosen_schema(schema), auto_migrate=False)


@contextmanager
def schema_as_typed(given: str | None) -> Iterator[None]:
    """Report an invalid schema name under the name of its option or environment variable."""
    with named_as_options({SCHEMA_SUBJECT: "--schema" if given else SCHEMA_VARIABLE}):
        yield


def load_app(locator: str) -> App:
    """Return the app that a locator names. Output of its module goes to stderr. Raises the same errors as `locate`."""
    with user_output_to_stderr():
        return locate(locator)


def chosen_schema(given: str | None) -> str:
    """Return the schema from --schema, else from EVERBEAT_SCHEMA, else the default schema."""
    return given or os.environ.get(SCHEMA_VARIABLE) or "everbeat"


_FORMS: Final = 'write "30m", "2h" or "7d" for the time before now, or a moment: 2030-01-31T12:00:00Z'


def to_moment(text: str, *, option: str) -> datetime:
    """Parse a time and return it in UTC. Raises typer.BadParameter if the text is not a time or has no time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{option} {text!r} is not a time: write it as 2030-01-31T12:00:00Z."
        ) from None
    if found.tzinfo is None:
        raise typer.BadParameter(
            f"{option} {text!r} has no time zone: write {found.isoformat()}Z for UTC, or +02:00 instead of Z."
        )
    return to_utc(found, subject=option)


def moment_or_span(text: str, *, option: str) -> datetime:
    """Parse a point in time, or a duration that ends now. Raises typer.BadParameter or ConfigurationError."""
    until = moment_or_length(text, option=option)
    return until if isinstance(until, datetime) else SystemClock().wall() - until


def moment_or_length(text: str, *, option: str) -> datetime | timedelta:
    """Parse a point in time or a duration. Raises typer.BadParameter or ConfigurationError."""
    if len(text) >= len("2030-01-31") and "-" in text:
        return to_moment(text, option=option)
    try:
        return timedelta(seconds=to_seconds(text, subject=option))
    except ConfigurationError as error:
        fix = f"{error.problems[0].shell_fix or error.problems[0].fix}, or a moment: 2030-01-31T12:00:00Z"
        raise ConfigurationError([replace(error.problems[0], fix=fix, shell_fix=None)]) from None


def to_past(text: str | None, *, option: str = "--since") -> When | None:
    """Parse the value of --since or --until: a point in time, or a duration that ends now.

    Raises:
        typer.BadParameter: The text is not a valid time.
        ConfigurationError: The text is not a valid duration.
    """
    if text is None:
        return None
    if len(text) >= len("2030-01-31") and "-" in text:
        return to_moment(text, option=option)
    try:
        return timedelta(seconds=to_seconds(text, subject=option))
    except ConfigurationError as error:
        raise ConfigurationError(
            [replace(problem, fix=_FORMS, shell_fix=None) for problem in error.problems]
        ) from None


def labels_sought(given: Sequence[str] | None) -> dict[str, str | None]:
    """Parse the values of --label: KEY=VALUE, or KEY for any value. Raises typer.BadParameter if a key is given twice."""
    found: dict[str, str | None] = {}
    for each in given or ():
        key, equals, value = each.partition("=")
        if key in found:
            raise typer.BadParameter(f"--label gives the key {key!r} twice: a task has one value for a key.")
        found[key] = value if equals else None
    return found


T = TypeVar("T")
_NAMED: Final = 5
_ANYWHERE: Final = 3
"""The rank of a match that ends within a part of an id."""
Given = TypeVar("Given", str, str | None)


def full_task_id(app: App, given: Given) -> Given:
    """Return the id of the task whose id begins with `given`, or None if `given` is None. Raises TaskNotFound or AmbiguousId."""
    return given and _whole(app, given, among=(tasks_between,), absent=TaskNotFound)


def full_workflow_id(app: App, given: Given) -> Given:
    """Return the id of the workflow whose id begins with `given`, or None if `given` is None. Raises WorkflowNotFound or AmbiguousId."""
    return given and _whole(app, given, among=(workflows_between,), absent=WorkflowNotFound)


def full_batch_id(app: App, given: str) -> str:
    """Return the id of the batch whose id begins with `given`. Raises BatchNotFound or AmbiguousId."""
    return _whole(app, given, among=(batches_between,), absent=BatchNotFound)


def full_target_id(app: App, given: str) -> str:
    """Return the id of the task or workflow whose id begins with `given`. Raises TaskNotFound or AmbiguousId."""
    return _whole(app, given, among=(workflows_between, tasks_between), absent=TaskNotFound)


def full_worker_id(app: App, given: Given, *, supervisors: bool = False, prefer_live: bool = False) -> Given:
    """Return the id of the worker whose id begins with `given`. If `supervisors` is set, also search supervisors.

    An id without a row is returned unchanged, because other records can still refer to that worker. Raises AmbiguousId.
    """
    if given is None:
        return given
    found = database_answer(
        app, parties_named(sought(given, subject="id"), supervisors=supervisors, limit=_NAMED + 1)
    )
    best = [each for each in found if each.rank == found[0].rank]
    if not best or (best[0].rank == _ANYWHERE and len(given) < SHORTEST_TYPED):
        return given
    if best[0].id == given:
        return given
    live = [each for each in best if each.state == LIVE]
    return _only(given, live if prefer_live and live else best)


def _whole(
    app: App,
    given: str,
    *,
    among: Sequence[Callable[..., Statement[list[Candidate]]]],
    absent: Callable[[str], Exception],
) -> str:
    """Return the full id for a prefix. A complete id, or a text that cannot be part of an id, is returned unchanged."""
    try:
        UUID(given)
    except ValueError:
        between = bounds(given)
    else:
        return given
    if between is None:
        return given
    found = [each for of in among for each in database_answer(app, of(*between, limit=_NAMED + 1))]
    if not found:
        raise absent(given)
    return _only(given, found)


def _only(given: str, found: Sequence[Candidate]) -> str:
    if len(found) > 1:
        named = [f"{each.id}  {_described(each)}" for each in found[:_NAMED]]
        raise AmbiguousId(given, named, more=len(found) > _NAMED)
    return found[0].id


def _described(found: Candidate) -> str:
    party = found.name == found.kind
    return f"{found.kind} {found.state}" if party else f"{found.kind} {found.name} {found.state}"


class ShortIds(Struct, frozen=True):
    """Provides the shortest unambiguous prefixes of ids for tables."""

    of_ids: dict[UUID, str]
    of_parties: dict[str, str]

    def uuid(self, one: UUID | None) -> Id | str:
        """Return the table cell for the id of a task or a workflow."""
        return "" if one is None else Id(str(one), self.of_ids.get(one, str(one)))

    def party(self, one: str | None) -> Id | str:
        """Return the table cell for the id of a worker or a supervisor."""
        return "" if one is None else Id(one, self.of_parties.get(one, one))


def short_ids(app: App, *, uuids: Iterable[UUID | None] = (), parties: Iterable[str | None] = ()) -> ShortIds:
    """Query the shortest unambiguous prefixes of these ids. If stdout is not a terminal, do not query or shorten anything."""
    if not stdout_is_terminal():
        return ShortIds({}, {})
    ids = list({each for each in uuids if each is not None})
    beside = database_answer(app, neighbours(ids)) if ids else {}
    names = {each for each in parties if each is not None}
    stems = sorted({stem(each) for each in names} - names)
    alike = database_answer(app, parties_alike(stems)) if stems else []
    return ShortIds(
        {each: shortest_prefix(each, beside.get(each, ())) for each in ids},
        {
            each: stem(each)
            for each in names
            if all(other == each or not other.startswith(f"{stem(each)}-") for other in alike)
        },
    )


def database_answer(app: App, statement: Statement[T]) -> T:
    """Run a statement on the database of an app and return its result."""
    return database_of(app).run(ask(statement), name="everbeat", twin="arun")


class Done(Struct, frozen=True):
    """The result for one name, as JSON and as a line of text. `note` is written to stderr."""

    document: object
    line: str
    note: str | None = None


def for_each(
    names: Sequence[str],
    act: Callable[[str], Done],
    *,
    refusals: tuple[type[EverbeatError], ...],
    key: str,
    listed_as: str,
    as_json: bool,
) -> NoReturn:
    """Perform the action for each name, even if it is refused for other names, and exit with the highest exit code."""
    documents: list[object] = []
    worst = ExitCode.OK
    refused: tuple[type[EverbeatError], ...] = (AmbiguousId, *refusals)
    for name in names:
        try:
            done = act(name)
        except refused as error:
            worst = max(worst, exit_code_of(error))
            documents.append({key: name, "error": failure_document(error)})
            if not as_json:
                show_failure(error, form=Form.TEXT)
            continue
        documents.append(done.document)
        if not as_json:
            print(on_one_line(done.line))
            if done.note is not None:
                print(on_one_line(done.note), file=sys.stderr)
    if as_json:
        show_json({listed_as: documents})
    raise typer.Exit(worst)
