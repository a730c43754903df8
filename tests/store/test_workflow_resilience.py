"""Workflows under bad values and at bad moments: they end, harm no other workflow, and state the reason."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.domain.plan import perform
from everbeat.domain.workflow.graph import ITEM, Edge, Graph, GraphNode, Hole, TaskSpec
from everbeat.errors import WorkflowNotRetryable
from everbeat.store import advance, expiry, retention, tasks
from everbeat.store import workflow_control as control
from everbeat.store.claims import Claimed
from everbeat.store.database import Database
from everbeat.store.leases import Settlement, settle
from everbeat.store.statement import Statement
from everbeat.store.steps import record_checkpoint
from everbeat.store.workflow_control import find_stuck
from everbeat.store.workflows import NodePlace, results
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, after, task
from tests.store.test_advance import failing, spread

SPEC = TaskSpec(name="work", queue="default")


def taking(name: str, *holes: Hole, **more: Any) -> GraphNode:
    """Return a node whose arguments come from these holes."""
    parts: list[Any] = []
    for number, hole in enumerate(holes):
        parts += [f'{"," if number else "{"}"a{number}":', hole]
    return task(name, template=(*parts, "}"), **more)


def child(*nodes: GraphNode, edges: tuple[Edge, ...] = (), **more: Any) -> GraphNode:
    return GraphNode(
        name="child", kind="workflow", graph=Graph(name="child", nodes=nodes, edges=edges, **more)
    )


def complete(db: StoreHarness, claimed: Claimed, result: bytes) -> None:
    settled = Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome="COMPLETED", result=result)
    db.run(settle([settled], channel=db.target.channel))


class TestValues:
    def test_a_nul_character_in_a_result_does_not_block_a_condition(self, db: StoreHarness) -> None:
        flow = Flow.start(db, [task("page"), task("yes")], [Edge(0, 1, path=("ok",), expects=True)])
        flow.settle_down()
        (page,) = flow.claim()
        complete(db, page, b'{"text": "a\\u0000b \\\\u0000", "ok": true}')
        flow.play()
        assert (flow.state, flow.nodes()["yes"]) == ("COMPLETED", "COMPLETED")

    def test_a_nul_character_in_the_error_of_a_child_does_not_block_its_workflow(
        self, db: StoreHarness
    ) -> None:
        flow = Flow.start(db, [child(task("inner"))])
        flow.settle_down()
        (inner,) = flow.claim()
        error = b'{"code": "BROKEN", "message": "no", "data": {"text": "a\\u0000b"}}'
        db.settle(inner, "FAILED", error=error)
        flow.settle_down()
        assert flow.state == "FAILED"
        assert "no" in flow.column("error")["message"], "the cause is stated at any depth"

    def test_a_deleted_result_is_reported_as_not_available_instead_of_null(self, db: StoreHarness) -> None:
        outcome = taking("outcome", Hole(0, "outcome"))
        nodes = [task("a"), task("b"), taking("value", Hole(0)), outcome]
        flow = Flow.start(
            db, nodes, [*after(1, 0), *after(2, 0, 1), Edge(0, 3, tolerates=True), *after(3, 1)]
        )
        flow.play(failing("b"))
        db.connection.execute(db.plain("delete from {schema}.tasks where state = 'COMPLETED'"))
        flow.retry()
        flow.play()
        assert flow.nodes() == {"a": "COMPLETED", "b": "COMPLETED", "value": "FAILED", "outcome": "COMPLETED"}
        assert flow.column("error")["code"] == "RESULT_NOT_AVAILABLE"
        assert flow.args("outcome")["a0"]["failed"]["code"] == "RESULT_NOT_AVAILABLE"

    def test_tasks_of_a_workflow_are_kept_as_long_as_the_workflow(self, db: StoreHarness) -> None:
        flow = Flow.start(db, [task("a")])
        flow.play()
        old = "update {schema}.tasks set completed_at = now() - interval '31 days', sent_at = now() - interval '32 days'"
        db.connection.execute(db.plain(old))
        prune = retention.prune_tasks(hours=720, limit=100, after=UUID(int=0), until=UUID(int=2**128 - 1))
        db.run(prune)
        assert db.table("tasks", "count(*)") == [(1,)]
        db.connection.execute(db.plain("delete from {schema}.workflows"))
        db.run(prune)
        assert db.table("tasks", "count(*)") == [(0,)]

    def test_a_result_that_is_nested_too_deeply_affects_only_its_node(self, db: StoreHarness) -> None:
        flow = Flow.start(db, [task("deep"), taking("taker", Hole(0, path=("x",)))], after(1, 0))
        flow.settle_down()
        (deep,) = flow.claim()
        complete(db, deep, b'{"deep": ' + b"[" * 5_000 + b"]" * 5_000 + b', "x": 1}')
        flow.play()
        assert flow.nodes()["taker"] in ("COMPLETED", "FAILED")
        assert flow.state in ("COMPLETED", "FAILED")

    def test_results_that_are_too_large_together_fail_only_the_node_that_takes_them(
        self, db: StoreHarness
    ) -> None:  # B13
        nodes = [task("large"), task("larger"), taking("both", Hole(0), Hole(1)), taking("one", Hole(0))]
        flow = Flow.start(db, nodes, [*after(2, 0, 1), *after(3, 0)], largest=1_000)
        flow.play(lambda name: "x" * 600 if name in ("large", "larger") else 1)
        assert flow.nodes() == {
            "large": "COMPLETED",
            "larger": "COMPLETED",
            "both": "FAILED",
            "one": "COMPLETED",
        }

    @pytest.mark.parametrize("storage", ["extended", "external"])
    def test_oversized_arguments_of_a_node_are_rejected_before_their_results_are_read(
        self, db: StoreHarness, monkeypatch: pytest.MonkeyPatch, storage: str
    ) -> None:  # W12
        db.connection.execute(
            db.plain(f"alter table {{schema}}.tasks alter column result set storage {storage}")
        )
        read: list[NodePlace] = []

        def noted(places: Sequence[NodePlace]) -> Statement[Any]:
            read.extend(places)
            return results(places)

        monkeypatch.setattr(advance, "results", noted)
        nodes = [task(f"n{number}") for number in range(40)]
        nodes += [
            taking("all", *map(Hole, range(40))),
            taking("parts", *(Hole(number, path=(0,)) for number in range(40))),
        ]
        flow = Flow.start(db, nodes, [*after(40, *range(40)), *after(41, *range(40))], largest=100_000)
        flow.play(lambda name: ["x" * 20_000] if name.startswith("n") else 1)
        assert (flow.nodes()["all"], flow.nodes()["parts"]) == ("FAILED", "FAILED")
        if storage == "external":
            assert read == []
        said = dict(db.table("nodes", "name, error ->> 'message'"))
        assert "passed to it total more than 100000 bytes, which is the payload_limit" in said["all"]
        assert "takes parts of are more than 400000 bytes" in said["parts"]
        flow.retry(largest=1_000_000)
        flow.play(lambda name: 1)
        assert flow.state == "COMPLETED"

    def test_an_oversized_list_is_not_stored_as_the_output(self, db: StoreHarness) -> None:  # W12
        flow = Flow.start(db, spread(3), output=0, largest=1_000)
        flow.play(lambda name: "x" * 600)
        assert (flow.state, flow.column("result")) == ("COMPLETED", None)
        assert flow.column("error")["code"] == "RESULT_UNSERIALISABLE"

    def test_map_members_whose_arguments_are_too_large_together_fail_their_map(
        self, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(advance, "MOST_BYTES_OF_MEMBERS", 1_000)
        each = GraphNode(
            name="each", kind="map", task=SPEC, items=(Hole(0),), template=('{"item":', Hole(ITEM), ',"all":', Hole(1), "}")
        )  # fmt: skip
        flow = Flow.start(db, [task("items"), task("large"), each], after(2, 0, 1))
        flow.play(lambda name: [1, 2, 3] if name == "items" else "x" * 500)
        assert flow.nodes() == {"items": "COMPLETED", "large": "COMPLETED", "each": "FAILED"}
        assert "more than 1,000 characters together" in flow.column("error")["message"]

    def test_a_step_enqueues_a_bounded_number_of_bytes(
        self, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(advance, "MOST_BYTES", 1_000)
        takers = [taking(f"t{number}", Hole(0)) for number in range(9)]
        flow = Flow.start(db, [task("large"), *takers], [Edge(0, number) for number in range(1, 10)])
        flow.settle_down()
        (large,) = flow.claim()
        complete(db, large, b'"' + b"x" * 400 + b'"')
        counts = []
        while done := flow.step().enqueued:
            counts.append(done)
        assert counts == [3, 3, 3]
        flow.play()
        assert flow.state == "COMPLETED"


class TestOutputs:
    def test_a_workflow_that_completes_without_its_output_states_the_reason(self, db: StoreHarness) -> None:
        inner = child(task("asked"), task("never"), edges=(Edge(0, 1, path=(), expects=True),), output=1)
        flow = Flow.start(db, [inner, taking("value", Hole(0)), taking("outcome", Hole(0, "outcome"))],
                          [*after(1, 0), Edge(0, 2, tolerates=True)])  # fmt: skip
        flow.play(lambda name: False)
        assert flow.nodes() == {"child": "COMPLETED", "value": "FAILED", "outcome": "COMPLETED"}
        assert flow.args("outcome")["a0"]["failed"]["code"] == "UPSTREAM_SKIPPED"
        assert "node never ended SKIPPED" in flow.column("error")["message"]

    def test_the_outcome_of_a_map_that_was_never_expanded_is_one_failure(self, db: StoreHarness) -> None:
        each = GraphNode(
            name="each", kind="map", task=SPEC, items=(Hole(0),), template=('{"item":', Hole(ITEM), "}")
        )
        flow = Flow.start(db, [task("items"), each, taking("all", Hole(1, "outcome"))],
                          [*after(1, 0), Edge(1, 2, tolerates=True)])  # fmt: skip
        flow.play(failing("items"))
        (told,) = flow.args("all")["a0"]
        assert told["failed"]["code"] == "UPSTREAM_SKIPPED"


class TestPauses:
    def test_a_retry_of_a_paused_workflow_resumes_its_children(self, db: StoreHarness) -> None:
        flow = Flow.start(db, [child(task("inner")), task("bad")], on_error="pause")
        flow.settle_down()
        claimed = flow.by_name(flow.claim())
        flow.end([claimed["bad"]], failing("bad"))
        flow.settle_down()
        states = db.table("workflows", "state")
        assert states == [("PAUSED",), ("PAUSED",)]
        flow.retry()
        flow.end([claimed["inner"]], str)
        flow.play()
        assert db.table("workflows", "state") == [("COMPLETED",), ("COMPLETED",)]

    def test_a_resume_during_a_pause_leaves_no_child_paused(self, db: StoreHarness) -> None:
        flow = Flow.start(db, [child(task("inner"), task("next"), edges=(Edge(0, 1),))])
        flow.settle_down()
        db.run(control.pause(flow.id, channel=db.target.channel))
        other = Database(db.target)
        resume = control.resume(flow.id, channel=db.target.channel)
        thread = threading.Thread(target=lambda: other.run(resume))

        def pause_and_be_overtaken(run: Any) -> None:
            perform(advance.step(channel=db.target.channel), run)
            thread.start()
            waits = b"select 1 from pg_locks where not granted and locktype = 'transactionid'"
            while thread.is_alive() and not db.connection.execute(waits).fetchone():
                pass

        db.database.transact(pause_and_be_overtaken)
        thread.join(20)
        other.close()
        flow.play()
        assert flow.state == "COMPLETED"

    def test_the_reconciler_detects_a_child_that_stays_held(self, db: StoreHarness) -> None:
        flow = Flow.start(db, [child(task("inner"))])
        flow.settle_down()
        held = "update {schema}.workflows set state = 'PAUSED', is_held = true where parent_id is not null"
        db.connection.execute(db.plain(held))
        assert flow.stuck() == [("child", "CHILD_HELD")]
        flow.reconcile()
        flow.play()
        assert flow.state == "COMPLETED"

    def test_the_reconciler_detects_a_stuck_workflow_after_the_clock_was_set_back(
        self, db: StoreHarness
    ) -> None:  # I14
        """The last entry of the outbox is an hour ahead, so it would count as recent for an hour."""
        flow = Flow.start(db, [child(task("inner"))])
        flow.settle_down()
        for held in (
            "update {schema}.workflows set state = 'PAUSED', is_held = true where parent_id is not null",
            "insert into {schema}.outbox (workflow_id, node, at) select id, null::integer, now() + interval '1 hour' from {schema}.workflows",
        ):
            db.connection.execute(db.plain(held))
        found = perform(find_stuck(grace_ms=10_000), db.run)
        assert [each.what for each in found] == ["CHILD_HELD"]

    def test_a_child_that_paused_by_itself_waits_for_its_own_retry(self, db: StoreHarness) -> None:
        flow = Flow.start(db, [child(task("inner"), on_error="pause"), task("other")])
        flow.settle_down()
        claimed = flow.by_name(flow.claim())
        flow.end([claimed["inner"]], failing("inner"))
        flow.settle_down()
        flow.pause()
        flow.resume()
        (within,) = [one for one, parent in db.table("workflows", "id, parent_id") if parent is not None]
        assert dict(db.table("workflows", "id, state"))[within] == "PAUSED", (
            "the error of the child was not handled yet"
        )
        assert flow.stuck() == []
        assert Flow(db, within).retry().again == ("inner",)
        flow.play()
        flow.end([claimed["other"]], str)
        flow.settle_down()
        assert flow.state == "COMPLETED"

    def test_ready_nodes_of_a_paused_workflow_cause_no_repeated_steps(self, db: StoreHarness) -> None:
        count = advance.MOST_EVENTS + 100
        flow = Flow.start(db, [task(f"n{number}") for number in range(count)])
        flow.pause()
        for _ in range(5):
            assert flow.step().workflows == 0
        flow.resume()
        flow.settle_down()
        assert db.table("tasks", "count(*)") == [(count,)]

    def test_a_rejected_node_pauses_its_workflow_like_a_failed_one(self, db: StoreHarness) -> None:
        flow = Flow.start(
            db, [task("a"), taking("b", Hole(0, path=("x",))), task("c")], after(1, 0), on_error="pause"
        )
        flow.settle_down()
        claimed = flow.by_name(flow.claim())
        flow.end([claimed["a"]], lambda name: None)
        flow.settle_down()
        assert (flow.state, flow.nodes()["b"]) == ("PAUSED", "FAILED")
        flow.resume()
        flow.end([claimed["c"]], str)
        flow.play()
        assert flow.state == "FAILED", "the resumed workflow continues without it"

    @pytest.mark.parametrize("what", ["checkpoint", "attempt", "signal"])
    def test_a_pause_keeps_a_task_that_has_a_checkpoint_an_attempt_or_a_signal(
        self, db: StoreHarness, what: str
    ) -> None:
        flow = Flow.start(db, [task("a")])
        flow.settle_down()
        (held,) = flow.claim(1)
        if what == "checkpoint":
            db.run(record_checkpoint(held.id, held.claim_id, b"[5]", number=1, progress=None))
        db.settle(held, "RELEASED")
        if what == "signal":
            sent = tasks.send_signal(
                uuid4(), target=held.id, name="go", value=b"1", channel=db.target.channel
            )
            db.run(sent)
        flow.pause()
        assert db.row(held.id, "state") == "PENDING"
        flow.resume()
        flow.play()
        assert flow.state == "COMPLETED"
        assert len(db.table("tasks", "id")) == 1


class TestRetries:
    def test_a_node_waits_for_parents_that_are_retried(self, db: StoreHarness) -> None:
        nodes = [task("a"), task("c"), taking("b", Hole(0, "outcome"), Hole(1))]
        flow = Flow.start(db, nodes, [Edge(0, 2, tolerates=True), *after(2, 1)], on_error="pause")
        flow.settle_down()
        claimed = flow.by_name(flow.claim())
        flow.end([claimed["a"]], failing("a"))
        flow.settle_down()
        flow.retry()
        flow.end([claimed["c"]], str)
        flow.settle_down()
        assert flow.nodes() == {"a": "ENQUEUED", "c": "COMPLETED", "b": "PENDING"}
        flow.play()
        assert flow.args("b")["a0"] == {"completed": "a"}

    def test_a_node_that_a_failure_made_ready_waits_again_after_a_retry(self, db: StoreHarness) -> None:
        nodes = [task("a"), taking("b", Hole(0, "outcome"))]
        flow = Flow.start(db, nodes, [Edge(0, 1, tolerates=True)], on_error="pause")
        flow.settle_down()
        flow.end(flow.claim(), failing("a"))
        flow.settle_down()
        assert (flow.state, flow.nodes()["b"]) == ("PAUSED", "READY")
        flow.retry()
        assert flow.nodes() == {"a": "ENQUEUED", "b": "PENDING"}
        flow.play()
        assert flow.args("b")["a0"] == {"completed": "a"}

    def test_a_quorum_counts_a_parent_that_completed_after_a_retry(self, db: StoreHarness) -> None:
        nodes = [task("a"), task("c"), task("b", quorum=1)]
        flow = Flow.start(db, nodes, after(2, 0, 1, joins=True), on_error="pause")
        flow.settle_down()
        claimed = flow.by_name(flow.claim())
        flow.end([claimed["a"]], failing("a"))
        flow.settle_down()
        flow.retry()
        (again,) = flow.claim()
        flow.end([again], str)
        flow.settle_down()
        assert flow.nodes()["b"] == "ENQUEUED"

    def test_a_retry_of_an_expired_node_drops_its_good_until(self, db: StoreHarness) -> None:
        late = TaskSpec(name="work", queue="default", good_until=datetime.now(UTC) - timedelta(seconds=1))
        flow = Flow.start(db, [GraphNode(name="late", task=late, args="{}")])
        flow.settle_down()
        db.run(expiry.expire(limit=10, channel=db.target.channel))
        flow.settle_down()
        assert flow.state == "FAILED"
        flow.retry()
        flow.play()
        assert flow.state == "COMPLETED"

    def test_a_retry_of_a_node_whose_task_started_in_time_drops_its_good_until(
        self, db: StoreHarness
    ) -> None:
        spec = TaskSpec(name="work", queue="default", good_until=datetime.now(UTC) + timedelta(hours=1))
        flow = Flow.start(db, [GraphNode(name="a", task=spec, args="{}")])
        flow.settle_down()
        flow.end(flow.claim(), failing("a"))
        flow.settle_down()
        assert flow.state == "FAILED"
        passed = "update {schema}.nodes set options = (options::jsonb || jsonb_build_object('good_until', now() - interval '1 s'))::json"
        assert db.connection.execute(db.plain(passed)).rowcount == 1
        flow.retry()
        db.run(expiry.expire(limit=10, channel=db.target.channel))
        flow.play()
        assert flow.state == "COMPLETED"

    def test_a_workflow_whose_key_belongs_to_another_live_one_cannot_be_retried(
        self, db: StoreHarness
    ) -> None:
        old = Flow.start(db, [task("a")], key="k")
        old.play(failing("a"))
        new = Flow.start(db, [task("a")], key="k")
        with pytest.raises(WorkflowNotRetryable, match=f"of the live workflow {new.id}"):
            old.retry()
        assert old.state == "FAILED"
