"""Test maps of a workflow definition: one workflow for each item, known at build time or at run time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from everbeat import App, Completed, Failed, Node, TaskError, Workflow, WorkflowHandle
from everbeat.domain.drawing.picture import picture
from everbeat.domain.workflow.graph import INPUT, ITEM, Edge, Hole
from everbeat.errors import ConfigurationError, PayloadError, PlaceholderUsed
from everbeat.workflows import NodeState, WorkflowState, results
from tests.client.workflow_app import (
    Order,
    Payment,
    anything,
    charge,
    is_open,
    list_orders,
    pack,
    report,
    total,
)
from tests.client.workflow_app import app as drafting
from tests.client.working import working

pytestmark = pytest.mark.usefixtures("migrated")


@drafting.define_workflow("wrapped")
def parcel(wf: Workflow, order: Order, fragile: bool = False) -> Node[str]:
    return wf.add(pack, wf.add(charge, order).result, fragile)


@drafting.define_workflow("choosy")
def choosy(wf: Workflow, number: int) -> Node[Any]:
    return wf.add(charge, Order(1)) if number % 2 else wf.add(report, Completed(Payment(1)))


@drafting.define_workflow("mapped_forever")
def forever(wf: Workflow, order: Order) -> None:
    wf.map(forever, [order])


class TestBuilding:
    def test_a_map_of_a_definition_has_one_workflow_node_for_each_known_item(self) -> None:
        wf = drafting.workflow("all")
        wf.add(is_open)
        mapped = wf.map(parcel, (Order(1), Order(2)), fragile=True)
        wf.add(anything, mapped[1].outcome)
        graph = wf.graph(mapped)
        _, whole, *members, _ = graph.nodes
        assert (whole.kind, whole.first_member, whole.members, whole.graph) == ("map", 2, 2, None)
        assert [(each.kind, each.name, each.member_of) for each in members] == [
            ("workflow", "wrapped[0]", 1),
            ("workflow", "wrapped[1]", 1),
        ]
        assert [each.graph.nodes[0].args for each in members if each.graph] == [
            '{"order":{"id":1}}',
            '{"order":{"id":2}}',
        ]
        assert graph.edges == (Edge(3, 4, tolerates=True),)
        assert results(mapped).__class__ is mapped.results.__class__

    def test_a_map_of_a_definition_over_a_result_has_one_graph_for_all_items(self) -> None:
        wf = drafting.workflow("all")
        orders, opened = wf.add(list_orders), wf.add(is_open)
        wf.map(parcel, orders.result, fragile=opened.result).named("parcels")
        graph = wf.graph()
        whole = graph.nodes[2]
        assert (whole.kind, whole.name, whole.members, whole.task) == ("map", "parcels", None, None)
        assert whole.items == (Hole(0),)
        assert whole.template == ('{"order":', Hole(ITEM), ',"fragile":', Hole(1), "}")
        assert whole.graph is not None
        assert whole.graph.nodes[0].template == ('{"order":', Hole(INPUT, path=("order",)), "}")
        assert graph.edges == (Edge(0, 2), Edge(1, 2))

    def test_a_map_of_a_definition_over_an_empty_list_keeps_its_conditions(self) -> None:
        wf = drafting.workflow("all")
        opened = wf.add(is_open)
        wf.map(choosy, list[int]()).when(opened.result)
        graph = wf.graph()
        assert (graph.nodes[1].kind, graph.nodes[1].items, graph.nodes[1].graph) == ("map", ("[]",), None)
        assert graph.edges == (Edge(0, 1, path=(), expects=True),)

    def test_known_items_can_build_different_workflows(self) -> None:
        wf = drafting.workflow("all")
        mapped = wf.map(choosy, [1, 2])
        wf.add(total, mapped.results)
        assert [len(each.graph.nodes) for each in wf.graph().nodes[1:3] if each.graph] == [1, 1]
        assert mapped.read_result('[{"amount":3},"told"]') == [Payment(3), "told"]

    def test_a_map_of_a_definition_names_the_item_that_does_not_fit(self) -> None:
        wf = drafting.workflow("all")
        with pytest.raises(PayloadError, match=r"Item 1 of the map: Argument 'order'"):
            wf.map(parcel, [Order(1), "no order"])  # type: ignore[list-item]
        with pytest.raises(PlaceholderUsed, match=r"parameter 'number' of workflow 'choosy'"):
            wf.map(choosy, wf.add(list_orders).result)  # type: ignore[arg-type]

    def test_a_map_of_a_definition_refuses_a_list_of_another_type(self) -> None:
        wf = drafting.workflow("all")
        wf.map(parcel, wf.add(is_open).result)  # type: ignore[arg-type]
        wf.add(total, wf.map(parcel, [Order(1)]).results)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"only a list has items") as found:
            wf.graph()
        assert "is list[str], but must be list[Payment]" in str(found.value)

    def test_a_workflow_that_maps_itself_is_refused(self) -> None:
        wf = drafting.workflow("all")
        with pytest.raises(
            ConfigurationError, match=r"wf\.map.*mapped_forever -> mapped_forever.*and would never end"
        ):
            wf.map(forever, [Order(1)])


@dataclass
class Tracks:
    app: App
    broken: set[int]
    ran: list[str]


@pytest.fixture
def tracks(database_url: str, schema: str) -> Iterator[Tracks]:
    app = App(database_url, schema=schema)
    yield Tracks(app, set(), [])
    app.close()


def outer(tracks: Tracks, *, on_error: Any = "fail") -> tuple[Workflow, Node[list[int]], Any]:
    """Return a workflow with a task that lists numbers, and a definition that doubles a number in two tasks."""
    app = tracks.app

    @app.task
    async def listed(numbers: list[int]) -> list[int]:
        return numbers

    @app.task
    async def half(number: int) -> int:
        tracks.ran.append(f"half {number}")
        if number in tracks.broken:
            raise TaskError("BROKEN", f"{number} is broken")
        return number

    @app.task
    async def add_up(first: int, second: int, more: int) -> int:
        tracks.ran.append(f"add {first}")
        return first + second + more

    @app.define_workflow("doubled")
    def doubled(wf: Workflow, number: int, more: int) -> Node[int]:
        first = wf.add(half, number).named("first")
        return wf.add(add_up, first.result, number, more).named("sum")

    wf = app.workflow("outer", on_error=on_error)
    return wf, wf.add(listed, [1, 2, 3]).named("numbers"), doubled


async def states(handle: WorkflowHandle[Any]) -> dict[str, NodeState]:
    return {node.name: node.state for node in await handle.anodes()}


class TestRunning:
    async def test_maps_over_known_and_unknown_items_return_the_results_of_their_workflows(
        self, tracks: Tracks
    ) -> None:
        wf, numbers, doubled = outer(tracks)

        @tracks.app.task
        async def say(known: list[int], made: list[int], one: int, none: list[int]) -> str:
            return f"{known} {made} {one} {none}"

        known = wf.map(doubled, [10, 20], 1)
        made = wf.map(doubled, numbers.result, numbers.result[2]).named("made")
        none = wf.map(doubled, list[int](), 1).named("none")
        said = wf.add(say, known.results, made.results, known[1].result, none.results)
        async with working(tracks.app):
            handle = await wf.astart(output=said)
            assert await handle.aresult(timeout="60s") == "[21, 41] [5, 7, 9] 41 []"
            assert await handle.aresult_of(made) == [5, 7, 9]
            assert await handle.aresult_of("made[1]") == 7
            nodes = await handle.anodes()
        assert {node.kind for node in nodes if node.member_of} == {"workflow"}
        drawn = {box.label: (box.kind, box.task) for box in picture(nodes, at=datetime.now(UTC)).boxes}
        assert drawn["made[0..2]"] == ("map", "doubled")
        assert await tracks.app.arecover_stuck_workflows(dry_run=True) == []

    async def test_a_map_of_workflows_can_be_the_output_of_its_workflow(self, tracks: Tracks) -> None:
        wf, numbers, doubled = outer(tracks)
        async with working(tracks.app):
            handle = await wf.astart(output=wf.map(doubled, numbers.result, 0))
            assert await handle.aresult(timeout="60s") == [2, 4, 6]

    async def test_a_retry_continues_within_the_failed_member_of_a_map(self, tracks: Tracks) -> None:
        tracks.broken.add(2)
        wf, numbers, doubled = outer(tracks)

        @tracks.app.task
        async def tell(ends: list[Completed[int] | Failed]) -> str:
            return " ".join(
                str(each.value) if isinstance(each, Completed) else str(each.error.code) for each in ends
            )

        mapped = wf.map(doubled, numbers.result, 0)
        told = wf.add(tell, mapped.outcomes)
        async with working(tracks.app):
            handle = await wf.astart(output=mapped)
            failed = await handle.aoutcome(timeout="60s")
            assert isinstance(failed, Failed)
            assert failed.error.code == "SUBWORKFLOW_FAILED"
            assert "node doubled[1] ended FAILED" in failed.error.message
            assert "node first ended FAILED: 2 is broken" in failed.error.message
            assert await handle.aresult_of(told) == "2 SUBWORKFLOW_FAILED 6"
            tracks.broken.clear()
            tracks.ran.clear()
            plan = await handle.aretry(dry_run=True)
            assert [*plan.again] == ["doubled", "tell", "doubled[1]", "doubled[1]/first", "doubled[1]/sum"]
            assert [*plan.completed] == ["tell"]
            await handle.aretry()
            assert await handle.aresult(timeout="60s") == [2, 4, 6]
            assert await handle.aresult_of(told) == "2 4 6"
            assert tracks.ran == ["half 2", "add 2"]
            tracks.ran.clear()
            again = await handle.aretry(from_node="numbers")
            assert "doubled[0]" in again.completed
            assert await handle.aresult(timeout="60s") == [2, 4, 6]
        assert sorted(tracks.ran) == sorted(f"{what} {n}" for what in ("half", "add") for n in (1, 2, 3))

    async def test_a_map_over_a_result_that_is_empty_returns_an_empty_list(self, tracks: Tracks) -> None:
        app = tracks.app
        wf, _, doubled = outer(tracks)

        @app.task
        async def nothing() -> list[int]:
            return []

        @app.task
        async def refused() -> bool:
            return False

        empty = wf.map(doubled, wf.add(nothing).result, 0)
        skipped = wf.map(doubled, list[int](), 0).named("skipped").when(wf.add(refused).result)
        after = wf.add(nothing).named("after").after(skipped)
        async with working(app):
            handle = await wf.astart(output=empty)
            assert await handle.aresult(timeout="60s") == []
            found = await states(handle)
        assert (found["skipped"], found[after.name]) == ("SKIPPED", "SKIPPED")

    async def test_a_pause_and_a_cancel_reach_the_members_of_a_map(self, tracks: Tracks) -> None:
        app = tracks.app
        wf, numbers, _ = outer(tracks)

        @app.task
        async def endless(number: int) -> int:
            tracks.ran.append(str(number))
            await asyncio.sleep(3600)  # until it is cancelled
            return number

        @app.define_workflow("long")
        def long(wf: Workflow, number: int) -> Node[int]:
            return wf.add(endless, number)

        async with working(app):
            handle = await wf.astart(output=wf.map(long, numbers.result))
            async with asyncio.timeout(60):
                while len(tracks.ran) < 3:
                    await asyncio.sleep(0.05)  # no event reports that the tasks began
                assert await handle.apause() == WorkflowState.PAUSED
                inner = [node.task_id for node in await handle.anodes() if node.member_of]
                while {(await app.workflow_handle(each).ainfo()).state for each in inner if each} != {
                    "PAUSED"
                }:
                    await asyncio.sleep(0.05)  # no event reports that a workflow is paused
                assert await handle.aresume() == WorkflowState.RUNNING
                assert len((await handle.aexplain()).reasons) == 3
                await handle.acancel()
                assert isinstance(await handle.aoutcome(timeout="60s"), Failed)
        assert {(await app.workflow_handle(each).ainfo()).state for each in inner if each} == {"CANCELLED"}

    async def test_a_failed_member_pauses_a_workflow_with_on_error_pause(self, tracks: Tracks) -> None:
        tracks.broken.add(3)
        wf, numbers, doubled = outer(tracks, on_error="pause")
        mapped = wf.map(doubled, numbers.result, 0)
        async with working(tracks.app):
            handle = await wf.astart(output=mapped)
            async with asyncio.timeout(60):
                while await handle.astatus() != WorkflowState.PAUSED:
                    await asyncio.sleep(0.05)  # no event reports that a workflow is paused
            tracks.broken.clear()
            await handle.aretry()
            assert await handle.aresult(timeout="60s") == [2, 4, 6]

    async def test_a_map_starts_many_members_in_several_transactions(
        self, tracks: Tracks, database_url: str, schema: str
    ) -> None:
        app = tracks.app

        @app.task
        async def listed() -> list[int]:
            return [*range(120)]

        @app.task
        async def same(number: int) -> int:
            return number

        @app.define_workflow("one")
        def one(wf: Workflow, number: int) -> Node[int]:
            return wf.add(same, number)

        wf = app.workflow("many")
        mapped = wf.map(one, wf.add(listed).result)
        async with working(app):
            handle = await wf.astart(output=mapped)
            assert await handle.aresult(timeout="60s") == [*range(120)]
        with psycopg.connect(database_url) as connection:
            graphs = connection.execute(f"select count(graph) from {schema}.nodes").fetchone()
        assert graphs == (1,), "members use the graph of their map"

    async def test_a_map_of_workflows_without_an_output_returns_a_list_of_none(self, tracks: Tracks) -> None:
        app = tracks.app
        wf, numbers, _ = outer(tracks)

        @app.task
        async def print_label(number: int) -> int:
            tracks.ran.append(f"print {number}")
            if number in tracks.broken:
                raise TaskError("BROKEN", f"{number} is broken")
            return number

        @app.define_workflow("printed")
        def printed(wf: Workflow, number: int) -> None:
            wf.add(print_label, number)

        @app.task
        async def tell(known: list[None], ends: list[Completed[None] | Failed]) -> str:
            return f"{known} {[isinstance(each, Completed) for each in ends]}"

        tracks.broken.add(2)
        known, made = wf.map(printed, [10, 20]), wf.map(printed, numbers.result).named("made")
        told = wf.add(tell, known.results, made.outcomes)
        async with working(app):
            handle = await wf.astart(output=made)
            failed = await handle.aoutcome(timeout="60s")
            assert isinstance(failed, Failed)
            assert failed.error.code == "SUBWORKFLOW_FAILED"
            assert await handle.aresult_of(told) == "[None, None] [True, False, True]"
            tracks.broken.clear()
            tracks.ran.clear()
            await handle.aretry()
            assert await handle.aresult(timeout="60s") == [None, None, None]
            assert await handle.aresult_of(known) == [None, None]
            assert await handle.aresult_of("made[1]") is None
        assert tracks.ran == ["print 2"]
