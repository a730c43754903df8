"""Stories that cannot fail prove nothing: each promise of a stop is broken once in real trees, and its story must go red."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.stories import test_a_deploy as a_deploy
from tests.stories.stage import Stage

pytestmark = pytest.mark.story

STORIES = [
    (
        "policy",
        a_deploy.test_a_stop_gives_no_code_a_second_run_that_its_policy_forbids,
        r"^async fail\n.*PENDING",
    ),
    (
        "order",
        a_deploy.test_a_second_run_begins_after_the_process_of_the_first_has_ended,
        r"/proc/\d+.*exists",
    ),
]


@pytest.mark.parametrize(("promise", "story", "seen"), STORIES, ids=[promise for promise, *_ in STORIES])
def test_a_broken_promise_of_a_stop_is_seen(
    stage: Stage,
    deploys: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    promise: str,
    story: Callable[[Stage, ModuleType], None],
    seen: str,
) -> None:  # J1
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "programs" / "broken"))
    monkeypatch.setenv("STORY_BREAKS", promise)
    with pytest.raises(AssertionError, match=seen):
        story(stage, deploys)
