"""Where code stands: coroutines through all that they await, threads as they run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from everbeat.runtime.stacks import coroutine_stack, thread_stack


async def innermost(gate: asyncio.Event) -> None:
    await gate.wait()


async def each(gate: asyncio.Event) -> AsyncIterator[int]:
    await innermost(gate)
    yield 1


async def outermost(gate: asyncio.Event) -> int:
    return sum([one async for one in each(gate)])


async def test_a_coroutine_is_followed_through_generators_to_what_it_awaits() -> None:
    gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(outermost(gate))
        while not task.get_coro().cr_await:  # type: ignore[union-attr]
            await asyncio.sleep(0)  # lets it come to its gate
        stack = coroutine_stack(task)
        gate.set()
    positions = [stack.index(f"in {name}\n") for name in ("outermost", "innermost", "wait")]
    assert positions == sorted(positions)
    assert coroutine_stack(task) == "(it cannot be told where)", "it has ended"


def test_a_thread_is_shown_where_it_waits() -> None:
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
    assert thread_stack(thread.ident) == "(it cannot be told where)", "it has ended"
    assert thread_stack(None) == "(it cannot be told where)"
