"""The log handler that gives the records of running code to the log of their attempt."""

from __future__ import annotations

import logging
from typing import Final

from everbeat.domain.task.current import current_log
from everbeat.runtime.fork import call_in_forked_child

_OWN: Final = "everbeat."


class CaptureHandler(logging.Handler):
    """Captures the records that code writes in an attempt. Records of everbeat itself are left out.

    It is the last handler of the root logger, so that it sees what the filters of the program's other handlers have changed.
    A child that the code forks does not capture: its lines could reach no worker.
    """

    def __init__(self) -> None:
        super().__init__()
        call_in_forked_child(self.remove)

    def remove(self) -> None:
        """Capture no records of this process from now on."""
        logging.root.removeHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Capture the record without the lock of the handler. A finalizer can log in a thread that holds another lock."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Add the record to the log of the running attempt, if the log is captured."""
        log = current_log.get()
        try:
            if log is not None and not (record.name or "").startswith(_OWN):
                log.capture(record)
            if len(logging.root.handlers) == 1:
                _write_as_last_resort(record)
        except Exception:  # noqa: BLE001 - as in the handlers of the standard library, logging never fails
            self.handleError(record)


_HANDLER: Final = CaptureHandler()


def start_capturing() -> None:
    """Capture the logs of this process from now on. A program that has configured its logging again does not end the capture.

    A handler that the program has added since the last call comes before the capture again.
    """
    if _HANDLER not in logging.root.handlers[-1:]:
        _HANDLER.remove()
        logging.root.addHandler(_HANDLER)


def stop_capturing() -> None:
    """Remove the handler. The next attempt whose log is captured adds it again."""
    _HANDLER.remove()


def _write_as_last_resort(record: logging.LogRecord) -> None:
    """Write a record as Python does for a program without handlers, which this handler would otherwise prevent."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger is not logging.root:
        if logger.handlers:
            return
        logger = logger.parent
    last = logging.lastResort
    if last is not None and record.levelno >= last.level:
        last.handle(record)
