"""A real Chromium watches the dashboard of a real database with real worker trees."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from urllib.parse import urlencode

import httpx
import pytest

from tests.migrated import MigratedSchemas
from tests.stories.scenario import SLACK, Scenario, Tree, new_scenario, program_of
from tests.web.browser import (
    BrowserThread,
    DashboardProcess,
    Observed,
    accessibility_problems,
    dashboard_process,
)

pytestmark = pytest.mark.xdist_group("browser")
PAGES = ("/pulse", "/workers", "/recoveries")
BEATS = {"runner_heartbeat_interval_ms": 2_000, "claimer_heartbeat_interval_ms": 2_000}
LIVE = "html[data-live-at]"
"""The page has received its parts at least once."""
COMMITTED_WITHIN_S = 1.0
DEATH_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def scenario(
    database_url: str, migrated_schemas: MigratedSchemas, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scenario]:
    """Yield one scenario for all tests of this module: to start its trees takes longest."""
    schema = migrated_schemas.take()
    try:
        with new_scenario(database_url, schema, tmp_path_factory.mktemp("pages"), is_migrated=True) as made:
            yield made
    finally:
        migrated_schemas.give_back(schema)


@pytest.fixture(scope="module")
def program(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario) as imported:
        yield imported


@pytest.fixture(scope="module")
def address(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dashboard_process(
        scenario.target, log=tmp_path_factory.mktemp("web") / "web.log", options=("--name", "shop")
    ) as found:
        yield found.address


def a_tree(scenario: Scenario, slot: str) -> Tree:
    return scenario.ready_tree(recovery=BEATS, worker={"processes": 1}, options=("--slot", slot))


def supervisor_of(scenario: Scenario, tree: Tree) -> str:
    (row,) = scenario.query("select id from {schema}.supervisors where pid = %s", tree.pid)
    return str(row["id"])


class Seen:
    """When a condition of the page was first true, by the clock of this machine."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    async def wait(self, page: Observed, name: str, selector: str, *, within_s: float) -> None:
        await page.page.wait_for_selector(selector, timeout=within_s * 1_000, state="attached")
        self.at[name] = time.time()


async def watch_a_death(
    browser: BrowserThread, address: str, scenario: Scenario, tree: Tree, name: str
) -> Seen:
    """Kill a tree with SIGKILL while its strip is watched, and return when the page showed what."""
    seen = Seen()
    async with browser.observed(f"{address}/pulse") as page:
        await page.page.wait_for_selector(f'[data-tree="{name}"].is-beats', timeout=20_000)
        await page.page.wait_for_selector(LIVE, timeout=20_000, state="attached")
        documents = list(page.documents)
        killed_at = time.time()
        await asyncio.to_thread(tree.kill)
        seen.at["killed"] = killed_at
        within = DEATH_WITHIN_S * SLACK + 10
        flat, incident = f'[data-tree="{name}"].is-dead line.flat', f'[data-incident="{name}"]'
        await asyncio.gather(
            seen.wait(page, "flat", flat, within_s=within),
            seen.wait(page, "incident", incident, within_s=within),
        )
        label = await page.page.get_attribute(f'[data-tree="{name}"] svg.strip', "aria-label")
        assert label is not None
        assert "noticed by session" in label
        assert page.documents == documents, "the page was loaded again"
        page.check()
    return seen


def test_a_killed_tree_goes_flat_and_its_incident_appears_without_a_reload(  # O1
    browser: BrowserThread, address: str, scenario: Scenario, program: ModuleType
) -> None:
    doomed = a_tree(scenario, "fra-2")  # alone at first, so that it gets the tasks
    name = supervisor_of(scenario, doomed)
    tasks = [program.wait_for_on_crash.send("film") for _ in range(16)]
    scenario.until(
        lambda: scenario.query(
            "select from {schema}.tasks t join {schema}.workers w on w.id = t.claimed_by_worker_id"
            " where t.state = 'RUNNING' and w.supervisor_id = %s",
            name,
        ),
        within=20,
        what="a task that runs on the tree that will die",
    )
    rescuer = a_tree(scenario, "fra-1")
    seen = browser.run(watch_a_death(browser, address, scenario, doomed, name), within=90)
    scenario.open_gate("film")
    scenario.until(
        lambda: {scenario.task(task.id)["state"] for task in tasks} == {"COMPLETED"},
        within=30,
        what="all tasks complete",
    )
    (row,) = scenario.query(
        "select extract(epoch from ended_at) as at from {schema}.supervisors where id = %s", name
    )
    decided = [
        float(each["at"])
        for each in scenario.query(
            "select extract(epoch from noticed_at) as at from {schema}.recoveries where supervisor_id = %s",
            name,
        )
    ]
    committed = max([float(row["at"]), *decided])
    shown = max(seen.at["flat"], seen.at["incident"])
    print(
        f"shown {shown - committed:.2f} s after the recovery and {shown - seen.at['killed']:.2f} s after the death"
    )
    assert shown - committed <= COMMITTED_WITHIN_S * SLACK
    assert shown - seen.at["killed"] <= DEATH_WITHIN_S * SLACK
    assert rescuer.process.poll() is None
    check_the_past(address, scenario, name, killed_at=seen.at["killed"])


def check_the_past(address: str, scenario: Scenario, tree: str, *, killed_at: float) -> None:
    """Check that the page of a moment before the death shows the tree alive with its running task, and one after it shows it dead."""
    (row,) = scenario.query("select ended_at from {schema}.supervisors where id = %s", tree)
    lost = scenario.query(
        "select task_id, started_at from {schema}.attempts where outcome in ('LOST', 'CRASHED')"
    )
    begun = max(each["started_at"] for each in lost)  # a task can start just before the kill
    assert begun.timestamp() < killed_at
    moments = {
        "before": begun,
        "unnoticed": row["ended_at"] - timedelta(milliseconds=10),
        "after": row["ended_at"] + timedelta(milliseconds=10),
    }
    found = {}
    for name, at in moments.items():
        answer = httpx.get(
            f"{address}/pulse",
            params={"at": at.isoformat()},
            headers={"accept": "application/json"},
            timeout=20,
        )
        assert answer.status_code == 200, answer.text
        found[name] = answer.json()
    states = {
        name: {each["supervisor_id"]: each["state"] for each in page["trees"]}.get(tree)
        for name, page in found.items()
    }
    # On a busy machine, a living tree misses beats, and two are missed before a death that is noticed late.
    alive = ("beats", "late")
    assert (states["before"] in alive, states["unnoticed"] in alive, states["after"]) == (True, True, "dead")
    ran = {run["task_id"] for run in found["before"]["runs"] if run["outcome"] in ("LOST", "CRASHED")}
    assert ran == {str(each["task_id"]) for each in lost}
    assert tree in found["unnoticed"]["dead_but_not_noticed"]
    assert tree in {each["id"] for each in found["after"]["incidents"]}


async def past_problems_of(browser: BrowserThread, address: str, scheme: str) -> list[str]:
    """Return what is wrong with the pages of a moment 20 s ago, also on a narrow screen."""
    at = (datetime.now(UTC) - timedelta(seconds=20)).isoformat()
    problems = []
    for path in ("/pulse", "/workers", "/recoveries", "/queues"):
        url = f"{address}{path}?{urlencode({'at': at})}"
        async with browser.observed(url, color_scheme=scheme, viewport={"width": 360, "height": 900}) as page:
            problems += await accessibility_problems(page.page)
            needed, shown = await page.page.evaluate(
                "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            )
            problems += [f"{path} needs {needed} of {shown} px"] if needed > shown else []
            page.check()
    return problems


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_of_the_past_has_no_accessibility_problem_and_fits_a_phone(
    browser: BrowserThread, address: str, scenario: Scenario, scheme: str
) -> None:
    assert browser.run(past_problems_of(browser, address, scheme)) == []


async def problems_of(browser: BrowserThread, url: str, scheme: str) -> list[str]:
    async with browser.observed(url, color_scheme=scheme) as page:
        await page.page.wait_for_selector(LIVE, timeout=20_000, state="attached")
        found = await accessibility_problems(page.page)
        page.check()
    return found


@pytest.mark.parametrize("path", PAGES)
def test_a_live_page_has_no_accessibility_problem_in_light_and_in_dark(  # O1
    browser: BrowserThread, address: str, scenario: Scenario, path: str
) -> None:
    for scheme in ("light", "dark"):
        assert browser.run(problems_of(browser, f"{address}{path}", scheme)) == []


async def widths_of(browser: BrowserThread, url: str, width: int) -> tuple[int, int]:
    async with browser.observed(url, viewport={"width": width, "height": 900}) as page:
        await page.page.wait_for_selector(LIVE, timeout=20_000, state="attached")
        found = await page.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        page.check()
    return found[0], found[1]


@pytest.mark.parametrize("width", [360, 1920])
def test_a_live_page_does_not_scroll_sideways(
    browser: BrowserThread, address: str, scenario: Scenario, width: int
) -> None:
    for path in PAGES:
        needed, shown = browser.run(widths_of(browser, f"{address}{path}", width))
        assert needed <= shown, f"{path} needs {needed} of {width} px"


async def calm_of(browser: BrowserThread, url: str) -> tuple[str | None, str]:
    async with browser.observed(url, reduced_motion="reduce") as page:
        await page.page.wait_for_selector(LIVE, timeout=20_000, state="attached")
        pen = await page.page.query_selector(".pen")
        motion = "none" if pen is None else await pen.evaluate("each => getComputedStyle(each).animationName")
        before = await page.page.evaluate("document.documentElement.dataset.liveAt")
        await page.page.wait_for_timeout(3_000)
        after = await page.page.evaluate("document.documentElement.dataset.liveAt")
        page.check()
    return None if before == after else after, motion


def test_the_paper_does_not_move_for_viewers_who_want_no_motion(
    browser: BrowserThread, address: str, scenario: Scenario
) -> None:
    assert browser.run(calm_of(browser, f"{address}/pulse")) == (None, "none")


async def refused_then_live(browser: BrowserThread, url: str) -> tuple[str, bool]:
    """Return what a page says while a proxy answers for the dashboard, and whether the page becomes live after that."""
    async with browser.observed("about:blank") as page:
        await page.page.route("**/pulse/stream*", lambda route: route.fulfill(status=502, body="Bad Gateway"))
        await page.page.goto(url)
        said = page.page.locator("#live-state", has_text="Not live")
        await said.wait_for(state="attached", timeout=20_000)
        box = await said.bounding_box()
        await page.page.unroute("**/pulse/stream*")
        await page.page.wait_for_selector(LIVE, timeout=20_000, state="attached")
        return await page.page.locator("#live-state").inner_text(), box is not None and box["height"] > 8


async def frozen_then_live(browser: BrowserThread, dashboard: DashboardProcess, path: str) -> bool:
    """Return whether a page says that it is not live exactly while its dashboard is frozen."""
    async with browser.observed(f"{dashboard.address}{path}") as page:
        await page.page.wait_for_selector(LIVE, timeout=20_000, state="attached")
        state = page.page.locator("#live-state")
        await page.page.wait_for_timeout(12_000)
        assert await state.inner_text() == ""
        dashboard.signal(signal.SIGSTOP)
        try:
            await state.and_(page.page.get_by_text("Not live")).wait_for(timeout=30_000)
        finally:
            dashboard.signal(signal.SIGCONT)
        await page.page.wait_for_selector("#live-state:empty", timeout=20_000, state="attached")
        return await page.page.locator("#live-state").inner_text() == ""


@pytest.mark.long
@pytest.mark.parametrize("path", ["/pulse", "/recoveries"])
def test_a_page_says_that_it_is_not_live_while_the_dashboard_is_frozen(
    browser: BrowserThread, scenario: Scenario, tmp_path: Path, path: str
) -> None:
    with dashboard_process(scenario.target, log=tmp_path / "web.log") as dashboard:
        assert browser.run(frozen_then_live(browser, dashboard, path), within=120)


def test_a_page_whose_stream_was_refused_says_so_and_becomes_live_again(
    browser: BrowserThread, address: str, scenario: Scenario
) -> None:
    assert browser.run(refused_then_live(browser, f"{address}/pulse")) == ("", True)
