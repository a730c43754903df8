"""Test the turns of connection attempts: waiting calls continue when an attempt ends in an unusual way."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from everbeat.client.database_access import Turns

GENEROUS_S = 10.0


def test_a_connection_attempt_whose_thread_cannot_start_does_not_block_the_next() -> None:  # J15
    turns: Turns[int] = Turns()

    async def program() -> int:
        before = threading.stack_size(1 << 46)  # no machine has room for such a stack
        try:
            with pytest.raises(RuntimeError, match="thread"):
                await turns.arun(lambda: 1, lambda: GENEROUS_S)
        finally:
            threading.stack_size(before)
        return await asyncio.wait_for(turns.arun(lambda: 2, lambda: 0.5), GENEROUS_S)

    assert asyncio.run(program()) == 2


def test_an_interrupted_connection_attempt_does_not_interrupt_other_calls() -> None:  # J15
    turns: Turns[int] = Turns()
    tries, goes_on = threading.Event(), threading.Event()
    waits = iter([GENEROUS_S])  # then its time is over

    def interrupted() -> int:
        tries.set()
        goes_on.wait(GENEROUS_S)
        raise KeyboardInterrupt

    def left_s() -> float:
        goes_on.set()
        return next(waits, 0.0)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(turns.run, interrupted, lambda: GENEROUS_S)
        assert tries.wait(GENEROUS_S)
        with pytest.raises(TimeoutError):
            turns.run(lambda: 1, left_s)
        with pytest.raises(KeyboardInterrupt):
            first.result(GENEROUS_S)
    assert turns.run(lambda: 3, lambda: GENEROUS_S) == 3
