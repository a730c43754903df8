"""Test how an asynchronous connection reads a reply that arrives in many parts."""

from __future__ import annotations

import asyncio
import time

from everbeat.store.target import Target

ROWS = 500
BYTES = 200
"""All rows together are more than libpq reads at once, and less than a Unix socket buffers."""
MOST_TURNS = 8


async def test_the_parts_of_a_reply_that_have_arrived_are_read_without_a_turn_of_the_loop_for_each(
    migrated: Target,
) -> None:
    connection = await migrated.aopen("everbeat test")
    async with connection:
        query = "select repeat('x', %s) from pg_sleep(0.1), generate_series(1, %s)"
        asked = asyncio.ensure_future(connection.execute(query, [BYTES, ROWS]))
        await asyncio.sleep(0.02)  # only the connection knows when it waits for the reply
        assert not asked.done()
        time.sleep(0.5)  # other code keeps the loop busy while the whole reply arrives
        turns = 0
        while not asked.done() and turns < 100:
            turns += 1
            await asyncio.sleep(0)  # one turn
        rows = await (await asked).fetchall()
    assert rows == [("x" * BYTES,)] * ROWS
    print(f"{turns} turns")
    assert turns <= MOST_TURNS
