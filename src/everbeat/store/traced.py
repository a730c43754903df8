"""The statement that reads what tracers need of recoveries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from everbeat.domain.tracing.carrier import decode_carrier
from everbeat.domain.tracing.model import TracedRecovery
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, uuids

_COLUMNS: Final = (
    "task_id", "name", "queue", "attempt", "fence", "worker_id", "hostname", "pid", "action", "cause", "noticed_by", "recovered_by",
    "started_at", "last_beat_at", "recovered_at", "workflow_id",
)  # fmt: skip
_BROKEN: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)


def traced_recoveries(ids: Sequence[UUID], *, recovered_by: str) -> Statement[dict[UUID, TracedRecovery]]:
    """Return, by task id, the latest recovery of each of these tasks by this process, with the carrier of the task."""
    parameters = {"ids": uuids(ids), "recovered_by": recovered_by}
    return Statement(
        "inspect/list_traced_recoveries", parameters, lambda found: {row[0]: _recovery(row) for row in found}
    )


def _recovery(row: Row) -> TracedRecovery:
    *columns, certificate, context = row
    return TracedRecovery(
        **dict(zip(_COLUMNS, columns, strict=True)),
        certificate=_certificate(certificate),
        carrier=decode_carrier(context),
    )


def _certificate(stored: str | None) -> dict[str, Any]:
    try:
        found = None if stored is None else msgspec.json.decode(stored)
    except _BROKEN:
        return {}
    return found if isinstance(found, dict) else {}
