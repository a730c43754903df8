"""Events contain no arguments beyond the variables of the user's code, and are small enough to be accepted."""

from __future__ import annotations

from typing import Any

import pytest
import sentry_sdk

from everbeat import App
from everbeat.errors import DatabaseError
from everbeat.sentry.events import MOST_EXCEPTIONS
from tests.client.working import working
from tests.sentry.conftest import NewApp, Sentry

SECRET = "-".join(["4711", "secret"])
"""An argument. The source of the test, which events quote, does not contain it."""


def frames_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    (thread,) = event["threads"]["values"]
    frames: list[dict[str, Any]] = thread["stacktrace"]["frames"]
    return frames


@pytest.mark.parametrize("is_hidden", [True, False])
async def test_the_stack_of_a_message_has_no_variables_of_everbeat_and_none_of_a_hidden_task(
    sentry: Sentry, new_app: NewApp, *, is_hidden: bool
) -> None:
    sentry.init(hide=["charge"] if is_hidden else [], attach_stacktrace=True)
    app = new_app()

    @app.task(name="charge")
    async def charge(card: str) -> None:
        sentry_sdk.capture_message(f"charging {card}")

    handle = await charge.asend(SECRET)
    async with working(app):
        await handle.aoutcome(timeout=30)
    (event,) = sentry.events
    frames = frames_of(event)
    assert frames[-1]["function"] == "charge"
    own = [frame for frame in frames if frame["module"].startswith("everbeat.")]
    assert own
    assert [frame for frame in own if "vars" in frame] == []
    assert (SECRET in str(frames[-1].get("vars"))) is not is_hidden
    assert (SECRET in str(event)) is not is_hidden


async def test_the_spans_of_a_hidden_task_have_no_texts(sentry: Sentry, new_app: NewApp) -> None:
    sentry.init(hide=["charge"])
    app = new_app()

    @app.task(name="charge")
    async def charge(card: str) -> None:
        with sentry_sdk.start_span(op="db", name=f"select {card}") as span:
            span.set_data("query", card)

    handle = await charge.asend(SECRET)
    async with working(app):
        await handle.aresult(timeout=30)
    (run,) = sentry.transactions()
    assert SECRET not in str(run)
    assert [span["op"] for span in run["spans"]] == ["queue.process", "db"]
    assert run["spans"][0]["data"]["messaging.message.id"] == str(handle.id)


def test_an_event_of_a_failed_send_has_no_variables_of_everbeat(sentry: Sentry) -> None:
    sentry.init()
    app = App("postgresql://nobody@127.0.0.1:1/none?connect_timeout=1")

    @app.task
    def charge(card: str) -> None: ...

    try:
        charge.send(SECRET)
    except DatabaseError as problem:
        sentry_sdk.capture_exception(problem)
    finally:
        app.close()
    (event,) = sentry.events
    frames = [frame for each in event["exception"]["values"] for frame in each["stacktrace"]["frames"]]
    assert len([frame for frame in frames if frame["module"].startswith("everbeat.")]) > 2
    assert [frame for frame in frames if SECRET in str(frame)] == []


async def test_a_long_chain_of_exceptions_is_cut(sentry: Sentry, new_app: NewApp) -> None:
    sentry.init()
    app = new_app()

    @app.task
    async def fail_again_and_again() -> None:
        problem: Exception | None = None
        for n in range(400):
            try:
                raise ValueError(f"{n} {'x' * 1_000}") from problem
            except ValueError as one:
                problem = one
        raise KeyError("last") from problem

    handle = await fail_again_and_again.asend()
    async with working(app):
        await handle.aoutcome(timeout=30)
    (event,) = sentry.events
    errors = event["exception"]["values"]
    assert len(errors) == MOST_EXCEPTIONS
    assert errors[-1]["type"] == "KeyError"
    assert errors[-2]["value"].startswith("399 ")
