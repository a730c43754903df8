"""The frame of all pages: the document, links below a root path, headers, preferences, and the search."""

from __future__ import annotations

import asyncio
import re
from itertools import islice

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from everbeat import App
from everbeat.web import live
from tests.web.conftest import NewVisitor


async def test_a_page_allows_no_inline_script_no_frame_and_no_other_host(new_visitor: NewVisitor) -> None:
    answer = await new_visitor().get("/nothing-here")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert "<style" not in answer.text
    assert " style=" not in answer.text
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    assert "https://" not in answer.text


async def test_a_missing_page_says_so_in_both_forms(new_visitor: NewVisitor) -> None:
    visitor = new_visitor()
    answer = await visitor.get("/nothing-here")
    assert answer.status_code == 404
    assert "There is no such page" in answer.text
    assert (await visitor.json("/nothing-here", status=404))["error"]["code"] == "NO_SUCH_PAGE"


async def test_every_link_of_the_navigation_and_the_start_page_lead_to_a_page(
    new_visitor: NewVisitor,
) -> None:
    visitor = new_visitor()
    page = await visitor.get((await visitor.get("/")).headers["location"])
    links = re.findall(r'<li><a href="([^"]+)"[^>]* data-key="(.)"', page.text)
    assert len(links) == len(dict(links)) == len({key for _, key in links}) >= 7
    for path, _ in links:
        answer = await visitor.get(path)
        assert answer.status_code == 200, path
        assert f'href="{path}" aria-current="page"' in answer.text


async def test_a_stranger_sees_neither_the_name_nor_a_link(new_visitor: NewVisitor) -> None:
    for path in ("/", "/nothing-here", "/find"):
        answer = await new_visitor(None).get(path)
        assert answer.status_code == 403
        assert "shop" not in answer.text
        assert "<nav" not in answer.text


async def test_links_of_a_mounted_dashboard_stay_below_its_path(new_visitor: NewVisitor) -> None:
    def below(web: object) -> Starlette:
        return Starlette(routes=[Mount("/ops/everbeat", app=web)])  # type: ignore[arg-type]

    visitor = new_visitor(mounted=below)
    answer = await visitor.get("/ops/everbeat/nothing-here")
    assert answer.status_code == 404
    assert 'href="/ops/everbeat/tasks"' in answer.text
    assert 'href="/tasks"' not in answer.text
    sheet = answer.text.partition('rel="stylesheet" href="')[2].partition('"')[0]
    assert sheet.startswith("/ops/everbeat/static/everbeat.css?v=")
    assert (await visitor.get(sheet)).headers["content-type"].startswith("text/css")


async def test_static_files_are_kept_only_under_the_version_of_their_content(new_visitor: NewVisitor) -> None:
    visitor = new_visitor(None)
    page = await new_visitor().get("/nothing-here")
    sheet = page.text.partition('rel="stylesheet" href="')[2].partition('"')[0]
    assert "immutable" in (await visitor.client.get(sheet)).headers["cache-control"]
    assert (await visitor.client.get("/static/everbeat.css")).headers["cache-control"] == "no-cache"
    assert (await visitor.client.get("/static/..%2fapplication.py")).status_code == 403


async def test_preferences_are_stored_in_cookies_and_lead_back_to_the_page(new_visitor: NewVisitor) -> None:
    visitor = new_visitor("see")
    headers = {
        **visitor.headers,
        "sec-fetch-site": "same-origin",
        "referer": "http://dashboard.test/tasks?state=FAILED",
    }
    answer = await visitor.client.post("/preferences", data={"theme": "dark"}, headers=headers)
    assert answer.headers["location"] == "/tasks?state=FAILED"
    page = await visitor.get("/nothing-here")
    assert 'data-theme="dark"' in page.text
    headers["referer"] = "http://dashboard.test//evil.test/"
    answer = await visitor.client.post("/preferences", data={"theme": "nonsense"}, headers=headers)
    assert answer.headers["location"] == "/"
    assert "set-cookie" not in answer.headers


async def test_the_search_goes_to_a_task_by_the_beginning_of_its_id(
    app: App, new_visitor: NewVisitor
) -> None:
    task = await app.asend_by_name("charge", {"order": "o-1"}, key="order-1")
    visitor = new_visitor()

    async def found(text: str) -> str:
        answer: httpx.Response = await visitor.get("/find", q=text)
        return answer.headers["location"]

    assert await found(str(task.id)) == f"/tasks/{task.id}"
    assert await found(str(task.id)[:18]) == f"/tasks/{task.id}"
    assert await found("order-1") == "/tasks?key=order-1"
    assert await found("charge") == "/tasks?name=charge"


async def test_an_address_with_a_slash_too_many_leads_to_its_page_without_naming_a_host(
    new_visitor: NewVisitor,
) -> None:
    visitor = new_visitor(prefix="/ops", mounted=lambda web: Starlette(routes=[Mount("/ops", app=web)]))
    answer = await visitor.get("/tasks/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/ops/tasks")
    for path in ("/nothing/", "/.//evil.test/", "/tasks//evil.test/"):
        assert (await visitor.get(path)).status_code == 404, path


async def test_more_viewers_than_the_limit_are_refused_even_if_all_come_at_once(
    new_visitor: NewVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_VIEWERS", 3)
    visitor = new_visitor("see")
    asked = [asyncio.ensure_future(visitor.get("/pulse/stream")) for _ in range(12)]
    try:
        async with asyncio.timeout(20):
            refused = [await each for each in islice(asyncio.as_completed(asked), 9)]
        assert all("too many viewers" in answer.text for answer in refused)
        assert sum(not each.done() for each in asked) == 3, "the others are still viewers"
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_stream_ends_after_some_time_so_that_the_user_is_checked_again(
    new_visitor: NewVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LONGEST_STREAM_S", 0.0)
    async with asyncio.timeout(20):
        answer = await new_visitor("see").get("/pulse/stream")
    assert answer.text.count("event: parts") == 1


async def test_the_start_page_keeps_the_moment_of_its_address(new_visitor: NewVisitor) -> None:
    visitor = new_visitor()
    query = {"at": "2026-11-29T14:03:20Z", "range": "6h", "path": "//evil.test/"}
    answer = await visitor.client.get("/", params=query, headers=visitor.headers)
    assert answer.headers["location"] == "/pulse?at=2026-11-29T14%3A03%3A20Z&range=6h"
    assert (await visitor.get("/")).headers["location"] == "/pulse"
