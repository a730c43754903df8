"""Test that the proxy leaves no task and no socket behind, because these would fail a later test."""

from __future__ import annotations

import asyncio

import pytest

from everbeat.store.target import Target
from tests.worker.proxy import Proxy


@pytest.mark.parametrize("is_stalled", [False, True], ids=["open", "stalled"])
async def test_the_proxy_closes_its_connections_when_it_ends(
    database_url: str, schema: str, is_stalled: bool
) -> None:
    before = asyncio.all_tasks()
    async with Proxy.before(Target.parse(database_url, schema=schema)) as proxy:
        connection = await proxy.target.aconnect("everbeat test")
        lines = tuple(proxy._lines)
        if is_stalled:
            proxy.stall()
    assert asyncio.all_tasks() == before
    assert len(lines) == 2
    assert all(line.transport.get_extra_info("socket").fileno() == -1 for line in lines)
    await connection.close()
