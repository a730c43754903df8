"""Fixtures that serve the dashboard of a real database to clients of each role, without a socket."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from everbeat import App
from everbeat.store.target import Target
from everbeat.web import Role, User, Web
from tests.migrated import MigratedSchemas
from tests.store.conftest import StoreHarness
from tests.web.acting_workers import Workers as Workers
from tests.web.browser import MISSING, BrowserThread, chromium_path
from tests.web.installations import Installation, served_installation

HOST = "http://dashboard.test"
SAME_ORIGIN = {"sec-fetch-site": "same-origin"}


def by_header(request: Request) -> User | None:
    """Return the user of the test: its name and its role are those of one header. Without the header, there is none."""
    role = request.headers.get("x-test-role")
    return None if role is None else User(f"{role}-user", Role(role))


@dataclass
class Visitor:
    """A browser of a user with one role."""

    client: httpx.AsyncClient
    headers: dict[str, str] = field(default_factory=dict)

    async def get(self, path: str, **parameters: Any) -> httpx.Response:
        """Load a page as a browser does."""
        return await self.client.get(path, params=parameters, headers={**self.headers, "accept": "text/html"})

    async def json(self, path: str, *, status: int = 200, **parameters: Any) -> Any:
        """Load a page as a program does."""
        headers = {**self.headers, "accept": "application/json"}
        answer = await self.client.get(path, params=parameters, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        """Submit a form of a page."""
        return await self.client.post(path, data=fields, headers={**SAME_ORIGIN, **self.headers})

    async def act(self, path: str, **fields: Any) -> str:
        """Submit a form and return the text of the page that follows."""
        answer = await self.post(path, **fields)
        assert answer.status_code == 303, answer.text
        followed = await self.get(answer.headers["location"])
        assert followed.status_code == 200, followed.text
        return followed.text


NewVisitor = Callable[..., Visitor]


@pytest.fixture
def workers(migrated: Target) -> Iterator[Workers]:
    """Yield the harness of the test's workers."""
    with migrated.connect("everbeat test") as connection:
        party = StoreHarness(migrated, connection)
        party.supervisor("s1", "w1", "w2")
        yield Workers(party)
        party.database.close()


@pytest.fixture
def app(migrated: Target) -> App:
    """Return an app with two tasks, whose database is the test's schema."""
    made = App(migrated.url, schema=migrated.schema, name="shop")

    @made.task(name="mail.welcome", queue="mail")
    async def welcome(user_id: int, secret: str = "") -> str:
        return f"{user_id}"

    @made.task(name="charge")
    async def charge(order: str, card: str = "") -> None: ...

    return made


@pytest.fixture
async def new_visitor(app: App) -> AsyncIterator[NewVisitor]:
    """Return a function that makes a visitor with a role. The other arguments are those of `Web`."""
    async with AsyncExitStack() as stack:

        def make(
            role: str | None = "admin", *, mounted: Any = None, prefix: str = "", **options: Any
        ) -> Visitor:
            web = Web(app, auth=by_header, **options)
            stack.push_async_callback(web.aclose)
            transport = httpx.ASGITransport(mounted(web) if mounted else web, client=("203.0.113.7", 4711))
            client = httpx.AsyncClient(transport=transport, base_url=f"{HOST}{prefix}")
            stack.push_async_callback(client.aclose)
            return Visitor(client, {} if role is None else {"x-test-role": role})

        yield make
        await app.aclose()


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserThread]:
    """Yield a real Chromium for all tests of this process."""
    executable = chromium_path()
    if executable is None:
        print(f"\n{MISSING}", file=sys.__stderr__, flush=True)  # a skip alone is easily overlooked
        pytest.skip(MISSING)
    thread = BrowserThread(executable)
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def full(
    database_url: str, migrated_schemas: MigratedSchemas, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Yield a served installation full of hostile rows."""
    folder = tmp_path_factory.mktemp("full")
    with served_installation(database_url, migrated_schemas, folder, is_full=True) as made:
        yield made


@pytest.fixture(scope="session")
def empty(
    database_url: str, migrated_schemas: MigratedSchemas, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Yield a served installation without any row."""
    folder = tmp_path_factory.mktemp("empty")
    with served_installation(database_url, migrated_schemas, folder, is_full=False) as made:
        yield made
