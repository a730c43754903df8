"""Notes an action in the audit log whose method notes nothing itself."""

from __future__ import annotations

from uuid import UUID, uuid4

from everbeat.client.database_access import database_of
from everbeat.domain.bulk_actions import Operator
from everbeat.store import audit
from everbeat.store.plan import ask
from everbeat.web.page import Visit


async def noted(
    visit: Visit,
    action: str,
    *,
    target: str,
    affected: int,
    note: str | None = None,
    call: UUID | None = None,
) -> None:
    """Note what the user of the visit has done. `call` makes the note idempotent. Raises DatabaseError."""
    operator = Operator(visit.user.name[:200], "web")
    entry = audit.record(operator, action, target=target, affected=affected, note=note, call=call or uuid4())
    await database_of(visit.app).arun(ask(entry))
