"""Test that keys, costs and numbers of limits that contradict each other are refused wherever a task is sent."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pytest

from everbeat import App, Limit, QueueConfig, Schedule
from everbeat.errors import ConfigurationError, PayloadError
from tests.client.conftest import NewApp
from tests.store.conftest import StoreHarness


class Lines(msgspec.Struct):
    numbers: list[int]


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"two": "k"}, "limit 'two' has no key"), ({"ten": None}, "limit 'ten' needs a key")],
)
def test_a_key_must_be_given_exactly_for_limits_with_keys(
    limited: NewApp, keys: dict[str, Any], message: str
) -> None:
    app = limited(Limit("two", concurrency=2), Limit("ten", concurrency=1, key="tenant_id"))

    @app.task(limits=["two", "ten"])
    def charge(tenant_id: str) -> None: ...

    with pytest.raises(ConfigurationError, match=message):
        charge.with_options(limits=keys)
    with pytest.raises(ConfigurationError, match=message):
        app.send_by_name("charge", {"tenant_id": "a"}, limits=keys)
    with pytest.raises(ConfigurationError, match=message):
        app.send_by_name("elsewhere", limits=keys)


def test_a_key_is_refused_for_children_nodes_and_schedules_too(limited: NewApp) -> None:
    app = limited(Limit("two", concurrency=2))

    @app.task(limits=["two"])
    def charge() -> None: ...

    # Built without `with_options`, whose check must not be the only one.
    wrong = type(charge)(charge._definition, sender=app._sender, options={"limits": {"two": "k"}})
    with pytest.raises(ConfigurationError, match="limit 'two' has no key"):
        app._sender.new_child(wrong.call())
    with pytest.raises(ConfigurationError, match="limit 'two' has no key"):
        app._sender.spec(wrong)
    with pytest.raises(ConfigurationError, match="limit 'two' has no key"):
        app.put_schedule(Schedule("hourly", wrong.call(), every="1h"))
    with pytest.raises(ConfigurationError, match="limit 'two' has no key"):
        app.send_many([wrong.call()])


def test_a_wrong_limit_is_refused_by_with_options_itself(limited: NewApp) -> None:
    app = limited(Limit("two", concurrency=2))

    @app.task(limits=["two"])
    def charge() -> None: ...

    with pytest.raises(ConfigurationError, match=r"'tow'.*use 'two'"):
        charge.with_options(limits={"tow": "x"})
    with pytest.raises(ConfigurationError, match="cost of task 'charge' = 3"):
        charge.with_options(costs={"two": 3})


def test_a_cost_above_a_limit_names_the_number_to_raise(limited: NewApp) -> None:
    app = limited(
        Limit("smooth", rate="5/s"),
        Limit("sliding", rate="5/s", window="sliding"),
        Limit("both", concurrency=2, rate="5/s", burst=3),
    )
    for name, cost, fix in (
        ("smooth", 2, "use 1 or less, or raise burst to 2 or more"),
        ("sliding", 6, "use 5 or less, or raise rate to 6 or more"),
        ("both", 3, "use 2 or less, or raise concurrency to 3 or more"),
        ("both", 4, "use 2 or less, or raise concurrency and burst to 4 or more"),
    ):
        with pytest.raises(ConfigurationError) as error:
            app.task(limits=[name], costs={name: cost}, name=f"{name}{cost}")(lambda: None)
        assert [problem.fix for problem in error.value.problems] == [fix]


def test_too_many_limits_are_listed_with_their_origins(limited: NewApp) -> None:
    app = limited(
        *(Limit(name, concurrency=1) for name in "abc"), queues=[QueueConfig("ledger", concurrency=5)]
    )
    listed = "limit 'a', limit 'b', limit 'c', concurrency of task 'f', concurrency of queue 'ledger'"
    with pytest.raises(ConfigurationError, match=f"these are {listed}.*remove 2 of them"):
        app.task(limits=["a", "b", "c"], concurrency=2, queue="ledger", name="f")(lambda: None)
    three = app.task(limits=["a", "b", "c"], name="three")(lambda: None)
    with pytest.raises(ConfigurationError, match="limit 'c', concurrency of queue 'ledger'"):
        three.with_options(queue="ledger")


def test_a_key_that_is_always_a_list_or_an_object_is_refused_at_registration(limited: NewApp) -> None:
    app = limited(
        Limit("whole", concurrency=1, key="value"), Limit("part", concurrency=1, key="lines.numbers")
    )

    def with_list(value: list[int]) -> None: ...
    def with_object(value: Lines | None) -> None: ...
    def with_part(lines: Lines) -> None: ...
    def with_either(value: list[int] | str) -> None: ...

    for function, limit in ((with_list, "whole"), (with_object, "whole"), (with_part, "part")):
        with pytest.raises(ConfigurationError, match="is a list or an object in task"):
            app.task(limits=[limit])(function)
    assert app.task(limits=["whole"])(with_either).name == "with_either"


def test_a_key_that_can_be_a_float_is_refused(limited: NewApp) -> None:
    app = limited(Limit("p", concurrency=1, key="n"))

    def with_float(n: float) -> None: ...
    def with_either(n: int | float | None = None) -> None: ...
    def with_decimal(n: Decimal) -> None: ...
    def with_limits(n: Annotated[float, msgspec.Meta(ge=0)]) -> None: ...

    for function in (with_float, with_either, with_decimal, with_limits):
        with pytest.raises(ConfigurationError, match=r"can be a float or a Decimal.*several spellings"):
            app.task(limits=["p"])(function)

    @app.task(limits=["p"])
    def with_any(n: Any = "1.5") -> None: ...

    gates = app._sender.limits.gates
    assert [gates(call).names for call in (with_any.call(), with_any.call(1), with_any.call("1e5"))] == [
        ("p/1.5",), ("p/1",), ("p/1e5",)
    ]  # fmt: skip
    for wrong in (1.0, -2.5, 1e300):
        with pytest.raises(PayloadError, match="is a float"):
            with_any.send(wrong)
    with pytest.raises(ConfigurationError, match="has a float as its default"):

        @app.task(limits=["p"])
        def with_default(n: Any = 2.5) -> None: ...


class Order(msgspec.Struct):
    tenant: str | None


def test_an_omitted_argument_has_the_same_key_as_its_default(limited: NewApp) -> None:
    app = limited(Limit("t", concurrency=1, key="order.tenant"))

    @app.task(limits=["t"])
    def pack(order: Order = Order("acme")) -> None: ...  # noqa: B008

    @app.task(limits=["t"])
    def pack_none(order: Order | None = None) -> None: ...

    gates = app._sender.limits.gates
    assert gates(pack.call()).names == gates(pack.call(Order("acme"))).names == ("t/acme",)
    assert gates(pack_none.call()).names == gates(pack_none.call(None)).names == ("t/null",)
    assert gates(pack_none.call(Order(None))).names == ("t/null",)
    (node,), _ = app._sender.limits.node_gates(pack.call())
    assert node.otherwise == "acme"
    with pytest.raises(ConfigurationError, match="NUL"):

        @app.task(limits=["t"])
        def broken(order: Order = Order("a\x00")) -> None: ...  # noqa: B008


def test_a_workflow_node_has_the_same_key_as_a_send(limited: NewApp, db: StoreHarness) -> None:
    app = limited(Limit("t", concurrency=1, key="order.tenant"))

    @app.task(limits=["t"])
    def pack(order: Order | None = Order("acme"), text: str = "") -> None: ...  # noqa: B008

    query = db.plain("select {schema}.gates_of(%s::json, %s::json)")
    for call in (
        pack.call(),
        pack.call(Order("x")),
        pack.call(None),
        pack.call(Order(None)),
        pack.call(Order("y" * 201)),
    ):
        nodes, _ = app._sender.limits.node_gates(call)
        found = db.connection.execute(
            query, [msgspec.json.encode(nodes).decode(), call.payload.decode()]
        ).fetchone()
        assert found == ([*app._sender.limits.gates(call).names],)


def test_the_fix_of_a_limit_in_the_wrong_place_can_be_written(limited: NewApp) -> None:
    app = limited(Limit("a", concurrency=1))
    with pytest.raises(ConfigurationError, match="write 'a', and declare the limit"):
        app.task(limits=[Limit("a", concurrency=1)])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match=r"write \[Limit\('stripe', concurrency=20\)\]"):
        App(app._database.address.portable, limits={"a": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"write \[QueueConfig\('mail'\)\]"):
        App(app._database.address.portable, queues="mail")  # type: ignore[arg-type]
