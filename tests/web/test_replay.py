"""The replay of the minutes around a past moment: its step links, its part of a page, and its script in a real Chromium."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import Route

from everbeat.web.moments import REPLAYED, read_moment, replay_of, written
from tests.web.browser import BrowserThread, Observed, accessibility_problems
from tests.web.conftest import NewVisitor, Workers
from tests.web.installations import Installation
from tests.web.test_every_page import sideways
from tests.web.test_past import PAGES, ago, story

__all__ = ["story"]
AT = datetime(2026, 11, 29, 14, 0, tzinfo=UTC)
PART = {"x-everbeat-part": "1"}


def test_a_replay_ends_before_now_and_stays_around_its_middle() -> None:
    later = AT + timedelta(hours=1)
    assert (replay_of(AT, None, now=later).since, replay_of(AT, None, now=later).until) == (
        AT - REPLAYED,
        AT + REPLAYED,
    )
    moved = replay_of(AT, written(AT - timedelta(minutes=2)), now=later)
    assert moved.around == AT - timedelta(minutes=2)
    for far in ("nonsense", written(AT - timedelta(minutes=6))):
        assert replay_of(AT, far, now=later).around == AT
    for seconds, until_s in ((35, 30), (11, 10), (10, 0), (0, -10)):
        found = replay_of(AT, None, now=AT + timedelta(seconds=seconds))
        assert found.until == AT + timedelta(seconds=until_s)
    at = AT + timedelta(seconds=1)
    assert replay_of(at, None, now=at + timedelta(milliseconds=1)).length_s == 290


@pytest.mark.parametrize("path", PAGES)
async def test_the_part_of_a_page_is_what_differs_from_moment_to_moment(
    story: tuple[Workers, Any], new_visitor: NewVisitor, path: str
) -> None:
    visitor = new_visitor("see")
    at = written(ago(story[0], minutes=12))
    page = (await visitor.get(path, at=at)).text
    part = (await visitor.client.get(path, params={"at": at}, headers={**visitor.headers, **PART})).text
    assert "<html" not in part
    assert '<nav class="nav"' not in part
    for name in ("as-of-now", "as-of-lead", "as-of-says", "as-of-steps", "past"):
        assert part.count(f'id="{name}"') == page.count(f'id="{name}"') == 1, name
    inside = re.compile(r'<div id="past">(.*)</div>', re.DOTALL)
    (whole,), (alone,) = inside.findall(page.partition("</main>")[0]), inside.findall(part)
    assert re.findall(r"<h1>(.*?)</h1>", whole) == re.findall(r"<h1>(.*?)</h1>", alone) != []
    present = await visitor.client.get(path, headers={**visitor.headers, **PART})
    assert "<html" in present.text, "a page of the present is not replayed"
    assert "data-replay" not in present.text


async def test_without_a_script_links_lead_from_moment_to_moment(
    story: tuple[Workers, Any], new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("see")
    at = ago(story[0], minutes=12).replace(microsecond=0)
    page = (await visitor.get("/workers", at=written(at), around=written(at))).text
    links = {
        words: parse_qs(urlsplit(href.replace("&amp;", "&")).query)
        for href, words in re.findall(r'<a class="btn" href="(/workers\?[^"]*)">([−+]\d+ \w)</a>', page)
    }
    steps = {words: read_moment(found["at"][0]) - at for words, found in links.items()}  # type: ignore[operator]
    assert {words: int(step.total_seconds()) for words, step in steps.items()} == {
        "−5 m": -300, "−1 m": -60, "−10 s": -10, "+10 s": 10, "+1 m": 60, "+5 m": 300,
    }  # fmt: skip
    assert {found["around"][0] for found in links.values()} == {written(at)}
    assert re.search(r"data-replay [^>]* hidden>", page)


async def test_an_incident_leads_to_its_replay(story: tuple[Workers, Any], new_visitor: NewVisitor) -> None:
    visitor = new_visitor("see")
    (href,) = re.findall(r'<a href="([^"]*)">replay it</a>', (await visitor.get("/recoveries")).text)
    address = urlsplit(href.replace("&amp;", "&"))
    page = (await visitor.get(address.path, **parse_qs(address.query))).text
    assert "data-plays" in page
    (value,) = re.findall(r'type="range"[^>]* value="(\d+)"', page)
    assert int(value) == (REPLAYED - timedelta(minutes=1)).total_seconds()


@pytest.fixture
def past(full: Installation) -> tuple[str, datetime]:
    """Return the address of the replay of a past moment, and the moment."""
    at = ago(full.workers, minutes=12).replace(microsecond=0)
    return f"{full.address}/workers?at={written(at)}", at


class Requests:
    """When the script of a replay sent its requests, for which moments, and how many were open at once."""

    def __init__(self, seen: Observed) -> None:
        self.moments: list[datetime] = []
        self.most_open = self._open = 0
        seen.page.on("request", self._sent)
        seen.page.on("requestfinished", self._ended)
        seen.page.on("requestfailed", self._ended)

    def _sent(self, request: Any) -> None:
        if request.resource_type == "fetch":
            (text,) = parse_qs(urlsplit(request.url).query)["at"]
            moment = read_moment(text)
            assert moment is not None
            self.moments.append(moment)
            self._open += 1
            self.most_open = max(self.most_open, self._open)

    def _ended(self, request: Any) -> None:
        self._open -= request.resource_type == "fetch"


SHOWN = "[data-replay][data-shown='{}']"
BUTTON = "[data-replay] button"
CLOCK = "() => performance.now()"


@pytest.mark.xdist_group("browser")
def test_a_replay_plays_pauses_and_follows_the_slider_with_one_request_a_second(
    browser: BrowserThread, past: tuple[str, datetime]
) -> None:  # O1
    address, at = past

    async def check() -> None:
        async with browser.observed(address) as seen:
            page, sent = seen.page, Requests(seen)
            assert await page.inner_text(BUTTON) == "Play"
            assert await page.input_value("[data-replay] input") == "300"
            await page.clock.install()  # the seconds between the requests pass at once
            begun = await page.evaluate(CLOCK)
            await page.focus(BUTTON)
            await page.keyboard.press("Enter")
            assert await page.inner_text(BUTTON) == "Pause"
            await page.wait_for_selector(SHOWN.format(written(at + timedelta(seconds=10))))
            await page.clock.fast_forward(1_000)
            await page.wait_for_selector(SHOWN.format(written(at + timedelta(seconds=20))))
            await page.keyboard.press("Enter")
            took_ms = await page.evaluate(CLOCK) - begun
            assert await page.inner_text(BUTTON) == "Play"
            steps = [(moment - at).total_seconds() for moment in sent.moments]
            assert steps == [10 * number for number in range(1, len(steps) + 1)]
            assert len(steps) <= took_ms / 1_000 + 1
            lead = await page.inner_text("#as-of-lead")
            assert f"{at + timedelta(seconds=20):%H:%M:%S}" in lead
            assert await page.inner_text("[data-replay] .moment") in lead
            assert f"at={written(at + timedelta(seconds=20))}".replace(":", "%3A") in page.url
            assert "around=" in page.url
            paused = len(sent.moments)
            await page.focus("[data-replay] input")
            gate = asyncio.Event()

            async def hold(route: Route) -> None:
                await gate.wait()
                await route.continue_()

            await page.route("**/workers?*", hold)
            for _ in range(5):
                await page.keyboard.press("ArrowLeft")
                await page.clock.fast_forward(1_000)
            assert len(sent.moments) == paused + 1, "the first request is not answered yet"
            gate.set()
            await page.wait_for_selector(SHOWN.format(written(at - timedelta(seconds=30))))
            assert len(sent.moments) == paused + 2, "the moments in between are passed over"
            assert sent.most_open == 1
            assert (
                await page.get_attribute("[data-replay] input", "aria-valuetext")
                == f"{at - timedelta(seconds=30):%H:%M:%S}"
            )
            nav = await page.get_attribute(".nav a[href^='/pulse']", "href")
            assert nav is not None
            assert parse_qs(urlsplit(nav).query)["at"] == [written(at - timedelta(seconds=30))]
            assert await page.evaluate("document.activeElement.type") == "range"
            await page.keyboard.press("End")
            await page.clock.fast_forward(1_000)
            await page.wait_for_selector(SHOWN.format(written(at + REPLAYED)))
            await page.keyboard.press("Home")
            await page.clock.fast_forward(1_000)
            await page.wait_for_selector(SHOWN.format(written(at - REPLAYED)))
            assert await accessibility_problems(page) == []
            assert await sideways(seen, 360) is None
            await page.reload()
            assert await page.input_value("[data-replay] input") == "0", (
                "the address keeps the middle of the replay"
            )
            seen.check()

    browser.run(check())


@pytest.mark.xdist_group("browser")
def test_a_replay_stops_at_its_end_and_says_that_the_dashboard_does_not_answer(
    browser: BrowserThread, past: tuple[str, datetime]
) -> None:
    address, at = past

    async def check() -> None:
        last = f"{address.partition('?')[0]}?at={written(at + REPLAYED - timedelta(seconds=10))}&around={written(at)}&play=1"
        async with browser.observed(last) as seen:
            page = seen.page
            await page.wait_for_selector(SHOWN.format(written(at + REPLAYED)))
            await page.wait_for_selector(f"{BUTTON}:has-text('Play')")
            assert "play=" not in page.url
            seen.check()
            await page.context.set_offline(True)
            await page.click(BUTTON)
            await page.wait_for_selector("text=The replay stopped")
            assert await page.inner_text(BUTTON) == "Play"
            seen.console.clear()
        async with browser.observed(last, reduced_motion="reduce") as seen:
            assert await seen.page.inner_text(BUTTON) == "Play", "nothing moves by itself"
            assert (
                await seen.page.evaluate("'shown' in document.querySelector('[data-replay]').dataset")
                is False
            )
            seen.check()

    browser.run(check())
