"""A stage for each story, and the program that sends to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.stories.stage import Stage, staged


@pytest.fixture
def stage(database_url: str, schema: str, tmp_path: Path) -> Iterator[Stage]:
    with staged(database_url, schema, tmp_path) as made:
        yield made


@pytest.fixture
def deeds(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stories' program as a sender imports it."""
    for name, value in stage.environment(recovery={}, worker={}).items():
        if name.startswith("STORY_"):
            monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "programs"))
    sys.modules.pop("deeds", None)
    import deeds as program  # type: ignore[import-not-found]  # the environment must be there before

    yield program
    program.app.close()
    sys.modules.pop("deeds", None)
