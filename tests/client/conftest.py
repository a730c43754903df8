"""Fixtures: an app in its own schema, and a store harness that acts as the app's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from everbeat import App, Limit
from everbeat.store.target import Target
from tests.invariants import breaches
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
def app(database_url: str, migrated: Target) -> Iterator[App]:
    opened = App(database_url, schema=migrated.schema)
    yield opened
    opened.close()


@pytest.fixture
def db(app: App, migrated: Target) -> Iterator[StoreHarness]:
    """Yield a harness with supervisor s1 and workers w1 and w2. The test runs all of their statements itself."""
    connection = migrated.connect("everbeat test")
    party = StoreHarness(migrated, connection)
    party.supervisor("s1", "w1", "w2")
    yield party
    assert breaches(connection, migrated.schema) == []
    party.database.close()
    connection.close()
