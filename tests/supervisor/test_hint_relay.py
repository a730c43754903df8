"""How a supervisor passes hints on to its worker processes: their order, their limits, and the state of its LISTEN session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast
from uuid import uuid4

import pytest

from everbeat.hints import OnHint, OnState
from everbeat.hints.topics import Everything, TasksReady, encode
from everbeat.protocol import Beaten, FromWorkerProcess, Hints, HintsArrive, Phantoms, ToWorkerProcess
from everbeat.runtime.channel import AsyncChannel, channel_pair
from everbeat.runtime.clock import SystemClock
from everbeat.supervisor.hint_relay import MOST_AT_ONCE, HintRelay
from everbeat.supervisor.processes import MOST_UNSENT_BYTES, WorkerChild

ALL = Hints(list(encode(Everything())))


class Source:
    """A source of hints that the test controls."""

    on_hint: OnHint
    on_state: OnState

    async def run(self, on_hint: OnHint, on_state: OnState) -> None:
        self.on_hint, self.on_state = on_hint, on_state
        await asyncio.Event().wait()


class Process:
    """A worker process as the supervisor sees it, and its end of the channel, which reads nothing until `read`."""

    def __init__(self, child: WorkerChild, socket: Any) -> None:
        self.child = child
        self._socket = socket
        self._channel: AsyncChannel | None = None

    @classmethod
    async def start(cls) -> Process:
        ours, theirs = channel_pair()
        child = WorkerChild(
            cast(Any, None), await AsyncChannel.open(ours, messages=FromWorkerProcess), clock=SystemClock()
        )
        child.is_welcome = True
        return cls(child, theirs)

    async def read(self, is_last: Callable[[Any], bool]) -> list[Any]:
        """Return the next messages up to the last one."""
        if self._channel is None:
            self._channel = await AsyncChannel.open(self._socket, messages=ToWorkerProcess)
        found: list[Any] = []
        async with asyncio.timeout(20):
            while not found or not is_last(found[-1]):
                found.append(await self._channel.receive())
        return found

    async def close(self) -> None:
        self.child.channel.close()
        if self._channel is None:
            self._socket.close()
        else:
            await self._channel.aclose()


@pytest.fixture
async def processes() -> AsyncIterator[list[Process]]:
    made = [await Process.start() for _ in range(3)]
    yield made
    for each in made:
        await each.close()


@pytest.fixture
async def source(processes: list[Process]) -> AsyncIterator[Source]:
    """The source of a relay to the processes, which is running."""
    made = Source()
    running = asyncio.create_task(HintRelay(made, [each.child for each in processes]).run())
    await asyncio.sleep(0)  # one iteration of the loop, in which the relay starts
    yield made
    running.cancel()


def is_beaten(message: Any) -> bool:
    return isinstance(message, Beaten)


async def end(process: Process) -> list[Any]:
    """Return all messages that were sent to a process so far."""
    process.child.send(Beaten(0, 0.0))
    return (await process.read(is_beaten))[:-1]


async def test_hints_that_arrive_together_travel_in_one_message_without_repetitions(
    processes: list[Process], source: Source
) -> None:
    for hint in [TasksReady("a"), TasksReady("b"), TasksReady("a")]:
        source.on_hint(hint)
    await asyncio.sleep(0)  # one iteration of the loop, in which the relay passes hints on
    source.on_hint(TasksReady("a"))
    await asyncio.sleep(0)  # as above
    for process in processes:
        assert await end(process) == [Hints(["t:a", "t:b"]), Hints(["t:a"])]


async def test_everything_replaces_many_hints_that_arrive_together(
    processes: list[Process], source: Source
) -> None:
    for number in range(MOST_AT_ONCE + 1):
        source.on_hint(TasksReady(f"queue {number}"))
    await asyncio.sleep(0)  # one iteration of the loop, in which the relay passes hints on
    assert await end(processes[0]) == [ALL]


async def test_workers_learn_whether_hints_arrive_and_a_process_without_welcome_gets_nothing(
    processes: list[Process], source: Source
) -> None:
    processes[1].child.is_welcome = False
    source.on_state(True)
    source.on_hint(TasksReady("a"))
    await asyncio.sleep(0)  # one iteration of the loop, in which the relay passes hints on
    source.on_state(False)
    assert await end(processes[0]) == [HintsArrive(True), Hints(["t:a"]), HintsArrive(False)]
    assert await end(processes[1]) == []


async def test_a_process_that_does_not_read_gets_everything_instead_of_most_hints(
    processes: list[Process],
) -> None:
    child = processes[0].child
    for number in range(20_000):
        child.send_hints([f"t:{number}"])
    assert child.channel.unsent_bytes < MOST_UNSENT_BYTES + 1_000
    got = await end(processes[0])
    assert got[-1] == ALL
    assert got.count(ALL) == 1
    assert got[:-1] == [Hints([f"t:{number}"]) for number in range(len(got) - 1)]
    child.send_hints(["t:later"])
    assert await end(processes[0]) == [Hints(["t:later"])]


async def test_hints_are_dropped_only_while_an_everything_has_not_left_the_supervisor(
    processes: list[Process],
) -> None:
    process, child = processes[0], processes[0].child
    fill_up(child)
    child.send_hints(["t:dropped"])
    for _ in range(40):
        child.send(Phantoms([(uuid4(), uuid4())] * 1_000))  # more than the sockets hold
    await process.read(lambda message: message == ALL)
    assert child.channel.unsent_bytes > MOST_UNSENT_BYTES
    child.send_hints(["t:after"])
    assert (await end(process))[-1] == ALL


def fill_up(child: WorkerChild) -> None:
    """Send hints until `Everything` stands for all further ones."""
    while child.channel.unsent_bytes <= MOST_UNSENT_BYTES:
        child.send_hints(["t:" + "q" * 1_000])
    child.send_hints(["t:q"])
