"""The bounded log of one running attempt, which is filled from log records."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Lock
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


class LogMemory:
    """Counts the size of the lines that wait in all logs of a process. Without a limit, a database that refuses only logs would fill it."""

    def __init__(self, *, most_bytes: int) -> None:
        self.used = 0
        self._most = most_bytes

    @property
    def is_full(self) -> bool:
        """Return whether no further line can wait."""
        return self.used >= self._most

    def change(self, size: int) -> None:
        """Add the size of lines that wait now. It is negative if they do not wait any longer."""
        # Without a lock, for which a finalizer could wait: a lost update only shifts the limit.
        self.used += size


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
    after each `unwritten`. If the `memory` that it shares with other logs is full, new lines are counted, but not kept.
    """

    def __init__(self, level: int, on_new: Callable[[], object], *, memory: LogMemory | None = None) -> None:
        self.level: Final = level
        self._on_new = on_new
        self._memory = memory
        self._arrived: deque[tuple[datetime, str, str, str, str | None]] = deque()
        self._guard = Lock()
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
        self._arrived.append((at, level, logger, _message(record), _traceback(record)))
        self._take_arrived()

    def _take_arrived(self) -> None:
        """Add the captured lines, unless another call holds the guard, which then adds them at its end.

        Code that logs must not wait for the guard. Its holder can run a finalizer that logs, and then waits for a handler's lock, which
        the code that logs might hold.
        """
        while self._arrived and self._guard.acquire(blocking=False):
            try:
                while self._arrived:
                    self._add(LogLine(self._last + 1, *self._arrived.popleft()))
            finally:
                self._guard.release()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        with self._guard:
            yield
        self._take_arrived()

    def merge(self, lines: Sequence[LogLine]) -> None:
        """Add lines that another process has numbered. Lines that this buffer already has are ignored."""
        with self._guarded():
            for line in lines:
                if line.number > self._last:
                    self._add(line)

    def unwritten(self) -> list[UnwrittenPart]:
        """Return the parts that have changed since they were written, oldest first."""
        with self._guarded():
            self._is_noted = False
            parts = sorted(self._changed.values(), key=lambda part: part.lines[0].number)
            return [UnwrittenPart(part.number, part.lines.copy()) for part in parts]

    def written(self, parts: Sequence[UnwrittenPart]) -> None:
        """Forget parts that are stored and have not changed since."""
        with self._guarded():
            for part in parts:
                known = self._changed.get(part.number)
                if known is not None and known.lines[-1].number == part.lines[-1].number:
                    del self._changed[part.number]
                    self._remember(-known.size)

    def forget(self) -> None:
        """Drop all lines that are not stored yet. The next line begins another part."""
        with self._guarded():
            self._remember(-sum(part.size for part in self._changed.values()))
            self._changed.clear()
            self._open, self._is_noted = None, False

    @property
    def has_unwritten(self) -> bool:
        """Return whether any part has changed since it was written."""
        return bool(self._changed)

    def _add(self, line: LogLine) -> None:
        self._last = line.number
        if self._memory is not None and self._memory.is_full:
            return
        part = self._open
        if part is None or part.is_full:
            place, self._parts = self._parts, self._parts + 1
            number = place if place < FIRST_PARTS else FIRST_PARTS + (place - FIRST_PARTS) % NEWEST_PARTS
            self._open = part = LogPart(number=number, lines=[])
        before = self._changed.get(part.number)
        held = 0 if before is None else before.size
        part.lines.append(line)
        part.size += len(line.message) + len(line.exception or "") + _LINE_BYTES
        self._changed[part.number] = part
        self._remember(part.size - held)
        if not self._is_noted:
            self._is_noted = True
            self._on_new()

    def _remember(self, size: int) -> None:
        if self._memory is not None:
            self._memory.change(size)


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
