"""The world that the model explores: the database, the memory of each process, and the changes from one world to the next."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from tests.protocol.model.statements import TERMINAL, Broken, Lease, Row, Size, Tables, put

TREES: Final = 2


class Life:
    """The state of a process. Away: frozen or cut off; it keeps its memory and can return at any time, or never."""

    UP: Final = "up"
    AWAY: Final = "away"
    DEAD: Final = "dead"


class Watch:
    """The knowledge of an observer about another holder."""

    NOTHING: Final = "nothing"
    FRESH: Final = "its beat was seen"
    STALE: Final = "it stood still for a whole threshold"
    MOVED: Final = "it stood still, and has moved since without the observer's knowing"


class Held(NamedTuple):
    """A lease in the memory of a worker. `done`: its code has ended and must be settled."""

    lease: Lease
    phase: Literal["claimed", "running", "done"]
    alone: bool = False


class Plan(NamedTuple):
    """The next action of an observer: recover these leases, or end the holder. `moved`: the holder has beaten since."""

    kind: Literal["age", "end", "ended", "child"]
    holder: int
    leases: tuple[Lease, ...] = ()
    moved: bool = False


class Tree(NamedTuple):
    """A supervisor and its worker. `doubt`: the claim whose reply was lost. `child`: whether the worker lives, or how it died."""

    life: str = Life.UP
    child: Literal["lives", "killed", "crashed"] = "lives"
    held: tuple[Held, ...] = ()
    doubt: Lease | None = None
    watches: tuple[str, ...] = (Watch.NOTHING,) * (2 * TREES)
    plan: Plan | None = None

    @property
    def works(self) -> bool:
        """Whether its worker can act."""
        return self.life == Life.UP and self.child == "lives"

    @property
    def is_about_to_act(self) -> bool:
        """Whether it has found a silent holder and not yet acted on it."""
        return self.plan is not None or Watch.STALE in self.watches or Watch.MOVED in self.watches


class World(NamedTuple):
    """The whole state. `net`: a settle that is still under way, and its tree. `muted`: which trees were silent for a whole
    threshold through their own fault. `silence`: for how many thresholds a holder has been silent while observed.
    """

    tables: Tables
    before: Tables | None
    trees: tuple[Tree, ...]
    is_up: bool
    net: tuple[Lease, int] | None
    muted: tuple[bool, ...]
    silence: tuple[int, ...]
    faults: int


class Step(NamedTuple):
    """One possible event. `kind`: a party acts, help comes from outside (a restart), or a fault happens."""

    name: str
    world: World
    kind: Literal["act", "help", "fault"] = "act"
    broken: Broken | None = None


def new_world(size: Size) -> World:
    """Return the initial world."""
    return World(
        tables=Tables((Row(),) * size.tasks, (0,) * (2 * TREES)),
        before=None,
        trees=(Tree(),) * TREES,
        is_up=True,
        net=None,
        muted=(False,) * TREES,
        silence=(0,) * (2 * TREES),
        faults=size.faults,
    )


def with_tree(world: World, tree: int, **changes: Any) -> World:
    """Return the world with one tree changed."""
    return world._replace(trees=put(world.trees, tree, world.trees[tree]._replace(**changes)))


def commit(world: World, tables: Tables, size: Size) -> World:
    """Return the world after a commit; with failovers, a replica is one commit behind."""
    if tables == world.tables:
        return world
    if "failover" not in size.kinds or world.faults == 0:
        return world._replace(tables=tables)
    return world._replace(tables=tables, before=world.tables)


def without(world: World, tree: int, held: Held) -> World:
    """Remove one lease from the memory of a tree."""
    left = tuple(each for each in world.trees[tree].held if each is not held)
    return with_tree(world, tree, held=left)


def with_fault(world: World) -> World:
    """Count a fault. Earlier observations no longer measure the silence of holders."""
    return world._replace(faults=world.faults - 1, silence=(0,) * (2 * TREES))


def new_grant(world: World) -> int:
    """Return the smallest number that no party remembers."""
    used = {row.grant for row in world.tables.rows}
    if world.before is not None:
        used |= {row.grant for row in world.before.rows}
    if world.net is not None:
        used.add(world.net[0].grant)
    for tree in world.trees:
        used |= {held.lease.grant for held in tree.held}
        if tree.doubt is not None:
            used.add(tree.doubt.grant)
        if tree.plan is not None:
            used |= {lease.grant for lease in tree.plan.leases}
    return next(number for number in range(1, 99) if number not in used)


def can_become_former(world: World, tree: int) -> bool:
    """Whether a tree can continue under a new id: the place of its former self is free, or both are equal."""
    tables = world.tables
    former = tree + TREES
    holds = any(row.holder == former for row in tables.rows)
    return not holds or not any(row.holder == tree for row in tables.rows)


def become_former(world: World, tree: int) -> World:
    """Assign the tree's rows in the database to its former self; the new self is registered and holds nothing."""
    former = tree + TREES
    if any(row.holder == former for row in world.tables.rows):
        # The tree itself held nothing, and the leases of its former self stay as they are.
        tables = world.tables._replace(ended=put(world.tables.ended, tree, 0))
        trees = tuple(
            each._replace(plan=None) if each.plan is not None and each.plan.holder == tree else each
            for each in world.trees
        )
        return world._replace(tables=tables, trees=trees)
    tables = _renamed(world.tables, tree, former)
    before = None if world.before is None else _renamed(world.before, tree, former)
    trees = tuple(_watching_former(each, tree, former) for each in world.trees)
    return world._replace(tables=tables, before=before, trees=trees)


def _renamed(tables: Tables, tree: int, former: int) -> Tables:
    rows = tuple(row._replace(holder=former) if row.holder == tree else row for row in tables.rows)
    ended = put(put(tables.ended, former, tables.ended[tree]), tree, 0)
    return Tables(rows, ended)


def _watching_former(observer: Tree, tree: int, former: int) -> Tree:
    watches = put(put(observer.watches, former, observer.watches[tree]), tree, Watch.NOTHING)
    plan = observer.plan
    if plan is not None and plan.holder == tree:
        plan = plan._replace(holder=former)
    return observer._replace(watches=watches, plan=plan)


def is_alive(world: World, holder: int) -> bool:
    """Whether the process behind a holder lives. A former self that was not declared dead by mistake is dead."""
    return holder < TREES and world.trees[holder].life != Life.DEAD


def is_finished(world: World) -> bool:
    """Whether every task has ended."""
    return all(row.state in TERMINAL for row in world.tables.rows)


def normalised(world: World) -> World:
    """Return an equivalent world without facts that can no longer matter, so that the graph stays small."""
    holders = {row.holder for row in world.tables.rows}
    trees = world.trees
    silence = world.silence
    for holder in range(2 * TREES):
        if holder in holders:
            continue
        if silence[holder]:
            silence = put(silence, holder, 0)
        for number, tree in enumerate(trees):
            if tree.watches[holder] != Watch.NOTHING:
                watches = put(tree.watches, holder, Watch.NOTHING)
                trees = put(trees, number, tree._replace(watches=watches))
    ended = world.tables.ended
    for former in range(TREES, 2 * TREES):
        if ended[former] and former not in holders:
            ended = put(ended, former, 0)
    tables = world.tables if ended == world.tables.ended else world.tables._replace(ended=ended)
    muted = world.muted
    for holder in range(TREES):
        if muted[holder] and holder not in holders and not _is_judged(trees, holder):
            muted = put(muted, holder, False)
    return World(tables, world.before, trees, world.is_up, world.net, muted, silence, world.faults)


def _is_judged(trees: tuple[Tree, ...], holder: int) -> bool:
    return any(tree.plan is not None and tree.plan.holder == holder for tree in trees)
