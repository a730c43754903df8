"""Makes the screenshots of the documentation: `python -m tests.web.screenshots`. It needs Chromium and takes about two minutes.

It starts worker trees on its own database, kills one tree and one process, freezes another tree, and takes pictures.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from everbeat.embedded.server import EmbeddedServer
from tests.stories.scenario import Scenario, Tree, new_scenario, program_of
from tests.web.browser import MISSING, BrowserThread, chromium_path, dashboard_process

PICTURES: Final = Path(__file__).parents[2] / "docs" / "images"
BEATS: Final = {
    "runner_heartbeat_interval_ms": 10_000,
    "claimer_heartbeat_interval_ms": 10_000,
    "running_stale_threshold_ms": 60_000,
    "claimed_stale_threshold_ms": 60_000,
    "check_interval_ms": 5_000,
}
TREES: Final = ("ams-1", "ams-2", "fra-1", "fra-2", "fra-3")
PAGES: Final = ("pulse", "workers", "recoveries")
WIDTHS: Final = (1440, 390)
SETTLES_S: Final = 75


def main(folder: Path, *, widths: tuple[int, ...] = WIDTHS) -> None:
    """Write a picture of each page in light and dark into a folder."""
    executable = chromium_path()
    if executable is None:
        sys.exit(MISSING)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as place,
        EmbeddedServer.open(Path(place)) as server,
        new_scenario(server.url, "everbeat", _within(place, "story"), check=False) as scenario,
    ):
        trees = {name: _tree(scenario, name) for name in TREES}
        _send(scenario)
        with dashboard_process(
            scenario.target, log=Path(place) / "web.log", options=("--name", "shop production")
        ) as dashboard:
            browser = BrowserThread(executable)
            try:
                browser.run(_watched(browser, dashboard.address, scenario, trees), within=SETTLES_S + 60)
                browser.run(_pictures(browser, dashboard.address, folder, widths), within=300)
            finally:
                browser.close()
        for gate in ("film", "late"):
            scenario.open_gate(gate)


def _within(place: str, name: str) -> Path:
    folder = Path(place) / name
    folder.mkdir()
    return folder


def _tree(scenario: Scenario, name: str) -> Tree:
    return scenario.ready_tree(
        recovery=BEATS,
        worker={"processes": 2, "async_concurrency": 8, "thread_concurrency": 2, "process_concurrency": 1},
        options=("--slot", name),
    )


def _send(scenario: Scenario) -> None:
    with program_of(scenario) as program:
        for _ in range(16):
            program.wait_for_on_crash.send("film")
        for number in range(40):
            program.quick.send(number)


async def _watched(browser: BrowserThread, address: str, scenario: Scenario, trees: dict[str, Tree]) -> None:
    """Watch the pulse while trees die, so that the strips of the pictures are full."""
    async with browser.observed(f"{address}/pulse"):
        began = time.monotonic()
        await asyncio.sleep(SETTLES_S / 3)  # the strips need time to pass
        trees["ams-1"].freeze()
        await asyncio.sleep(SETTLES_S / 3)  # until heartbeats are missing
        (worker, *_) = scenario.workers(trees["ams-2"])
        _kill(worker["pid"])
        trees["fra-2"].kill()
        await asyncio.sleep(
            max(0.0, SETTLES_S - 15 - (time.monotonic() - began))
        )  # until the tasks run again


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def _pictures(browser: BrowserThread, address: str, folder: Path, widths: tuple[int, ...]) -> None:
    for width in widths:
        for scheme in ("light", "dark"):
            for page in PAGES:
                context: dict[str, Any] = {
                    "viewport": {"width": width, "height": 1000},
                    "color_scheme": scheme,
                }
                async with browser.observed(f"{address}/{page}", **context) as seen:
                    await seen.page.wait_for_timeout(1_500)
                    await seen.page.screenshot(path=folder / f"{page}-{scheme}-{width}.png", full_page=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
