"""The parameters of addresses: none, an empty one, a repeated one, a long one and one with control characters."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.web.conftest import NewVisitor, Workers

UNKNOWN = "00000000-0000-0000-0000-000000000000"
PARAMETERS = {
    "/pulse": ("at", "range"), "/workers": ("at",), "/recoveries": ("incident",), "/recoveries/stream": ("incident",),
    "/recoveries/export": ("incident",), "/changes/stream": ("of", "after"), "/find": ("q",),
    "/tasks": ("name", "state", "limit", "before", "since", "label", "batch", "order", "group"), "/queues": ("queue",),
    "/workflows": ("state", "before", "name"), "/schedules": ("after",), "/inbox": ("after",), "/audit": ("actor", "before", "since"),
    f"/tasks/{UNKNOWN}/items": ("after",),
}  # fmt: skip
WRONG = ("x" * 4_000, "\0\x1b[31m\n\ud800")


@pytest.mark.parametrize(
    ("path", "name", "others"),
    [
        ("/recoveries/export", "incident", ""),
        ("/changes/stream", "of", "after=a.1.0"),
        ("/changes/stream", "after", "of=tasks"),
    ],
)
async def test_an_address_without_the_parameter_that_it_needs_says_which_and_shows_an_example(
    workers: Workers, new_visitor: NewVisitor, path: str, name: str, others: str
) -> None:
    visitor = new_visitor("read")
    for given, code in (
        ("", "MISSING"),
        (f"{name}=", "MISSING"),
        (f"{name}=%20", "MISSING"),
        (f"{name}=a&{name}=b", "REPEATED"),
    ):
        address = f"{path}?{given}&{others}"
        answer = await visitor.client.get(address, headers={**visitor.headers, "accept": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, code)
        assert f"'{name}'" in error["message"]
        assert f"{path}?" in error["fix"]
        assert f"{name}=" in error["fix"]
        page = await visitor.client.get(address, headers={**visitor.headers, "accept": "text/html"})
        assert (page.status_code, "The parameter &#39;" in page.text) == (400, True)


async def test_no_parameter_of_a_list_is_a_defect(workers: Workers, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("admin")
    for path, names in PARAMETERS.items():
        for value in WRONG:
            text = quote(value.encode(errors="surrogatepass"))
            for query in (f"{name}={text}&{name}={text}" for name in names):
                answer = await visitor.client.get(
                    f"{path}?once=1&{query}", headers={**visitor.headers, "accept": "application/json"}
                )
                assert answer.status_code < 500, (path, query[:80], answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"]["message"], (path, query[:80])
