"""Two versions of a program are deployed forwards and backwards under load, while processes and trees are killed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.stories.deploy_oracles import judge
from tests.stories.fleet import Fleet
from tests.stories.scenario import Scenario

pytestmark = pytest.mark.story


def deploy(
    scenario: Scenario, *, seconds: float, per_second: float, seed: int, every_s: float = 5.0
) -> Counter[str]:
    """Deploy for this many seconds and return the figures; fail if there is any problem."""
    fleet = Fleet(scenario, seed=seed)
    scenario.until(
        lambda: len(scenario.query("select from {schema}.workers")) == 2, within=30, what="two trees"
    )
    fleet.send(per_second=per_second)
    fleet.deploy(seconds, every_s=every_s)
    fleet.finish(within=90)
    figures = judge(scenario, fleet)
    print(f"seed {seed}: {dict(sorted(figures.items()))}")
    return figures


@pytest.mark.long
def test_deploys_forwards_and_backwards_under_kills_lose_and_fail_no_task(
    scenario: Scenario,
) -> None:  # J1 J2
    figures = deploy(scenario, seconds=10, per_second=8, seed=1, every_s=3)
    assert figures["COMPLETED"] > figures["FAILED"]
    assert 0 < figures["declines"] < figures["tasks"] / 2


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_minute_of_deploys_forwards_and_backwards_under_kills_loses_no_task(
    scenario: Scenario, seed: int
) -> None:  # J1 J2
    figures = deploy(scenario, seconds=62, per_second=12, seed=seed)
    assert figures["COMPLETED"] > figures["FAILED"]
    assert 0 < figures["declines"] < figures["tasks"] / 2
