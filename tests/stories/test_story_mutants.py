"""Mutants of the stories about stops: each promise is broken once in real trees, and its story must fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.stories import test_a_deploy as a_deploy
from tests.stories.scenario import Scenario

pytestmark = pytest.mark.story

STORIES = [
    (
        "policy",
        a_deploy.test_a_stop_causes_no_second_run_that_the_policy_forbids,
        r"^async fail\n.*PENDING",
    ),
    (
        "order",
        a_deploy.test_a_second_run_begins_after_the_process_of_the_first_has_ended,
        r"/proc/\d+.*exists",
    ),
]


@pytest.mark.parametrize(("promise", "story", "seen"), STORIES, ids=[promise for promise, *_ in STORIES])
def test_a_story_fails_if_its_promise_about_a_stop_is_broken(
    scenario: Scenario,
    deploys: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    promise: str,
    story: Callable[[Scenario, ModuleType], None],
    seen: str,
) -> None:  # J1
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "programs" / "broken"))
    monkeypatch.setenv("STORY_BREAKS", promise)
    with pytest.raises(AssertionError, match=seen):
        story(scenario, deploys)
