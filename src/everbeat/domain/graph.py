"""A workflow as data: nodes, what they wait for, and how their arguments are put together from what others returned.

What lives here: the graph as it is stored, and the filling of its templates. What may not: how users build one (`client.workflow`),
checks (`graph_checks`), and what its nodes have come to (`advance`).

A template is JSON text with holes: texts and holes in turns, of which the whole is a JSON object of arguments by parameter name. Values
are put in as the text they were stored as, so nothing is read and written again on the way from one task to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

NodeKind: TypeAlias = Literal["task", "workflow", "map"]
Wanted: TypeAlias = Literal["value", "outcome"]
OnError: TypeAlias = Literal["fail", "pause", "continue"]

INPUT: Final = -1
"""As the source of a hole: the arguments that the workflow itself was given."""
_NO_ERROR: Final = '{"code":"RESULT_NOT_AVAILABLE","message":"it ended without an error"}'
_NO_RESULT: Final = '{"code":"RESULT_NOT_AVAILABLE","message":"it completed, and its result is gone"}'


class ResultMissing(LookupError):
    """What completed has no result: a child without its output, or one that somebody deleted."""


ITEM: Final = -2
"""As the source of a hole in the template of a map's members: the item of the member."""


class Hole(Struct, frozen=True, array_like=True):
    """A place in a template: what node `source` returned, or the part of it at `path` (names of fields, indexes of lists).

    `outcome`: the whole end instead, as `{"completed": value}` or `{"failed": {"code": ..., "message": ..., "data": ...}}`. Of a map: a
    list of its members', in the order of its items. Of `INPUT`, path begins with the name of a parameter.
    """

    source: int
    wants: Wanted = "value"
    path: tuple[str | int, ...] = ()


Template: TypeAlias = tuple[str | Hole, ...]


class TaskSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which task a node sends and how, as in `NewTask`: `policy` and `flags` are JSON text, `good_until` is in ISO 8601."""

    name: str
    queue: str
    priority: int = 0
    policy: str | None = None
    flags: str | None = None
    good_until: str | None = None
    serial: str | None = None


class Edge(Struct, frozen=True, omit_defaults=True):
    """`child` waits for the end of `parent`.

    It is met when the parent COMPLETED, or by any end if it `tolerates`; where `expects` is given, only if the value at `path` of the
    parent's result is that, too. Every edge that does not count for the child's quorum (`joins`) must be met.
    """

    parent: int
    child: int
    tolerates: bool = False
    joins: bool = False
    path: tuple[str, ...] | None = None
    expects: bool | None = None


class Node(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One vertex; its number is its place in the graph.

    `task` with `args` (all known, JSON text) or a `template`. `workflow` with the `graph` of the child, and its arguments as `args` or `template`.
    `map`: a collector, which ends when its members have. With `members` they stand in the graph, `members` nodes from
    `first_member` on, each with `member_of`; without, `items` is a template of one hole that becomes a JSON list when the node is ready,
    and each item makes a member of `task` with the arguments of `template`, whose hole `ITEM` is the item.

    `quorum`: how many of the edges that join must be met.
    """

    name: str
    kind: NodeKind = "task"
    task: TaskSpec | None = None
    args: str | None = None
    template: Template | None = None
    items: Template | None = None
    graph: Graph | None = None
    member_of: int | None = None
    first_member: int | None = None
    members: int | None = None
    quorum: int | None = None


class Graph(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A workflow to start. `success`: it is COMPLETED when all nodes of any of these cases are, whatever else failed; none: when no node
    failed. `output`: the node whose value is the workflow's."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    on_error: OnError = "fail"
    success: tuple[tuple[int, ...], ...] = ()
    output: int | None = None


class Known(Struct, frozen=True):
    """What a source of holes has come to: JSON texts, as stored. `parts`: of a map, what each of its members has come to."""

    state: str
    result: str | None = None
    error: str | None = None
    parts: Sequence[Known] | None = None


def holes(template: Template) -> list[Hole]:
    """The holes of a template, in order."""
    return [part for part in template if isinstance(part, Hole)]


def fill(template: Template, known: Mapping[int, Known]) -> str:
    """The template with its holes filled. Raises LookupError for a path that leads nowhere, naming hole and path; ResultMissing."""
    return "".join(part if isinstance(part, str) else _filling(part, known[part.source]) for part in template)


def _filling(hole: Hole, known: Known) -> str:
    if known.parts is not None:
        if hole.wants == "outcome" and known.state != "COMPLETED" and not known.parts:
            # Its list was never made: told as one that failed, or nobody could tell it from an empty one.
            return f'[{{"failed":{known.error or _NO_ERROR}}}]'
        return "[" + ",".join(_filling(hole, part) for part in known.parts) + "]"
    if hole.wants == "outcome":
        if known.state == "COMPLETED" and known.result is None:
            return f'{{"failed":{known.error or _NO_RESULT}}}'
        if known.state == "COMPLETED":
            return f'{{"completed":{known.result}}}'
        return f'{{"failed":{known.error or _NO_ERROR}}}'
    if known.result is None:
        raise ResultMissing(known.error or _NO_RESULT)
    return part_at(known.result, hole.path)


def part_at(text: str, path: Sequence[str | int]) -> str:
    """The part of a JSON text at a path, as the text it is there; raises LookupError where there is none."""
    for step in path:
        try:
            if isinstance(step, int):
                text = _raw(msgspec.json.decode(text, type=list[msgspec.Raw])[step])
            else:
                text = _raw(msgspec.json.decode(text, type=dict[str, msgspec.Raw])[step])
        except (LookupError, msgspec.MsgspecError):
            raise LookupError(f"no {step!r} in {text[:80]}") from None
    return text


def items_of(text: str) -> list[str]:
    """The items of a JSON list, each as the text it is there; raises ValueError if it is none."""
    try:
        return [_raw(each) for each in msgspec.json.decode(text, type=list[msgspec.Raw])]
    except msgspec.MsgspecError:
        raise ValueError(f"no list: {text[:80]}") from None


def _raw(part: msgspec.Raw) -> str:
    return bytes(memoryview(part)).decode()


def encode(graph: Graph | Template) -> bytes:
    """As JSON, to be stored."""
    return msgspec.json.encode(graph)


def decode_graph(data: bytes | str) -> Graph:
    """The graph that was stored."""
    return msgspec.json.decode(data, type=Graph)


def decode_template(data: bytes | str) -> Template:
    """The template that was stored."""
    return msgspec.json.decode(data, type=Template)
