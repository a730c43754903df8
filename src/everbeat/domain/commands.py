"""The commands that alarms and checks give to an operator."""

from __future__ import annotations

from typing import Final

from everbeat.domain.duration import spelled

SWEEP: Final = "everbeat sweep"
_USUAL_SCHEMA: Final = "everbeat"
_LEAST_MS: Final = 60_000
"""Without the app, the command allows no less: two heartbeat intervals of the default settings."""


def sweep_command(*, beat_interval_ms: int, schema: str) -> str:
    """Return the command that recovers at once the tasks of silent trees, for trees that beat this often."""
    threshold = spelled(max(2 * beat_interval_ms, _LEAST_MS) / 1_000)
    return f"{SWEEP} --threshold {threshold}" + ("" if schema == _USUAL_SCHEMA else f" --schema {schema}")
