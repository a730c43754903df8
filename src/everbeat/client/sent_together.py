"""Checks of calls that are sent in one statement: their connection, their patience, and the size of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everbeat.client.task import Call
from everbeat.domain.settings.settings import refused
from everbeat.domain.typed_json import LARGEST_BYTES
from everbeat.errors import PayloadError


def one_connection(calls: Sequence[Call[Any]], connection: object) -> object:
    """Return the connection in whose transaction the calls are stored. Raises ConfigurationError if their connections differ."""
    own = [call.connection for call in calls]
    given = own if connection is None else [connection, *(each for each in own if each is not None)]
    if any(each is not given[0] for each in given):
        raise refused(
            len({id(each) for each in given}),
            subject="connections of a send_many",
            code="CONTRADICTION",
            rule="is more than one, but one statement can only be part of one transaction",
            fix="make all calls by the same with_options(connection=...), or by none",
        )
    return given[0] if given else None


def longest_patience_s(calls: Sequence[Call[Any]], patience_s: float | None) -> float | None:
    """Return the patience, in seconds, for storing all calls: `patience_s` if given, else the longest patience of any call."""
    own = [call.patience_s for call in calls if call.patience_s is not None]
    return patience_s if patience_s is not None else max(own, default=None)


def require_room(calls: Sequence[Call[Any]]) -> None:
    """Raise PayloadError if the arguments of the calls are too large for one statement."""
    size = sum(len(call.payload) for call in calls)
    if size > LARGEST_BYTES:
        raise PayloadError(
            f"The arguments of the {len(calls):,} calls of a send_many would take {size:,} bytes of JSON;"
            f" one statement takes {LARGEST_BYTES:,}.",
            parameter="calls",
            fix="send them in several batches.",
        )
