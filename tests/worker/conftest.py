"""A stand for workers; its end checks that no worker left a lease or broke an invariant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everbeat.store.target import Target
from tests.invariants import breaches, install_audit
from tests.worker.deeds import gate
from tests.worker.stand import Stand


@pytest.fixture
def stand(database_url: str, schema: str) -> Iterator[Stand]:
    gate.reset()
    party = Stand(Target.parse(database_url, schema=schema))
    install_audit(party.connection, schema)
    yield party
    gate.opened.set()
    broken = breaches(party.connection, schema)
    party.close()
    assert broken == []
