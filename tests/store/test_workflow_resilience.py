"""What a workflow holds, or is told, at the worst moment: it ends all the same, harms no other, and says why."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.domain.graph import ITEM, Edge, Graph, Hole, Node, TaskSpec
from everbeat.errors import WorkflowNotRetryable
from everbeat.store import advance, handing_on, retention, signals, tasks
from everbeat.store import workflow_control as control
from everbeat.store.database import Database
from everbeat.store.leases import Claimed, Settlement, settle
from everbeat.store.partial_work import record_checkpoint
from everbeat.store.plan import perform
from everbeat.store.reconcile import find_stuck
from everbeat.store.statement import Statement
from everbeat.store.workflow_values import results
from everbeat.store.workflows import Place
from tests.store.conftest import Hands
from tests.store.flows import Flow, after, task
from tests.store.test_advance import failing, spread

SPEC = TaskSpec(name="work", queue="default")


def taking(name: str, *holes: Hole, **more: Any) -> Node:
    """A node that is called with these."""
    parts: list[Any] = []
    for number, hole in enumerate(holes):
        parts += [f'{"," if number else "{"}"a{number}":', hole]
    return task(name, template=(*parts, "}"), **more)


def child(*nodes: Node, edges: tuple[Edge, ...] = (), **more: Any) -> Node:
    return Node(name="child", kind="workflow", graph=Graph(name="child", nodes=nodes, edges=edges, **more))


def complete(hands: Hands, claimed: Claimed, result: bytes) -> None:
    settled = Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome="COMPLETED", result=result)
    hands.run(settle([settled], channel=hands.target.channel))


class TestValues:
    def test_a_nul_in_a_result_stops_no_condition(self, hands: Hands) -> None:
        flow = Flow.start(hands, [task("page"), task("yes")], [Edge(0, 1, path=("ok",), expects=True)])
        flow.settle_down()
        (page,) = flow.claim()
        complete(hands, page, b'{"text": "a\\u0000b \\\\u0000", "ok": true}')
        flow.play()
        assert (flow.state, flow.nodes()["yes"]) == ("COMPLETED", "COMPLETED")

    def test_a_nul_in_the_error_of_a_child_stops_nobody(self, hands: Hands) -> None:
        flow = Flow.start(hands, [child(task("inner"))])
        flow.settle_down()
        (inner,) = flow.claim()
        error = b'{"code": "BROKEN", "message": "no", "data": {"text": "a\\u0000b"}}'
        hands.settle(inner, "FAILED", error=error)
        flow.settle_down()
        assert flow.state == "FAILED"
        assert "no" in flow.column("error")["message"], "the cause is said, however deep it lies"

    def test_a_result_that_is_gone_is_missed_and_not_null(self, hands: Hands) -> None:
        outcome = taking("outcome", Hole(0, "outcome"))
        nodes = [task("a"), task("b"), taking("value", Hole(0)), outcome]
        flow = Flow.start(
            hands, nodes, [*after(1, 0), *after(2, 0, 1), Edge(0, 3, tolerates=True), *after(3, 1)]
        )
        flow.play(failing("b"))
        hands.connection.execute(hands.plain("delete from {schema}.tasks where state = 'COMPLETED'"))
        flow.retry()
        flow.play()
        assert flow.nodes() == {"a": "COMPLETED", "b": "COMPLETED", "value": "FAILED", "outcome": "COMPLETED"}
        assert flow.column("error")["code"] == "RESULT_NOT_AVAILABLE"
        assert flow.args("outcome")["a0"]["failed"]["code"] == "RESULT_NOT_AVAILABLE"

    def test_the_tasks_of_a_workflow_are_kept_as_long_as_it_is(self, hands: Hands) -> None:
        flow = Flow.start(hands, [task("a")])
        flow.play()
        old = "update {schema}.tasks set completed_at = now() - interval '31 days', sent_at = now() - interval '32 days'"
        hands.connection.execute(hands.plain(old))
        prune = retention.prune_tasks(hours=720, limit=100, after=UUID(int=0), until=UUID(int=2**128 - 1))
        hands.run(prune)
        assert hands.table("tasks", "count(*)") == [(1,)]
        hands.connection.execute(hands.plain("delete from {schema}.workflows"))
        hands.run(prune)
        assert hands.table("tasks", "count(*)") == [(0,)]

    def test_what_nests_too_deep_fails_its_node_alone(self, hands: Hands) -> None:
        flow = Flow.start(hands, [task("deep"), taking("taker", Hole(0, path=("x",)))], after(1, 0))
        flow.settle_down()
        (deep,) = flow.claim()
        complete(hands, deep, b'{"deep": ' + b"[" * 5_000 + b"]" * 5_000 + b', "x": 1}')
        flow.play()
        assert flow.nodes()["taker"] in ("COMPLETED", "FAILED")
        assert flow.state in ("COMPLETED", "FAILED")

    def test_results_that_are_too_large_for_one_node_fail_it_alone(self, hands: Hands) -> None:  # B13
        nodes = [task("large"), task("larger"), taking("both", Hole(0), Hole(1)), taking("one", Hole(0))]
        flow = Flow.start(hands, nodes, [*after(2, 0, 1), *after(3, 0)], largest=1_000)
        flow.play(lambda name: "x" * 600 if name in ("large", "larger") else 1)
        assert flow.nodes() == {
            "large": "COMPLETED",
            "larger": "COMPLETED",
            "both": "FAILED",
            "one": "COMPLETED",
        }

    @pytest.mark.parametrize("storage", ["extended", "external"])
    def test_what_is_too_large_is_refused_before_most_of_it_is_read(
        self, hands: Hands, monkeypatch: pytest.MonkeyPatch, storage: str
    ) -> None:  # W12
        hands.connection.execute(
            hands.plain(f"alter table {{schema}}.tasks alter column result set storage {storage}")
        )
        read: list[Place] = []

        def noted(places: Sequence[Place]) -> Statement[Any]:
            read.extend(places)
            return results(places)

        monkeypatch.setattr(handing_on, "results", noted)
        nodes = [task(f"n{number}") for number in range(40)]
        nodes += [
            taking("all", *map(Hole, range(40))),
            taking("parts", *(Hole(number, path=(0,)) for number in range(40))),
        ]
        flow = Flow.start(hands, nodes, [*after(40, *range(40)), *after(41, *range(40))], largest=100_000)
        flow.play(lambda name: ["x" * 20_000] if name.startswith("n") else 1)
        assert (flow.nodes()["all"], flow.nodes()["parts"]) == ("FAILED", "FAILED")
        if storage == "external":
            assert read == []
        said = dict(hands.table("nodes", "name, error ->> 'message'"))
        assert "is given are more than 100000 bytes, which is the payload_limit" in said["all"]
        assert "takes parts of are more than 400000 bytes" in said["parts"]
        flow.retry(largest=1_000_000)
        flow.play(lambda name: 1)
        assert flow.state == "COMPLETED"

    def test_a_list_that_is_too_large_is_not_the_output(self, hands: Hands) -> None:  # W12
        flow = Flow.start(hands, spread(3), output=0, largest=1_000)
        flow.play(lambda name: "x" * 600)
        assert (flow.state, flow.column("result")) == ("COMPLETED", None)
        assert flow.column("error")["code"] == "RESULT_UNSERIALISABLE"

    def test_members_that_are_too_much_together_fail_their_map(
        self, hands: Hands, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(advance, "MOST_BYTES_OF_MEMBERS", 1_000)
        each = Node(
            name="each", kind="map", task=SPEC, items=(Hole(0),), template=('{"item":', Hole(ITEM), ',"all":', Hole(1), "}")
        )  # fmt: skip
        flow = Flow.start(hands, [task("items"), task("large"), each], after(2, 0, 1))
        flow.play(lambda name: [1, 2, 3] if name == "items" else "x" * 500)
        assert flow.nodes() == {"items": "COMPLETED", "large": "COMPLETED", "each": "FAILED"}
        assert "more than 1,000 characters together" in flow.column("error")["message"]

    def test_a_step_enqueues_so_many_bytes_and_the_next_one_the_rest(
        self, hands: Hands, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(advance, "MOST_BYTES", 1_000)
        takers = [taking(f"t{number}", Hole(0)) for number in range(9)]
        flow = Flow.start(hands, [task("large"), *takers], [Edge(0, number) for number in range(1, 10)])
        flow.settle_down()
        (large,) = flow.claim()
        complete(hands, large, b'"' + b"x" * 400 + b'"')
        counts = []
        while done := flow.step().enqueued:
            counts.append(done)
        assert counts == [3, 3, 3]
        flow.play()
        assert flow.state == "COMPLETED"


class TestOutputs:
    def test_one_that_completes_without_its_output_says_why(self, hands: Hands) -> None:
        inner = child(task("asked"), task("never"), edges=(Edge(0, 1, path=(), expects=True),), output=1)
        flow = Flow.start(hands, [inner, taking("value", Hole(0)), taking("outcome", Hole(0, "outcome"))],
                          [*after(1, 0), Edge(0, 2, tolerates=True)])  # fmt: skip
        flow.play(lambda name: False)
        assert flow.nodes() == {"child": "COMPLETED", "value": "FAILED", "outcome": "COMPLETED"}
        assert flow.args("outcome")["a0"]["failed"]["code"] == "UPSTREAM_SKIPPED"
        assert "node never ended SKIPPED" in flow.column("error")["message"]

    def test_a_map_that_was_never_made_is_told_as_one_failure(self, hands: Hands) -> None:
        each = Node(
            name="each", kind="map", task=SPEC, items=(Hole(0),), template=('{"item":', Hole(ITEM), "}")
        )
        flow = Flow.start(hands, [task("items"), each, taking("all", Hole(1, "outcome"))],
                          [*after(1, 0), Edge(1, 2, tolerates=True)])  # fmt: skip
        flow.play(failing("items"))
        (told,) = flow.args("all")["a0"]
        assert told["failed"]["code"] == "UPSTREAM_SKIPPED"


class TestPauses:
    def test_a_retry_of_a_paused_one_frees_its_children(self, hands: Hands) -> None:
        flow = Flow.start(hands, [child(task("inner")), task("bad")], on_error="pause")
        flow.settle_down()
        claimed = flow.by_name(flow.claim())
        flow.end([claimed["bad"]], failing("bad"))
        flow.settle_down()
        states = hands.table("workflows", "state")
        assert states == [("PAUSED",), ("PAUSED",)]
        flow.retry()
        flow.end([claimed["inner"]], str)
        flow.play()
        assert hands.table("workflows", "state") == [("COMPLETED",), ("COMPLETED",)]

    def test_a_resume_beside_a_pause_that_is_handed_down_leaves_no_child_behind(self, hands: Hands) -> None:
        flow = Flow.start(hands, [child(task("inner"), task("next"), edges=(Edge(0, 1),))])
        flow.settle_down()
        hands.run(control.pause(flow.id, channel=hands.target.channel))
        other = Database(hands.target)
        resume = control.resume(flow.id, channel=hands.target.channel)
        thread = threading.Thread(target=lambda: other.run(resume))

        def pause_and_be_overtaken(run: Any) -> None:
            perform(advance.step(channel=hands.target.channel), run)
            thread.start()
            waits = b"select 1 from pg_locks where not granted and locktype = 'transactionid'"
            while thread.is_alive() and not hands.connection.execute(waits).fetchone():
                pass

        hands.database.transact(pause_and_be_overtaken)
        thread.join(20)
        other.close()
        flow.play()
        assert flow.state == "COMPLETED"

    def test_a_child_that_stays_held_is_found(self, hands: Hands) -> None:
        flow = Flow.start(hands, [child(task("inner"))])
        flow.settle_down()
        held = "update {schema}.workflows set state = 'PAUSED', is_held = true where parent_id is not null"
        hands.connection.execute(hands.plain(held))
        assert flow.stuck() == [("child", "CHILD_HELD")]
        flow.reconcile()
        flow.play()
        assert flow.state == "COMPLETED"

    def test_what_is_stuck_is_found_after_the_clock_was_set_back(self, hands: Hands) -> None:  # I14
        """The last entry of the outbox is an hour ahead, so it would be younger than the grace for an hour."""
        flow = Flow.start(hands, [child(task("inner"))])
        flow.settle_down()
        for held in (
            "update {schema}.workflows set state = 'PAUSED', is_held = true where parent_id is not null",
            "insert into {schema}.outbox (workflow_id, node, at) select id, null::integer, now() + interval '1 hour' from {schema}.workflows",
        ):
            hands.connection.execute(hands.plain(held))
        found = perform(find_stuck(grace_ms=10_000), hands.run)
        assert [each.what for each in found] == ["CHILD_HELD"]

    def test_a_child_that_paused_by_itself_waits_for_its_retry(self, hands: Hands) -> None:
        flow = Flow.start(hands, [child(task("inner"), on_error="pause"), task("other")])
        flow.settle_down()
        claimed = flow.by_name(flow.claim())
        flow.end([claimed["inner"]], failing("inner"))
        flow.settle_down()
        flow.pause()
        flow.resume()
        (within,) = [one for one, parent in hands.table("workflows", "id, parent_id") if parent is not None]
        assert dict(hands.table("workflows", "id, state"))[within] == "PAUSED", (
            "nobody has looked at its error"
        )
        assert flow.stuck() == []
        assert Flow(hands, within).retry().again == ("inner",)
        flow.play()
        flow.end([claimed["other"]], str)
        flow.settle_down()
        assert flow.state == "COMPLETED"

    def test_many_ready_nodes_of_a_paused_one_keep_nobody_busy(self, hands: Hands) -> None:
        count = advance.MOST_EVENTS + 100
        flow = Flow.start(hands, [task(f"n{number}") for number in range(count)])
        flow.pause()
        for _ in range(5):
            assert flow.step().workflows == 0
        flow.resume()
        flow.settle_down()
        assert hands.table("tasks", "count(*)") == [(count,)]

    def test_a_node_that_is_refused_pauses_like_one_that_failed(self, hands: Hands) -> None:
        flow = Flow.start(
            hands, [task("a"), taking("b", Hole(0, path=("x",))), task("c")], after(1, 0), on_error="pause"
        )
        flow.settle_down()
        claimed = flow.by_name(flow.claim())
        flow.end([claimed["a"]], lambda name: None)
        flow.settle_down()
        assert (flow.state, flow.nodes()["b"]) == ("PAUSED", "FAILED")
        flow.resume()
        flow.end([claimed["c"]], str)
        flow.play()
        assert flow.state == "FAILED", "a resume goes on without it"

    @pytest.mark.parametrize("what", ["checkpoint", "attempt", "signal"])
    def test_what_has_begun_is_not_taken_back(self, hands: Hands, what: str) -> None:
        flow = Flow.start(hands, [task("a")])
        flow.settle_down()
        (held,) = flow.claim(1)
        if what == "checkpoint":
            hands.run(record_checkpoint(held.id, held.claim_id, b"[5]", number=1, progress=None))
        hands.settle(held, "RELEASED")
        if what == "signal":
            sent = signals.send_signal(
                uuid4(), target=held.id, name="go", value=b"1", channel=hands.target.channel
            )
            hands.run(sent)
        flow.pause()
        assert hands.row(held.id, "state") == "PENDING"
        flow.resume()
        flow.play()
        assert flow.state == "COMPLETED"
        assert len(hands.table("tasks", "id")) == 1


class TestRetries:
    def test_nobody_begins_before_what_begins_again(self, hands: Hands) -> None:
        nodes = [task("a"), task("c"), taking("b", Hole(0, "outcome"), Hole(1))]
        flow = Flow.start(hands, nodes, [Edge(0, 2, tolerates=True), *after(2, 1)], on_error="pause")
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

    def test_a_node_that_was_ready_by_a_failure_waits_again(self, hands: Hands) -> None:
        nodes = [task("a"), taking("b", Hole(0, "outcome"))]
        flow = Flow.start(hands, nodes, [Edge(0, 1, tolerates=True)], on_error="pause")
        flow.settle_down()
        flow.end(flow.claim(), failing("a"))
        flow.settle_down()
        assert (flow.state, flow.nodes()["b"]) == ("PAUSED", "READY")
        flow.retry()
        assert flow.nodes() == {"a": "ENQUEUED", "b": "PENDING"}
        flow.play()
        assert flow.args("b")["a0"] == {"completed": "a"}

    def test_a_quorum_counts_what_completed_the_second_time(self, hands: Hands) -> None:
        nodes = [task("a"), task("c"), task("b", quorum=1)]
        flow = Flow.start(hands, nodes, after(2, 0, 1, joins=True), on_error="pause")
        flow.settle_down()
        claimed = flow.by_name(flow.claim())
        flow.end([claimed["a"]], failing("a"))
        flow.settle_down()
        flow.retry()
        (again,) = flow.claim()
        flow.end([again], str)
        flow.settle_down()
        assert flow.nodes()["b"] == "ENQUEUED"

    def test_what_expired_gets_no_deadline_that_has_passed(self, hands: Hands) -> None:
        late = TaskSpec(name="work", queue="default", good_until=datetime.now(UTC) - timedelta(seconds=1))
        flow = Flow.start(hands, [Node(name="late", task=late, args="{}")])
        flow.settle_down()
        hands.run(tasks.expire(limit=10, channel=hands.target.channel))
        flow.settle_down()
        assert flow.state == "FAILED"
        flow.retry()
        flow.play()
        assert flow.state == "COMPLETED"

    def test_one_whose_key_another_lives_with_is_not_retried(self, hands: Hands) -> None:
        old = Flow.start(hands, [task("a")], key="k")
        old.play(failing("a"))
        new = Flow.start(hands, [task("a")], key="k")
        with pytest.raises(WorkflowNotRetryable, match=f"workflow {new.id} lives"):
            old.retry()
        assert old.state == "FAILED"
