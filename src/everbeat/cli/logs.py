"""Logs of the processes of a tree: where they go, and from which level on."""

from __future__ import annotations

import logging
import os
from typing import Final

LOG_LEVEL_VARIABLE: Final = "EVERBEAT_LOG_LEVEL"
LOG_FORMAT: Final = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"


def log_to_stderr() -> None:
    """Shows logs, unless the user's module has set up logging itself; EVERBEAT_LOG_LEVEL says from which level on."""
    if not logging.root.handlers:
        level = os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper()
        known = logging.getLevelNamesMapping().get(level, logging.INFO)
        logging.basicConfig(level=known, format=LOG_FORMAT)
