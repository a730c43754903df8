"""Actions of workers, and the beats of their supervisors, with valid and lost claims."""

from __future__ import annotations

from uuid import uuid4

from everbeat.store import claims, lines, workers
from tests.protocol.stateful.holder_actions import Fate
from tests.protocol.stateful.ledger import Grant
from tests.protocol.stateful.parties import Tree
from tests.protocol.stateful.simulation_state import SimulationState

ALL = 100


class WorkerActions(SimulationState):
    """The actions of a worker and its supervisor."""

    def claim(self, tree: Tree, limit: int, fate: Fate, suspects: bool | None) -> None:
        call = uuid4()
        self.database.run(lines.apply_changes(readers=["work"], queues=None, channel=None))
        statement = claims.claim(
            worker_id=tree.worker_id, claim_call=call, names=["work"], limit=limit, queues=None, queue_priorities={},
            suspects=suspects,
        )  # fmt: skip
        buried = self.database.ask(
            "select 1 from {schema}.workers where id = %s and ended_at is not null", tree.worker_id
        )
        eligible = [] if buried or self.is_paused else self.ledger.eligible()
        got = self.database.run_and_lose(statement) if fate == "commit lost" else self.database.run(statement)
        assert {one.id for one in got} <= {entry.id for entry in eligible}, (
            "a claim took what was not to be taken"
        )
        assert all(one.suspect == suspects for one in got) or suspects is None
        if suspects is None:
            assert len(got) == min(limit, len(eligible)), "a claim left what was to be taken"
        for one in got:
            if fate == "commit lost":
                grant = Grant(one.id, one, tree.worker_id, call)
                self.ledger.grants.append(grant)
            else:
                grant = self.ledger.claimed(one, tree.worker_id, call)
            (tree.in_doubt if fate == "reply lost" else tree.held).append(grant)

    def resolve_doubt(self, tree: Tree, *, forget: bool) -> None:
        doubtful, tree.in_doubt = tree.in_doubt, []
        for call in dict.fromkeys(grant.call for grant in doubtful if not forget):
            mine = [grant for grant in doubtful if grant.call == call and self.ledger.holds(grant)]
            if not mine:
                continue  # its task has another holder, so a repeated call would claim again
            again = claims.claim(
                worker_id=tree.worker_id,
                claim_call=call,
                names=["work"],
                limit=3,
                queues=None,
                queue_priorities={},
            )
            got = {one.claim_id for one in self.database.run(again)}
            assert got == {grant.claimed.claim_id for grant in mine}, (
                "a repeated claim answered something else"
            )
            tree.held += mine

    def beat(self, tree: Tree) -> None:
        held = [grant.lease for grant in tree.held]
        answer = self.database.run(workers.beat(tree.supervisor_id, held, draining=False))
        if tree.is_ended:
            assert answer.seq is None, "a supervisor that was declared dead got a sequence number"
            tree.register()
            return
        assert answer.seq is not None, "a live supervisor was declared dead"
        tree.muted_s = 0.0
        lost = [grant for grant in tree.held if not self.ledger.holds(grant)]
        assert {one[1] for one in answer.lost} == {grant.claimed.claim_id for grant in lost}, (
            "told of other losses"
        )
        tree.held = [grant for grant in tree.held if self.ledger.holds(grant)]
        unsure = {grant.lease for grant in tree.in_doubt}
        known = {grant.lease: grant for grant in self.ledger.grants}
        for task, claim_id, worker_id in answer.phantoms:
            grant = known[task, claim_id]
            if worker_id == tree.worker_id and (task, claim_id) not in unsure:
                self.holder_actions.perform(grant, "release")
                if self.ledger.holds(grant):
                    self.holder_actions.perform(grant, "hand back")

    def start_held(self) -> None:
        """Start all claimed tasks of workers that can."""
        for _, grant in self.held():
            if grant.phase == "claimed":
                self.holder_actions.perform(grant, "start")

    def start_over(self) -> None:
        """Release or fail with a retry all held tasks of workers that can, and claim again."""
        for tree, grant in self.held():
            self.holder_actions.perform(grant, "release" if grant.phase == "claimed" else "fail and retry")
            tree.held.remove(grant)
        self.take_over()

    def take_over(self) -> None:
        """Claim and start all available tasks by workers that can."""
        for tree in self.workers():
            self.claim(tree, ALL, "answered", None)
        self.start_held()
