"""How each kind of fault is done to NATS, and how it is healed.

What lives here: one function a kind. What may not: when, and what follows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final, TypeAlias
from uuid import UUID, uuid4

from nats.errors import Error as NatsClientError

from everbeat.wake.carrier import Message, encode
from tests.chaos.nats_side import NatsSide
from tests.chaos.plan import Fault, Kind

Held: TypeAlias = Iterator[dict[str, object]]
Tasks: TypeAlias = Callable[[], Sequence[tuple[UUID, str, int]]]
"""Some tasks of the run, ended or not: id, queue, fence."""

_PAUSE_S: Final = 1.0
_GARBAGE: Final = (b"", b"{}", b"\xff\xfe", b'{"task_id": "no id", "queue": "default", "number": 1}')


class NobodyThere(Exception):
    """There was nothing to strike; says why."""


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
    """A share of those that lie in the stream, after a while in which none was delivered."""
    dice = Random(fault.victim)
    with side.server_lock:
        asked(side.pause())
        time.sleep(_PAUSE_S)  # messages come in and stay
        try:
            gone = asked(side.remove_some(lambda: dice.random() < fault.amount))
        finally:
            asked(side.resume())
    yield {"messages": gone}


def _strays(fault: Fault, side: NatsSide, tasks: Tasks) -> Held:
    """Old messages of tasks once more, in any order; of tasks that never were; and what is no message."""
    dice = Random(fault.victim)
    known = tasks()
    if not known:
        raise NobodyThere("nothing had been sent")
    words = list(_GARBAGE) * 10  # more than one worker has room for
    for _ in range(int(fault.amount)):
        task_id, queue, fence = dice.choice(known)
        if dice.random() < 0.1:
            task_id = uuid4()
        old = Message(
            task_id=task_id,
            queue=queue,
            number=dice.randrange(1, 10_000),
            times=dice.randrange(3),
            fence=dice.randint(0, fence),
        )
        words += [encode(old)] * dice.choice((1, 1, 3))
    dice.shuffle(words)
    with side.server_lock:
        asked(side.server.publish(side.subject, *words))
    yield {"messages": len(words)}


def asked(question: Coroutine[Any, Any, Any]) -> Any:
    """The answer of NATS; raises NobodyThere where there is none, or a refusal."""
    try:
        return asyncio.run(question)
    except (NatsClientError, OSError, TimeoutError, AssertionError, KeyError) as problem:
        raise NobodyThere(f"NATS did not do it: {type(problem).__name__} {problem}") from None


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
