"""The bounded log of one running attempt, which is filled from log records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from threading import RLock
from typing import Final

from msgspec import Struct

from everbeat.domain.task.captured_log import LogLine, UnwrittenPart
from everbeat.errors import TaskStopped
from everbeat.errors.wording import class_name, storable

PART_BYTES: Final = 16_384
"""The size from which a part of a log is full. The last line of a part can make it larger."""
PART_LINES: Final = 250
FIRST_PARTS: Final = 4
"""The number of parts at the beginning of a log that are always kept."""
NEWEST_PARTS: Final = 12
"""The number of later parts that are kept. A new part replaces the oldest of them."""
MESSAGE_BYTES: Final = 8_192
TRACEBACK_BYTES: Final = 8_192
_NAME_BYTES: Final = 200
_LINE_BYTES: Final = 100
"""About how many bytes of JSON a line needs beyond its texts."""


class LogPart(Struct, kw_only=True, eq=False):
    """A part of a log. `number` is its place: a later part with the same number replaces it."""

    number: int
    lines: list[LogLine]
    size: int = 0

    @property
    def is_full(self) -> bool:
        """Return whether the next line belongs to another part."""
        return self.size >= PART_BYTES or len(self.lines) >= PART_LINES


class LogBuffer:
    """The parts of one attempt's log that are not stored yet, and the part that is being filled. Safe for use from any thread.

    The first parts and the newest parts are kept, so the buffer is bounded. It never waits. `on_new` is called for the first new line
    after each `unwritten`.
    """

    def __init__(self, level: int, on_new: Callable[[], object]) -> None:
        self.level: Final = level
        self._on_new = on_new
        self._guard = RLock()  # a finalizer can run while a line is added, and log as well
        self._parts = 0
        self._open: LogPart | None = None
        self._changed: dict[int, LogPart] = {}
        self._last = 0
        self._is_noted = False

    def capture(self, record: logging.LogRecord) -> None:
        """Add a record, unless its level is too low."""
        if record.levelno < self.level:
            return
        at = datetime.fromtimestamp(record.created, UTC)
        level, logger = (storable(str(each), limit=_NAME_BYTES) for each in (record.levelname, record.name))
        message, exception = _message(record), _traceback(record)
        with self._guard:
            line = LogLine(self._last + 1, at, level, logger, message, exception)
            self._add(line)

    def merge(self, lines: Sequence[LogLine]) -> None:
        """Add lines that another process has numbered. Lines that this buffer already has are ignored."""
        with self._guard:
            for line in lines:
                if line.number > self._last:
                    self._add(line)

    def unwritten(self) -> list[UnwrittenPart]:
        """Return the parts that have changed since they were written, oldest first."""
        with self._guard:
            self._is_noted = False
            parts = sorted(self._changed.values(), key=lambda part: part.lines[0].number)
            return [UnwrittenPart(part.number, part.lines.copy()) for part in parts]

    def written(self, parts: Sequence[UnwrittenPart]) -> None:
        """Forget parts that are stored and have not changed since."""
        with self._guard:
            for part in parts:
                known = self._changed.get(part.number)
                if known is not None and known.lines[-1].number == part.lines[-1].number:
                    del self._changed[part.number]

    @property
    def has_unwritten(self) -> bool:
        """Return whether any part has changed since it was written."""
        return bool(self._changed)

    def _add(self, line: LogLine) -> None:
        part = self._open
        if part is None or part.is_full:
            place, self._parts = self._parts, self._parts + 1
            number = place if place < FIRST_PARTS else FIRST_PARTS + (place - FIRST_PARTS) % NEWEST_PARTS
            self._open = part = LogPart(number=number, lines=[])
        part.lines.append(line)
        part.size += len(line.message) + len(line.exception or "") + _LINE_BYTES
        self._last = line.number
        self._changed[part.number] = part
        if not self._is_noted:
            self._is_noted = True
            self._on_new()


def _message(record: logging.LogRecord) -> str:
    try:
        return storable(str(record.getMessage()), limit=MESSAGE_BYTES)
    except TaskStopped:
        raise
    except BaseException as problem:  # noqa: BLE001 - arguments of a record run the user's code
        return f"<the message cannot be formatted: {class_name(type(problem))}>"


def _traceback(record: logging.LogRecord) -> str | None:
    texts: list[str] = []
    try:
        if record.exc_info:
            texts.append(record.exc_text or _FORMATTER.formatException(record.exc_info))
        if record.stack_info:
            texts.append(str(record.stack_info))
    except TaskStopped:
        raise
    except BaseException as problem:  # noqa: BLE001 - as above
        texts.append(f"<the traceback cannot be formatted: {class_name(type(problem))}>")
    if not texts:
        return None
    return storable("\n".join(texts), limit=TRACEBACK_BYTES, tail=TRACEBACK_BYTES * 3 // 4)


_FORMATTER: Final = logging.Formatter()
