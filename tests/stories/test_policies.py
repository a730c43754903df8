"""The precedence of policies: the task's own, the app-wide default, and one given at a send."""

from __future__ import annotations

import pytest

from everbeat import WORKER_CRASHED, App, Handle, RetryPolicy
from tests.stories.scenario import SLACK, Scenario

pytestmark = pytest.mark.story

ONE_CRASH = RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=[WORKER_CRASHED])
ONE_FAILURE = RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=["SMTP_DOWN"])


def sent(scenario: Scenario, *, on_crash: str, given: RetryPolicy | None) -> Handle[None]:
    """Send a task that always kills its process, registered with one retry after a crash."""
    app = App(scenario.url, schema=scenario.schema, on_crash=on_crash)  # type: ignore[arg-type]

    @app.task(name="poison", run_in="process", retry=ONE_CRASH)
    def poison(how: str) -> None: ...

    return (poison if given is None else poison.with_options(retry=given)).send("exit")


@pytest.mark.long
def test_the_most_specific_policy_limits_the_runs_of_a_crashing_task(scenario: Scenario) -> None:
    scenario.ready_tree()
    listed = sent(scenario, on_crash="retry", given=None)
    replaced = sent(scenario, on_crash="fail", given=ONE_FAILURE)
    both = sent(scenario, on_crash="retry", given=ONE_FAILURE)
    for handle in (listed, replaced, both):
        error = handle.outcome(timeout=30 * SLACK).error  # type: ignore[union-attr]
        assert (error.code, error.data["poison"]) == (WORKER_CRASHED, False)
        attempts = scenario.attempts(handle.id)
        assert [one["will_retry"] for one in attempts] == [True, False], handle.info().policy
