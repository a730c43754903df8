"""The captured log of an attempt: its stored lines, and the levels from which records are captured."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.settings.checks import one_of

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
LOG_LEVELS: Final[tuple[LogLevel, ...]] = ("debug", "info", "warning", "error", "critical")


class LogLine(Struct, frozen=True, omit_defaults=True):
    """One captured log record. `number` counts the records of an attempt from 1, also those that were not kept.

    `at` is the time by the clock of the worker's machine, in UTC. `exception` is the traceback and the stack of the record, if any.
    """

    number: int
    at: datetime
    level: str
    logger: str
    message: str
    exception: str | None = None


class CapturedLog(Struct, frozen=True):
    """The captured log of one attempt. `lines` are in order. `dropped` counts the records before the last line that were not kept.

    `claim_id` identifies the claim to which the attempt belonged.
    """

    attempt: int
    claim_id: UUID
    lines: Sequence[LogLine]
    dropped: int = 0

    def with_gaps(self, *, newest: int | None = None) -> Iterator[tuple[LogLine | None, int]]:
        """Yield the lines, each with the number of lines that are missing before it, and at last None if lines are missing at the end.

        `newest`: yield only this many lines, and count the others as missing.
        """
        shown = self.lines if newest is None else self.lines[-newest:]
        left = self.dropped + len(self.lines) - len(shown)
        inner = shown[-1].number - shown[0].number + 1 - len(shown) if shown else 0
        last = shown[0].number - 1 - (left - inner) if shown else 0
        for line in shown:
            missing = max(0, line.number - last - 1)  # another program may have changed the numbers
            left -= missing
            last = line.number
            yield line, missing
        if left:
            yield None, left


class UnwrittenPart(Struct, frozen=True, array_like=True):
    """The state of a part at one moment."""

    number: int
    lines: list[LogLine]


def capture_level(value: object, /, *, subject: str) -> LogLevel | Literal[False]:
    """Return the lowest level to capture, or False. True stands for "info"."""
    if value is True:
        return "info"
    return False if value is False else _level(value, subject=subject)


def level_number(level: LogLevel) -> int:
    """Return the number of a level."""
    return logging.getLevelNamesMapping()[level.upper()]


def encode_lines(lines: Sequence[LogLine]) -> str:
    """Return lines as JSON."""
    return msgspec.json.encode(lines).decode()


def decode_lines(text: str) -> list[LogLine]:
    """Return the lines that `encode_lines` has encoded. Return none if another program has changed the text."""
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return []


_level: Final = one_of(*LOG_LEVELS)
_DECODER: Final = msgspec.json.Decoder(list[LogLine])
