"""Statements that make trees of workers quiet, and resume them."""

from __future__ import annotations

from collections.abc import Sequence

from everbeat.domain.inspection import QuietTree
from everbeat.store.statement import Statement


def quiet(
    ids: Sequence[str], *, host: str | None, everyone: bool, quiet: bool, channel: str
) -> Statement[list[QuietTree]]:
    """Make the chosen trees quiet, or resume them; returns all that were chosen and have not ended."""
    parameters = {"ids": list(ids), "host": host, "everyone": everyone, "quiet": quiet, "channel": channel}
    return Statement(
        "worker/quiet",
        parameters,
        lambda found: [QuietTree(row[0], row[1], row[2], row[3], tuple(row[4])) for row in found],
    )
