"""The attempts on the page of a task: steps and the last progress as marks, in words, and as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from uuid import UUID

import pytest

from everbeat import App
from everbeat.store import leases, steps
from everbeat.store.recorded import RecordedStep
from everbeat.web.attempt_lanes import events_of, lanes_of
from tests.web.browser import BrowserThread, accessibility_problems
from tests.web.conftest import NewVisitor, Workers
from tests.web.installations import Installation
from tests.web.test_every_page import sideways

SECRET = "4242-secret-4242"


def crashed_and_running(workers: Workers, *, name: str = "charge") -> UUID:
    """Store a task whose first attempt died at 31 percent after a step, and whose second one waits for an event at 78 percent."""
    first = workers.start(name)
    record(workers, first, "probe", "reserve")
    report(workers, first, 0.31)
    (lease,) = [each for each in workers.db.leases() if each.id == first.id]
    certificate = {
        "last_progress": {"stage": "encode", "fraction": 0.31, "message": f"6,240 frames {SECRET}"}
    }
    error = {"code": "WORKER_CRASHED", "message": "killed by SIGKILL", "data": certificate}
    workers.db.recover(lease, "retry", outcome="CRASHED", error=json.dumps(error).encode())
    (second,) = [each for each in workers.db.claim(names=(name,)) if each.id == first.id]
    assert workers.db.start(second) == ["started"]
    record(workers, second, "encode#2")
    waiting = steps.wait_for_signal(
        second.id, second.claim_id, name="approved", event="approved", timeout_ms=None
    )
    workers.db.run(waiting)
    report(workers, second, 0.78)
    return first.id


def record(workers: Workers, held: Any, *names: str) -> None:
    for name in names:
        assert workers.db.run(steps.record_step(held.id, held.claim_id, name=name, result=b'"done"'))


def report(workers: Workers, held: Any, fraction: float) -> None:
    progress = {"stage": "encode", "fraction": fraction, "message": f"frames {SECRET}"}
    assert workers.db.run(leases.record_progress(held.id, held.claim_id, json.dumps(progress).encode()))


async def test_steps_and_the_last_progress_of_each_attempt_are_drawn_and_put_into_words(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    task = crashed_and_running(workers)
    page = unescape((await new_visitor("read").get(f"/tasks/{task}")).text)
    lanes = re.findall(
        r'<svg role="img" aria-label="(Attempt [^"]*)">(.*?)<div class="told">(.*?)</div>', page, re.DOTALL
    )
    (crashed, drawn, _), (running, drawn_again, told) = lanes
    assert re.fullmatch(
        r"Attempt 1: CRASHED, [^;]+; 2 recorded; last progress encode 31 % 6,240 frames .*", crashed
    )
    assert re.fullmatch(
        r"Attempt 2: RUNNING, [^;]+; 2 recorded; last progress encode 78 % frames .*", running
    )
    assert (drawn.count("k-live"), drawn.count("hollow")) == (2, 0)
    assert (drawn_again.count("k-live"), drawn_again.count("hollow")) == (1, 1), "a wait has another shape"
    assert ">31 %</text>" in drawn
    assert "encode 78 %" in told
    table = page.partition("The same as a table")[2].partition("</table>")[0]
    rows = re.findall(r'<td class="wide">([^<]*)</td>', table)
    assert [re.sub(r"[\d.]+ m?s", "N s", row) for row in rows] == [
        "started on w1",
        "step probe done, N s after the start",
        "step reserve done, N s after the mark before",
        f"last progress: encode 31 % 6,240 frames {SECRET}",
        "crashed after N s, WORKER_CRASHED",
        "started on w1",
        "step encode#2 done, N s after the start",
        "wait for the event approved begun",
        f"last progress: encode 78 % frames {SECRET}",
    ]


async def test_hidden_progress_is_in_no_lane_and_in_no_table(
    workers: Workers, new_visitor: NewVisitor
) -> None:  # O3
    task = crashed_and_running(workers)
    for visitor in (new_visitor("see"), new_visitor("admin", hide=["charge:card"])):
        page = (await visitor.get(f"/tasks/{task}")).text
        assert SECRET not in page
        assert "encode 31" not in page
        assert "step probe done" in page


AT = datetime(2030, 1, 1, tzinfo=UTC)


def step(number: int, **given: Any) -> RecordedStep:
    at = AT + timedelta(seconds=number)
    values = {
        "kind": "step", "name": f"s{number}", "state": "DONE", "attempt": 1, "begun_at": at, "recorded_at": at, "due_at": None,
        "result": None, "is_cut": None,
    }  # fmt: skip
    return RecordedStep(**(values | given))


async def told_of(app: App, workers: Workers, recorded: Sequence[RecordedStep]) -> list[Any]:
    held = workers.start()
    task = await app.ainfo(held.id)
    lanes, _ = lanes_of(task, [], recorded, now=datetime.now(UTC))
    return lanes


async def test_each_kind_of_record_says_the_duration_that_is_known(app: App, workers: Workers) -> None:
    minute = AT + timedelta(minutes=1)
    (lane,) = await told_of(app, workers, [
        step(1, kind="sleep", due_at=minute + timedelta(seconds=1)),
        step(2, kind="event", recorded_at=minute),
        step(3, kind="event", state="TIMED_OUT", recorded_at=minute),
        step(4, kind="event", state="OPEN"),
        step(9),
    ])  # fmt: skip
    assert [(each.shape, each.told) for each in lane.steps] == [
        ("open", "sleep s1 for 1 m"),
        ("open", "wait for the event s2 ended after 58 s"),
        ("late", "wait for the event s3 timed out after 57 s"),
        ("open", "wait for the event s4 begun"),
        ("done", "step s9 done, 5.0 s after the mark before"),
    ]


async def test_a_lane_draws_a_bounded_number_of_steps_and_counts_the_others(
    app: App, workers: Workers
) -> None:
    (lane,) = await told_of(app, workers, [step(number) for number in range(130)])
    assert (len(lane.steps), lane.not_drawn, lane.steps[-1].told) == (
        100,
        30,
        "step s129 done, 1.0 s after the mark before",
    )
    assert "130 recorded" in lane.told
    assert len(events_of([lane])) == 101


@pytest.mark.xdist_group("browser")
def test_the_lanes_are_accessible_at_360_pixels_in_light_and_dark(
    browser: BrowserThread, full: Installation
) -> None:  # O1
    task = crashed_and_running(full.workers, name="drawn")

    async def check() -> None:
        async with browser.observed(f"{full.address}/tasks/{task}") as seen:
            await seen.page.click("text=The same as a table")
            assert await seen.page.locator(".as-table td.wide").count() == 9
            for scheme in ("light", "dark"):
                await seen.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
                assert await accessibility_problems(seen.page) == []
            assert await sideways(seen, 360) is None
            seen.check()

    browser.run(check())
