"""The protocol is correct in every interleaving of a small world, and each known mistake is found.

A variant counts as caught only because the unchanged protocol is correct in the same world.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

import pytest

from tests.protocol.model.search import Verdict, explore
from tests.protocol.model.statements import EVERY_FAULT, Broken, Choices, Size

# Each world is explored completely. The minimum sizes keep a change from emptying a world unnoticed.
ANY_ONE = Size(faults=1, kinds=(*EVERY_FAULT, "failover"))
REPLIES = Size(faults=2, kinds=("lose reply", "delay settle", "kill worker"))
FROZEN = Size(faults=2, kinds=("freeze",), drains=False)
DELAYED = Size(faults=2, kinds=("kill tree", "delay settle"), cancels=False)
FAILOVERS = Size(faults=2, kinds=("failover",))
DEATHS = Size(faults=2, kinds=("freeze", "kill tree"), cancels=False)
OUTAGES = Size(faults=2, kinds=("freeze", "outage"), cancels=False)
SIBLINGS = Size(tasks=2, faults=1, kinds=("kill worker",), cancels=False)
POISON = Size(faults=0, poison=True)
NEIGHBOUR = Size(tasks=2, workers=1, faults=0, poison=True, cancels=False, drains=False)

LARGE = (DEATHS, SIBLINGS, FROZEN, OUTAGES)
"""Worlds that take too long for every run; the random runs find the same mistakes."""

QUICK = {
    "one fault of any kind": (ANY_ONE, 8_500),
    "lost and late replies, dead workers": (REPLIES, 2_300),
    "frozen trees": (FROZEN, 16_000),
    "dead trees and late settles": (DELAYED, 5_000),
    "failovers that lose a commit": (FAILOVERS, 600),
    "frozen and dead trees": (DEATHS, 33_000),
    "outages": (OUTAGES, 15_000),
    "two tasks in a worker that dies": (SIBLINGS, 16_000),
    "a task that kills its process": (POISON, 170),
    "a task that kills its process, and a neighbour": (NEIGHBOUR, 1_300),
}
LONG = {
    "two faults of any kind": (Size(faults=2), 80_000),
    "failovers and deaths": (Size(faults=2, kinds=("failover", "kill tree")), 60_000),
    "two tasks, one fault": (Size(tasks=2, faults=1, kinds=("freeze", "lose reply"), cancels=False), 100_000),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A mistake, the world in which it shows, and the invariant that it breaks."""

    why: str
    choices: Choices
    size: Size
    breaks: Broken


VARIANTS = [
    Variant("a settle guarded by the id alone", Choices(guard="nothing"), ANY_ONE, Broken.I8),
    Variant("a settle guarded by the state", Choices(guard="state"), ANY_ONE, Broken.I8),
    Variant("a settle guarded by the worker's name", Choices(guard="name"), DELAYED, Broken.I8),
    Variant("a claim id without its random part", Choices(random_claim_ids=False), FAILOVERS, Broken.I10),
    Variant("a start that is not fenced", Choices(fenced_start=False), ANY_ONE, Broken.I10),
    Variant("a recovery without swap on the claim", Choices(recovery_swaps_claim=False), FROZEN, Broken.I5),
    Variant("a recovery without swap on the beat", Choices(recovery_swaps_beat=False), FROZEN, Broken.I13),
    Variant("no amnesty after an outage", Choices(amnesty=False), ANY_ONE, Broken.I13),
    Variant("a start-up that proves deaths by host names", Choices(start_up_by_proof=False), ANY_ONE, Broken.I13),
    Variant("beats that copy the table instead of memory", Choices(beats_vouch_for_memory=False), ANY_ONE, Broken.L3),
    Variant("beats that name tasks, not claims", Choices(beats_name_claims=False), DEATHS, Broken.L1),
    Variant("beats that revive an ended supervisor", Choices(beats_refuse_the_ended=False), DEATHS, Broken.L3),
    Variant("claims by a buried worker", Choices(claims_refuse_the_ended=False), FROZEN, Broken.I26),
    Variant("sweeps that never revisit ended workers", Choices(sweeps_revisit_the_ended=False), ANY_ONE, Broken.L3),
    Variant("a crash that drops a requested cancel", Choices(crash_honours_cancel=False), ANY_ONE, Broken.I18),
    Variant("no limit of crashes", Choices(crash_limit=False), POISON, Broken.L3),
    Variant("a lost host as evidence against the code", Choices(hosts_are_no_evidence=False), DELAYED, Broken.E13),
    Variant("suspects that run with others", Choices(suspects_run_alone=False), NEIGHBOUR, Broken.I15),
]  # fmt: skip


@cache
def unchanged(size: Size) -> Verdict:
    """Return the result of the unchanged protocol."""
    return explore(Choices(), size)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if QUICK[name][0] in LARGE else name for name in QUICK],
)
def test_the_protocol_is_correct_in_every_interleaving_of_a_small_world(name: str) -> None:
    size, floor = QUICK[name]
    verdict = unchanged(size)
    assert verdict.broken is None, str(verdict)
    assert verdict.worlds >= floor, f"{verdict.worlds} worlds prove less than the minimum of {floor}"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LONG)
def test_the_protocol_is_correct_in_every_interleaving_of_a_larger_world(name: str) -> None:
    size, floor = LONG[name]
    verdict = explore(Choices(), size, most=3_000_000)
    assert verdict.broken is None, str(verdict)
    assert verdict.worlds >= floor


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=pytest.mark.long) if variant.size in LARGE else variant
        for variant in VARIANTS
    ],
    ids=lambda variant: variant.why,
)
def test_the_model_finds_each_known_mistake(variant: Variant) -> None:
    assert unchanged(variant.size).broken is None, "the unchanged protocol is correct in this world"
    verdict = explore(variant.choices, variant.size)
    assert verdict.broken is variant.breaks, str(verdict)


def test_every_choice_has_a_variant_with_the_mistake() -> None:
    right = Choices()
    names = {each.name for each in fields(Choices)}
    wrong = {name for one in VARIANTS for name in names if getattr(one.choices, name) != getattr(right, name)}
    assert wrong == names
