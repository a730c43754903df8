"""Workflows in which something should have happened and has not: found, and moved on by the same step as all others.

What lives here: the pass over all live workflows, as plans. What may not: when there is one (`services.reconciler`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from uuid import UUID

from everbeat.store.advance import step
from everbeat.store.plan import Plan, ask
from everbeat.store.workflow_control import StuckNode, look, restore, stuck

PAGE: Final = 200
GRACE_MS: Final = 10_000
"""What has happened so recently is on its way."""
_FIRST: Final = UUID(int=0)
_UNCHANGED: Final = "the step that should put this right did not change it"
NEVER_MENDED: Final = {"NOTHING_MOVES": "its open nodes wait for each other, and none of them can begin"}


def problem_of(one: StuckNode) -> str:
    """Why this is still stuck after a step."""
    return NEVER_MENDED.get(one.what, _UNCHANGED)


def find_stuck(*, grace_ms: int, only: UUID | None = None) -> Plan[list[StuckNode]]:
    """What is stuck, of all live workflows or of one."""
    found: list[StuckNode] = []
    after: UUID | None = _FIRST
    while after is not None:
        page = yield from ask(stuck(after=after, limit=PAGE, grace_ms=grace_ms, only=only))
        found.extend(page.found)
        after = page.next_after
    return found


def move_on(ids: Collection[UUID], *, channel: str) -> Plan[None]:
    """In one transaction: everything of these workflows is looked at, and what follows is done."""
    yield from ask(restore(ids))
    yield from ask(look(ids))
    yield from step(channel=channel, ids=ids)
