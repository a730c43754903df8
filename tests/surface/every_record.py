"""List all records by name: those that need only the package, and those that need a database."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.surface import (
    command_help,
    error_codes,
    json_keys,
    log_events,
    public_names,
    schema_objects,
    settings,
    statement_order,
)
from tests.surface.record import Record

OF_THE_PACKAGE = (
    Record("command_help", command_help.text),
    Record("error_codes", error_codes.text),
    Record("log_events", log_events.text),
    Record("public_names", public_names.text),
    Record("settings", settings.text),
)
OF_PROCESSES = (Record("statement_order", statement_order.text),)
"""What real workers do."""
OF_A_DATABASE: dict[str, Callable[[str, str], str]] = {
    "json_keys": json_keys.text,
    "schema_objects": schema_objects.text,
}
"""Functions of a URL and the name of a schema that does not exist yet."""
NAMES = (*(record.name for record in (*OF_THE_PACKAGE, *OF_PROCESSES)), *OF_A_DATABASE)


def of_a_database(name: str, *, url: str, schema: str) -> Record:
    """Return the record of this name, taken in a separate schema."""
    return Record(name, lambda: OF_A_DATABASE[name](url, schema))


def unknown(names: Sequence[str]) -> list[str]:
    """Return the names that no record has."""
    return [name for name in names if name not in NAMES]
