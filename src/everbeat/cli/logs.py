"""Logs of the processes of a tree: where they go, and from which level on."""

from __future__ import annotations

import logging
import os
from typing import Final

from everbeat.errors.visible import visible

LOG_LEVEL_VARIABLE: Final = "EVERBEAT_LOG_LEVEL"
LOG_FORMAT: Final = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"


class VisibleFormatter(logging.Formatter):
    """Formats records with control characters as visible escapes: a log of data is read in terminals, too."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of the record and its traceback."""
        return visible(super().format(record))


def log_to_stderr() -> None:
    """Shows logs, unless the user's module has set up logging itself; EVERBEAT_LOG_LEVEL says from which level on."""
    if not logging.root.handlers:
        level = os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper()
        known = logging.getLevelNamesMapping().get(level, logging.INFO)
        show_logs(known)


def show_logs(level: int) -> None:
    """Write logs to stderr from `level` on, unless logging is already set up."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
