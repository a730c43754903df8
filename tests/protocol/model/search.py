"""The search: all reachable worlds, shortest paths first, until a promise is broken or no new world is found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tests.protocol.model.environment import Environment
from tests.protocol.model.observers import Observers
from tests.protocol.model.statements import Broken, Choices, Size
from tests.protocol.model.supervisors import Supervisors
from tests.protocol.model.workers import Workers
from tests.protocol.model.world import Life, Step, World, is_finished, new_world, normalised


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a search: the number of worlds, the first broken promise, and the shortest path to it."""

    worlds: int
    broken: Broken | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = "clean" if self.broken is None else f"{self.broken.value} after: {'; '.join(self.trace)}"
        return f"{self.worlds} worlds, {found}"


class TooLarge(Exception):
    """The graph has more worlds than the search may visit."""


class Protocol:
    """All possible steps of a world."""

    def __init__(self, choices: Choices, size: Size) -> None:
        self._workers = Workers(choices, size)
        self._supervisors = Supervisors(choices, size)
        self._observers = Observers(choices, size)
        self._environment = Environment(choices, size)

    def steps(self, world: World) -> Iterator[Step]:
        """Yield the possible next steps."""
        for number, tree in enumerate(world.trees):
            if tree.works:
                yield from self._workers.code(world, number)
                if world.is_up:
                    yield from self._workers.steps(world, number)
            if tree.life == Life.UP and world.is_up:
                yield from self._supervisors.steps(world, number)
                yield from self._observers.steps(world, number)
        yield from self._environment.steps(world)
        if world.faults:
            yield from self._environment.faults(world)


def explore(choices: Choices, size: Size, *, most: int = 400_000) -> Verdict:
    """Search the whole graph. Raises TooLarge beyond `most` worlds."""
    protocol = Protocol(choices, size)
    first = normalised(new_world(size))
    numbers: dict[World, int] = {first: 0}
    came_from: list[tuple[int, str]] = [(-1, "")]
    backwards: list[list[int]] = [[]]
    queue = deque([first])
    while queue:
        world = queue.popleft()
        here = numbers[world]
        for step in protocol.steps(world):
            if step.broken is not None:
                return Verdict(len(numbers), step.broken, _path_to(came_from, here, step))
            reached = normalised(step.world)
            there = numbers.get(reached)
            if there is None:
                there = numbers[reached] = len(numbers)
                came_from.append((here, step.name))
                backwards.append([])
                queue.append(reached)
                if there >= most:
                    raise TooLarge(f"more than {most} worlds for {choices} and {size}")
            if step.kind == "act":
                backwards[there].append(here)
    stuck = _first_stuck(list(numbers), backwards)
    if stuck is not None:
        return Verdict(len(numbers), Broken.L3, _path_to(came_from, stuck))
    return Verdict(len(numbers))


def _first_stuck(worlds: list[World], backwards: list[list[int]]) -> int | None:
    """Return the first world in which a worker works, but from which the parties alone can never finish all tasks."""
    can_finish = [is_finished(world) for world in worlds]
    open_ends = [number for number, finished in enumerate(can_finish) if finished]
    while open_ends:
        for before in backwards[open_ends.pop()]:
            if not can_finish[before]:
                can_finish[before] = True
                open_ends.append(before)
    for number, world in enumerate(worlds):
        if not can_finish[number] and any(tree.life == Life.UP for tree in world.trees):
            return number
    return None


def _path_to(came_from: list[tuple[int, str]], here: int, last: Step | None = None) -> tuple[str, ...]:
    names = [] if last is None else [last.name]
    while here > 0:
        here, name = came_from[here]
        names.append(name)
    return tuple(reversed(names))
