"""External events: time, operators, delayed statements, restarts and faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.protocol.model.observers import Observers
from tests.protocol.model.rules import Rules, without_worker
from tests.protocol.model.statements import TERMINAL, Broken, Choices, Size, put
from tests.protocol.model.supervisors import Supervisors
from tests.protocol.model.world import (
    TREES,
    Life,
    Step,
    Watch,
    World,
    become_former,
    can_become_former,
    with_fault,
    with_tree,
)  # fmt: skip

UNNOTICED: Final = 3


class Environment(Rules):
    """All events outside the parties; when time passes, it makes every party beat and check."""

    def __init__(self, choices: Choices, size: Size) -> None:
        super().__init__(choices, size)
        self._supervisors = Supervisors(choices, size)
        self._observers = Observers(choices, size)

    def steps(self, world: World) -> Iterator[Step]:
        """Yield the steps without an actor, and those of operators."""
        yield from self._threshold_passes(world)
        if world.is_up and self.size.cancels:
            for task, row in enumerate(world.tables.rows):
                if not row.cancel and row.state not in TERMINAL:
                    yield self.committed(
                        f"cancel {task}", world, self.database.cancel(world.tables, task), kind="help"
                    )
        if world.net is not None and world.is_up:
            lease, tree = world.net
            arrived = world._replace(net=None)
            yield Step("what was under way is lost", arrived)
            answer = self.database.settle(world.tables, lease, tree)
            yield self.committed(f"the settle of {lease.task} by {tree} arrives", arrived, answer)
        if not world.is_up:
            yield Step("the database is back", self._forgiven(world._replace(is_up=True)))
        for tree, each in enumerate(world.trees):
            if each.life == Life.AWAY:
                yield Step(f"{tree} is back", with_tree(world, tree, life=Life.UP), "help")
            elif each.life == Life.DEAD and world.is_up and can_become_former(world, tree):
                yield from self._restarts(world, tree)

    def _restarts(self, world: World, tree: int) -> Iterator[Step]:
        watches = (Watch.NOTHING,) * (2 * TREES)
        born = with_tree(
            become_former(world, tree), tree, life=Life.UP, child="lives", held=(), doubt=None, plan=None,
            watches=watches,
        )  # fmt: skip
        born = born._replace(muted=put(born.muted, tree, False), silence=(0,) * (2 * TREES))
        yield Step(f"{tree} starts anew", born, "help")
        if not self.choices.start_up_by_proof:
            for other in range(TREES):
                if other != tree and not world.tables.ended[other]:
                    yield self._observers.ends(
                        born, f"{tree} starts anew and takes {other} for its own past", other
                    )

    def _threshold_passes(self, world: World) -> Iterator[Step]:
        """Let every running tree beat and check. Not while an observer is about to act: it would have acted before."""
        if world.is_up and any(tree.life == Life.UP and tree.is_about_to_act for tree in world.trees):
            return
        later = world
        if world.is_up:
            for tree, each in enumerate(world.trees):
                if each.life == Life.UP and each.child == "lives":
                    later = self._supervisors.beat(later, tree).world
        muted = tuple(world.trees[tree].life != Life.UP or later.muted[tree] for tree in range(TREES))
        later = later._replace(muted=muted)
        for tree, each in enumerate(later.trees):
            if each.life == Life.UP and (world.is_up or not self.choices.amnesty):
                watches = tuple(
                    self._watched(later, tree, holder, each.watches[holder]) for holder in range(2 * TREES)
                )
                later = with_tree(later, tree, watches=watches)
        broken = None
        if world.is_up and any(tree.life == Life.UP for tree in world.trees):
            later, broken = self._silence_grows(later)
        if later != world:
            yield Step("a threshold passes", later, broken=broken)

    def _watched(self, world: World, tree: int, holder: int, watch: str) -> str:
        held = any(row.holder == holder for row in world.tables.rows)
        if holder == tree or world.tables.ended[holder] or not held:
            return Watch.NOTHING
        if world.is_up and self._has_beaten(world, holder):
            return Watch.FRESH
        if watch == Watch.NOTHING:
            return Watch.FRESH if world.is_up else Watch.NOTHING
        return Watch.STALE if watch == Watch.FRESH else watch

    def _has_beaten(self, world: World, holder: int) -> bool:
        if holder < TREES and world.trees[holder].life == Life.UP:
            return True
        if self.choices.beats_name_claims:
            return False
        # Any supervisor that names the task keeps it alive, even if it no longer holds it.
        leased = {lease.task for lease in world.tables.leases_of(holder)}
        return any(
            held.lease.task in leased for tree in world.trees if tree.life == Life.UP for held in tree.held
        )

    def _silence_grows(self, world: World) -> tuple[World, Broken | None]:
        silence, broken = world.silence, None
        for holder in range(2 * TREES):
            is_silent = not (holder < TREES and world.trees[holder].life == Life.UP)
            if is_silent and not world.tables.ended[holder] and world.tables.leases_of(holder):
                silence = put(silence, holder, min(silence[holder] + 1, UNNOTICED))
                if silence[holder] == UNNOTICED:
                    broken = Broken.L1
        return world._replace(silence=silence), broken

    def faults(self, world: World) -> Iterator[Step]:
        """Yield the possible faults, one at a time."""
        kinds, after = self.size.kinds, with_fault(world)
        for tree, each in enumerate(world.trees):
            if each.life != Life.UP:
                continue
            if "freeze" in kinds:
                yield Step(f"{tree} is frozen", with_tree(after, tree, life=Life.AWAY), "fault")
            if "kill tree" in kinds:
                dead = with_tree(after, tree, life=Life.DEAD, held=(), doubt=None, plan=None, child="lives")
                yield Step(f"tree {tree} is killed", dead, "fault")
            if "kill worker" in kinds and each.child == "lives":
                yield Step(f"worker {tree} is killed", without_worker(after, tree, "killed"), "fault")
        if world.is_up and "outage" in kinds:
            yield Step("the database goes away", self._errors(after._replace(is_up=False)), "fault")
        if world.is_up and "failover" in kinds and world.before not in (None, world.tables):
            assert world.before is not None
            lost = after._replace(tables=world.before, before=None)
            yield Step("a failover loses the last commit", self._forgiven(self._errors(lost)), "fault")

    def _errors(self, world: World) -> World:
        """Let statements fail: earlier decisions are dropped and never retried."""
        return world._replace(trees=tuple(tree._replace(plan=None) for tree in world.trees))

    def _forgiven(self, world: World) -> World:
        """Restart all windows: silence during an outage of the database does not count."""
        if not self.choices.amnesty:
            return world
        nothing = (Watch.NOTHING,) * (2 * TREES)
        return world._replace(trees=tuple(tree._replace(watches=nothing) for tree in world.trees))
