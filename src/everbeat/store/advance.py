"""Advance workflows by one step in one transaction: read results within a memory limit, and pass them to the next nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec
import psycopg
from msgspec import Struct, structs

from everbeat.domain.settings.units import spelled_size
from everbeat.domain.workflow.graph import (
    ITEM,
    Hole,
    Known,
    ResultMissing,
    Template,
    decode_graph,
    decode_template,
    fill,
    holes,
    items_of,
)
from everbeat.domain.workflow.states import EndedWorkflow, WorkflowVerdict, verdict
from everbeat.errors import ARGUMENTS_INVALID, RESULT_NOT_AVAILABLE, RESULT_UNSERIALISABLE
from everbeat.errors.wording import amount
from everbeat.store import workflows
from everbeat.store.plan import Plan, ask
from everbeat.store.workflows import (
    Composition,
    Locked,
    NodePlace,
    ReadyNode,
    Source,
    Value,
    results,
    sources,
)

SMALL: Final = 2_000
"""The limit for small values, in bytes as stored.

PostgreSQL stores larger values out of line and often compressed, so they can be much larger when they are read.
"""
MOST_SMALL: Final = 2_000
MOST_LARGE: Final = 4
"""The number of large results that one statement reads. Each of them can be as large as the app's `payload_limit`."""
PARTS: Final = 4
"""The results from which a node takes parts may total at most this many times the `payload_limit` of the app that started the workflow."""


class InputsTooLarge(ValueError):
    """Raised if a node would receive more input than its limit allows."""


class NodeInputs:
    """The sources of the nodes in one step, and the values of these sources that are currently in memory."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources: dict[NodePlace, list[Source]] = {}
        for source in sources:
            self._sources.setdefault((source.workflow_id, source.of), []).append(source)
        self._texts: dict[NodePlace, tuple[str | None, str | None]] = {}
        self._large: set[NodePlace] = set()
        self.read = 0
        """The number of characters of large values that this step has read."""

    def read_small(self) -> Plan[None]:
        """Read the small values of all nodes, up to `MOST_SMALL` with each statement."""
        places = {
            source.place: None for each in self._sources.values() for source in each if source.stored < SMALL
        }
        yield from self._take([*places], at_once=MOST_SMALL)

    def known(self, workflow_id: UUID, holes: Collection[Hole], *, largest: int) -> Plan[dict[int, Known]]:
        """Return the values for these template holes, by node number.

        Raises InputsTooLarge if the values are too large, if possible before reading any of them.
        """
        whole = {source for hole in holes if not hole.path for source in hole.sources}
        sources = {
            of: self._sources.get((workflow_id, of), [])
            for of in dict.fromkeys(source for hole in holes for source in hole.sources)
        }
        stored = {of: sum(each.stored for each in found) for of, found in sources.items()}
        _require(sum(stored[of] for of in whole), sum(stored.values()), largest)
        given = taken = 0
        for of, found in sources.items():
            for first in range(0, len(found), MOST_LARGE):
                places = [each.place for each in found[first : first + MOST_LARGE]]
                self.read += yield from self._take(places, at_once=MOST_LARGE)
                size = sum(map(self._size, places))
                taken += size
                given += size if of in whole else 0
                _require(given, taken, largest)
        return known_of(self._values(found) for found in sources.values()).get(workflow_id, {})

    def release(self, *, beyond: int) -> None:
        """Drop the large values from memory if they have more than `beyond` characters in total."""
        if sum(map(self._size, self._large)) > beyond:
            for place in self._large:
                del self._texts[place]
            self._large.clear()

    def _take(self, places: Sequence[NodePlace], *, at_once: int) -> Plan[int]:
        """Read the values that are not in memory yet. Return the number of characters read."""
        missing = [place for place in places if place not in self._texts]
        taken = 0
        for first in range(0, len(missing), at_once):
            found = yield from ask(results(missing[first : first + at_once]))
            for workflow_id, number, result, error in found:
                place = workflow_id, number
                self._texts[place] = result, error
                taken += self._size(place)
                if self._size(place) >= SMALL:
                    self._large.add(place)
        return taken

    def _size(self, place: NodePlace) -> int:
        result, error = self._texts.get(place, (None, None))
        return len(result or "") + len(error or "")

    def _values(self, sources: Iterable[Source]) -> Iterable[Value]:
        for one in sources:
            result, error = self._texts.get(one.place, (None, None))
            yield Value(
                one.workflow_id, one.of, one.place_in_map, one.state, result, error, one.is_map, one.ended_at
            )


def _require(given: int, taken: int, largest: int) -> None:
    if given > largest:
        raise InputsTooLarge(
            f"the results passed to it total more than {spelled_size(largest)}, which is the payload_limit of the app that started the"
            " workflow; keep large data elsewhere and pass its place, or raise App(payload_limit=...)"
        )
    if taken > PARTS * largest:
        raise InputsTooLarge(
            f"the results that it takes parts of are more than {spelled_size(PARTS * largest)}, {PARTS} times the payload_limit of the app"
            " that started the workflow; let the tasks return what is wanted of them, or raise App(payload_limit=...)"
        )


def known_of(found: Iterable[Iterable[Value]]) -> dict[UUID, dict[int, Known]]:
    """Return the values grouped by workflow and node. The value of a map contains its members in order."""
    known: dict[UUID, dict[int, Known]] = {}
    members: dict[NodePlace, list[tuple[int, Known]]] = {}
    maps: list[Value] = []
    for value in (value for some in found for value in some):
        one = Known(value.state, value.result, value.error, ended_at=value.ended_at)
        if value.place is not None:
            members.setdefault((value.workflow_id, value.number), []).append((value.place, one))
        elif value.is_map:
            maps.append(value)
        else:
            known.setdefault(value.workflow_id, {})[value.number] = one
    for value in maps:
        parts = [
            part for _, part in sorted(members.get((value.workflow_id, value.number), []), key=_by_place)
        ]
        known.setdefault(value.workflow_id, {})[value.number] = Known(
            value.state, None, value.error, parts=parts
        )
    return known


def _by_place(member: tuple[int, Known]) -> int:
    return member[0]


MOST_ENTRIES: Final = 2_000
MOST_WORKFLOWS: Final = 100
MOST_EVENTS: Final = 500
MOST_ENQUEUED: Final = 500
"""The maximum cost of one step, in nodes. A step of this cost holds its locks for some tens of milliseconds."""
COST_OF_CHILD: Final = 10
"""The cost of a child workflow, in nodes. All tasks share one statement, but each child workflow needs two statements."""
MOST_BYTES: Final = 16_000_000
"""The maximum total size of the results read and the arguments composed in one step. The next step enqueues the remaining nodes."""
MOST_BYTES_OF_MEMBERS: Final = 128_000_000
"""The maximum total size of the arguments of all members of a map over a result. One statement writes all of them."""


class AdvanceResult(Struct, frozen=True):
    """The numbers of workflows that a step handled, of nodes that it enqueued, and of workflows that it finished.

    `workflows` does not include workflows that are waiting for a child that another transaction has locked.
    """

    workflows: int
    enqueued: int = 0
    ended: int = 0


class StepTimedOut(Exception):
    """Raised if the server cancelled a statement of a step because the statement took too long.

    This is not an outage, so the step must not be repeated immediately.
    """


def step(
    *,
    channel: str,
    ids: Collection[UUID] | None = None,
    only: UUID | None = None,
    without: Collection[UUID] = (),
    most: int = MOST_WORKFLOWS,
    on_locked: Callable[[Collection[UUID]], None] | None = None,
) -> Plan[AdvanceResult]:
    """Advance workflows by one step.

    If `ids` is None, the step handles up to `most` workflows that have new events and that no other transaction has locked. Otherwise, it
    handles the workflows in `ids`. `only` restricts the step to one workflow and its children. `without` lists workflows to exclude.
    `on_locked` is called with the ids of the workflows that the step has locked. Raises StepTimedOut if a statement takes too long.
    """
    try:
        return (
            yield from _step(ids, only=only, without=without, most=most, on_locked=on_locked, channel=channel)
        )
    except psycopg.errors.QueryCanceled as problem:
        raise StepTimedOut(f"a statement of its step took too long: {problem}") from problem


def _step(
    ids: Collection[UUID] | None,
    *,
    only: UUID | None,
    without: Collection[UUID],
    most: int,
    on_locked: Callable[[Collection[UUID]], None] | None,
    channel: str,
) -> Plan[AdvanceResult]:
    if ids is None:
        locked = yield from ask(workflows.lock(entries=MOST_ENTRIES, limit=most, only=only, without=without))
    else:
        locked = yield from ask(workflows.lock_these(ids))
    if on_locked is not None:
        on_locked([each.id for each in locked])
    if not locked:
        return AdvanceResult(0)
    states = {each.id: each.state for each in locked}
    happened = yield from ask(workflows.absorb(states, limit=MOST_EVENTS))
    stopping = yield from _pause(locked, states, happened.failed)
    stopping |= {each for each in happened.whole if states[each] in ("PAUSED", "CANCELLING")}
    waiting_for_a_child: set[UUID] = set()
    if stopping:
        waiting_for_a_child |= yield from ask(workflows.withdraw(stopping, channel=channel))
    ready = [*happened.ready]
    going_on = [each for each in happened.whole if states[each] == "RUNNING"]
    if going_on:
        waiting_for_a_child |= yield from ask(workflows.let_go(going_on))
    if happened.nodes:
        ready += yield from ask(workflows.resolve(happened.nodes))
    begins = [each for each in ready if states[each.workflow_id] == "RUNNING"]
    largest = {each.id: each.largest for each in locked}
    enqueued = yield from _begin(begins, largest, channel)
    waiting = [each.place for each in ready if states[each.workflow_id] == "PAUSED"]
    if waiting:
        yield from ask(workflows.hold(waiting, again=[False] * len(waiting)))
    ended = yield from _end(states.keys() - {each.workflow_id for each in begins}, largest, channel)
    # A workflow that is waiting for another transaction does not justify another step immediately.
    return AdvanceResult(len(states.keys() - waiting_for_a_child), enqueued, ended)


def _pause(locked: Iterable[Locked], states: dict[UUID, str], failed: Sequence[NodePlace]) -> Plan[set[UUID]]:
    """Pause the running workflows that have a failed node and `on_error='pause'`. Return the ids of the paused workflows."""
    hit = {place[0] for place in failed}
    pausing = [
        each.id for each in locked if each.id in hit and each.on_error == "pause" and each.state == "RUNNING"
    ]
    if not pausing:
        return set()
    paused = yield from ask(workflows.pause_failed(pausing))
    states.update(dict.fromkeys(paused, "PAUSED"))
    return set(paused)


def _begin(ready: Sequence[ReadyNode], largest: Mapping[UUID, int], channel: str) -> Plan[int]:
    """Send the tasks of these nodes, create the members of their maps, and start their child workflows. Return the number of tasks sent."""
    now, later = _portion(ready)
    if later:
        yield from ask(workflows.hold([each.place for each in later], again=[True] * len(later)))
    args: dict[NodePlace, str | None] = {each.place: None for each in now if each.kind == "task"}
    composed = [each.place for each in now if each.composed]
    if composed:
        parts = yield from ask(workflows.compositions(composed))
        handing = yield from _handing(parts)
        spent, late = 0, list[NodePlace]()
        for part in parts:
            place = part.workflow_id, part.number
            if spent and spent + handing.read > MOST_BYTES:
                args.pop(place, None)
                late.append(place)
                continue
            most = largest[part.workflow_id]
            spent += 1  # also for a part that is refused, so that the first one is never late
            try:
                known = yield from handing.known(part.workflow_id, _sources(part), largest=most)
                match part.kind:
                    case "task":
                        filled = args[place] = _filled(part.template, part.args, known, most)
                        spent += len(filled or "")
                    case "map":
                        members = _members(part, known)
                        spent += sum(map(len, members))
                        yield from ask(workflows.expand(place, members))
                    case _:
                        yield from _start_child(part, known, most, channel)
            except (LookupError, ValueError, RecursionError) as problem:
                args.pop(place, None)
                code = RESULT_NOT_AVAILABLE if isinstance(problem, ResultMissing) else ARGUMENTS_INVALID
                message = f"the arguments of node {part.name} cannot be put together: {problem}"
                yield from ask(workflows.refuse(place, code=code, message=message))
            handing.release(beyond=MOST_BYTES)
        if late:
            yield from ask(workflows.hold(late, again=[True] * len(late)))
    if args:
        yield from ask(workflows.enqueue([*args], [*args.values()], channel=channel))
    return len(args)


def _portion(ready: Sequence[ReadyNode]) -> tuple[Sequence[ReadyNode], Sequence[ReadyNode]]:
    """Return the nodes that this step begins, and those that it leaves to the next step."""
    cost = 0
    for count, each in enumerate(ready):
        cost += COST_OF_CHILD if each.kind == "workflow" else 1
        if cost > MOST_ENQUEUED:
            return ready[:count], ready[count:]
    return ready, ()


def _handing(parts: Iterable[Composition]) -> Plan[NodeInputs]:
    """Return the sources of all template holes, with the small values already read."""
    wanted = {
        (part.workflow_id, source) for part in parts for hole in _sources(part) for source in hole.sources
    }
    if not wanted:
        return NodeInputs(())
    handing = NodeInputs((yield from ask(sources(wanted))))
    yield from handing.read_small()
    return handing


def _sources(part: Composition) -> list[Hole]:
    texts = [text for text in (part.template, part.items) if text is not None]
    return [hole for text in texts for hole in holes(decode_template(text)) if hole.source != ITEM]


def _filled(template: str | None, args: str | None, known: dict[int, Known], largest: int) -> str | None:
    """Return the arguments of a node. Raises ValueError if they are too large."""
    if template is None:
        return args
    filled = fill(decode_template(template), known)
    if len(filled) > largest:
        raise ValueError(
            f"they would take {len(filled):,} characters of JSON; one task takes at most {largest:,}, the payload_limit of the app"
            " that started the workflow; keep large data elsewhere and pass its place, or raise App(payload_limit=...)"
        )
    return filled


def _members(part: Composition, known: dict[int, Known]) -> list[str]:
    """Return the arguments of a map's members. Raises ValueError if they are too large in total."""
    items = items_of(fill(decode_template(part.items or "[]"), known))
    template: Template = decode_template(part.template or "[]")
    members: list[str] = []
    size = 0
    for item in items:
        members.append(fill(template, known | {ITEM: Known("COMPLETED", item)}))
        size += len(members[-1])
        if size > MOST_BYTES_OF_MEMBERS:
            raise ValueError(
                f"those of its {amount(len(items), 'member')} are more than {MOST_BYTES_OF_MEMBERS:,} characters together;"
                " keep large data elsewhere, and pass its place"
            )
    return members


def _start_child(part: Composition, known: dict[int, Known], largest: int, channel: str) -> Plan[None]:
    given = _filled(part.template, part.args, known, largest)
    graph = decode_graph(part.graph or "{}")
    place = part.workflow_id, part.number
    child = yield from ask(workflows.adopt(place))
    if child is not None:
        statement = workflows.insert(
            child,
            graph,
            channel=channel,
            given=None if given is None else given.encode(),
            parent=place,
            largest=largest,
        )
        yield from ask(statement)


def _end(ids: Iterable[UUID], largest: Mapping[UUID, int], channel: str) -> Plan[int]:
    candidates = [*ids]
    if not candidates:
        return 0
    ended = yield from ask(workflows.ended(candidates))
    if not ended:
        return 0
    verdicts: list[WorkflowVerdict] = []
    for each in ended:
        complete = yield from _with_output(each, largest[each.workflow_id])
        verdicts.append(verdict(complete))
    yield from ask(workflows.finish(verdicts, channel=channel))
    return len(ended)


def _with_output(ended: EndedWorkflow, largest: int) -> Plan[EndedWorkflow]:
    if not ended.output_is_map or ended.output is None or ended.output_state != "COMPLETED":
        return ended
    output = Hole(ended.output)
    handing = NodeInputs((yield from ask(sources([(ended.workflow_id, ended.output)]))))
    result, error = None, ended.output_error
    try:
        known = yield from handing.known(ended.workflow_id, [output], largest=largest)
        result = fill((output,), known)
    except ResultMissing as missing:  # a member completed without its output, or its row was deleted
        error = str(missing)
    except InputsTooLarge as problem:
        message = f"the list of what its members returned cannot be the result: {problem}"
        error = msgspec.json.encode({"code": RESULT_UNSERIALISABLE, "message": message}).decode()
    return structs.replace(ended, output_result=result, output_error=error)
