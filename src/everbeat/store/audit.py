"""Statements that write, read and delete the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from everbeat.domain.bulk_actions import AuditEntry, Operator
from everbeat.domain.settings.units import When
from everbeat.store import rows
from everbeat.store.inspection import moment_or_age
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

RETENTION_HOURS: Final = 90 * 24
"""How long the audit log and ended bulk actions are kept, in hours."""
_COLUMNS: Final = AuditEntry.__struct_fields__


def record(
    operator: Operator,
    action: str,
    *,
    target: str | None = None,
    affected: int | None = None,
    outcome: str = "done",
    note: str | None = None,
    call: UUID,
) -> Statement[None]:
    """Note an action. Run the statement in the transaction of the action, so that neither is stored without the other. `call` makes it idempotent."""
    values = {
        "actor": operator.actor, "origin": operator.origin, "action": action, "target": target, "affected": affected, "outcome": outcome,
        "note": note, "call": call,
    }  # fmt: skip
    return Statement("audit/record_action", values, rows.nothing)


def entries(
    *,
    since: When | None,
    actor: str | None,
    action: str | None,
    before: int | None,
    limit: int,
    most: int | None = None,
) -> Statement[list[AuditEntry]]:
    """List the audit log, newest first. At most `most` entries are examined (None: all)."""

    def read(found: Sequence[Row]) -> list[AuditEntry]:
        listed = [dict(zip(_COLUMNS, row, strict=True)) for row in found]
        return [AuditEntry(**each | {"filters": rows.optional_mapping(each["filters"])}) for each in listed]

    values = moment_or_age(since) | {
        "actor": actor, "action": action, "before": before, "limit": limit, "most": most,
    }  # fmt: skip
    return Statement("audit/list_actions", values, read)


def last_examined(*, since: When | None, before: int | None, most: int) -> Statement[int | None]:
    """Return the id of the last entry that a list examines, or None if it examines all of them."""
    values = moment_or_age(since) | {"before": before, "most": most}
    return Statement(
        "audit/find_last_examined", values, lambda found: found[0][0] if len(found) == 2 else None
    )


def prune(*, limit: int, hours: int = RETENTION_HOURS) -> Statement[int]:
    """Delete up to `limit` rows of the audit log, and the bulk actions, that are older than `hours`. Return how many were deleted."""
    return Statement("audit/prune", {"hours": hours, "limit": limit}, rows.only(int))


def name_in(document: str) -> Any:
    """Return the name in the stored form of a definition."""
    return msgspec.json.decode(document)["name"]
