"""A real Chromium for the tests of pages, one for all of them. It runs on an event loop of its own thread."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from playwright.async_api import Browser, BrowserContext, Page, Playwright, async_playwright

from everbeat.store.target import Target

T = TypeVar("T")
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "NO BROWSER: the pages of the dashboard are NOT tested, because no Chromium is installed. Install it: apt-get install chromium"
AXE = Path(__file__).parent / "axe" / "axe.min.js"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"


def chromium_path() -> str | None:
    """Return the path of the Chromium that the system has installed. None is ever downloaded."""
    return next((found for name in CHROMIUMS if (found := shutil.which(name)) is not None), None)


@dataclass
class Observed:
    """A page with everything that its browser reported: the console, failed scripts, and requests to other hosts."""

    page: Page
    host: str
    console: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on(
            "console",
            lambda message: (
                self.console.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        self.page.on("pageerror", lambda problem: self.console.append(str(problem)))
        self.page.on("request", self._requested)

    def _requested(self, request: Any) -> None:
        if urlsplit(request.url).netloc != self.host and not request.url.startswith("data:"):
            self.elsewhere.append(request.url)
        if request.resource_type == "document":
            self.documents.append(request.url)

    def check(self) -> None:
        """Check that the page reported no problem and requested nothing from another host."""
        assert self.console == []
        assert self.elsewhere == []


class BrowserThread:
    """Runs Chromium, and coroutines that use it, on an event loop in a thread. The loop of the test stays free."""

    def __init__(self, executable: str) -> None:
        self._executable = executable
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser", daemon=True)
        self._thread.start()
        self._playwright: Playwright
        self._browser: Browser
        self.run(self._open())

    def run(self, work: Awaitable[T], *, within: float = 60.0) -> T:
        """Run a coroutine beside the browser, and return its result."""

        async def bounded() -> T:
            return await asyncio.wait_for(work, within)

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()

    async def _open(self) -> None:
        self._playwright = await async_playwright().start()
        self._browser = await self._playwright.chromium.launch(
            executable_path=self._executable,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb"],
        )

    @asynccontextmanager
    async def observed(self, url: str, **context: Any) -> AsyncIterator[Observed]:
        """Open a page at this address in its own context."""
        given: Mapping[str, Any] = {
            "viewport": {"width": 1440, "height": 1000},
            "timezone_id": "UTC",
        } | context
        opened: BrowserContext = await self._browser.new_context(**given)
        try:
            page = Observed(await opened.new_page(), urlsplit(url).netloc)
            page.watch()
            await page.page.goto(url)
            yield page
        finally:
            await opened.close()

    def close(self) -> None:
        """Close the browser and the thread."""

        async def end() -> None:
            await self._browser.close()
            await self._playwright.stop()

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class DashboardProcess:
    """A running `everbeat web`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self.address = _address(process, log)

    def terminate(self) -> None:
        """Send SIGTERM, as a service manager does."""
        self._process.terminate()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return self._process.wait(20)


@contextmanager
def dashboard_process(
    target: Target, *, log: Path, options: tuple[str, ...] = (), locator: str | None = None
) -> Iterator[DashboardProcess]:
    """Run `everbeat web` for a schema, or for the app of a locator, whose schema it is."""
    place = ["--url", target.url, "--schema", target.schema] if locator is None else [locator]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "everbeat", "web", *place, "--port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "EVERBEAT_DATABASE_URL": target.url, "EVERBEAT_SCHEMA": target.schema},
        )
    try:
        yield DashboardProcess(process, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    patience = threading.Event()
    for _ in range(600):
        said = log.read_text(errors="replace")
        if "http://" in said:
            return "http://" + said.partition("http://")[2].split()[0]
        assert process.poll() is None, said
        patience.wait(0.05)  # the process says its address when it listens
    raise AssertionError(log.read_text(errors="replace"))


def axe_source() -> str:
    """Return the source of axe-core, whose content is the one that was vendored."""
    content = AXE.read_bytes()
    assert hashlib.sha256(content).hexdigest() == AXE_SHA256
    return content.decode()


async def accessibility_problems(page: Page) -> list[str]:
    """Return what axe-core finds wrong with a page by WCAG 2.2 A and AA."""
    found = await page.evaluate(axe_source() + ";" + _RUN_AXE)
    return [
        f"{each['id']} ({each['impact']}): {each['help']}: {node['target']} {node['failureSummary']}"
        for each in found
        for node in each["nodes"][:3]
    ]


_RUN_AXE = """
axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}).then(result => result.violations)
"""
