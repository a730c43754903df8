"""Each mutant changes a statement that runs today. The tests of the mutants themselves are long and run rarely."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

from everbeat.store.statement import source
from tests.store.test_mutants import Mutant

MODULES = sorted(
    path.stem for path in Path(__file__).parent.glob("test_*.py") if "\nMUTANTS = [" in path.read_text()
)
DEFINITION = re.compile(r"^create or replace (function|trigger|view) (?:\{schema\}\.)?(\w+)", re.MULTILINE)


def newest_definitions() -> dict[tuple[str, str], str]:
    """Return the newest file of each function, trigger and view of the schema."""
    folder = files("everbeat") / "sql" / "schema"
    newest = {}
    for version in sorted(each.name for each in folder.iterdir() if each.is_dir()):
        for file in sorted(each.name for each in (folder / version).iterdir() if each.name.endswith(".sql")):
            name = f"schema/{version}/{file.removesuffix('.sql')}"
            newest |= {found.groups(): name for found in DEFINITION.finditer(source(name))}
    return newest


@pytest.mark.parametrize("module", MODULES)
def test_each_mutant_changes_text_of_a_statement_that_no_later_migration_replaces(module: str) -> None:
    newest = newest_definitions()
    mutants: list[Mutant] = import_module(f"tests.store.{module}").MUTANTS
    assert mutants
    for mutant in mutants:
        text = source(mutant.name)
        assert mutant.old in text, f"{mutant.why}: {mutant.name} no longer contains {mutant.old}"
        if mutant.name.startswith("schema/"):
            replaced = {newest[found.groups()] for found in DEFINITION.finditer(text)} - {mutant.name}
            assert not replaced, f"{mutant.why}: {mutant.name} is replaced by {replaced}"
