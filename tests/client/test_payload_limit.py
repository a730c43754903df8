"""Test the payload limit: the app refuses larger arguments before it stores anything and names the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from everbeat import App
from everbeat.client import sent_together
from everbeat.errors import ConfigurationError, PayloadError

pytestmark = pytest.mark.usefixtures("migrated")
LIMIT = 1024 * 1024
FITS = LIMIT - len('{"text":""}')


@pytest.fixture
def small(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema, payload_limit="1MB")
    opened.migrate()
    yield opened
    opened.close()


def test_every_kind_of_send_refuses_arguments_above_the_payload_limit(small: App) -> None:  # B13
    @small.task
    def work(text: str) -> None: ...

    too_long = "x" * (FITS + 1)
    sends: list[Callable[[], Any]] = [
        lambda: work.send(too_long),
        lambda: small.send_many([work.call("x"), work.call(too_long)]),
        lambda: small.send_by_name("work", {"text": too_long}),
        lambda: small.send_by_name("elsewhere", {"text": too_long}),
        lambda: small.workflow("flow").add(work, too_long),
    ]
    for send in sends:
        with pytest.raises(PayloadError) as caught:
            send()
        assert (
            f"would take {LIMIT + 1:,} bytes of JSON; App.payload_limit allows {LIMIT:,}"
            in caught.value.message
        )
        assert (
            caught.value.fix
            == "store large data elsewhere and send a reference to it, or raise App(payload_limit=...)."
        )
    assert small.list_tasks() == []
    assert small.list_workflows() == []
    assert work.send("x" * FITS).info().state == "PENDING"
    assert small.send_by_name("elsewhere", {"text": "x" * FITS}).info().state == "PENDING"


def test_the_default_payload_limit_accepts_20_megabytes_and_refuses_more_than_32(
    database_url: str, schema: str
) -> None:  # B13
    app = App(database_url, schema=schema)
    assert app.payload_limit == 32 * 1024 * 1024

    @app.task
    def work(text: str) -> None: ...

    try:
        assert work.send("x" * 20_000_000).info().state == "PENDING"
        with pytest.raises(PayloadError, match="33,554,432"):
            work.send("x" * 33_554_432)
    finally:
        app.close()


@pytest.mark.parametrize("wrong", ["1023KB", "257MB", 0, "many", None, True])
def test_a_payload_limit_outside_its_bounds_is_refused(wrong: Any) -> None:  # B13
    with pytest.raises(ConfigurationError, match=r"App\.payload_limit"):
        App("postgresql://localhost/x", payload_limit=wrong)
    assert App("postgresql://localhost/x", payload_limit="256MB").payload_limit == 256 * 1024 * 1024


def test_send_many_has_one_limit_for_the_arguments_of_all_its_calls(
    small: App, monkeypatch: pytest.MonkeyPatch
) -> None:  # B13
    @small.task
    def work(text: str) -> None: ...

    monkeypatch.setattr(
        sent_together, "LARGEST_BYTES", 3 * LIMIT
    )  # 256 MB would take the memory of the machine
    calls = [work.call("x" * FITS) for _ in range(4)]
    with pytest.raises(PayloadError, match="The arguments of the 4 calls") as caught:
        small.send_many(calls)
    assert caught.value.fix == "send them in several batches."
    assert small.list_tasks() == []
    assert len(small.send_many(calls[:3])) == 3
