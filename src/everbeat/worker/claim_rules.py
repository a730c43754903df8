"""What a claimer asks of the rest of its worker, and tells it.

What lives here: the record. What may not: getting work (`claimer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from everbeat.worker.attempt import Attempt, LaneName


class ClaimRules(Struct, frozen=True, kw_only=True):
    """What the claimer asks of the rest of the worker."""

    worker_id: Callable[[], str]
    may_claim: Callable[[], bool]
    may_start: Callable[[], bool]
    is_deaf: Callable[[], bool]
    is_told: Callable[[], bool]
    on_progress: Callable[[Attempt], None]
    launch: Callable[[LaneName, Sequence[Attempt]], None]
    not_started: Callable[[Attempt, str], None]
    on_claimed: Callable[[], None]
    on_happened: Callable[[bool], None]
