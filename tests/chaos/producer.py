"""A producer: sends tasks until its input ends, and writes every intention and every acknowledgement to a file.

`python -m tests.chaos.producer LOG SEED SENDS_PER_S FIRST_NUMBER`. An intention without an acknowledgement is in doubt.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO, TypeAlias
from uuid import UUID

from everbeat import EverbeatError, Handle, Node, Task
from tests.chaos.clock import boot_s
from tests.chaos.program import LONGEST_S, NODE_TASKS, WEIGHTS, app, cancelled, expiring, lined
from tests.chaos.tree_oracles import CANARY
from tests.chaos.workflow_oracles import BOTTOM, LEFT, NODES, RIGHT, TAIL, TOP

Send: TypeAlias = tuple[Task[[int, float, str], str], int, float]
"""A task, its number and its seconds."""

_LONGEST_S: Final = 5.0
_CANCEL_WITHIN_S: Final = 2.0
_GOOD_FOR_S: Final = 3.0
_WORKFLOWS: Final = 0.1
"""How often a workflow is started, too."""


class Producer:
    """One loop: sends, and sometimes cancels what it sent."""

    def __init__(self, log: TextIO, *, dice: Random, first: int) -> None:
        self._log = log
        self._dice = dice
        # Of their own: a seed sends the same tasks whether there are workflows or not.
        self._other_dice = Random(first)
        self._number = first
        self._line = f"line of {first}"
        self._to_cancel: list[tuple[float, UUID]] = []

    def step(self) -> None:
        """One send of one task or of several, sometimes the start of a workflow, and the cancels that are due."""
        self._send_some()
        if self._other_dice.random() < _WORKFLOWS:
            self._start()
        self._cancel()

    def _start(self) -> None:
        """A diamond and a tail, of any tasks."""
        workflow = app.workflow("diamond")
        nodes: list[Node[str]] = []
        numbers: list[int] = []
        names: list[str] = []
        for _ in range(NODES):
            self._number += 1
            task = self._other_dice.choice(NODE_TASKS)
            seconds = LONGEST_S.get(task, 1.0) * self._other_dice.random() ** 2
            nodes.append(workflow.add(task, self._number, seconds, CANARY))
            numbers.append(self._number)
            names.append(task.name)
        nodes[LEFT].after(nodes[TOP])
        nodes[RIGHT].after(nodes[TOP])
        nodes[BOTTOM].after(nodes[LEFT], nodes[RIGHT])
        nodes[TAIL].after(nodes[BOTTOM]).allow_failed()
        self._write(intends=numbers, names=names)
        try:
            handle = workflow.start()
        except EverbeatError as problem:
            self._write(doubts=numbers, why=str(problem)[:200])
        else:
            self._write(started=str(handle.id), numbers=numbers)

    def _send_some(self) -> None:
        sends = [self._next() for _ in range(self._dice.choice((1, 1, 1, 1, 1, 8)))]
        numbers = [number for _, number, _ in sends]
        self._write(intends=numbers, names=[task.name for task, _, _ in sends])
        try:
            handles = self._send(sends)
        except EverbeatError as problem:
            self._write(doubts=numbers, why=str(problem)[:200])
            return
        self._write(sent=numbers, ids=[str(handle.id) for handle in handles])
        for (task, _, _), handle in zip(sends, handles, strict=True):
            if task.name == cancelled.name:
                self._to_cancel.append((boot_s() + self._dice.uniform(0, _CANCEL_WITHIN_S), handle.id))

    def _send(self, sends: Sequence[Send]) -> list[Handle[Any]]:
        if len(sends) == 1:
            ((task, number, seconds),) = sends
            return [task.send(number, seconds, CANARY)]
        return app.send_many([task.call(number, seconds, CANARY) for task, number, seconds in sends])

    def _next(self) -> Send:
        (task,) = self._dice.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
        longest = LONGEST_S.get(task, _LONGEST_S)
        # Most are short; those that take seconds are what a fault finds running.
        seconds = longest * self._dice.random() ** 2
        self._number += 1
        if task is expiring:
            task = task.with_options(good_until=datetime.now(UTC) + timedelta(seconds=_GOOD_FOR_S))
        elif task is lined:
            task = task.with_options(serial=self._line)
        return task, self._number, seconds

    def _cancel(self) -> None:
        due = [one for one in self._to_cancel if one[0] <= boot_s()]
        self._to_cancel = [one for one in self._to_cancel if one[0] > boot_s()]
        for _, task_id in due:
            self._write(cancels=str(task_id))
            try:
                answer = app.cancel(task_id)
            except EverbeatError as problem:
                self._write(cancel_doubted=str(task_id), why=str(problem)[:200])
            else:
                self._write(cancelled=str(task_id), verdict=answer.verdict)

    def _write(self, **line: object) -> None:
        self._log.write(json.dumps({**line, "at": boot_s()}) + "\n")
        self._log.flush()


def main() -> None:
    """Until standard input ends."""
    log, seed, sends_per_s, first = sys.argv[1:]
    dice = Random(int(seed))
    with Path(log).open("a", encoding="utf-8") as file:
        producer = Producer(file, dice=dice, first=int(first))
        while not select.select([sys.stdin], [], [], dice.expovariate(float(sends_per_s)))[0]:
            producer.step()
    app.close()


if __name__ == "__main__":
    main()
