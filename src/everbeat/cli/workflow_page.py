"""One workflow as people and as programs see it.

What lives here: the page of `everbeat workflows show`, its drawing in colours, and a workflow as a JSON document. What may not: fetching
it, and where lines of the drawing go (`domain.drawing_text`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct, structs
from rich.text import Text

from everbeat.cli.output import (
    amount,
    brief,
    compact_json,
    data_console,
    duration,
    moment,
    optional_moment,
    paragraph,
    say,
    show_heading,
    show_pairs,
    show_table,
    state,
    state_style,
)
from everbeat.domain.drawing import Drawn, folded, picture, printable, tally
from everbeat.domain.drawing_text import SYMBOLS, draw
from everbeat.domain.outcome import TaskError
from everbeat.domain.workflow_info import NodeInfo, NodeState, WorkflowInfo, WorkflowState

MOST_LINES: Final = 60
_WELL: Final = frozenset({NodeState.COMPLETED, NodeState.SKIPPED, NodeState.PENDING})


class WorkflowSeen(Struct, frozen=True):
    """A workflow and its nodes as they were at one moment."""

    info: WorkflowInfo
    nodes: Sequence[NodeInfo]
    at: datetime


def workflow_document(info: WorkflowInfo) -> dict[str, object]:
    """A workflow with its record's names as keys, and how many nodes it has."""
    return structs.asdict(info) | {"node_count": info.nodes}


def workflow_remark(info: WorkflowInfo) -> str:
    """What a list says of a workflow: its error, or how far it is."""
    if info.error is not None and info.state is WorkflowState.FAILED:
        return brief(str(info.error))
    if info.state is WorkflowState.COMPLETED:
        return ""
    return tally(info.counts)


def show_workflow(seen: WorkflowSeen) -> None:
    """Writes the page of one workflow to stdout."""
    show_pairs(_facts(seen))
    boxes = folded(seen.nodes, at=seen.at, limit=MOST_LINES)
    errors = {node.name: node.error for node in seen.nodes if node.error is not None}
    show_heading("Nodes")
    show_table(
        ("NODE", "STATE", "KIND", "TASK", "TRY", "TOOK", "WHAT", "ID"),
        [_node(box, errors) for box in _worth_a_line(boxes)],
        numbers=("TRY",),
        empty="It has no nodes.",
    )
    if len(boxes) > MOST_LINES:
        say(f"{amount(len(boxes) - MOST_LINES, 'line')} are left out; what failed or runs comes first.")
    if seen.info.error is not None and seen.info.error.traceback:
        show_heading("Traceback")
        show_pairs([("", paragraph(seen.info.error.traceback.rstrip()))])


def show_graph(seen: WorkflowSeen, *, width: int) -> None:
    """Writes the drawing of one workflow to stdout, in colours where those are shown."""
    console = data_console()
    head = f"{printable(seen.info.name)}  {seen.info.id}  "
    console.print(Text.assemble(head, state(seen.info.state)), soft_wrap=True)
    drawn = picture(seen.nodes, at=seen.at, limit=MOST_LINES)
    for line in draw(drawn, width=width, plain=not _can_draw()):
        text = Text()
        for span in line:
            text.append(span.text, style="" if span.state is None else state_style(span.state))
        text.rstrip()
        console.print(text, soft_wrap=True)


def _can_draw() -> bool:
    try:
        "".join((*SYMBOLS.values(), "│─╭╮╰╯├┤┬┴┼…")).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _facts(seen: WorkflowSeen) -> Iterator[tuple[str, str | Text | None]]:
    info = seen.info
    yield "id", str(info.id)
    yield "name", info.name
    yield "key", info.key
    yield "state", state(info.state)
    yield "nodes", f"{info.nodes:,}: {_tally(seen.nodes)}" if info.nodes else "0"
    yield "on error", info.on_error
    yield "parent", None if info.parent_id is None else str(info.parent_id)
    yield "output", info.output
    yield (
        "result",
        compact_json(info.result) if info.state is WorkflowState.COMPLETED and info.output else None,
    )
    yield "error", None if info.error is None else paragraph(str(info.error))
    yield (
        "error data",
        None if info.error is None or info.error.data is None else compact_json(info.error.data),
    )
    yield "sent at", moment(info.sent_at)
    yield "paused at", optional_moment(info.paused_at)
    yield "cancel requested at", optional_moment(info.cancel_requested_at)
    yield "ended at", optional_moment(info.ended_at)
    yield (
        "took",
        duration(((info.ended_at or seen.at) - info.sent_at).total_seconds())
        + ("" if info.ended_at else " so far"),
    )


def _tally(nodes: Sequence[NodeInfo]) -> str:
    counts = dict.fromkeys((node.state for node in nodes), 0)
    for node in nodes:
        counts[node.state] += 1
    return tally(counts)


def _node(box: Drawn, errors: Mapping[str, TaskError]) -> tuple[str | Text, ...]:
    error = None if box.counts else errors.get(box.key)
    said = [box.status] if box.counts else [] if error is None else [brief(str(error))]
    if box.waiting:
        said.append(box.waiting)
    return (
        printable(box.label),
        state(box.state),
        box.kind,
        box.task or "",
        str(box.attempt or ""),
        duration(box.seconds),
        "; ".join(said),
        "" if box.task_id is None else str(box.task_id),
    )


def _worth_a_line(boxes: Sequence[Drawn]) -> Sequence[Drawn]:
    """As many as there is room for: where that is not enough for all, those that failed or run first."""
    if len(boxes) <= MOST_LINES:
        return boxes
    return sorted(boxes, key=lambda box: box.state in _WELL and not box.counts)[:MOST_LINES]
