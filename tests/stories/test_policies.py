"""Which of several policies decides: the task's own, the app-wide default, or one given at a send."""

from __future__ import annotations

import pytest

from everbeat import WORKER_CRASHED, App, Handle, RetryPolicy
from tests.stories.stage import SLACK, Stage

pytestmark = pytest.mark.story

ONE_CRASH = RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=[WORKER_CRASHED])
ONE_FAILURE = RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=["SMTP_DOWN"])


def sent(stage: Stage, *, on_crash: str, given: RetryPolicy | None) -> Handle[None]:
    """A task that always kills its process, registered with one retry after a crash."""
    app = App(stage.url, schema=stage.schema, on_crash=on_crash)  # type: ignore[arg-type]

    @app.task(name="poison", run_in="process", retry=ONE_CRASH)
    def poison(how: str) -> None: ...

    return (poison if given is None else poison.with_options(retry=given)).send("exit")


def test_the_nearest_policy_bounds_the_runs_of_a_task_that_kills_its_process(stage: Stage) -> None:
    stage.ready_tree()
    listed = sent(stage, on_crash="retry", given=None)
    replaced = sent(stage, on_crash="fail", given=ONE_FAILURE)
    both = sent(stage, on_crash="retry", given=ONE_FAILURE)
    for handle in (listed, replaced, both):
        error = handle.outcome(timeout=30 * SLACK).error  # type: ignore[union-attr]
        assert (error.code, error.data["poison"]) == (WORKER_CRASHED, False)
        attempts = stage.attempts(handle.id)
        assert [one["will_retry"] for one in attempts] == [True, False], handle.info().policy
