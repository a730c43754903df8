"""Test the stacks of coroutines, through all that they await, and of threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from everbeat.runtime.main_loop import coroutine_stack, thread_stack


async def innermost(gate: asyncio.Event) -> None:
    await gate.wait()


async def each(gate: asyncio.Event) -> AsyncIterator[int]:
    await innermost(gate)
    yield 1


async def outermost(gate: asyncio.Event) -> int:
    return sum([one async for one in each(gate)])


async def test_the_stack_of_a_coroutine_includes_awaited_generators() -> None:
    gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(outermost(gate))
        while not task.get_coro().cr_await:  # type: ignore[union-attr]
            await asyncio.sleep(0)  # lets it reach its gate
        stack = coroutine_stack(task)
        gate.set()
    positions = [stack.index(f"in {name}\n") for name in ("outermost", "innermost", "wait")]
    assert positions == sorted(positions)
    assert coroutine_stack(task) == "(unknown place)", "it has ended"


def test_the_stack_of_a_thread_shows_where_it_waits() -> None:
    begun, gate = threading.Event(), threading.Event()

    def wait_here() -> None:
        begun.set()
        gate.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    begun.wait()
    stack = thread_stack(thread.ident)
    gate.set()
    thread.join()
    assert "in wait_here" in stack
    assert thread_stack(thread.ident) == "(unknown place)", "it has ended"
    assert thread_stack(None) == "(unknown place)"
