"""The schema that a command makes for itself and drops afterwards.

What lives here: making it, what a role that may not is told, dropping it. What may not: what the command does in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from everbeat.app import App
from everbeat.errors import DatabaseUnreachable, SchemaForbidden


@contextmanager
def own_schema(app: App, *, keep: bool = False) -> Iterator[None]:
    """Inside, the app's schema is there; afterwards it is gone, unless it is to be kept. Raises a DatabaseError."""
    try:
        try:
            app.migrate()
        except SchemaForbidden as problem:
            raise _forbidden(app, problem) from None
        yield
    finally:
        if not keep:
            with suppress(DatabaseUnreachable):  # then nothing was made, or that very error is on its way
                app.door.drop()


def _forbidden(app: App, problem: SchemaForbidden) -> SchemaForbidden:
    with app.door.target.connect("everbeat migrate") as connection:
        role, database = connection.info.user, connection.info.dbname
    return SchemaForbidden(
        f"This command makes a schema of its own, whose name is a new one each time: {problem.message}",
        fix=f'let the role make schemas: GRANT CREATE ON DATABASE "{database}" TO "{role}".',
    )
