"""Fixtures: a scenario for each story, and the programs that send tasks to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.migrated import MigratedSchemas
from tests.stories.scenario import Scenario, new_scenario, program_of


@pytest.fixture
def scenario(database_url: str, migrated_schemas: MigratedSchemas, tmp_path: Path) -> Iterator[Scenario]:
    """Yield a scenario in a lent schema. If the story changes its definition or its relay, the schema is dropped afterwards."""
    schema = migrated_schemas.take()
    try:
        with new_scenario(database_url, schema, tmp_path, is_migrated=True) as made:
            yield made
    finally:
        migrated_schemas.give_back(schema)


@pytest.fixture
def sample_tasks(scenario: Scenario) -> Iterator[ModuleType]:
    """Yield the stories' sample program, imported as by a sender."""
    with program_of(scenario) as program:
        yield program


@pytest.fixture
def mischief(scenario: Scenario) -> Iterator[ModuleType]:
    """Yield the program with misbehaving tasks, imported as by a sender."""
    with program_of(scenario, "mischief") as program:
        yield program


@pytest.fixture
def deploys(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "deploys") as program:
        yield program
