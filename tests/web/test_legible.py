"""Words of the pages in a real Chromium, at the widths of a laptop and a telephone: none is cut off or lies on another."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.web.browser import BrowserThread
from tests.web.installations import Installation

pytestmark = pytest.mark.xdist_group("browser")
LAPTOP: Final = {"width": 1280, "height": 800}
TELEPHONE: Final = {"width": 390, "height": 844}


def seen_by(browser: BrowserThread, url: str, size: Any, script: str, **context: Any) -> Any:
    """Open a page at this size, and return the value of a script."""

    async def opened() -> Any:
        async with browser.observed(url, viewport=size, **context) as seen:
            return await seen.page.evaluate(script)

    return browser.run(opened())


@pytest.mark.parametrize("size", [LAPTOP, TELEPHONE], ids=["laptop", "telephone"])
def test_the_hint_of_the_search_field_is_not_cut_off(
    browser: BrowserThread, full: Installation, size: dict[str, int]
) -> None:
    hint, room = seen_by(browser, f"{full.address}/tasks", size, _HINT)
    assert 0 < hint <= room


_HINT = """() => {
  const field = document.getElementById("search"), style = getComputedStyle(field);
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  return [pen.measureText(field.placeholder).width, field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)];
}"""


def test_all_states_of_tasks_can_be_chosen_without_scrolling_on_a_laptop(
    browser: BrowserThread, full: Installation
) -> None:
    assert seen_by(browser, f"{full.address}/tasks", LAPTOP, _HIDDEN_TABS) == []


_HIDDEN_TABS = """() => {
  const bar = document.querySelector(".tabs").getBoundingClientRect();
  return [...document.querySelectorAll(".tabs a")].filter(each => {
    const box = each.getBoundingClientRect(); return box.right > bar.right + 1 || box.left < bar.left - 1;
  }).map(each => each.textContent.trim());
}"""


def test_the_facts_of_departed_workers_do_not_overlap_on_a_telephone(
    browser: BrowserThread, full: Installation
) -> None:
    cells, too_wide = seen_by(browser, f"{full.address}/workers", TELEPHONE, _WIDE_CELLS)
    assert cells > 0
    assert too_wide == []


_WIDE_CELLS = """() => {
  const cells = [...document.querySelectorAll("[aria-labelledby=h-gone] td")];
  return [cells.length, cells.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent)];
}"""


def test_the_worker_of_an_attempt_keeps_its_room_beside_a_long_error_on_a_telephone(
    browser: BrowserThread, full: Installation
) -> None:
    url = f"{full.address}{full.ones['failed task']}"
    assert seen_by(browser, url, TELEPHONE, "document.querySelector('.attempts .who').clientWidth") >= 120


def test_a_long_log_does_not_push_the_error_off_the_page(browser: BrowserThread, full: Installation) -> None:
    script = """() => {
      const log = document.createElement("pre"); log.className = "code tall"; log.textContent = "page 1\\n".repeat(4000);
      document.getElementById("main").append(log); return log.clientHeight;
    }"""
    assert seen_by(browser, f"{full.address}/tasks", LAPTOP, script) <= 400


def test_the_axis_of_attempts_has_the_clock_that_the_user_chose(
    browser: BrowserThread, full: Installation
) -> None:
    url = f"{full.address}{full.ones['failed task']}"
    script = """() => { const mark = document.querySelector(".attempts text[data-at]");
      return [mark.textContent, document.querySelector("[data-zone]").textContent.trim(), mark.dataset.at]; }"""
    told, zone, moment = seen_by(browser, url, LAPTOP, script, timezone_id="Asia/Kolkata")
    hours, minutes = int(moment[11:13]), int(moment[14:16]) + 30
    assert told[:5] == f"{(hours + 5 + minutes // 60) % 24:02d}:{minutes % 60:02d}"
    assert zone == "local"
