"""A batch of recoveries that PostgreSQL refuses: which refusals end a task, and which are tried again."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest

from everbeat.errors import DatabaseError
from everbeat.services.division import recovered_divided
from everbeat.store.leases import Recovered, RecoveryOrder


def internal_error() -> DatabaseError:
    problem = DatabaseError("tuple concurrently updated")
    problem.__cause__ = psycopg.errors.InternalError_()
    return problem


async def test_an_internal_error_of_the_server_fails_no_task() -> None:
    tried: list[int] = []

    async def refuse(orders: Sequence[RecoveryOrder]) -> list[Recovered]:
        tried.append(len(orders))
        raise internal_error()

    with pytest.raises(DatabaseError, match="concurrently"):
        await recovered_divided(
            cast(list[RecoveryOrder], [SimpleNamespace(id=1), SimpleNamespace(id=2)]), refuse
        )
    assert tried == [2, 1]
