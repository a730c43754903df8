"""Plays the parties of a workflow: starts graphs, steps them on, and settles their tasks as a script says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from everbeat.client.workflow_control import recover_stuck
from everbeat.client.workflow_retrying import retry
from everbeat.domain.failure import error_to_json
from everbeat.domain.graph import Edge, Graph, Node, TaskSpec
from everbeat.domain.outcome import TaskError
from everbeat.domain.workflow_info import StuckWorkflow, WorkflowRetry
from everbeat.store import advance, workflows
from everbeat.store import workflow_control as control
from everbeat.store.advance import Step
from everbeat.store.leases import Claimed, Settlement, settle
from everbeat.store.plan import Transaction, perform
from everbeat.store.reconcile import find_stuck, move_on
from tests.store.conftest import Hands

Script = Callable[[str], Any]
"""What a node's task returns, by the node's name; an Exception instance fails it."""


def task(name: str, **more: Any) -> Node:
    spec = TaskSpec(name="work", queue="default")
    if "template" not in more:
        more.setdefault("args", json.dumps({"name": name}))
    return Node(name=name, task=spec, **more)


def after(child: int, *parents: int, **more: Any) -> list[Edge]:
    return [Edge(parent, child, **more) for parent in parents]


@dataclass
class Flow:
    """A workflow under way, and the hands that move it."""

    hands: Hands
    id: UUID

    @classmethod
    def start(cls, hands: Hands, nodes: Sequence[Node], edges: Sequence[Edge] = (), **more: Any) -> Flow:
        key, workflow_id = more.pop("key", None), more.pop("id", None) or uuid4()
        largest = more.pop("largest", None)
        graph = Graph(name="flow", nodes=tuple(nodes), edges=tuple(edges), **more)
        started = hands.run(
            workflows.insert(workflow_id, graph, channel=hands.target.channel, key=key, largest=largest)
        )
        assert started is not None
        return cls(hands, started.id)

    def step(self) -> Step:
        return self.hands.database.transact(
            lambda run: perform(advance.step(channel=self.hands.target.channel), run)
        )

    def pause(self) -> None:
        self.hands.run(control.pause(self.id, channel=self.hands.target.channel))
        self.settle_down()

    def resume(self) -> None:
        self.hands.run(control.resume(self.id, channel=self.hands.target.channel))
        self.settle_down()

    def cancel(self) -> None:
        self.hands.run(control.cancel(self.id, channel=self.hands.target.channel))
        self.settle_down()

    def retry(self, **options: Any) -> WorkflowRetry:
        chosen: dict[str, Any] = {
            "completed": "rerun",
            "from_node": None,
            "dry_run": False,
            "largest": 1,
        } | options
        answer: WorkflowRetry = self._perform(retry(self.id, channel=self.hands.target.channel, **chosen))
        if not answer.dry_run:
            self.settle_down()
        return answer

    def stuck(self) -> list[tuple[str | None, str]]:
        found = perform(find_stuck(grace_ms=0), self.hands.run)
        return sorted((each.node or "", each.what) for each in found)  # type: ignore[return-value]

    def reconcile(self) -> None:
        """As the reconciler: what is stuck is moved on."""
        found = perform(find_stuck(grace_ms=0), self.hands.run)
        ids = {each.workflow_id for each in found}
        self.hands.database.transact(
            lambda run: perform(move_on(ids, channel=self.hands.target.channel), run)
        )
        self.settle_down()

    def recovered(self, *, dry_run: bool = False) -> list[StuckWorkflow]:
        """As `app.recover_stuck_workflows()`, of what is stuck at this moment."""

        found: list[StuckWorkflow] = self._perform(
            recover_stuck(channel=self.hands.target.channel, dry_run=dry_run, grace_ms=0)
        )
        return found

    def _perform(self, plan: Any) -> Any:
        """Runs a plan of a client."""

        def do(step: Any) -> Any:
            if isinstance(step, Transaction):
                return self.hands.database.transact(lambda run: perform(step.make(), run))
            return self.hands.run(step)

        return perform(plan, do)

    def settle_down(self) -> None:
        """Steps until nothing has happened any more."""
        while self.step().workflows:
            pass

    def nodes(self) -> dict[str, str]:
        found = self.hands.connection.execute(
            self.hands.plain("select name, state from {schema}.nodes where workflow_id = %s order by number"),
            [self.id],
        ).fetchall()
        return dict(found)

    def column(self, name: str) -> Any:
        found = self.hands.connection.execute(
            self.hands.plain(f"select {name} from {{schema}}.workflows where id = %s"), [self.id]
        ).fetchone()
        assert found is not None
        return found[0]

    @property
    def state(self) -> str:
        return str(self.column("state"))

    def claim(self, limit: int = 100) -> list[Claimed]:
        claimed = self.hands.claim(limit=limit)
        self.hands.start(*claimed)
        return claimed

    def by_name(self, claimed: Sequence[Claimed]) -> dict[str, Claimed]:
        names = self.names()
        return {names[each.id]: each for each in claimed}

    def end(self, claimed: Sequence[Claimed], script: Script) -> None:
        names = self.names()
        settlements = [_settlement(each, script(names.get(each.id, "?"))) for each in claimed]
        if settlements:
            self.hands.run(settle(settlements, channel=self.hands.target.channel))

    def names(self) -> Mapping[UUID, str]:
        found = self.hands.connection.execute(
            self.hands.plain("select task_id, name from {schema}.nodes where task_id is not null")
        ).fetchall()
        return dict(found)

    def play(self, script: Script = lambda name: name, *, at_once: int = 100) -> None:
        """Runs tasks until there is nothing to claim."""
        self.settle_down()
        while claimed := self.claim(at_once):
            self.end(claimed, script)
            self.settle_down()

    def args(self, name: str) -> Any:
        found = self.hands.connection.execute(
            self.hands.plain(
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
