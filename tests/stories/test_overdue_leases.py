"""The metric of overdue leases rises when no supervisor recovers a dead tree, and falls when one does."""

from __future__ import annotations

from types import ModuleType

import pytest

from everbeat import App, RecoveryConfig
from everbeat.cli.metrics import ClusterMetrics
from everbeat.domain.metrics import names
from tests.domain.test_metrics import samples
from tests.stories.scenario import BY_AGE, FAST, Scenario

pytestmark = pytest.mark.story

OFF = {**FAST, **BY_AGE, "auto_requeue_stale_claimed": False, "auto_fail_stale_running": False}


@pytest.mark.parametrize(
    "configured",
    [pytest.param(FAST, id="on in the app", marks=pytest.mark.long), pytest.param(OFF, id="off in the app")],
)
def test_overdue_leases_are_counted_while_recovery_is_off_and_none_when_it_is_on(
    scenario: Scenario, sample_tasks: ModuleType, configured: dict[str, object]
) -> None:  # O5
    app = App(scenario.url, schema=scenario.schema, recovery=RecoveryConfig(**configured))
    cluster = ClusterMetrics(app)

    def overdue() -> float:
        return samples(cluster.read().text())[names.LEASES_OVERDUE.name][()]

    try:
        tree = scenario.ready_tree(recovery=OFF)
        sent = sample_tasks.wait_for_on_crash.send("go")
        scenario.until(scenario.started(sent.id), within=20, what="it runs")
        assert overdue() == 0
        tree.kill()
        scenario.ready_tree(recovery=OFF)
        scenario.until(lambda: overdue() == 1, within=30, what="the lease is overdue")
        assert scenario.recoveries() == []
        scenario.open_gate("go")
        scenario.ready_tree(recovery=FAST)
        scenario.until(scenario.state_is(sent.id, "COMPLETED"), within=30, what="it was recovered and ran")
        assert overdue() == 0
    finally:
        app.close()
