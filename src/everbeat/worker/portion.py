"""How much one claim takes: so many tasks, and so many bytes, that its answer comes in good time.

What lives here: these two numbers, and what is learned from the answers. What may not: the statement.

An answer that does not come would be asked for again and again: whatever made it late, the next portion is smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from everbeat.store.leases import CLAIM_BYTES, Claimed

FIRST_CLAIM: Final = 100
MOST_CLAIMED: Final = 500
SOON_S: Final = 1.0
LATE_S: Final = 5.0
"""An answer that takes longer makes the next portion smaller; one that comes soon makes it larger, up to the whole."""
_SMALLEST: Final = 1 / 512


class Portion:
    """`rows` and `most_bytes` of the next claim; at least one task is taken however large it is."""

    def __init__(self) -> None:
        self.rows = FIRST_CLAIM
        self.most_bytes = CLAIM_BYTES
        self._share = 1.0
        self._mean = 0

    def answered(self, claimed: Sequence[Claimed], *, took_s: float) -> None:
        """The tasks of the next claim may be as large as these."""
        if took_s > LATE_S:
            self._share = max(_SMALLEST, self._share / 2)
        elif took_s < SOON_S:
            self._share = min(1.0, self._share * 2)
        if claimed:
            self._mean = sum(len(task.args) + len(task.checkpoint or "") for task in claimed) // len(claimed)
        self._fit(MOST_CLAIMED if claimed else self.rows)

    def unanswered(self) -> None:
        """A claim took too long, or its answer did."""
        self._share = max(_SMALLEST, self._share / 4)
        self._fit(self.rows // 4)

    def _fit(self, most: int) -> None:
        self.most_bytes = int(CLAIM_BYTES * self._share)
        self.rows = max(1, min(most, int(MOST_CLAIMED * self._share), self.most_bytes // (self._mean + 1)))
