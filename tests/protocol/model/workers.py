"""Workers: they claim, start, run, settle and release; user code ends, or kills its process."""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.model.rules import Rules, with_held, with_phase, without_worker
from tests.protocol.model.statements import CLAIMED, PENDING, RUNNING, Answer, Lease
from tests.protocol.model.world import Held, Step, World, new_grant, with_fault, with_tree, without


class Workers(Rules):
    """The workers of all trees."""

    def code(self, world: World, tree: int) -> Iterator[Step]:
        """Yield the ends of user code, which need no database."""
        for held in world.trees[tree].held:
            if held.phase != "running" or self.is_poison(held):
                continue
            yield Step(f"code of {held.lease.task} ends on {tree}", with_phase(world, tree, held, "done"))

    def steps(self, world: World, tree: int) -> Iterator[Step]:
        """Yield the steps of a worker that use the database."""
        yield from self._claims(world, tree)
        for held in world.trees[tree].held:
            match held.phase:
                case "claimed":
                    yield from self._starts(world, tree, held)
                case "running" if self.is_poison(held):
                    yield self._kills(world, tree, held)
                case "running" if self.size.drains:
                    yield self._settles(world, tree, held, released=True)
                case "running":
                    pass  # its code has not ended
                case "done":
                    yield from self._finishes(world, tree, held)

    def _claims(self, world: World, tree: int) -> Iterator[Step]:
        doubt = world.trees[tree].doubt
        if doubt is not None:
            row = world.tables.rows[doubt.task]
            forgotten = with_tree(world, tree, doubt=None)
            yield Step(f"{tree} abandons its claim of {doubt.task}", forgotten)
            if row.holder == tree and row.claim == doubt.claim and row.state in (CLAIMED, RUNNING):
                taken = Held(doubt, "running", row.alone) if row.state == RUNNING else Held(doubt, "claimed")
                yield Step(f"{tree} repeats its claim of {doubt.task}", with_held(forgotten, tree, taken))
            return
        if tree >= self.size.workers:
            return
        mine = {held.lease.task for held in world.trees[tree].held}
        for task, row in enumerate(world.tables.rows):
            if row.state != PENDING or task in mine:
                continue
            answer = self.database.claim(world.tables, task, tree, new_grant(world))
            if not answer.accepted:
                continue
            taken = answer.tables.rows[task]
            lease = Lease(task, taken.claim, taken.grant, CLAIMED)
            yield from self._taken(world, tree, answer, Held(lease, "claimed"), "claims")
            if self.size.begins:
                alone = self.choices.suspects_run_alone and taken.suspect
                begun = self.database.start(answer.tables, task, lease, alone=alone)
                yield from self._taken(world, tree, begun, Held(lease, "running", alone), "claims and starts")

    def _taken(self, world: World, tree: int, answer: Answer, held: Held, verb: str) -> Iterator[Step]:
        step = self.committed(f"{tree} {verb} {held.lease.task}", world, answer)
        yield step._replace(world=with_held(step.world, tree, held))
        if world.faults and "lose reply" in self.size.kinds:
            lost = with_tree(with_fault(step.world), tree, doubt=held.lease)
            yield step._replace(name=f"{step.name}, the reply is lost", world=lost, kind="fault")

    def _starts(self, world: World, tree: int, held: Held) -> Iterator[Step]:
        lease = held.lease
        alone = self.choices.suspects_run_alone and world.tables.rows[lease.task].suspect
        answer = self.database.start(world.tables, lease.task, lease, alone=alone)
        step = self.committed(f"{tree} starts {lease.task}", world, answer)
        if not answer.accepted:
            yield Step(f"the start of {lease.task} by {tree} is refused", without(world, tree, held))
            return
        yield step._replace(world=with_phase(step.world, tree, held, "running", alone=alone))
        if world.faults and "lose reply" in self.size.kinds:
            name = f"{tree} starts {lease.task}, the reply is lost"
            yield step._replace(name=name, world=with_fault(step.world), kind="fault")
        given_back = self.database.release(world.tables, lease)
        if given_back.accepted and self.size.drains:
            step = self.committed(f"{tree} gives {lease.task} back", world, given_back)
            yield step._replace(world=without(step.world, tree, held))

    def _finishes(self, world: World, tree: int, held: Held) -> Iterator[Step]:
        step = self._settles(world, tree, held)
        yield step
        if not world.faults:
            return
        lease = held.lease
        if "lose reply" in self.size.kinds:
            answer = self.database.settle(world.tables, lease, tree)
            lost = self.committed(
                f"{tree} settles {lease.task}, the reply is lost", world, answer, kind="fault"
            )
            yield lost._replace(world=with_fault(lost.world))
        if "delay settle" in self.size.kinds and world.net is None:
            under_way = with_fault(world)._replace(net=(lease, tree))
            yield Step(f"a settle of {lease.task} by {tree} stays under way", under_way, "fault")

    def _settles(self, world: World, tree: int, held: Held, *, released: bool = False) -> Step:
        answer = self.database.settle(world.tables, held.lease, tree, released=released)
        verb = "hands back" if released else "settles"
        refused = "" if answer.accepted else ", refused"
        step = self.committed(f"{tree} {verb} {held.lease.task}{refused}", world, answer)
        return step._replace(world=without(step.world, tree, held))

    def _kills(self, world: World, tree: int, held: Held) -> Step:
        """Let the code kill its process: its own task process, or the worker with all its tasks."""
        if not held.alone:
            return Step(
                f"the code of {held.lease.task} kills worker {tree}", without_worker(world, tree, "crashed")
            )
        guilty = held.lease._replace(state=RUNNING, charge="crash", suspect=True)
        answer = self.database.recover(world.tables, guilty, process_died=True)
        step = self.committed(f"the code of {held.lease.task} kills its process under {tree}", world, answer)
        return step._replace(world=without(step.world, tree, held))
