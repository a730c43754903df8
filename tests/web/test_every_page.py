"""All pages in a real Chromium, without any row and with long and hostile names: accessibility, widths, contrast, and the keyboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import pytest

from tests.web.browser import BrowserThread, Observed, accessibility_problems
from tests.web.installations import Installation

pytestmark = pytest.mark.xdist_group("browser")
NARROW, WIDE = 360, 3840
Scheme: TypeAlias = Literal["light", "dark"]


async def sideways(seen: Observed, width: int) -> str | None:
    """Return what reaches beyond the right edge at this width, or None."""
    await seen.page.set_viewport_size({"width": width, "height": 900})
    found: list[Any] = await seen.page.evaluate(_BEYOND)
    return f"{width} px: {found}" if found else None


_BEYOND = """() => {
  const root = document.documentElement;
  if (root.scrollWidth <= root.clientWidth) return [];
  const isClipped = (each) => { for (let up = each; up && up !== document.body; up = up.parentElement) {
    if (getComputedStyle(up).overflowX !== "visible") return true; } return false; };
  return [...document.querySelectorAll("body *")]
    .filter(each => each.getBoundingClientRect().right > root.clientWidth + 1 && !isClipped(each)).slice(0, 4)
    .map(each => `${each.tagName}.${each.className} ${each.getBoundingClientRect().right}`);
}"""


async def problems_of(seen: Observed, url: str, schemes: Sequence[Scheme]) -> list[str]:
    """Return what is wrong with a page in these colour schemes and at all widths."""
    found = []
    await seen.page.goto(url)
    await seen.page.evaluate(_USE)
    for scheme in schemes:
        await seen.page.emulate_media(color_scheme=scheme)
        found += [f"{scheme}: {each}" for each in await accessibility_problems(seen.page)]
    found += [each for width in (NARROW, WIDE) if (each := await sideways(seen, width))]
    await seen.page.evaluate(_OPEN)
    found += [f"opened, {each}" for each in [await sideways(seen, NARROW)] if each]
    found += [text for text in seen.console if "404" not in text] + seen.elsewhere
    seen.console.clear()
    return found


async def all_problems(
    browser: BrowserThread, made: Installation, schemes: Mapping[str, Sequence[Scheme]]
) -> str:
    """Return what is wrong with all pages, each on a line. `schemes` are the colour schemes in which axe-core examines a page, by its name."""
    wrong = []
    async with browser.observed(f"{made.address}/nothing-here") as seen:
        for name, path in made.pages.items():
            found = await problems_of(seen, f"{made.address}{path}", schemes.get(name, ()))
            wrong += [f"{name}: {each}" for each in found]
    return "\n".join(wrong)


_USE = "() => { const main = document.getElementById('main'); main.tabIndex = -1; main.focus(); }"
"""A page that somebody uses does not load itself again."""
_OPEN = "() => { for (const each of document.querySelectorAll('details')) each.open = true; }"


def test_pages_with_long_names_are_accessible_and_never_scroll_sideways(
    browser: BrowserThread, full: Installation
) -> None:  # O1, O2
    schemes: Mapping[str, Sequence[Scheme]] = {
        "/tasks?state=FAILED": ["light"],
        "failed task": ["dark"],
        "/queues": ["light"],
    }
    assert browser.run(all_problems(browser, full, schemes), within=200) == ""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "empty"])
def test_every_page_is_accessible_in_light_and_in_dark(
    browser: BrowserThread, kind: str, request: pytest.FixtureRequest
) -> None:  # O1, O2
    made = request.getfixturevalue(kind)
    schemes: Mapping[str, Sequence[Scheme]] = dict.fromkeys(made.pages, ("light", "dark"))
    assert browser.run(all_problems(browser, made, schemes), within=500) == ""
