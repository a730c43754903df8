"""What a pass of retention deleted, or would delete.

What lives here: the record. What may not: what is old, which the configuration says and the database's clock decides.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import asdict


class PruneResult(Struct, frozen=True):
    """Rows deleted for their age, by table; of a dry run, rows that a pass would delete now."""

    tasks: int = 0
    attempts: int = 0
    recoveries: int = 0
    steps: int = 0
    signals: int = 0
    beats: int = 0
    worker_states: int = 0
    workers: int = 0
    supervisors: int = 0
    workflows: int = 0
    nodes: int = 0
    edges: int = 0

    def by_table(self) -> dict[str, int]:
        """The numbers by the names of their tables."""
        return asdict(self)

    @property
    def total(self) -> int:
        """All rows together."""
        return sum(self.by_table().values())
