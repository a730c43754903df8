"""Sends what is around the work: tasks with labels and failure handlers, growing batches, gathers and streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final

from everbeat import Batch, Call, EverbeatError, Handle
from tests.chaos.program import app, closed, gathering, handled, member, streaming
from tests.chaos.tree_oracles import CANARY

_SHARE: Final = 0.15
"""The share of a producer's steps that also send something of this page."""
_LONGEST_S: Final = 1.0
_PARTS: Final = 3
"""A batch is sealed after it has grown this many times."""


class Around:
    """The sends of one producer. `number` returns the next number of a task, and `write` writes a line of the producer's log."""

    def __init__(self, random: Random, *, number: Callable[[], int], write: Callable[..., None]) -> None:
        self._random = random
        self._number = number
        self._write = write
        self._growing: list[tuple[Batch, int]] = []

    def step(self) -> None:
        """Send nothing, or a task, or a part of a batch."""
        if self._random.random() >= _SHARE:
            return
        task = self._random.choice((handled, handled, gathering, streaming, member))
        if task is member:
            self._grow()
        else:
            labels = {"part": str(self._random.randrange(3))}
            number = self._number()
            call = task.with_options(labels=labels).call(number, self._seconds(), CANARY)
            self._send([number], task.name, lambda: app.send_many([call]))

    def _grow(self) -> None:
        batch, parts = self._growing.pop() if self._growing else (self._new_batch(), 0)
        numbers = [self._number() for _ in range(4)]
        calls: list[Call[str]] = [member.call(number, self._seconds(), CANARY) for number in numbers]
        self._send(numbers, member.name, lambda: batch.open().send_many(calls))
        if parts + 1 < _PARTS:
            self._growing.append((batch, parts + 1))
            return
        with suppress(EverbeatError):  # the run seals the rest
            batch.seal()

    def _new_batch(self) -> Batch:
        return app.batch("members", on_end=closed.call(), on_success=closed.call())

    def _send(self, numbers: Sequence[int], name: str, send: Callable[[], Sequence[Handle[Any]]]) -> None:
        self._write(intends=numbers, names=[name] * len(numbers))
        try:
            handles = send()
        except EverbeatError as problem:
            self._write(doubts=numbers, why=str(problem)[:200])
        else:
            self._write(sent=numbers, ids=[str(handle.id) for handle in handles])

    def _seconds(self) -> float:
        return _LONGEST_S * self._random.random() ** 2
