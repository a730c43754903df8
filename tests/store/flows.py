"""A harness for workflows: start graphs, advance them, and settle their tasks by a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from everbeat.client.workflow.operations import recover_stuck, retry
from everbeat.domain.plan import perform
from everbeat.domain.task.outcome import error_to_json
from everbeat.domain.workflow.graph import Edge, Graph, GraphNode, TaskSpec
from everbeat.domain.workflow.states import StuckWorkflow, WorkflowRetry
from everbeat.errors import TaskError
from everbeat.store import advance, workflows
from everbeat.store import workflow_control as control
from everbeat.store.advance import AdvanceResult
from everbeat.store.claims import Claimed
from everbeat.store.leases import Settlement, settle
from everbeat.store.plan import Transaction
from everbeat.store.workflow_control import find_stuck, move_on
from tests.store.conftest import StoreHarness

Script = Callable[[str], Any]
"""The result of each node's task by the node's name; an Exception instance fails the node."""


def task(name: str, **more: Any) -> GraphNode:
    spec = TaskSpec(name="work", queue="default")
    if "template" not in more:
        more.setdefault("args", json.dumps({"name": name}))
    return GraphNode(name=name, task=spec, **more)


def after(child: int, *parents: int, **more: Any) -> list[Edge]:
    return [Edge(parent, child, **more) for parent in parents]


@dataclass
class Flow:
    """One started workflow, with the operations that workers and clients perform on it."""

    db: StoreHarness
    id: UUID

    @classmethod
    def start(
        cls, db: StoreHarness, nodes: Sequence[GraphNode], edges: Sequence[Edge] = (), **more: Any
    ) -> Flow:
        key, workflow_id = more.pop("key", None), more.pop("id", None) or uuid4()
        largest = more.pop("largest", None)
        graph = Graph(name="flow", nodes=tuple(nodes), edges=tuple(edges), **more)
        started = db.run(
            workflows.insert(workflow_id, graph, channel=db.target.channel, key=key, largest=largest)
        )
        assert started is not None
        return cls(db, started.id)

    def step(self) -> AdvanceResult:
        return self.db.database.transact(
            lambda run: perform(advance.step(channel=self.db.target.channel), run)
        )

    def pause(self) -> None:
        self.db.run(control.pause(self.id, channel=self.db.target.channel))
        self.settle_down()

    def resume(self) -> None:
        self.db.run(control.resume(self.id, channel=self.db.target.channel))
        self.settle_down()

    def cancel(self) -> None:
        self.db.run(control.cancel(self.id, channel=self.db.target.channel))
        self.settle_down()

    def retry(self, **options: Any) -> WorkflowRetry:
        chosen: dict[str, Any] = {
            "completed": "rerun",
            "from_node": None,
            "dry_run": False,
            "largest": 1,
        } | options
        answer: WorkflowRetry = self._perform(retry(self.id, channel=self.db.target.channel, **chosen))
        if not answer.dry_run:
            self.settle_down()
        return answer

    def stuck(self) -> list[tuple[str | None, str]]:
        found = perform(find_stuck(grace_ms=0), self.db.run)
        return sorted((each.node or "", each.what) for each in found)  # type: ignore[return-value]

    def reconcile(self) -> None:
        """Advance stuck workflows, as the reconciler does."""
        found = perform(find_stuck(grace_ms=0), self.db.run)
        ids = {each.workflow_id for each in found}
        self.db.database.transact(lambda run: perform(move_on(ids, channel=self.db.target.channel), run))
        self.settle_down()

    def recovered(self, *, dry_run: bool = False) -> list[StuckWorkflow]:
        """Recover the workflows that are stuck now, as `app.recover_stuck_workflows()` does."""

        found: list[StuckWorkflow] = self._perform(
            recover_stuck(channel=self.db.target.channel, dry_run=dry_run, grace_ms=0)
        )
        return found

    def _perform(self, plan: Any) -> Any:
        """Run a plan of a client."""

        def do(step: Any) -> Any:
            if isinstance(step, Transaction):
                return self.db.database.transact(lambda run: perform(step.make(), run))
            return self.db.run(step)

        return perform(plan, do)

    def settle_down(self) -> None:
        """Advance until a step changes nothing."""
        while self.step().workflows:
            pass

    def nodes(self) -> dict[str, str]:
        found = self.db.connection.execute(
            self.db.plain("select name, state from {schema}.nodes where workflow_id = %s order by number"),
            [self.id],
        ).fetchall()
        return dict(found)

    def column(self, name: str) -> Any:
        found = self.db.connection.execute(
            self.db.plain(f"select {name} from {{schema}}.workflows where id = %s"), [self.id]
        ).fetchone()
        assert found is not None
        return found[0]

    @property
    def state(self) -> str:
        return str(self.column("state"))

    def claim(self, limit: int = 100) -> list[Claimed]:
        claimed = self.db.claim(limit=limit)
        self.db.start(*claimed)
        return claimed

    def by_name(self, claimed: Sequence[Claimed]) -> dict[str, Claimed]:
        names = self.names()
        return {names[each.id]: each for each in claimed}

    def end(self, claimed: Sequence[Claimed], script: Script) -> None:
        names = self.names()
        settlements = [_settlement(each, script(names.get(each.id, "?"))) for each in claimed]
        if settlements:
            self.db.run(settle(settlements, channel=self.db.target.channel))

    def names(self) -> Mapping[UUID, str]:
        found = self.db.connection.execute(
            self.db.plain("select task_id, name from {schema}.nodes where task_id is not null")
        ).fetchall()
        return dict(found)

    def play(self, script: Script = lambda name: name, *, at_once: int = 100) -> None:
        """Run tasks until there is nothing to claim."""
        self.settle_down()
        while claimed := self.claim(at_once):
            self.end(claimed, script)
            self.settle_down()

    def args(self, name: str) -> Any:
        found = self.db.connection.execute(
            self.db.plain(
                "select t.args from {schema}.tasks t join {schema}.nodes n on n.task_id = t.id"
                " where n.workflow_id = %s and n.name = %s"
            ),
            [self.id, name],
        ).fetchone()
        assert found is not None
        return found[0]


def _settlement(claimed: Claimed, value: Any) -> Settlement:
    if isinstance(value, Exception):
        known = value if isinstance(value, TaskError) else TaskError("BROKEN", str(value))
        error = error_to_json(known)
        return Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome="FAILED", error=error)
    result = json.dumps(value).encode()
    return Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome="COMPLETED", result=result)
