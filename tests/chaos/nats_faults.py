"""The injection and the end of each type of NATS fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final, TypeAlias
from uuid import UUID, uuid4

from nats.errors import Error as NatsClientError

from everbeat.nats.stream_plan import TaskMessage, encode
from tests.chaos.nats_side import NatsSide
from tests.chaos.plan import Fault, Kind

Held: TypeAlias = Iterator[dict[str, object]]
Tasks: TypeAlias = Callable[[], Sequence[tuple[UUID, str, int]]]
"""A function that returns the id, queue and fence of some tasks of the run, finished or not."""

_PAUSE_S: Final = 1.0
_GARBAGE: Final = (b"", b"{}", b"\xff\xfe", b'{"task_id": "no id", "queue": "default", "number": 1}')


class NatsFaultImpossible(Exception):
    """Raised when a fault currently has no target. The message is the reason."""


def _kill(fault: Fault, side: NatsSide, _: Tasks) -> Held:
    with side.server_lock:
        side.server.kill()
        try:
            yield {}
        finally:
            side.server.start()


def _empty(fault: Fault, side: NatsSide, _: Tasks) -> Held:
    with side.server_lock:
        side.server.kill()
        try:
            yield {}
        finally:
            side.server.restart(empty=True)


def _freeze(fault: Fault, side: NatsSide, _: Tasks) -> Held:
    with side.server_lock:
        side.server.freeze()
        try:
            yield {}
        finally:
            side.server.thaw()


def _cut(fault: Fault, side: NatsSide, _: Tasks) -> Held:
    assert fault.tree is not None
    line = side.lines[fault.tree]
    side.do(line.cut)
    yield {}
    side.do(line.join)


def _delete_stream(fault: Fault, side: NatsSide, _: Tasks) -> Held:
    with side.server_lock:
        asked(side.server.delete_stream(side.plan.stream))
    yield {}


def _delete_consumer(fault: Fault, side: NatsSide, _: Tasks) -> Held:
    with side.server_lock:
        asked(side.server.delete_consumer(side.plan.stream, side.consumer))
    yield {}


def _delete_messages(fault: Fault, side: NatsSide, _: Tasks) -> Held:
    """Delete a share of the messages in the stream, after a period without deliveries."""
    random = Random(fault.victim)
    with side.server_lock:
        asked(side.pause())
        time.sleep(_PAUSE_S)  # messages accumulate in the stream
        try:
            gone = asked(side.remove_some(lambda: random.random() < fault.amount))
        finally:
            asked(side.resume())
    yield {"messages": gone}


def _strays(fault: Fault, side: NatsSide, tasks: Tasks) -> Held:
    """Publish old task messages again in random order, messages for unknown tasks, and garbage."""
    random = Random(fault.victim)
    known = tasks()
    if not known:
        raise NatsFaultImpossible("nothing had been sent")
    words = list(_GARBAGE) * 10  # more messages than one worker can hold
    for _ in range(int(fault.amount)):
        task_id, queue, fence = random.choice(known)
        if random.random() < 0.1:
            task_id = uuid4()
        old = TaskMessage(
            task_id=task_id,
            queue=queue,
            number=random.randrange(1, 10_000),
            times=random.randrange(3),
            fence=random.randint(0, fence),
        )
        words += [encode(old)] * random.choice((1, 1, 3))
    random.shuffle(words)
    with side.server_lock:
        asked(side.server.publish(side.subject, *words))
    yield {"messages": len(words)}


def asked(question: Coroutine[Any, Any, Any]) -> Any:
    """Return the reply from NATS. Raises NatsFaultImpossible if there is no reply or an error occurs."""
    try:
        return asyncio.run(question)
    except (NatsClientError, OSError, TimeoutError, AssertionError, KeyError) as problem:
        raise NatsFaultImpossible(f"NATS did not do it: {type(problem).__name__} {problem}") from None


NATS_WAYS: Final[Mapping[Kind, Callable[[Fault, NatsSide, Tasks], Held]]] = {
    Kind.NATS_KILL: _kill,
    Kind.NATS_EMPTY: _empty,
    Kind.NATS_FREEZE: _freeze,
    Kind.NATS_CUT: _cut,
    Kind.NATS_DELETE_STREAM: _delete_stream,
    Kind.NATS_DELETE_CONSUMER: _delete_consumer,
    Kind.NATS_DELETE_MESSAGES: _delete_messages,
    Kind.NATS_STRAYS: _strays,
}
