"""How large the arguments or the result of a task can be: the setting of an app, and its bounds."""

from __future__ import annotations

from typing import Final

from everbeat.domain.gathering import attempt
from everbeat.domain.size import size
from everbeat.domain.typed_json import LARGEST_BYTES

DEFAULT_LIMIT: Final = "32MB"
"""Room for 20 MB with what JSON adds. A worker holds several copies of a payload, so a few of these fit into a small process."""
LEAST_BYTES: Final = 1024 * 1024
"""Checkpoints, recorded steps, signals and error data have this limit of their own, so that none exceeds an app's."""


def payload_limit(value: str | int) -> int:
    """The limit in bytes; raises ConfigurationError."""
    checked: int = attempt(
        lambda: size(LEAST_BYTES, LARGEST_BYTES)(value, subject="App.payload_limit"), otherwise=LARGEST_BYTES
    )
    return checked
