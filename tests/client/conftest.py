"""An app in a schema of its own, and hands that play its workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everbeat import App
from everbeat.store.target import Target
from tests.invariants import breaches, install_audit
from tests.store.conftest import Hands


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema)
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture
def hands(app: App, database_url: str, schema: str) -> Iterator[Hands]:
    """A supervisor s1 with the workers w1 and w2, moved by hand."""
    target = Target.parse(database_url, schema=schema)
    connection = target.connect("everbeat test")
    install_audit(connection, schema)
    party = Hands(target, connection)
    party.supervisor("s1", "w1", "w2")
    yield party
    assert breaches(connection, schema) == []
    party.database.close()
    connection.close()
