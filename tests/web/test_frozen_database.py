"""Live pages of a frozen database say within seconds that they are old, and recover by themselves. A standby is watched, too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from everbeat import App
from everbeat.store.target import Target
from tests.replication import Pair
from tests.store.conftest import StoreHarness
from tests.web.browser import BrowserThread, Observed, dashboard_process

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("browser")]
SAYS_WITHIN_S = 10.0
LIVE = "html[data-live-at]"
STATE = "() => document.querySelector('#live-state').innerText"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Yield a primary with a tree, and its standby."""
    made = Pair.open()
    app = App(made.primary.tcp_url, auto_migrate="create")
    try:
        app.list_workers()
        target = Target.parse(made.primary.tcp_url, schema="everbeat")
        with target.connect("everbeat test") as connection:
            StoreHarness(target, connection).supervisor("fra-1-1-aa", "w1")
        made.wait_replayed()
        yield made
    finally:
        made.thaw_primary()
        app.close()
        made.close()


def beat(pair: Pair, *, ago: str = "0 s") -> None:
    """Let the tree beat, or set its last beat back."""
    with psycopg.connect(pair.primary.tcp_url, autocommit=True) as connection:
        connection.execute(
            "update everbeat.supervisors set last_beat_at = now() - %s::interval, beat_seq = beat_seq + 1",
            [ago],
        )
        connection.execute("update everbeat.workers set started_at = now() - interval '1 h'")


async def said(page: Observed, holds: Callable[[str], bool], *, within_s: float) -> float:
    """Return after how many seconds the line about the state of the page fulfils a condition."""
    began = time.monotonic()
    while not holds(await page.page.evaluate(STATE)):
        assert time.monotonic() - began < within_s, await page.page.evaluate(STATE)
        await asyncio.sleep(0.1)  # the page has no event for the test
    return time.monotonic() - began


@pytest.mark.parametrize("path", ["/pulse", "/tasks"])
def test_a_page_says_that_a_frozen_database_makes_it_old_and_is_live_after_the_thaw(
    browser: BrowserThread, pair: Pair, tmp_path: Path, path: str
) -> None:
    async def story(address: str) -> None:
        async with browser.observed(f"{address}{path}") as page:
            await page.page.wait_for_selector(LIVE, timeout=20_000, state="attached")
            await asyncio.to_thread(pair.freeze_primary)
            took_s = await said(page, lambda text: text.startswith("Not live"), within_s=SAYS_WITHIN_S)
            print(f"{path}: said that it is old after {took_s:.1f} s")
            assert "This page shows its last state." in await page.page.evaluate(STATE)
            await asyncio.to_thread(pair.thaw_primary)
            took_s = await said(page, lambda text: not text, within_s=SAYS_WITHIN_S)
            print(f"{path}: was live {took_s:.1f} s after the thaw")
            assert len(page.documents) == 1, "the page was loaded again"
            page.check()

    target = Target.parse(pair.primary.tcp_url, schema="everbeat")
    with dashboard_process(target, log=tmp_path / "web.log") as dashboard:
        browser.run(story(dashboard.address), within=60)


def test_a_standby_shows_beats_as_they_arrive_and_judges_no_tree_by_old_ones(
    browser: BrowserThread, pair: Pair, tmp_path: Path
) -> None:
    async def story(address: str) -> None:
        async with browser.observed(f"{address}/pulse") as page:
            for ago, state in (("0 s", "beats"), ("1 h", "unknown"), ("0 s", "beats")):
                await asyncio.to_thread(beat, pair, ago=ago)
                await page.page.wait_for_selector(
                    f'[data-tree="fra-1-1-aa"].is-{state}', timeout=10_000, state="attached"
                )
                if state == "unknown":
                    lead = await page.page.inner_text("#live-say .lead")
                    assert lead == "Whether 1 tree beats is not known"
            page.check()

    target = Target.parse(pair.standby.tcp_url, schema="everbeat")
    with dashboard_process(target, log=tmp_path / "web.log") as dashboard:
        browser.run(story(dashboard.address), within=60)
