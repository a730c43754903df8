"""The common base of all parties of the model: the choices, the statements, and the form of a step."""

from __future__ import annotations

from typing import Literal

from tests.protocol.model.statements import Answer, Choices, Database, Size
from tests.protocol.model.world import TREES, Held, Step, World, commit, with_tree, without


class Rules:
    """One variant of the protocol, and the size of the explored world."""

    def __init__(self, choices: Choices, size: Size) -> None:
        self.choices = choices
        self.size = size
        self.database = Database(choices, size, TREES)

    def committed(
        self, name: str, world: World, answer: Answer, *, kind: Literal["act", "help", "fault"] = "act"
    ) -> Step:
        """Return the reply of a statement as a step."""
        return Step(name, commit(world, answer.tables, self.size), kind, answer.broken)

    def is_poison(self, held: Held) -> bool:
        """Whether this code kills its process."""
        return self.size.poison and held.lease.task == 0


def with_held(world: World, tree: int, held: Held) -> World:
    """Add one lease to the memory of a tree."""
    return with_tree(world, tree, held=tuple(sorted((*world.trees[tree].held, held))))


def with_phase(
    world: World, tree: int, held: Held, phase: Literal["running", "done"], *, alone: bool | None = None
) -> World:
    """Move a lease in the memory of a tree to its next phase."""
    new = held._replace(phase=phase, alone=held.alone if alone is None else alone)
    return with_held(without(world, tree, held), tree, new)


def without_worker(world: World, tree: int, how: Literal["killed", "crashed"]) -> World:
    """Let the worker of a tree die, with its whole memory; its supervisor lives."""
    return with_tree(world, tree, child=how, held=(), doubt=None)
