"""The page of records lists the fields of every public record, as the code has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import everbeat
from everbeat import inspection, recovery, workflows
from everbeat.inspection import TaskInfo, TaskSummary
from tests.docs.tables import marked_tables
from tests.surface.public_names import names_of

MARKED = marked_tables("inspecting.md")
NOT_ONLY_READ = {
    *("Call", "Completed", "Completion", "Context", "Failed", "NamedStep"),  # objects that programs work with
    *("Default", "FailWithBackoff", "Skip"),  # answers of hooks, without fields
}
RECORDS: dict[str, Any] = {
    f"{place.__name__}.{name}": kind
    for place in (everbeat, inspection, recovery, workflows)
    for name in names_of(place)
    if hasattr(kind := getattr(place, name), "__struct_fields__") and name not in NOT_ONLY_READ
}


def test_every_public_record_has_a_table_in_the_documentation() -> None:
    assert set(MARKED) == set(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_the_documented_table_of_a_record_has_its_fields_and_properties_in_order(name: str) -> None:
    assert [(row["Field"], row["Type"]) for row in MARKED[name]] == [*members(RECORDS[name])]
    assert all(row["Is"] for row in MARKED[name])


def members(record: Any) -> Iterator[tuple[str, str]]:
    """The fields and then the properties, with their annotations; of a TaskInfo those that a TaskSummary has not."""
    elsewhere = TaskSummary if record is TaskInfo else object
    for name in record.__struct_fields__:
        if not hasattr(elsewhere, name) and not name.startswith("_"):
            owner = next(each for each in record.__mro__ if name in inspect.get_annotations(each))
            yield name, written(inspect.get_annotations(owner)[name])
    for owner in reversed(record.__mro__):
        for name, each in vars(owner).items():
            if isinstance(each, property) and not name.startswith("_") and not hasattr(elsewhere, name):
                yield name, written(each.fget.__annotations__["return"])


def written(annotation: str) -> str:
    return annotation.replace(" | ", " or ")  # a bar ends the cell of a table
