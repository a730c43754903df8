"""Fixtures that serve the dashboard of a real database to clients of each role, without a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx
import pytest
from starlette.requests import Request

from everbeat import App
from everbeat.domain.task.steps import ANSWER_PREFIX
from everbeat.store import steps
from everbeat.store.target import Target
from everbeat.web import Role, User, Web
from tests.store.conftest import StoreHarness

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


@dataclass
class Workers:
    """Supervisor s1 with workers w1 and w2, whose statements the test runs itself."""

    db: StoreHarness

    def send(self, name: str = "charge", *, arguments: Any = None, **options: Any) -> UUID:
        """Send a task."""
        return self.db.send(name, args=json.dumps(arguments or {}).encode(), **options)

    def start(self, name: str = "charge", *, worker: str = "w1", **options: Any) -> Any:
        """Send a task, claim it and start it. Return its lease."""
        sent = self.send(name, **options)
        found = self.db.claim(worker, names=(name,))
        (claimed,) = [each for each in found if each.id == sent]
        assert self.db.start(claimed) == ["started"]
        return claimed

    def fail(self, name: str = "charge", *, error: dict[str, Any] | None = None, **options: Any) -> UUID:
        """Send a task and let it fail."""
        claimed = self.start(name, **options)
        stored = {
            "code": "REFUSED",
            "message": "the bank said no",
            "type": "shop.Refused",
            "data": None,
            "traceback": "",
        }
        assert (
            self.db.settle(claimed, "FAILED", error=json.dumps(stored | (error or {})).encode()) == "FAILED"
        )
        return claimed.id

    def ask(self, text: str, *, note: str | None = None, **kind: Any) -> UUID:
        """Send a task whose code asks a person, and suspend it."""
        claimed = self.start()
        asked = json.dumps({"question": text, "type": kind, "note": note})
        event = f"{ANSWER_PREFIX}refund"
        self.db.run(
            steps.wait_for_signal(
                claimed.id, claimed.claim_id, name=event, event=event, timeout_ms=None, question=asked
            )
        )
        assert self.db.settle(claimed, "SUSPENDED") == "PENDING"
        return claimed.id


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
