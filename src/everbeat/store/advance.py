"""One step of workflows: what has happened to some of them becomes what follows from it, in one transaction.

What lives here: the order of the statements, under the lock of the workflows. What may not: when to take a step (`worker.advancer`),
and transactions (`store.session`, `store.database`).

A step that is repeated, or taken by two, changes nothing twice: whoever holds the lock finds in the outbox what is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec
import psycopg
from msgspec import Struct, structs

from everbeat.domain.graph import (
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
from everbeat.domain.outcome import ARGUMENTS_INVALID, RESULT_NOT_AVAILABLE, RESULT_UNSERIALISABLE
from everbeat.domain.verdict import Ended, Verdict, verdict
from everbeat.store import workflows
from everbeat.store.handing_on import Handing, TooMuch
from everbeat.store.plan import Plan, ask
from everbeat.store.workflow_values import sources
from everbeat.store.workflows import Composition, Locked, Place, ReadyNode

MOST_LOOKED_AT: Final = 2_000
MOST_WORKFLOWS: Final = 100
MOST_EVENTS: Final = 500
MOST_ENQUEUED: Final = 500
"""A step holds its locks for some tens of milliseconds."""
MOST_BYTES: Final = 16_000_000
"""Of results that were read and arguments that were put together: nodes beyond are enqueued by the next step."""
MOST_BYTES_OF_MEMBERS: Final = 128_000_000
"""Of the arguments of all members of a map over a result, which are written in one statement."""


class Step(Struct, frozen=True):
    """What a step did: workflows it was at (without those that wait for a child that another transaction holds), nodes it enqueued,
    workflows it ended."""

    workflows: int
    enqueued: int = 0
    ended: int = 0


class StepTimedOut(Exception):
    """The server ended a statement of a step. It is no outage, so that the step is not repeated at once."""


def step(
    *,
    channel: str,
    ids: Collection[UUID] | None = None,
    only: UUID | None = None,
    without: Collection[UUID] = (),
    most: int = MOST_WORKFLOWS,
    on_locked: Callable[[Collection[UUID]], None] | None = None,
) -> Plan[Step]:
    """Takes one step: with the workflows that something happened to and nobody is at, `most` of them, or with these (`ids`).
    `only`: none but this one and what is within it; `without`: none of those. `on_locked` is told which it is about to be at. Raises StepTimedOut."""
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
) -> Plan[Step]:
    if ids is None:
        locked = yield from ask(workflows.lock(look=MOST_LOOKED_AT, limit=most, only=only, without=without))
    else:
        locked = yield from ask(workflows.lock_these(ids))
    if on_locked is not None:
        on_locked([each.id for each in locked])
    if not locked:
        return Step(0)
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
    if happened.look:
        ready += yield from ask(workflows.resolve(happened.look))
    begins = [each for each in ready if states[each.workflow_id] == "RUNNING"]
    largest = {each.id: each.largest for each in locked}
    enqueued = yield from _begin(begins, largest, channel)
    waiting = [each.place for each in ready if states[each.workflow_id] == "PAUSED"]
    if waiting:
        yield from ask(workflows.hold(waiting, again=[False] * len(waiting)))
    ended = yield from _end(states.keys() - {each.workflow_id for each in begins}, largest, channel)
    # What waits for another transaction is not worth the next step at once.
    return Step(len(states.keys() - waiting_for_a_child), enqueued, ended)


def _pause(locked: Iterable[Locked], states: dict[UUID, str], failed: Sequence[Place]) -> Plan[set[UUID]]:
    """Pauses those of which a node failed and that asked for it; answers which."""
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
    """Sends tasks, makes members of maps, starts children."""
    now, later = ready[:MOST_ENQUEUED], ready[MOST_ENQUEUED:]
    if later:
        yield from ask(workflows.hold([each.place for each in later], again=[True] * len(later)))
    args: dict[Place, str | None] = {each.place: None for each in now if each.kind == "task"}
    composed = [each.place for each in now if each.composed]
    if composed:
        parts = yield from ask(workflows.compositions(composed))
        handing = yield from _handing(parts)
        spent, late = 0, list[Place]()
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


def _handing(parts: Iterable[Composition]) -> Plan[Handing]:
    """The sources of all holes, with what is small of them."""
    wanted = {(part.workflow_id, hole.source) for part in parts for hole in _sources(part)}
    if not wanted:
        return Handing(())
    handing = Handing((yield from ask(sources(wanted))))
    yield from handing.read_small()
    return handing


def _sources(part: Composition) -> list[Hole]:
    texts = [text for text in (part.template, part.items) if text is not None]
    return [hole for text in texts for hole in holes(decode_template(text)) if hole.source != ITEM]


def _filled(template: str | None, args: str | None, known: dict[int, Known], largest: int) -> str | None:
    """The arguments of a node; raises ValueError where they are too large."""
    if template is None:
        return args
    filled = fill(decode_template(template), known)
    if len(filled) > largest:
        raise ValueError(
            f"they would take {len(filled):,} characters of JSON; one task takes at most {largest:,}, the payload_limit of the app"
            " that started the workflow; keep large data elsewhere and hand on where it is, or raise App(payload_limit=...)"
        )
    return filled


def _members(part: Composition, known: dict[int, Known]) -> list[str]:
    """The arguments of a map's members; raises ValueError where they are too much together."""
    items = items_of(fill(decode_template(part.items or "[]"), known))
    template: Template = decode_template(part.template or "[]")
    members: list[str] = []
    size = 0
    for item in items:
        members.append(fill(template, known | {ITEM: Known("COMPLETED", item)}))
        size += len(members[-1])
        if size > MOST_BYTES_OF_MEMBERS:
            raise ValueError(
                f"those of its {len(items):,} members are more than {MOST_BYTES_OF_MEMBERS:,} characters together;"
                " keep large data elsewhere, and hand on where"
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
    verdicts: list[Verdict] = []
    for each in ended:
        complete = yield from _with_output(each, largest[each.workflow_id])
        verdicts.append(verdict(complete))
    yield from ask(workflows.finish(verdicts, channel=channel))
    return len(ended)


def _with_output(ended: Ended, largest: int) -> Plan[Ended]:
    if not ended.output_is_map or ended.output is None or ended.output_state != "COMPLETED":
        return ended
    output = Hole(ended.output)
    handing = Handing((yield from ask(sources([(ended.workflow_id, ended.output)]))))
    result, error = None, ended.output_error
    try:
        known = yield from handing.known(ended.workflow_id, [output], largest=largest)
        result = fill((output,), known)
    except TooMuch as problem:
        message = f"the list of what its members returned cannot be the result: {problem}"
        error = msgspec.json.encode({"code": RESULT_UNSERIALISABLE, "message": message}).decode()
    return structs.replace(ended, output_result=result, output_error=error)
