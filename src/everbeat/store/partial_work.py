"""Statements of code that runs: its checkpoint, and the commit of its own rows together with its completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from uuid import UUID

from msgspec import Struct
from psycopg import sql

from everbeat.store.statement import Row, Statement, nothing

CommitOutcome = Literal["landed", "rolled_back", "open", "lost", "unclear"]


class ConnectionFacts(Struct, frozen=True, kw_only=True):
    """Where a connection of the user's leads, and in what transaction it is."""

    database: str
    user: str
    has_tables: bool
    is_read_only: bool
    isolation: str


def record_checkpoint(
    task_id: UUID, claim_id: UUID, checkpoint: bytes, *, number: int, progress: bytes | None
) -> Statement[bool]:
    """Stores a checkpoint, unless one of a higher number is stored, and progress if there is any; False when the lease was lost."""
    parameters = {
        "id": task_id,
        "claim_id": claim_id,
        "checkpoint": checkpoint.decode(),
        "number": number,
        "progress": None if progress is None else progress.decode(),
    }
    return Statement("task/record_checkpoint", parameters, bool)


def installation() -> Statement[UUID]:
    """The id of this installation."""
    return Statement("commit/installation", {}, lambda found: _uuid(found[0][0]))


def commit_facts(*, schema: str, mark: str) -> Statement[ConnectionFacts]:
    """Looks where a connection leads, and marks its transaction."""
    table = sql.Identifier(schema, "installation").as_string(None)
    return Statement("commit/facts", {"installation": table, "mark": mark}, _facts)


def commit_lease(task_id: UUID, claim_id: UUID) -> Statement[tuple[UUID, bool]]:
    """The id of the installation that a connection found, and whether the attempt holds its task there."""
    return Statement(
        "commit/lease",
        {"id": task_id, "claim_id": claim_id},
        lambda found: (_uuid(found[0][0]), bool(found[0][1])),
    )


def commit_mark(mark: str) -> Statement[bool]:
    """Whether the transaction is still the one that was marked."""
    return Statement("commit/mark", {"mark": mark}, lambda found: bool(found[0][0]))


def commit_hurry(most_ms: int) -> Statement[None]:
    """From here on the transaction may not idle for longer than that: then the server ends its session, and with it the hold on the task."""
    return Statement("commit/hurry", {"most_ms": most_ms}, nothing)


def commit_outcome(task_id: UUID, claim_id: UUID) -> Statement[CommitOutcome]:
    """What became of a commit: "open" while a transaction holds the task; "unclear" asks to be asked again."""
    return Statement("commit/outcome", {"id": task_id, "claim_id": claim_id}, _outcome)


def _facts(found: Sequence[Row]) -> ConnectionFacts:
    database, user, has_tables, read_only, isolation, _ = found[0]
    return ConnectionFacts(
        database=database,
        user=user,
        has_tables=bool(has_tables),
        is_read_only=read_only == "on",
        isolation=isolation,
    )


def _outcome(found: Sequence[Row]) -> CommitOutcome:
    match found[0]:
        case ("COMPLETED", _, _):
            return "landed"
        case (str(), _, _) | (None, None, False):
            return "lost"
        case (None, True, _):
            return "rolled_back"
        case (None, None, _):
            return "open"
        case _:
            return "unclear"  # the look-up was older than the row: both changed in between


def _uuid(value: object) -> UUID:
    return value if isinstance(value, UUID) else UUID(str(value))
