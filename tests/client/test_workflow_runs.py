"""Test that a real worker runs each kind of node and passes each task its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from everbeat import App, Completed, Failed, Node, TaskError, TaskResult, Workflow
from everbeat.workflows import Nodes, outcomes, results
from tests.client.working import working

pytestmark = pytest.mark.usefixtures("migrated")


@dataclass
class Order:
    id: int


@dataclass
class Payment:
    amount: int
    is_large: bool


class Size(NamedTuple):
    width: int
    height: int


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    app = App(database_url, schema=schema)
    yield app
    app.close()


async def run(app: App, wf: Workflow, output: Node[Any] | Nodes[Any]) -> Any:
    """Start the workflow, run a worker until it has ended, and return its outcome."""
    async with working(app):
        handle = await wf.astart(output=output)
        return await handle.aoutcome(timeout="30s")


async def test_every_kind_of_argument_reaches_its_task(app: App) -> None:
    @app.task
    async def list_orders(count: int) -> list[Order]:
        return [Order(number) for number in range(1, count + 1)]

    @app.task
    async def charge(order: Order, factor: int = 1) -> Payment:
        if order.id == 13:
            raise TaskError("DECLINED", "no", {"order": order.id})
        return Payment(order.id * factor, order.id > 2)

    @app.task
    async def size(payment: Payment) -> Size:
        return Size(payment.amount, 7)

    @app.task
    async def add_up(
        numbers: list[int], payments: list[Payment], paid: dict[str, TaskResult[Payment]]
    ) -> list[str]:
        assert all(isinstance(each, Payment) for each in payments)
        ends = [f"{name}:{_spelled(each)}" for name, each in paid.items()]
        return [str(sum(numbers) + sum(each.amount for each in payments)), *ends]

    @app.define_workflow("inner")
    def inner(wf: Workflow, orders: list[Order], factor: int) -> Nodes[Payment]:
        return wf.map(charge, orders, factor)

    wf = app.workflow("order", on_error="continue")
    orders = wf.add(list_orders, 3)
    first = wf.add(charge, orders.result[0], factor=5)
    failed = wf.add(charge, Order(13))
    skipped = wf.add(size, failed.result)
    mapped = wf.map(charge, orders.result, first.result.amount)
    within = wf.add(inner, orders.result, first.result.amount)
    known = wf.map(charge, [Order(1), Order(2)])
    measured = wf.add(size, first.result)
    total = (
        wf.add(
            add_up,
            [measured.result.height, first.result.amount, 100],
            within.result,
            {"first": first.outcome, "failed": failed.outcome, "known": known[1].outcome},
        )
        .after(skipped)
        .allow_failed()
    )
    last = wf.add(add_up, [], mapped.results, {"x": Completed(Payment(1, False))}).after(total)
    both = wf.add(add_up, [], results([*known, first]), {})
    judged = wf.add(collect_of(app), last.result, both.result, total.result, outcomes([failed, first]))
    assert await run(app, wf, judged) == Completed(
        [
            ["30", "x:1"],
            ["8"],
            ["142", "first:5", "failed:DECLINED no {'order': 13}", "known:2"],
            ["DECLINED no {'order': 13}", "5"],
        ]
    )


async def test_conditions_and_joins_decide_what_runs(app: App) -> None:
    ran: list[str] = []

    @app.task
    async def charge(amount: int) -> Payment:
        return Payment(amount, amount > 100)

    @app.task
    async def note(name: str) -> str:
        ran.append(name)
        return name

    wf = app.workflow("order", on_error="continue")
    small, large = wf.add(charge, 5), wf.add(charge, 500)
    yes = wf.add(note, "yes").when(large.result.is_large).unless(small.result.is_large)
    no = wf.add(note, "no").when(small.result.is_large)
    wf.add(note, "never").after(no)
    wf.add(note, "tolerant").after(no).allow_failed()
    end = wf.add(note, "end").after(yes, no, small, join=2)
    assert await run(app, wf, end) == Completed("end")
    assert sorted(ran) == ["end", "tolerant", "yes"]


def collect_of(app: App) -> Any:
    @app.task
    async def collect(
        last: list[str], both: list[str], total: list[str], ends: list[TaskResult[Payment]]
    ) -> list[list[str]]:
        return [last, both, total, [_spelled(each) for each in ends]]

    return collect


def _spelled(end: TaskResult[Payment]) -> str:
    match end:
        case Completed(Payment(amount)):
            return str(amount)
        case Failed(error):
            return f"{error.code} {error.message} {error.data}"
        case _:
            raise AssertionError(end)


async def test_nodes_after_a_skipped_map_of_an_empty_list_are_skipped(app: App) -> None:
    @app.task
    async def is_wanted() -> bool:
        return False

    @app.task
    async def pack(article: str, wanted: bool) -> str:
        return article

    @app.task
    async def ship() -> str:
        return "shipped"

    @app.task
    async def say(shipped: Completed[str] | Failed) -> str:
        return shipped.error.code if isinstance(shipped, Failed) else shipped.value

    wf = app.workflow("nothing")
    wanted = wf.add(is_wanted)
    packed = wf.map(pack, list[str](), wanted.result).when(wanted.result).named("packed")
    shipped = wf.add(ship).after(packed)
    assert await run(app, wf, wf.add(say, shipped.outcome)) == Completed("UPSTREAM_SKIPPED")


async def test_a_retried_workflow_passes_new_outcomes_to_nodes_that_tolerate_failure(app: App) -> None:  # J7
    stock = [0]

    @app.task
    async def reserve() -> int:
        if stock[0] == 0:
            raise TaskError("NO_STOCK", "nothing is left")
        return stock[0]

    @app.task
    async def ship(count: int) -> str:
        return f"shipped {count}"

    @app.task
    async def tell(reserved: Completed[int] | Failed) -> str:
        return reserved.error.code if isinstance(reserved, Failed) else "thank you"

    wf = app.workflow("order")
    reserved = wf.add(reserve)
    told = wf.add(tell, reserved.outcome)
    async with working(app):
        handle = await wf.astart(output=wf.add(ship, reserved.result))
        assert isinstance(await handle.aoutcome(timeout="30s"), Failed)
        assert await handle.aresult_of(told) == "NO_STOCK"
        stock[0] = 3
        assert (await handle.aretry(dry_run=True)).completed == ("tell",)
        assert (await handle.aretry()).completed == ("tell",)
        assert await handle.aresult(timeout="30s") == "shipped 3"
        assert await handle.aresult_of(told) == "thank you"
