"""Fixtures: an app in its own schema, and a store harness that acts as the app's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from everbeat import App, Limit
from everbeat.store.target import Target
from tests.invariants import breaches, install_audit
from tests.store.conftest import StoreHarness

NewApp = Callable[..., App]


@pytest.fixture
def limited(app: App) -> Iterator[NewApp]:
    """Yield a factory of apps with limits, on the database of the app."""
    opened: list[App] = []

    def new(*limits: Limit, **settings: Any) -> App:
        url = app._database.address.portable
        opened.append(App(url, schema=app.schema, limits=limits, **settings))
        return opened[-1]

    yield new
    for each in opened:
        each.close()


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema)
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    """Yield a harness with supervisor s1 and workers w1 and w2. The test runs all of their statements itself."""
    target = Target.parse(database_url, schema=schema)
    connection = target.connect("everbeat test")
    install_audit(connection, schema)
    party = StoreHarness(target, connection)
    party.supervisor("s1", "w1", "w2")
    yield party
    assert breaches(connection, schema) == []
    party.database.close()
    connection.close()
