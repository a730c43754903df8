"""A producer, which sends tasks until its standard input closes, and records every intended and acknowledged send in a file.

Run `python -m tests.chaos.producer LOG SEED SENDS_PER_S FIRST_NUMBER`. The outcome of a send without an acknowledgement is in doubt.
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
from tests.chaos.around import Around
from tests.chaos.clock import boot_s
from tests.chaos.program import LONGEST_S, NODE_TASKS, WEIGHTS, app, cancelled, expiring, lined
from tests.chaos.tree_oracles import CANARY
from tests.chaos.workflow_oracles import BOTTOM, LEFT, NODES, RIGHT, TAIL, TOP

Send: TypeAlias = tuple[Task[[int, float, str], str], int, float]
"""A task, its number and how many seconds it runs."""

_LONGEST_S: Final = 5.0
_CANCEL_WITHIN_S: Final = 2.0
_GOOD_FOR_S: Final = 3.0
_WORKFLOWS: Final = 0.1
"""The share of steps that also start a workflow."""


class Producer:
    """Sends tasks and sometimes cancels them."""

    def __init__(self, log: TextIO, *, random: Random, first: int) -> None:
        self._log = log
        self._random = random
        # Use a separate random generator, so that a seed sends the same tasks with or without workflows.
        self._other_random = Random(first)
        self._number = first
        self._line = f"line of {first}"
        self._around = Around(Random(first + 1), number=self._next_number, write=self._write)
        self._to_cancel: list[tuple[float, UUID]] = []

    def step(self) -> None:
        """Send one or more tasks, sometimes start a workflow, and send the cancels that are due."""
        self._send_some()
        if self._other_random.random() < _WORKFLOWS:
            self._start()
        self._around.step()
        self._cancel()

    def _start(self) -> None:
        """Start a workflow of random tasks: a diamond with a tail."""
        workflow = app.workflow("diamond")
        nodes: list[Node[str]] = []
        numbers: list[int] = []
        names: list[str] = []
        for _ in range(NODES):
            self._number += 1
            task = self._other_random.choice(NODE_TASKS)
            seconds = LONGEST_S.get(task, 1.0) * self._other_random.random() ** 2
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
        sends = [self._next() for _ in range(self._random.choice((1, 1, 1, 1, 1, 8)))]
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
                self._to_cancel.append((boot_s() + self._random.uniform(0, _CANCEL_WITHIN_S), handle.id))

    def _send(self, sends: Sequence[Send]) -> list[Handle[Any]]:
        if len(sends) == 1:
            ((task, number, seconds),) = sends
            return [task.send(number, seconds, CANARY)]
        return app.send_many([task.call(number, seconds, CANARY) for task, number, seconds in sends])

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _next(self) -> Send:
        (task,) = self._random.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
        longest = LONGEST_S.get(task, _LONGEST_S)
        # Most tasks are short. Faults affect mainly those that take seconds.
        seconds = longest * self._random.random() ** 2
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
    """Run until standard input is closed."""
    log, seed, sends_per_s, first = sys.argv[1:]
    random = Random(int(seed))
    with Path(log).open("a", encoding="utf-8") as file:
        producer = Producer(file, random=random, first=int(first))
        while not select.select([sys.stdin], [], [], random.expovariate(float(sends_per_s)))[0]:
            producer.step()
    app.close()


if __name__ == "__main__":
    main()
