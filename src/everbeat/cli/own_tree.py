"""Temporary schemas and trees of a command: they end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

from everbeat.app import App
from everbeat.client.database_access import database_of
from everbeat.errors import DatabaseUnreachable, SchemaForbidden


@contextmanager
def own_schema(app: App, *, keep: bool = False) -> Iterator[None]:
    """Create the app's schema for the duration of the block, and drop it afterward unless `keep` is set. Raises a DatabaseError."""
    try:
        try:
            app.migrate()
        except SchemaForbidden as problem:
            raise _forbidden(app, problem) from None
        yield
    finally:
        if not keep:
            # The database is unreachable: nothing was created, or the same error is already being raised.
            with suppress(DatabaseUnreachable):
                database_of(app).drop()


def _forbidden(app: App, problem: SchemaForbidden) -> SchemaForbidden:
    with database_of(app).target.connect("everbeat migrate") as connection:
        role, database = connection.info.user, connection.info.dbname
    return SchemaForbidden(
        f"This command creates a temporary schema with a new name each time: {problem.message}",
        fix=f'let the role create schemas: GRANT CREATE ON DATABASE "{database}" TO "{role}".',
    )


def start_own_tree(
    locator: str,
    *options: str,
    environment: Mapping[str, str] | None = None,
    output: IO[Any] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a supervisor in its own session, so that Ctrl-C reaches only the command, which stops its trees itself.

    On Linux, the kernel kills the supervisor if the command dies. Must be called in the main thread. `output` receives
    stdout and stderr. By default, the supervisor inherits the command's streams.
    """
    own = [sys.executable, "-m", "everbeat.cli.tree_process", str(os.getpid())]
    return subprocess.Popen(
        [*own, locator, *options],
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
    )
