"""The public names: each has one place, can be imported, and loads no more than it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

import everbeat
from everbeat.errors import (
    DatabaseError,
    EventTimeout,
    EverbeatError,
    TaskError,
    TaskFailed,
    TaskStopped,
    WaitTimeout,
)

PLACES = (
    "everbeat.errors",
    "everbeat.inspection",
    "everbeat.logging",
    "everbeat.metrics",
    "everbeat.middleware",
    "everbeat.recovery",
    "everbeat.sentry",
    "everbeat.workflows",
)
"""The public modules beside the top level."""
IN_TWO_PLACES = {
    each.__name__
    for each in (DatabaseError, EventTimeout, EverbeatError, TaskError, TaskFailed, TaskStopped, WaitTimeout)
} | {"WORKER_CRASHED"}
"""Names that most programs catch or retry."""
CLIENT = ("everbeat.app", "everbeat.client", "everbeat.store", "psycopg")
WORKER = (
    "everbeat.worker",
    "everbeat.supervisor",
    "everbeat.recovering",
    "everbeat.maintenance",
    "everbeat.cli",
)


def names_of(place: str) -> set[str]:
    """Return the names that a public module re-exports."""
    return {
        name
        for name in vars(import_module(place))
        if not name.startswith("_") and name not in ("resources", "tasks", "tree", "wording")
    }


def loaded_by(statement: str, *, of: tuple[str, ...]) -> list[str]:
    """Return the modules of these packages that a fresh Python has loaded after a statement."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return [
        name for name in json.loads(done.stdout) if f"{name}.".startswith(tuple(f"{each}." for each in of))
    ]


def test_every_top_level_name_can_be_imported() -> None:
    for name in everbeat.__all__:
        assert getattr(everbeat, name) is not None
    assert set(everbeat.__all__) <= set(dir(everbeat))
    assert len(everbeat.__all__) <= 40


def test_a_public_name_has_one_place_except_names_that_most_programs_catch() -> None:
    found = [name for place in PLACES for name in names_of(place)] + everbeat.__all__
    assert {name for name in found if found.count(name) > 1} == IN_TWO_PLACES


def test_a_name_of_another_public_module_is_rejected_with_its_place() -> None:
    with pytest.raises(AttributeError, match=r"from everbeat\.inspection import SweepResult"):
        getattr(everbeat, "SweepResult")  # noqa: B009 - a type checker would refuse the plain form


def test_an_unknown_name_raises_the_usual_import_error() -> None:
    with pytest.raises(AttributeError, match="Aap"):
        getattr(everbeat, "Aap")  # noqa: B009 - a type checker would refuse the plain form
    with pytest.raises(ImportError):
        exec("from everbeat import Aap")


def test_importing_the_package_or_its_errors_loads_no_client() -> None:
    assert loaded_by("import everbeat", of=("everbeat",)) == ["everbeat"]
    assert loaded_by("from everbeat import errors", of=CLIENT) == []
    assert loaded_by("import everbeat.recovery, everbeat.inspection, everbeat.logging", of=CLIENT) == []


def test_a_sending_program_loads_no_worker_code() -> None:
    statement = (
        "from everbeat import App; import everbeat.workflows; App('postgresql://localhost/never-opened')"
    )
    assert loaded_by(statement, of=WORKER) == []
