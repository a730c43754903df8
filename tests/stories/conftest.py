"""A stage for each story, and the program that sends to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.stories.stage import Stage, program_of, staged


@pytest.fixture
def stage(database_url: str, schema: str, tmp_path: Path) -> Iterator[Stage]:
    with staged(database_url, schema, tmp_path) as made:
        yield made


@pytest.fixture
def deeds(stage: Stage) -> Iterator[ModuleType]:
    """The stories' program as a sender imports it."""
    with program_of(stage) as program:
        yield program


@pytest.fixture
def mischief(stage: Stage) -> Iterator[ModuleType]:
    """The program of rude tasks as a sender imports it."""
    with program_of(stage, "mischief") as program:
        yield program


@pytest.fixture
def deploys(stage: Stage) -> Iterator[ModuleType]:
    with program_of(stage, "deploys") as program:
        yield program
