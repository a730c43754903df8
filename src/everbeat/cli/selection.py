"""Which database a command speaks to: the options every command has, and the app made of them.

What lives here: --url, --schema, --app and --json. What may not: what is asked through the app.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final, TypeAlias

import typer

from everbeat.app import App
from everbeat.cli.locate import locate
from everbeat.cli.streams import own_voice
from everbeat.cli.typed import typed_as
from everbeat.errors import WrongDatabaseURL
from everbeat.store.address import URL_VARIABLE
from everbeat.store.url import SCHEMA_SUBJECT

SCHEMA_VARIABLE: Final = "EVERBEAT_SCHEMA"

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
        help="PostgreSQL URL, or 'embedded' for one in ./.everbeat; EVERBEAT_DATABASE_URL is not heeded.",
    ),
]
"""Of commands that work in a schema of their own: they touch a database only where one is named."""
SchemaOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--schema", metavar="NAME", help="Schema.  [env: EVERBEAT_SCHEMA; default: everbeat]"),
]
AppOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--app", metavar="LOCATOR", help="Take database and schema from an app: module:app."),
]
JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout; errors as one on stderr.")
]
LimitOption: TypeAlias = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="At most so many.")]


@contextmanager
def selected_app(
    *, url: str | None, schema: str | None, locator: str | None, may_make: bool = False
) -> Iterator[App]:
    """The app of a command, closed afterwards. One without a locator knows no tasks and never migrates.

    An embedded server that is not there is made only where the command may. Raises typer.BadParameter for options that
    contradict each other, and what `load_app` and App raise.
    """
    if locator is not None and (url is not None or schema is not None):
        raise typer.BadParameter(
            "an app brings its own database and schema; give --app, or --url and --schema."
        )
    app = _plain_app(url, schema) if locator is None else load_app(locator)
    try:
        if not may_make:
            app.door.address.require_there()
        yield app
    finally:
        app.close()


def _plain_app(url: str | None, schema: str | None) -> App:
    if url is None and URL_VARIABLE not in os.environ:
        raise WrongDatabaseURL(
            f"No database was given: there is no --url, and {URL_VARIABLE} is not set.",
            fix="give --url postgresql://user@host/database, or --app module:app; 'embedded' is the PostgreSQL in ./.everbeat.",
        )
    with schema_as_typed(schema):
        return App(url, schema=chosen_schema(schema), auto_migrate=False)


@contextmanager
def schema_as_typed(given: str | None) -> Iterator[None]:
    """Inside, what is wrong with a schema's name is said of the option, or of the variable."""
    with typed_as({SCHEMA_SUBJECT: "--schema" if given else SCHEMA_VARIABLE}):
        yield


def load_app(locator: str) -> App:
    """The app that a locator names; what its module prints goes to stderr. Raises as `locate`."""
    with own_voice():
        return locate(locator)


def chosen_schema(given: str | None) -> str:
    """The schema of --schema, else of EVERBEAT_SCHEMA, else the usual one."""
    return given or os.environ.get(SCHEMA_VARIABLE) or "everbeat"
