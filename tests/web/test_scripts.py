"""The scripts of the pages in a real Chromium: keys, times, theme, questions before actions, copying, and streams of unseen pages."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest
from playwright.async_api import Dialog, Page

from everbeat import App
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.web.browser import BrowserThread, Observed, dashboard_process
from tests.web.installations import LISTS, Installation
from tests.web.test_every_page import sideways

pytestmark = pytest.mark.xdist_group("browser")
LIVE = "html[data-live-at]"
FOCUSED = "() => document.activeElement.id || document.activeElement.outerHTML.slice(0, 120)"
ZONE = "Asia/Kolkata"


def run(
    browser: BrowserThread, url: str, check: Callable[[Observed], Awaitable[None]], **context: Any
) -> None:
    """Open a page, and check it. Its console must stay empty."""

    async def checked() -> None:
        async with browser.observed(url, **context) as seen:
            await check(seen)
            seen.check()

    browser.run(checked())


def test_keys_find_and_open_pages_but_not_while_a_user_types(
    browser: BrowserThread, full: Installation
) -> None:
    async def check(seen: Observed) -> None:
        page = seen.page
        await page.keyboard.press("/")
        assert await page.evaluate(FOCUSED) == "search"
        await page.keyboard.type("g t/")
        assert await page.input_value("#search") == "g t/"
        await page.keyboard.press("Escape")
        assert await page.evaluate(FOCUSED) != "search"
        await page.keyboard.press("g")
        await page.keyboard.press("q")
        await page.wait_for_url("**/queues")

    run(browser, f"{full.address}/tasks", check)


def test_tab_reaches_every_control_in_the_order_of_the_page_and_none_keeps_the_focus(
    browser: BrowserThread, full: Installation
) -> None:
    async def check(seen: Observed) -> None:
        page = seen.page
        await page.keyboard.press("Tab")
        assert "skip" in await page.evaluate(FOCUSED)
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.getElementById('main').contains(document.activeElement)")
        await page.goto(f"{full.address}/tasks")
        await page.evaluate(_NUMBER_CONTROLS)
        count, visited = await page.evaluate("window.controls.length"), []
        for _ in range(count):
            await page.keyboard.press("Tab")
            visited.append(await page.evaluate(_NUMBER_OF_FOCUSED))
        assert visited == list(range(count)), "a control is skipped, or keeps the focus"

    run(browser, f"{full.address}/tasks", check)


_NUMBER_CONTROLS = """() => {
  window.controls = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
    .filter(each => !each.disabled && each.type !== "hidden" && each.checkVisibility({visibilityProperty: true}));
}"""
_NUMBER_OF_FOCUSED = """() => {
  const style = getComputedStyle(document.activeElement);
  return style.outlineStyle === "none" ? "no outline" : window.controls.indexOf(document.activeElement);
}"""


def test_times_are_local_or_utc_and_the_theme_is_remembered(
    browser: BrowserThread, full: Installation
) -> None:
    async def check(seen: Observed) -> None:
        page = seen.page
        moment = datetime.fromisoformat(str(await page.get_attribute("main time", "datetime")))
        local, utc = (f"{moment.astimezone(zone):%H:%M:%S}" for zone in (ZoneInfo(ZONE), UTC))
        assert local in await page.inner_text("main time")
        before = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.click("button[value=utc]")
        assert utc in await page.inner_text("main time")
        await page.click("button[value=dark]")
        assert await page.get_attribute("html", "data-theme") == "dark"
        after = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert before != after
        assert utc in await page.inner_text("main time")
        await page.click("button[value=auto]")
        assert await page.get_attribute("html", "data-theme") is None
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == before

    run(browser, f"{full.address}{full.ones['failed task']}", check, timezone_id=ZONE)


def test_an_action_that_cannot_be_undone_asks_first(browser: BrowserThread, full: Installation) -> None:
    task = full.workers.send("asked")

    async def check(seen: Observed) -> None:
        page = seen.page
        questions: list[str] = []

        async def refuse(dialog: Dialog) -> None:
            questions.append(dialog.message)
            await (dialog.dismiss() if len(questions) == 1 else dialog.accept())

        page.on("dialog", refuse)
        await page.click("button:has-text('Cancel')")
        assert full.workers.db.row(task, "state") == "PENDING"
        await page.click("button:has-text('Cancel')")
        await page.wait_for_selector("text=The task is cancelled")
        assert questions == ["Cancel this task? Its code is asked to stop."] * 2

    run(browser, f"{full.address}/tasks/{task}", check)


def test_a_command_is_copied_and_one_box_ticks_all_rows(browser: BrowserThread, full: Installation) -> None:
    async def check(seen: Observed) -> None:
        page = seen.page
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        button = page.locator("main button.copy").first
        await button.click()
        assert await page.evaluate("navigator.clipboard.readText()") == await button.get_attribute(
            "data-copy"
        )
        await page.goto(f"{full.address}/tasks")
        ticked = "document.querySelectorAll('input[name=id]:checked').length"
        rows = await page.evaluate("document.querySelectorAll('input[name=id]').length")
        await page.check("[data-ticks]")
        assert await page.evaluate(ticked) == rows > 1
        await page.uncheck("[data-ticks]")
        assert await page.evaluate(ticked) == 0

    run(browser, f"{full.address}{full.ones['recovered task']}", check)


async def hide(page: Page, *, is_hidden: bool) -> None:
    await page.evaluate(
        "(is) => { Object.defineProperty(document, 'hidden', {configurable: true, get: () => is});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        is_hidden,
    )


def test_an_unseen_page_has_no_stream_and_misses_nothing(browser: BrowserThread, full: Installation) -> None:
    task = full.workers.fail("unseen")

    async def check(seen: Observed) -> None:
        page = seen.page
        await page.wait_for_selector(LIVE, state="attached")
        await hide(page, is_hidden=True)
        same = {"sec-fetch-site": "same-origin"}
        async with httpx.AsyncClient(base_url=full.address, headers=same) as client:
            assert (await client.post(f"/tasks/{task}/retry")).status_code == 303
        last = await page.get_attribute("html", "data-live-at")
        await asyncio.sleep(2.5)  # a stream would have brought the notice
        assert await page.get_attribute("html", "data-live-at") == last
        await hide(page, is_hidden=False)
        await page.wait_for_selector("#live-changed .lead")

    run(browser, f"{full.address}/tasks/{task}", check)


@pytest.mark.long
def test_a_page_that_is_not_ready_loads_itself_again_unless_it_is_used(
    browser: BrowserThread, full: Installation
) -> None:
    async def check(seen: Observed) -> None:
        page = seen.page
        assert await page.get_attribute("html", "data-refresh") == "3"
        async with page.expect_navigation(timeout=10_000):
            pass
        await page.focus("main input[name=actor]")
        await page.fill("main input[name=actor]", "ann")
        await asyncio.sleep(4)  # the page would have been loaded again
        assert await page.input_value("main input[name=actor]") == "ann"

    run(browser, f"{full.address}/audit", check)


@pytest.mark.long
def test_nothing_moves_for_viewers_who_want_no_motion(browser: BrowserThread, full: Installation) -> None:
    async def check(seen: Observed) -> None:
        for path in full.pages.values():
            await seen.page.goto(f"{full.address}{path}")
            assert await seen.page.evaluate("document.getAnimations().length") == 0, path
        seen.console.clear()  # one of the pages does not exist

    run(browser, f"{full.address}/tasks", check, reduced_motion="reduce")


def test_a_program_that_mounts_the_dashboard_loads_no_library_of_the_terminal() -> None:
    text = "import sys, everbeat.web; print(sorted({'typer', 'rich', 'everbeat.cli'} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.long
@pytest.mark.parametrize("path", ["/pulse", "/queues"])
def test_an_open_page_says_that_the_database_is_away_and_continues_when_it_is_back(
    browser: BrowserThread, new_server: NewServer, tmp_path: Path, path: str
) -> None:  # O2
    server = new_server()
    app = App(server.url)
    app.migrate()
    app.close()
    target = Target.parse(server.url, schema="everbeat")
    with dashboard_process(target, log=tmp_path / "web.log") as process:

        async def check(seen: Observed) -> None:
            page = seen.page
            await page.wait_for_selector(LIVE, state="attached")
            server.stop("immediate")
            await page.wait_for_selector("text=Not live")
            box = await page.locator("#live-state").bounding_box()
            assert box is not None
            assert box["height"] > 10, "only a screen reader would notice"
            for other in LISTS if path == "/queues" else ():
                async with browser.observed(f"{process.address}{other}") as away:
                    assert away.elsewhere == []
                    assert [text for text in away.console if "status of" not in text] == []
                    assert await sideways(away, 360) is None
            await asyncio.to_thread(server.restart, "immediate")
            await page.wait_for_selector("#live-state:empty", state="attached")

        run(browser, f"{process.address}{path}", check)
