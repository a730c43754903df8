"""Test when the resources of a process open and close, and what happens if one fails, hangs or is shared."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from everbeat.domain.user_context_managers import manager_factory
from everbeat.errors import RegistrationError, ResourceFailed, ResourceNotOpen
from everbeat.runtime.resources import Resource, ResourceSet


def resource(resources: ResourceSet, function: Callable[[], Any]) -> Resource[Any]:
    made: Resource[Any] = Resource(
        manager_factory(function, what="a resource", parameters=0, takes="no parameter")
    )
    resources.add(made)
    return made


class Shop:
    """Two resources, a sync and an async one, and what happened to them."""

    def __init__(self, *, with_async: bool = True) -> None:
        self.log: list[str] = []
        self.threads: list[int] = []
        self.set = ResourceSet()
        self.first = resource(self.set, self.sync)
        self.second = resource(self.set, self.asynchronous) if with_async else None

    def sync(self) -> Iterator[str]:
        self.threads.append(threading.get_ident())
        self.log.append("first opened")
        yield "one"
        self.threads.append(threading.get_ident())
        self.log.append("first closed")

    async def asynchronous(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup():
            self.log.append(f"second opened after {self.first.value}")
            yield "two"
        self.log.append(f"second closed before {self.first.value}")


async def test_resources_open_in_order_and_close_in_reverse_order() -> None:
    shop = Shop()
    async with shop.set.aopened():
        assert shop.first.value == "one"
        assert shop.second is not None
        assert shop.second.value == "two"
    assert shop.log == ["first opened", "second opened after one", "second closed before one", "first closed"]
    assert len(set(shop.threads)) == 1
    assert threading.get_ident() not in shop.threads, "a sync resource does not block the loop"


@pytest.mark.parametrize(
    ("is_async", "block"), [(False, "with app.resources()"), (True, "async with app.aresources()")]
)
def test_the_value_of_a_closed_resource_says_how_to_open_it(is_async: bool, block: str) -> None:
    shop = Shop()
    closed = shop.second if is_async else shop.first
    assert closed is not None
    with pytest.raises(ResourceNotOpen, match="is not open in this process") as found:
        _ = closed.value
    assert block in str(found.value)


def test_sync_resources_open_in_the_calling_thread_of_a_with_block() -> None:
    shop = Shop(with_async=False)
    with shop.set.opened():
        assert shop.first.value == "one"
        with shop.set.opened():
            assert shop.first.value == "one"
        assert shop.log == ["first opened"], "an inner block shares them"
    assert shop.log == ["first opened", "first closed"]
    assert shop.threads == [threading.get_ident()] * 2
    with shop.set.opened():
        assert shop.log[2:] == ["first opened"], "they can be opened again"


def test_an_async_resource_is_refused_in_a_sync_block_before_any_opens() -> None:
    shop = Shop()
    with pytest.raises(ResourceFailed, match=r"async with app\.aresources"), shop.set.opened():
        pass
    assert shop.log == []


async def test_a_resource_that_fails_is_named_and_closes_the_earlier_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop = Shop()

    async def broken() -> AsyncIterator[None]:
        raise ConnectionError("no broker")
        yield

    resource(shop.set, broken)
    with pytest.raises(
        ResourceFailed,
        match=r"Resource 'broken' \(.*test_resources.py:\d+\) cannot be opened: ConnectionError: no broker",
    ):
        await shop.set.aopen()
    assert shop.log[-2:] == ["second closed before one", "first closed"]
    assert "resource_failed name=broken" in caplog.text
    assert "Traceback" in caplog.text
    with pytest.raises(ResourceFailed):
        await shop.set.aopen()  # a failed start holds nothing


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_resource_that_hangs_when_it_opens_is_named_in_time(is_async: bool) -> None:
    shop, release = Shop(), threading.Event()

    def hangs() -> Iterator[None]:
        release.wait(60)
        yield

    async def ahangs() -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    resource(shop.set, ahangs if is_async else hangs)
    with pytest.raises(ResourceFailed, match=r"hangs' .* did not open within 0\.2 s"):
        await shop.set.aopen(within_s=0.2)
    assert shop.log[-2:] == ["second closed before one", "first closed"]
    release.set()


async def test_a_resource_that_hangs_when_it_closes_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    resources = ResourceSet()

    async def hangs() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    made = resource(resources, hangs)
    await resources.aopen()
    await asyncio.wait_for(resources.aclose(within_s=0.1), timeout=5)
    assert "resource_hangs name=hangs" in caplog.text
    assert "await asyncio.Event().wait()" in caplog.text, "the stack shows where"
    with pytest.raises(ResourceNotOpen):
        _ = made.value


async def test_a_resource_that_fails_when_it_closes_is_logged_and_the_others_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop = Shop()

    def breaks() -> Iterator[int]:
        yield 1
        raise ValueError("half closed")

    resource(shop.set, breaks)
    with caplog.at_level(logging.ERROR):
        async with shop.set.aopened():
            pass
    assert "phase=close" in caplog.text
    assert shop.log[-2:] == ["second closed before one", "first closed"]


async def test_the_last_of_several_users_closes_the_resources() -> None:
    shop = Shop()
    await shop.set.aopen()
    await shop.set.aopen()
    await shop.set.aclose()
    assert shop.first.value == "one"
    await shop.set.aclose()
    assert shop.log[-1] == "first closed"


async def test_resources_are_not_shared_with_another_event_loop() -> None:
    shop = Shop()
    async with shop.set.aopened():
        with pytest.raises(ResourceFailed, match="on another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(shop.set.aopen()))
        assert shop.first.value == "one"
    assert shop.log[-1] == "first closed"


async def test_cancelling_the_opening_closes_what_is_open() -> None:
    shop, reached = Shop(), asyncio.Event()

    async def hangs() -> AsyncIterator[None]:
        reached.set()
        await asyncio.Event().wait()
        yield

    resource(shop.set, hangs)
    opening = asyncio.create_task(shop.set.aopen())
    await reached.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert shop.log[-1] == "first closed"


def test_a_forked_child_has_no_open_resources() -> None:
    shop = Shop(with_async=False)
    with shop.set.opened():
        child = os.fork()
        if child == 0:
            try:
                _ = shop.first.value
            except ResourceNotOpen:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert shop.first.value == "one"


def test_a_function_with_a_parameter_cannot_be_a_resource() -> None:
    def pool(size: int) -> Iterator[int]:
        yield size

    with pytest.raises(RegistrationError, match="cannot be called with no parameter"):
        resource(ResourceSet(), pool)
