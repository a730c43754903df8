"""The rights: every address with every role and with none, the origin of requests, and the ways to log in."""

from __future__ import annotations

import base64
import re
from typing import Any
from uuid import UUID

import httpx
import pytest
from starlette.requests import Request

from everbeat import App
from everbeat.errors import ConfigurationError
from everbeat.web import Basic, Loopback, Role, TrustedHeader, User, Web
from everbeat.web.routes import ROUTES, Route
from everbeat.web.serving import chosen_authentication
from tests.web.conftest import SAME_ORIGIN, NewVisitor, Workers

NOBODY = UUID(int=7)
FILLED = {"id": str(NOBODY), "to": "1", "name": "n", "digest": "0", "value": "1"}


def path_of(route: Route) -> str:
    """Return the address of a route with an id that does not exist."""
    path = re.sub(r"\{[^}]*\}", str(NOBODY), route.path)
    return f"{path}?once=1" if path.endswith("/stream") else path


async def request(visitor: Any, route: Route, *, json: bool) -> httpx.Response:
    """Send what the route expects, as its page or a program would."""
    headers = {**visitor.headers, **SAME_ORIGIN, "accept": "application/json" if json else "text/html"}
    if route.method == "GET":
        return await visitor.client.get(path_of(route), headers=headers)
    body: dict[str, Any] = {"json": FILLED} if json else {"data": FILLED}
    return await visitor.client.post(path_of(route), headers=headers, **body)


def test_an_address_that_changes_something_is_a_post_and_needs_a_role_that_operates() -> None:
    for route in ROUTES:
        if route.changes:
            assert route.method == "POST", route.path
            assert route.role.includes(Role.OPERATE), route.path
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    deleting = [route for route in ROUTES if "delete" in route.path]
    assert deleting
    assert {route.role for route in deleting} == {Role.ADMIN}


@pytest.mark.parametrize("role", [None, *Role])
async def test_every_address_is_open_to_exactly_the_roles_of_the_table(
    role: Role | None, new_visitor: NewVisitor
) -> None:  # O3
    visitor = new_visitor(role)
    for route in ROUTES:
        for json in (False, True):
            answer = await request(visitor, route, json=json)
            is_allowed = role is not None and role.includes(route.role)
            place = f"{role}: {route.method} {route.path}: {answer.status_code} {answer.text[:300]}"
            assert (answer.status_code not in (401, 403)) is is_allowed, place
            assert answer.status_code != 500, place
            if json and not is_allowed:
                code = answer.json()["error"]["code"]
                assert code == ("NOT_AUTHENTICATED" if role is None else "ROLE_TOO_LOW")


async def test_a_read_only_dashboard_refuses_every_change_and_offers_none(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("admin", read_only=True)
    for route in ROUTES:
        if route.changes:
            answer = await request(visitor, route, json=True)
            assert answer.json()["error"]["code"] == "READ_ONLY", route.path
    failed = workers.fail()
    for path in ("/tasks", f"/tasks/{failed}"):
        page = await visitor.get(path)
        assert "read-only" in page.text
        assert set(re.findall(r'<form[^>]*method="post"[^>]*action="([^"]*)"', page.text)) <= {
            "/preferences",
            "/tasks/search",
        }


@pytest.mark.parametrize(
    ("headers", "body", "is_allowed"),
    [
        ({"sec-fetch-site": "same-origin"}, "form", True),
        ({"sec-fetch-site": "cross-site", "origin": "http://dashboard.test"}, "form", False),
        ({"sec-fetch-site": "same-site"}, "form", False),
        ({"sec-fetch-site": "none"}, "form", False),
        ({"origin": "http://dashboard.test"}, "form", True),
        ({"origin": "https://dashboard.test"}, "form", True),
        ({"origin": "http://dashboard.test:81"}, "form", False),
        ({"origin": "http://dashboard.test.evil.test"}, "form", False),
        ({"origin": "null"}, "form", False),
        ({"origin": "http://[broken"}, "form", False),
        ({}, "form", False),
        ({}, "json", False),
        ({"authorization": "Bearer x"}, "form", False),
        ({"authorization": "Bearer x"}, "json", True),
        ({"authorization": "Bearer x", "origin": "http://evil.test"}, "json", False),
    ],
)
async def test_a_form_of_another_site_changes_nothing(
    headers: dict[str, str], body: str, is_allowed: bool, app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O3
    failed = workers.fail()
    visitor = new_visitor("operate")
    sent: dict[str, Any] = {"json": {}} if body == "json" else {"data": {"x": "1"}}
    answer = await visitor.client.post(
        f"/tasks/{failed}/retry", headers={**visitor.headers, **headers}, **sent
    )
    assert (answer.status_code == 303) is is_allowed, answer.text
    assert ((await app.ainfo(failed)).state == "PENDING") is is_allowed


async def test_a_form_that_is_too_large_is_refused(new_visitor: NewVisitor) -> None:
    visitor = new_visitor()
    path = f"/tasks/{NOBODY}/signal"
    assert (await visitor.post(path, name="n", value="x" * 70_000)).status_code == 413
    many = {f"f{number}": "1" for number in range(1_100)}
    assert (await visitor.post(path, **many)).status_code == 400
    assert (await visitor.get("/tasks", name="n" * 9_000)).status_code == 414


def basic(name: str, password: str) -> dict[str, str]:
    """Return the header of a user's name and password."""
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


async def status(
    web: Web, *, client: str = "203.0.113.7", host: str = "dashboard.test", **headers: str
) -> int:
    """Return the status of a page for a client with this address."""
    transport = httpx.ASGITransport(web, client=(client, 1))
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as session:
        answer = await session.get("/tasks", headers=sent)
    await web.aclose()
    return answer.status_code


async def test_basic_authentication_asks_for_a_password_and_compares_it(app: App) -> None:
    web = Web(app, auth=Basic.parse("ann:see:correct-horse bob:admin:battery:staple", subject="users"))
    transport = httpx.ASGITransport(web)
    async with httpx.AsyncClient(transport=transport, base_url="http://dashboard.test") as session:
        refused = await session.get("/tasks")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        for wrong in (basic("ann", "wrong"), basic("eve", ""), basic("", ""), {"authorization": "Basic %%%"}):
            assert (await session.get("/tasks", headers=wrong)).status_code == 401
        assert (await session.get("/tasks", headers=basic("ann", "correct-horse"))).status_code == 200
        assert (
            "bob · may do everything"
            in (await session.get("/tasks", headers=basic("bob", "battery:staple"))).text
        )
    await web.aclose()


@pytest.mark.parametrize(
    "text", ["", "ann", "ann:operate", "ann:root:a-long-password", "ann:see:short", ":see:a-long-password"]
)
def test_users_in_the_environment_are_checked_without_showing_a_password(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Basic.parse(text, subject="EVERBEAT_WEB_USERS")
    assert "a-long-password" not in str(caught.value)
    assert "short" not in str(caught.value)


async def test_a_trusted_header_counts_only_from_its_proxy(app: App) -> None:
    def web() -> Web:
        roles = {"eve": Role.ADMIN}
        return Web(app, auth=TrustedHeader("X-User", proxies=["10.0.0.0/8", "::1"], role=None, roles=roles))

    assert await status(web(), client="10.1.2.3", x_user="eve") == 200
    assert await status(web(), client="::1", x_user="eve") == 200
    assert await status(web(), client="::ffff:10.1.2.3", x_user="eve") == 200
    assert await status(web(), client="::ffff:203.0.113.7", x_user="eve") == 403
    assert await status(web(), client="203.0.113.7", x_user="eve") == 403
    assert await status(web(), client="10.1.2.3", x_user="mallory") == 403
    assert await status(web(), client="10.1.2.3") == 403


async def test_without_authentication_only_this_machine_is_answered_by_its_own_name(app: App) -> None:
    def web() -> Web:
        return Web(app, auth=Loopback())

    for host in ("localhost", "127.0.0.1", "127.0.0.1:7717", "[::1]:7717"):
        assert await status(web(), client="127.0.0.1", host=host) == 200, host
    assert await status(web(), client="::ffff:127.0.0.1", host="localhost") == 200
    for host in ("dashboard.test", "localhost.evil.test", "127.0.0.1.evil.test", "0.0.0.0"):
        assert await status(web(), client="127.0.0.1", host=host) == 403, host
    assert await status(web(), client="10.0.0.1", host="localhost") == 403
    assert await status(web(), client="127.0.0.1", host="localhost", x_forwarded_for="1.2.3.4") == 403


async def test_a_function_of_the_user_can_be_async_and_can_reject(app: App) -> None:
    async def who(request: Request) -> User | None:
        return User("ann", Role.SEE) if request.headers.get("x-test") else None

    assert await status(Web(app, auth=who), x_test="1") == 200
    assert await status(Web(app, auth=who)) == 403


async def test_if_the_function_of_the_user_fails_no_user_is_admitted_and_its_message_stays_secret(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    def who(request: Request) -> User | None:
        raise RuntimeError(request.headers["x-test"])

    web = Web(app, auth=who)
    transport = httpx.ASGITransport(web)
    async with httpx.AsyncClient(transport=transport, base_url="http://dashboard.test") as session:
        for path in ("/tasks", "/nothing", "/pulse/stream"):
            answer = await session.get(path, headers={"x-test": "the-session-token"})
            assert answer.status_code == 500, path
            assert "shop" not in answer.text
            assert "the-session-token" not in answer.text + "".join(r.getMessage() for r in caplog.records)
    await web.aclose()
    assert "RuntimeError" in caplog.text


async def test_texts_that_no_row_and_no_digest_can_contain_are_refused(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("admin")
    assert (await visitor.get("/find", q="\0")).status_code == 303
    assert (await visitor.get("/find", q="a\0b")).status_code == 303
    for verb in ("cancel", "delete", "retry", "run_now"):
        answer = await visitor.post(f"/tasks/all/{verb}", digest="\u202e", state="FAILED")
        assert answer.status_code == 409, answer.text


def test_a_dashboard_without_authentication_cannot_be_made(app: App) -> None:
    with pytest.raises(ConfigurationError, match="auth"):
        Web(app, auth=None)  # type: ignore[arg-type]


def test_a_server_that_others_can_reach_does_not_start_without_authentication() -> None:
    def choose(host: str, **more: Any) -> Any:
        settings: dict[str, Any] = {"users": None, "header": None, "proxies": (), "role": None, "roles": {}}
        return chosen_authentication(host, **settings | more)

    for host in ("127.0.0.1", "localhost", "::1"):
        assert isinstance(choose(host), Loopback)
    for host in ("0.0.0.0", "::", "10.0.0.1", "web-1"):
        with pytest.raises(ConfigurationError, match="needs authentication"):
            choose(host)
        assert isinstance(choose(host, users="ann:see:a-long-password"), Basic)
        assert isinstance(choose(host, header="X-User", proxies=["10.0.0.1"]), TrustedHeader)
    with pytest.raises(ConfigurationError, match=r"--trusted-header = .*also give --proxy"):
        choose("0.0.0.0", header="X-User")
    with pytest.raises(ConfigurationError, match="--role"):
        choose("0.0.0.0", header="X-User", proxies=["10.0.0.1"], role="root")
    with pytest.raises(ConfigurationError, match=r"--proxy = .*also give --trusted-header"):
        choose("127.0.0.1", proxies=["10.0.0.1"])
