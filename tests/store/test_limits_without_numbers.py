"""Test limits that set no number, and gates whose limit does not exist: they let every task start."""

from __future__ import annotations

import pytest

from tests.store.conftest import StoreHarness


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_limit_without_numbers_lets_every_task_start(db: StoreHarness, is_declared: bool) -> None:
    if is_declared:
        db.connection.execute(db.plain("insert into {schema}.limits (name) values ('gpu')"))
    sent = [db.send(gates='{"gpu"}') for _ in range(5)]
    assert [each.id for each in db.claim(starts=10)] == sent
