"""Supervisors: they beat for the leases of their worker, learn that they were declared dead, and bury a dead worker."""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.model.rules import Rules
from tests.protocol.model.statements import CLAIMED, CRASHED, KILLED, RUNNING, Lease, put
from tests.protocol.model.world import (
    TREES,
    Plan,
    Step,
    Watch,
    World,
    become_former,
    can_become_former,
    commit,
    with_tree,
)  # fmt: skip


class Supervisors(Rules):
    """The supervisors of all trees."""

    def steps(self, world: World, tree: int) -> Iterator[Step]:
        """Yield the steps of a supervisor for its own worker."""
        me = world.trees[tree]
        if me.child == "lives":
            yield self.beat(world, tree)
        elif me.plan is None and can_become_former(world, tree):
            yield self._buries(world, tree)

    def beat(self, world: World, tree: int) -> Step:
        """Return the step of a beat, its reply and its consequences."""
        me, tables = world.trees[tree], world.tables
        if tables.ended[tree] and self.choices.beats_refuse_the_ended:
            if not can_become_former(world, tree):
                return Step(f"{tree} waits for a new id", world)
            reborn = with_tree(become_former(world, tree), tree, held=(), doubt=None)
            reborn = reborn._replace(muted=put(reborn.muted, tree, False))
            return Step(f"{tree} learns that it was declared dead, and returns under a new id", reborn)
        world = self._seen_alive(world, tree)
        if not self.choices.beats_name_claims:
            return Step(f"{tree} beats", world)
        held = tuple(each for each in me.held if self._is_mine(world, tree, each.lease))
        world = with_tree(world, tree, held=held)
        known = {each.lease.claim for each in held}
        broken = None
        if self.choices.beats_vouch_for_memory and me.doubt is None:
            for lease in tables.leases_of(tree):
                if lease.claim in known:
                    continue
                if lease.state == CLAIMED:
                    answer = self.database.release(world.tables, lease)
                else:
                    answer = self.database.settle(world.tables, lease, tree, released=True)
                broken = broken or answer.broken
                world = commit(world, answer.tables, self.size)
        return Step(f"{tree} beats", world, broken=broken)

    def _is_mine(self, world: World, tree: int, lease: Lease) -> bool:
        row = world.tables.rows[lease.task]
        return row.holder == tree and row.claim == lease.claim

    def _seen_alive(self, world: World, tree: int) -> World:
        """Let the beats of a tree advance; observers that found it silent do not know yet."""
        trees = list(world.trees)
        for number, observer in enumerate(trees):
            plan, watches = observer.plan, observer.watches
            if watches[tree] == Watch.STALE:
                watches = put(watches, tree, Watch.MOVED)
            if plan is not None and plan.holder == tree and not plan.moved:
                plan = plan._replace(moved=True)
            trees[number] = observer._replace(watches=watches, plan=plan)
        return world._replace(
            trees=tuple(trees), muted=put(world.muted, tree, False), silence=put(world.silence, tree, 0)
        )

    def _buries(self, world: World, tree: int) -> Step:
        """Bury a dead worker: its row ends for good, and its leases are judged before they are changed."""
        leases = world.tables.leases_of(tree)
        shared = [
            lease for lease in leases if lease.state == RUNNING and not world.tables.rows[lease.task].alone
        ]
        crashed = world.trees[tree].child == "crashed"
        many = len(shared) > 1 and self.choices.suspects_run_alone
        decided = tuple(
            lease._replace(
                charge="crash" if lease in shared and not many else "loss",
                suspect=lease in shared and (crashed or world.tables.rows[lease.task].process_died),
            )
            for lease in leases
        )
        buried = become_former(world, tree)
        former = tree + TREES
        if decided:
            buried = buried._replace(
                tables=buried.tables._replace(
                    ended=put(buried.tables.ended, former, CRASHED if crashed else KILLED)
                )
            )
        plan = Plan("child", former, decided) if decided else None
        return Step(f"{tree} buries its worker", with_tree(buried, tree, child="lives", plan=plan))
