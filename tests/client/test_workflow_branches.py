"""Test failure branches, delays and first results of workflows with a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import pytest

from everbeat import App, Completed, Failed, TaskError, Workflow
from everbeat.errors import ConfigurationError, TaskFailed
from everbeat.workflows import WorkflowState, first
from tests.client.working import working

pytestmark = pytest.mark.usefixtures("migrated")
SOON_S = "30s"


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    app = App(database_url, schema=schema)
    yield app
    app.close()


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.fixture
def order(app: App, done: list[str]) -> Workflow:
    """Return a workflow that pays, packs and ships, and that refunds what it charged if a later node fails."""

    @app.task
    async def charge(cents: int) -> int:
        done.append("charge")
        return cents

    @app.task
    async def pack(cents: int, works: bool) -> str:
        if not works:
            raise TaskError("OUT_OF_STOCK", "no lamp is left")
        return f"parcel for {cents}"

    @app.task
    async def ship(parcel: str) -> str:
        if "13" in parcel:
            raise TaskError("NO_ROAD", "the parcel cannot be shipped")
        return f"shipped {parcel}"

    @app.task
    async def refund(cents: int) -> str:
        done.append("refund")
        return f"refunded {cents}"

    @app.define_workflow("order")
    def order(wf: Workflow, cents: int, works: bool) -> None:
        charged = wf.add(charge, cents).named("charged")
        packed = wf.add(pack, charged.result, works).named("packed")
        shipped = wf.add(ship, packed.result).named("shipped")
        wf.add(refund, charged.result).when_failed(packed, shipped).named("refunded")

    return order  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("cents", "works", "states", "ran"),
    [
        (17, True, {"packed": "COMPLETED", "shipped": "COMPLETED", "refunded": "SKIPPED"}, ["charge"]),
        (
            17,
            False,
            {"packed": "FAILED", "shipped": "SKIPPED", "refunded": "COMPLETED"},
            ["charge", "refund"],
        ),
        (
            13,
            True,
            {"packed": "COMPLETED", "shipped": "FAILED", "refunded": "COMPLETED"},
            ["charge", "refund"],
        ),
    ],
)
async def test_a_node_that_handles_failures_runs_if_and_only_if_one_of_them_happens(
    app: App,
    order: Workflow,
    done: list[str],
    cents: int,
    works: bool,
    states: dict[str, str],
    ran: list[str],
) -> None:
    async with working(app):
        handle = await order.astart(cents, works)  # type: ignore[call-arg]
        if "FAILED" in states.values():
            with pytest.raises(TaskFailed, match=r"OUT_OF_STOCK|NO_ROAD"):
                await handle.aresult(timeout=SOON_S)
        else:
            await handle.aresult(timeout=SOON_S)
        nodes = await handle.anodes()
    assert {node.name: node.state for node in nodes if node.name != "charged"} == states
    assert done == ran
    assert {node.name: node.conditions for node in nodes}["refunded"] == ("if one of packed, shipped fails",)


async def test_a_retry_takes_the_failure_branch_back_if_the_failed_node_completes(app: App) -> None:
    runs: list[str] = []

    @app.task
    async def work() -> str:
        runs.append("work")
        if len(runs) == 1:
            raise TaskError("BROKEN", "the first run fails")
        return "worked"

    @app.task
    async def repair(end: Completed[str] | Failed) -> None:
        assert isinstance(end, Failed)
        runs.append(end.error.code)

    wf = app.workflow("repaired")
    worked = wf.add(work)
    wf.add(repair, worked.outcome).when_failed(worked)
    async with working(app):
        handle = await wf.astart(output=worked)
        assert isinstance(await handle.aoutcome(timeout=SOON_S), Failed)
        assert runs == ["work", "BROKEN"]
        await handle.aretry()
        assert await handle.aresult(timeout=SOON_S) == "worked"
        states = {node.name: node.state for node in await handle.anodes()}
    assert states == {"work": "COMPLETED", "repair": "SKIPPED"}
    assert runs == ["work", "BROKEN", "work"]


async def test_a_cancelled_workflow_runs_no_failure_branch(app: App) -> None:
    @app.task
    async def wait() -> None:
        await asyncio.Event().wait()

    @app.task
    async def undo() -> None: ...

    wf = app.workflow("cancelled")
    waiting = wf.add(wait)
    wf.add(undo).when_failed(waiting)
    async with working(app):
        handle = await wf.astart()
        await handle.acancel()
        assert isinstance(await handle.aoutcome(timeout=SOON_S), Failed)
        assert await handle.astatus() is WorkflowState.CANCELLED
        states = {node.name: node.state for node in await handle.anodes()}
    assert states["undo"] in ("CANCELLED", "SKIPPED")


async def test_the_first_result_is_passed_on_while_the_other_node_still_runs(app: App) -> None:
    shown = asyncio.Event()

    @app.task
    async def slow() -> str:
        await shown.wait()
        return "slow"

    @app.task
    async def quick() -> str:
        return "quick"

    @app.task
    async def show(value: str) -> str:
        shown.set()
        return f"shown {value}"

    wf = app.workflow("race")
    output = wf.add(show, first([wf.add(slow), wf.add(quick)]))
    async with working(app):
        handle = await wf.astart(output=output)
        assert await handle.aresult(timeout=SOON_S) == "shown quick"
        states = {node.name: node.state for node in await handle.anodes()}
    assert states == {"slow": "COMPLETED", "quick": "COMPLETED", "show": "COMPLETED"}


async def test_a_failed_node_is_never_the_first_and_without_a_result_the_taker_is_skipped(app: App) -> None:
    @app.task
    async def fail(code: str) -> str:
        raise TaskError(code, "it fails")

    @app.task
    async def work() -> str:
        return "worked"

    @app.task
    async def show(value: str) -> str:
        return value

    wf = app.workflow("race", on_error="continue")
    one, other = wf.add(fail, "A"), wf.add(fail, "B")
    shown = wf.add(show, first([one, wf.add(work).after(one, join="all").allow_failed()])).named("shown")
    wf.add(show, first([one, other])).named("unshown")
    async with working(app):
        handle = await wf.astart(output=shown)
        assert await handle.aresult(timeout=SOON_S) == "worked"
        states = {node.name: node.state for node in await handle.anodes()}
    assert states["unshown"] == "SKIPPED"


async def test_a_delayed_node_starts_after_its_delay_and_not_before(app: App) -> None:
    @app.task
    async def note(name: str) -> None: ...

    wf = app.workflow("reminder")
    begun = wf.add(note, "begun").named("begun")
    wf.map(note, ["late"]).after(begun).delayed("700ms").named("reminders")
    async with working(app):
        handle = await wf.astart()
        await handle.aresult(timeout=SOON_S)
        nodes = {node.name: node for node in await handle.anodes()}
    before, after = nodes["begun"].ended_at, nodes["reminders[0]"].started_at
    assert before is not None
    assert after is not None
    assert after - before >= timedelta(seconds=0.7)


class TestMistakes:
    @pytest.fixture
    def wf(self, app: App) -> Workflow:
        return app.workflow("wrong")

    def test_a_node_cannot_take_the_result_of_a_node_whose_failure_it_handles(
        self, app: App, wf: Workflow
    ) -> None:
        @app.task
        def one() -> int:
            return 1

        @app.task
        def two(value: int) -> None: ...

        first_one = wf.add(one)
        wf.add(two, first_one.result).when_failed(first_one)
        with pytest.raises(ConfigurationError, match=r"when_failed of node 'two'.*take \.outcome instead"):
            wf.graph()

    def test_a_node_handles_one_group_of_failures(self, app: App, wf: Workflow) -> None:
        @app.task
        def one() -> int:
            return 1

        nodes = [wf.add(one) for _ in range(4)]
        wf.add(one).when_failed(nodes[0]).when_failed(nodes[1])
        wf.add(one).after(nodes[0], nodes[1], join="any").when_failed(nodes[2], nodes[3])
        wf.add(one).when_failed()
        with pytest.raises(ConfigurationError) as caught:
            wf.graph()
        assert [problem.code for problem in caught.value.problems] == ["DUPLICATE", "DUPLICATE", "EMPTY"]

    def test_first_needs_nodes_with_the_same_type_of_result(self, app: App, wf: Workflow) -> None:
        @app.task
        def one() -> int:
            return 1

        @app.task
        def two(number: int = 1) -> str:
            return ""

        with pytest.raises(ConfigurationError, match="different types"):
            first([wf.add(one), wf.add(two)])  # type: ignore[list-item]
        with pytest.raises(ConfigurationError, match="names no node"):
            first([])
        with pytest.raises(ConfigurationError, match="contains a Nodes"):
            first([wf.map(two, [])])  # type: ignore[list-item]

    def test_a_condition_cannot_be_the_first_of_several_results(self, app: App, wf: Workflow) -> None:
        @app.task
        def is_open() -> bool:
            return True

        wf.add(is_open).when(first([wf.add(is_open), wf.add(is_open)]))
        with pytest.raises(ConfigurationError, match="is the first of several results"):
            wf.graph()

    @pytest.mark.parametrize("delay", ["soon", -1, "200000d"])
    def test_a_wrong_delay_is_refused(self, app: App, wf: Workflow, delay: object) -> None:
        @app.task
        def one() -> int:
            return 1

        with pytest.raises(ConfigurationError, match="delayed"):
            wf.add(one).delayed(delay)  # type: ignore[arg-type]

    def test_a_node_that_runs_a_workflow_cannot_be_delayed(self, app: App, wf: Workflow) -> None:
        @app.task
        def one() -> int:
            return 1

        @app.define_workflow("inner")
        def inner(wf: Workflow) -> None:
            wf.add(one)

        wf.add(inner).delayed("1s")
        with pytest.raises(ConfigurationError, match="only tasks can be delayed"):
            wf.graph()
