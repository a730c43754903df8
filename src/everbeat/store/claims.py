"""The statement that claims tasks, the tasks that it returns, and two statements that keep claims cheap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from uuid import UUID

from msgspec import Struct, structs

from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, integers, uuids, without
from everbeat.store.tasks import MarkedGroup, marked_json

ClaimPlace: TypeAlias = tuple[datetime, UUID]
"""The position of a task in its lane: its enqueue time, then its id."""
NO_FLOORS: Final[Mapping[tuple[str, int], ClaimPlace]] = MappingProxyType({})

CLAIM_BYTES: Final = 16 * 1024 * 1024
"""The maximum total size, in bytes, of the arguments and checkpoints that one claim returns.

The first task is returned even if it is larger.
"""

_CONTEXT_PLACE: Final = 22
"""The place of the part "context" in a row, which is after `labels`."""


class Claimed(Struct, frozen=True):
    """A task that this worker has just claimed. `args`, `policy`, `checkpoint` and `labels` are JSON text.

    `attempt` is the number of attempts started.

    `suspect`: the task may kill its process, so it runs in its own process. `started_at`: when the attempt started, if it started with
    the claim. `in_line`: the task belongs to a serial line. `whole_id`: the workflow or batch that the task belongs to. `is_cut`: the claim
    omitted further tasks because the reply would have been too large. `looked_s`: the duration of the search in seconds, if the search was
    long. A repeated claim returns None for `is_cut` and `looked_s`. `is_marked`: only workers whose code meets the task's needs can claim
    the task. `tick`: the tick of the schedule that sent the task. `due_queues`: the queues that have the most urgent tasks, if there are more
    than 64 of them; only one task of a claim has it. `line_floors`: for the next claims, where the ready lines begin; only one
    task of a claim has it. `context`: the carrier and other facts for tracers, as JSON text, if the claim asked for them.
    """

    id: UUID
    claim_id: UUID
    fence: int
    name: str
    queue: str
    priority: int
    args: str
    attempt: int
    retry_count: int
    crash_count: int
    loss_count: int
    policy: str | None
    enqueued_at: datetime
    good_until: datetime | None
    suspect: bool = False
    checkpoint: str | None = None
    started_at: datetime | None = None
    in_line: bool = False
    whole_id: UUID | None = None
    is_marked: bool = False
    tick: datetime | None = None
    labels: str | None = None
    looked_s: float | None = None
    is_cut: bool | None = None
    due_queues: list[str] | None = None
    line_floors: str | None = None
    lines_changed: bool | None = None
    context: str | None = None


def claim(
    *,
    worker_id: str,
    claim_call: UUID,
    names: Sequence[str],
    limit: int,
    queues: Sequence[str] | None,
    queue_priorities: Mapping[str, int],
    channel: str | None = None,
    after_queue: str | None = None,
    suspects: bool | None = None,
    starts: int = 0,
    policies: bytes | None = None,
    alone: bool = False,
    floors: Mapping[tuple[str, int], ClaimPlace] = NO_FLOORS,
    line_floors: str | None = None,
    most_bytes: int = CLAIM_BYTES,
    marked: Sequence[MarkedGroup] = (),
    with_lines: bool = True,
    with_context: bool = False,
) -> Statement[list[Claimed]]:
    """Claim up to `limit` due tasks with these names, ordered by queue priority, then task priority, then enqueue time.

    `suspects`: True claims only suspects, False only other tasks, and None both. The first `starts` claimed tasks start immediately, with
    `policies` (a JSON object keyed by task name) and `alone` as in `start`. `floors`: for each (queue, priority), claim only tasks after
    the given position. `line_floors`: the `line_floors` of an earlier claim for these names. The claim stops before the arguments and
    checkpoints exceed `most_bytes` in total, but always includes the first task. Marked tasks are claimed only if they belong to one of
    the `marked` groups. Queues of equal priority take turns, beginning after `after_queue`. The hints about lines that this worker cannot
    serve are sent to `channel`. Tasks with limits are claimed only if they start with the claim. Without `with_lines`, tasks with a serial
    key or limits are not claimed, and the claim does not report whether lines have changed. `with_context`: return what tracers need.
    """
    parameters = {
        "worker_id": worker_id, "claim_call": claim_call, "names": list(names), "limit": limit,
        "most_bytes": most_bytes, "queues": None if queues is None else list(queues),
        "queue_names": list(queue_priorities), "queue_priorities": list(queue_priorities.values()), "suspects": suspects,
        "starts": starts, "policies": None if policies is None else policies.decode(), "alone": alone,
        "marked": marked_json(marked), "channel": channel, "after_queue": after_queue, "line_floors": line_floors,
        "floor_queues": [queue for queue, _ in floors], "floor_priorities": integers([priority for _, priority in floors]),
        "floor_ats": [place[0] for place in floors.values()], "floor_ids": uuids([place[1] for place in floors.values()]),
    }  # fmt: skip

    def read(found: Sequence[Row]) -> list[Claimed]:
        claimed = [_traced(*row) if with_context else Claimed(*row) for row in found]
        claimed.sort(
            key=lambda task: (
                queue_priorities.get(task.queue, 100),
                task.priority,
                task.enqueued_at,
                task.id.int,
            )
        )
        return claimed

    # Even if there is nothing to find, each of these parts takes a tenth of a claim's time.
    parts = (("marked", bool(marked)), ("lines", with_lines), ("context", with_context))
    omitted = [part for part, is_needed in parts if not is_needed]
    return Statement(without(*omitted, name="task/claim_tasks"), parameters, read)


def _traced(*row: Any) -> Claimed:
    """Return the task of a row with the part "context", which follows the columns that each row has."""
    claimed = Claimed(*row[:_CONTEXT_PLACE], *row[_CONTEXT_PLACE + 1 :])
    return structs.replace(claimed, context=row[_CONTEXT_PLACE])


def suspects_wait(
    *, names: Sequence[str], queues: Sequence[str] | None, marked: Sequence[MarkedGroup] = ()
) -> Statement[bool]:
    """Return whether a suspect with one of these names in one of these queues is due. The check is almost free without suspects."""
    parameters = {
        "names": list(names),
        "queues": None if queues is None else list(queues),
        "marked": marked_json(marked),
    }
    return Statement("task/check_suspects", parameters, rows.only(bool))


def set_aside(*, names: Sequence[str], queues: Sequence[str] | None, channel: str) -> Statement[int]:
    """Mark up to 1,000 due tasks in front of a lane whose names are not among `names`, and return how many were marked."""
    parameters = {
        "names": list(names),
        "queues": None if queues is None else list(queues),
        "channel": channel,
    }
    return Statement("task/set_aside", parameters, rows.only(lambda tasks, _: int(tasks)))
