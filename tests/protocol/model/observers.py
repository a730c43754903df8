"""Observers: every supervisor watches the others, judges those whose beats stop, and carries out its decisions."""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.model import statements as st
from tests.protocol.model.rules import Rules
from tests.protocol.model.statements import RUNNING, Broken, Lease, Tables, put
from tests.protocol.model.world import TREES, Plan, Step, Watch, World, commit, is_alive, with_tree


class Observers(Rules):
    """The observers of all trees."""

    def steps(self, world: World, tree: int) -> Iterator[Step]:
        """Yield the next steps of an observer."""
        me = world.trees[tree]
        if me.plan is not None:
            yield self._carries_out(world, tree, me.plan)
            return
        for holder in range(2 * TREES):
            if holder != tree:
                yield from self._judges(world, tree, holder)

    def _judges(self, world: World, tree: int, holder: int) -> Iterator[Step]:
        tables, watch = world.tables, world.trees[tree].watches[holder]
        leases = tables.leases_of(holder)
        match tables.ended[holder]:
            case st.LIVE if watch == Watch.STALE or (
                watch == Watch.MOVED and not self.choices.recovery_swaps_beat
            ):
                seen = self._watching(world, tree, holder, Watch.FRESH)
                plan = Plan("age", holder, leases)
                yield Step(f"{tree} finds {holder} silent", with_tree(seen, tree, plan=plan))
            case st.LIVE if watch == Watch.MOVED:
                yield Step(f"{tree} sees {holder} move", self._watching(world, tree, holder, Watch.FRESH))
            case st.LIVE if not is_alive(world, holder) and leases:
                yield self.ends(world, f"{tree} proves the death of {holder}", holder)
            case st.ENDED:
                buried = tables._replace(ended=put(tables.ended, holder, st.BURIED))
                step = Step(f"{tree} buries the workers of {holder}", commit(world, buried, self.size))
                yield step
            case _ if tables.ended[holder] >= st.BURIED and leases and self.choices.sweeps_revisit_the_ended:
                plan = Plan("ended", holder, self._suspected(tables, holder, leases))
                yield Step(f"{tree} revisits {holder}", with_tree(world, tree, plan=plan))

    def _carries_out(self, world: World, tree: int, plan: Plan) -> Step:
        idle = with_tree(world, tree, plan=None)
        undone = plan.moved and self.choices.recovery_swaps_beat
        if plan.kind in ("age", "end") and (undone or world.tables.ended[plan.holder]):
            return Step(f"{tree} drops its decision on {plan.holder}", idle)
        if plan.kind == "end":
            return self.ends(idle, f"{tree} ends {plan.holder}", plan.holder)
        tables, broken, landed = world.tables, None, 0
        process_died = plan.kind == "child" or tables.ended[plan.holder] in (st.KILLED, st.CRASHED)
        for lease in plan.leases:
            answer = self.database.recover(tables, lease, process_died=process_died)
            landed += answer.accepted
            tables, broken = answer.tables, broken or answer.broken
        if plan.kind == "age" and landed and self._is_innocent(world, plan.holder):
            broken = broken or Broken.I13
        done = commit(idle, tables, self.size)
        if plan.kind == "age" and landed == len(plan.leases):
            done = with_tree(done, tree, plan=Plan("end", plan.holder, (), plan.moved))
        return Step(f"{tree} recovers {landed} of {plan.holder} ({plan.kind})", done, broken=broken)

    def _suspected(self, tables: Tables, holder: int, leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        """By the record of the end: no task after the loss of a host; as a mutant, every task that has lost a holder before."""

        def is_suspect(task: int) -> bool:
            row = tables.rows[task]
            match tables.ended[holder]:
                case st.CRASHED:
                    return not row.alone
                case st.KILLED:
                    return row.process_died and not row.alone
                case _:
                    return row.losses > 0 and not self.choices.hosts_are_no_evidence

        return tuple(
            lease._replace(suspect=lease.state == RUNNING and is_suspect(lease.task)) for lease in leases
        )

    def ends(self, world: World, name: str, holder: int) -> Step:
        """End a supervisor for good; its workers are not buried yet."""
        broken = Broken.I13 if self._is_innocent(world, holder) else None
        ended = world.tables._replace(ended=put(world.tables.ended, holder, st.ENDED))
        return Step(name, commit(world, ended, self.size), broken=broken)

    def _is_innocent(self, world: World, holder: int) -> bool:
        """Whether the holder lives and was never silent for a threshold through its own fault since its last beat."""
        return is_alive(world, holder) and not world.muted[holder]

    def _watching(self, world: World, tree: int, holder: int, watch: str) -> World:
        return with_tree(world, tree, watches=put(world.trees[tree].watches, holder, watch))
