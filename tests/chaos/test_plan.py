"""The plan for a seed never changes, can be stored in a file, and contains every type of fault."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest

from tests.chaos.plan import (
    KINDS,
    OF_LIVENESS,
    OF_NATS,
    OF_THE_DATABASE,
    OF_THE_NATS_SERVER,
    ONE_AT_A_TIME,
    THRESHOLD_S,
    Kind,
    Plan,
    make_plan,
)

SEEDS = range(1, 30)


def test_a_seed_always_gives_the_same_plan() -> None:
    assert make_plan(seed=7, seconds=60) == make_plan(seed=7, seconds=60)
    assert make_plan(seed=7, seconds=60) != make_plan(seed=8, seconds=60)


def test_a_plan_survives_its_file() -> None:
    plan = make_plan(seed=7, seconds=60)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("text", ["{}", "[]", '{"seed": 1, "faults": [{}]}', "no json"])
def test_a_file_that_is_not_a_plan_is_rejected(text: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Plan.from_json(text)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_short_plan_contains_every_kind_of_fault(seed: int) -> None:
    faults = make_plan(seed=seed, seconds=26).faults
    assert {fault.kind for fault in faults} == set(KINDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_first_freezes_a_tree_for_long_while_another_tree_observes(seed: int) -> None:
    first, *others = make_plan(seed=seed, seconds=26).faults
    assert first.kind is Kind.FREEZE_TREE
    assert first.lasts_s > THRESHOLD_S + 1
    meanwhile = [fault for fault in others if fault.at_s < first.at_s + THRESHOLD_S + 1]
    assert all(fault.tree not in (None, first.tree) for fault in meanwhile)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_has_one_fault_of_the_server_at_a_time(seed: int) -> None:
    faults = [fault for fault in make_plan(seed=seed, seconds=300).faults if fault.kind in ONE_AT_A_TIME]
    assert len(faults) > 10
    assert all(before.end_s < after.at_s for before, after in pairwise(faults))


def test_only_faults_of_trees_and_lines_have_a_tree() -> None:
    for fault in make_plan(seed=3, seconds=600).faults:
        if fault.kind in OF_THE_DATABASE:
            assert fault.tree is None
        if fault.kind is Kind.LOSE_REPLY:
            assert (fault.verb in ("send", "cancel")) == (fault.tree is None)


@pytest.mark.parametrize(
    ("seconds", "digest"),
    [
        (26, "4fb23183f9d0e30c96ecb04a4fd10204ce891a7e49f630b8224434db4072f280"),
        (60, "a8cefa04c2f1a329d33bc9fb8e834d3f1d58e2e4587fc154e319a4881accf699"),
        (600, "a648c6d1b2124fdf79fba298dc3f55c42819e9ff5793c52499db8e9ec2f6bd41"),
    ],
)
def test_a_plan_without_the_newer_kinds_has_not_changed(seconds: float, digest: str) -> None:
    plans = "".join(make_plan(seed=seed, seconds=seconds).to_json() for seed in SEEDS)
    assert hashlib.sha256(plans.encode()).hexdigest() == digest


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_with_nats_contains_every_kind_and_one_fault_of_the_server_at_a_time(seed: int) -> None:
    plan = make_plan(seed=seed, seconds=60, nats=True)
    assert plan == make_plan(seed=seed, seconds=60, nats=True)
    assert Plan.from_json(plan.to_json()) == plan
    assert {fault.kind for fault in plan.faults} == {*KINDS, *OF_NATS}
    server_faults = [fault for fault in plan.faults if fault.kind in OF_THE_NATS_SERVER]
    assert all(before.end_s < after.at_s for before, after in pairwise(server_faults))
    assert all(
        (fault.tree is None) == (fault.kind in OF_THE_NATS_SERVER)
        for fault in plan.faults
        if fault.kind in OF_NATS
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_with_the_newer_kinds_contains_every_kind_and_one_fault_of_the_server_at_a_time(
    seed: int,
) -> None:
    plan = make_plan(seed=seed, seconds=60, liveness=True)
    assert plan == make_plan(seed=seed, seconds=60, liveness=True)
    assert Plan.from_json(plan.to_json()) == plan
    assert {fault.kind for fault in plan.faults} == {*KINDS, *OF_LIVENESS}
    server_faults = [fault for fault in plan.faults if fault.kind in ONE_AT_A_TIME]
    assert all(before.end_s < after.at_s for before, after in pairwise(server_faults))
    assert all(fault.tree is None for fault in plan.faults if fault.kind in OF_LIVENESS)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_phases_of_the_database_last_longer_than_the_thresholds(seed: int) -> None:
    faults = make_plan(seed=seed, seconds=60, liveness=True).faults
    first = {kind: next(fault for fault in faults if fault.kind is kind) for kind in OF_LIVENESS}
    assert first[Kind.READ_ONLY].lasts_s > THRESHOLD_S
    assert first[Kind.EXHAUST_CONNECTIONS].lasts_s > 2 * THRESHOLD_S
