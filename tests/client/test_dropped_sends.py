"""Test what a send returns or raises if a limit with when_full="drop" has no room."""

from __future__ import annotations

from datetime import timedelta

import pytest

from everbeat import App, Limit
from everbeat.errors import LimitFull
from tests.client.conftest import NewApp
from tests.store.conftest import StoreHarness


def with_two_functions(limited: NewApp) -> App:
    app = limited(Limit("shared", concurrency=1, when_full="drop"))

    @app.task(limits=["shared"])
    def report() -> int:
        return 7

    @app.task(limits=["shared"])
    def export() -> str:
        return "done"

    return app


@pytest.mark.parametrize("is_held", [True, False])
def test_a_dropped_send_names_the_function_of_the_task_that_it_returns(
    limited: NewApp, db: StoreHarness, is_held: bool
) -> None:
    app = with_two_functions(limited)
    rival = app.send_by_name("export")
    claimed = db.claim(names=("export",), starts=1)
    if not is_held:  # a task that has run before waits on, although its limit is full
        db.settle(*claimed, "RELEASED")
        app.set_limit("shared", concurrency=0)
        db.claim(names=("export",), starts=1)
    dropped = app.send_by_name("report")
    assert (dropped.id, dropped.name, dropped.existed) == (rival.id, "export", True)


def test_a_dropped_send_decodes_the_result_of_another_function_as_plain_json(
    limited: NewApp, db: StoreHarness
) -> None:
    app = limited(Limit("shared", concurrency=1, when_full="drop"))

    @app.task(limits=["shared"])
    def report() -> int:
        return 7

    @app.task(limits=["shared"])
    def export() -> str:
        return "done"

    export.send()
    claimed = db.claim(names=("export",), starts=1)
    dropped = report.send()
    db.start(*claimed)
    db.complete(*claimed, result=b'"done"')
    assert dropped.result(timeout="5s") == "done"  # type: ignore[comparison-overlap]


def test_a_dropped_send_prefers_the_task_that_has_its_key(limited: NewApp, db: StoreHarness) -> None:
    app = limited(Limit("shared", concurrency=2, when_full="drop"))

    @app.task(limits=["shared"])
    def report() -> None: ...

    other = report.with_options(key="a").send()
    db.claim(names=("report",), starts=1)
    own = report.with_options(key="b").send()
    assert own.id != other.id
    assert report.with_options(key="b").send().id == own.id
    assert report.with_options(key="c").send().id == other.id


def test_a_send_that_no_task_could_replace_names_the_limit_without_room(limited: NewApp) -> None:
    app = limited(Limit("report", concurrency=2, when_full="drop", key="user"))

    @app.task(limits=["report"], costs={"report": 2})
    def report(user: str) -> None: ...

    app.set_limit("report", concurrency=0)
    with pytest.raises(LimitFull) as error:
        report.send("ann")
    assert str(error.value) == (
        "Task 'report' was not sent: it needs 2 permits of limit 'report', whose concurrency is 0."
        " Fix: raise it with app.set_limit('report', concurrency=2) or more, or restore the numbers of the code: app.clear_limit('report')."
    )
    assert (error.value.limit, error.value.concurrency, error.value.cost) == ("report", 0, 2)
    app.set_limit("report", concurrency=1)
    with pytest.raises(LimitFull, match="whose concurrency is 1"):
        report.with_options(key="k").send("ann")
    app.clear_limit("report")
    first = report.send("ann")
    app.set_limit("report", concurrency=0)
    assert report.send("ann").id == first.id
    with pytest.raises(LimitFull):
        report.send("ben")


async def test_an_async_send_raises_the_same_error(limited: NewApp) -> None:
    app = limited(Limit("report", concurrency=2, when_full="drop"))

    @app.task(limits=["report"])
    async def report() -> None: ...

    await app.aset_limit("report", concurrency=0)
    with pytest.raises(LimitFull):
        await report.asend()


def test_a_task_that_is_due_later_does_not_fill_its_limit(limited: NewApp, db: StoreHarness) -> None:
    app = limited(Limit("report", concurrency=1, when_full="drop"))

    @app.task(limits=["report"])
    def report() -> None: ...

    later = report.schedule(timedelta(hours=1))
    first = report.send()
    assert first.id != later.id
    assert report.send().id == first.id
    db.claim(names=("report",), starts=1)
    assert report.send().id == first.id
