"""Tracers that a library has installed for all apps of this process that are created afterwards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from everbeat.domain.tracing.model import Tracer

_log = logging.getLogger("everbeat.runtime")
_installed: Final[list[Tracer]] = []
_made: Final = {"apps": 0}
"""How many apps were created before the first tracer was installed."""


def install_tracer(tracer: Tracer) -> None:
    """Trace all apps that are created from now on. Earlier apps are not traced, and a warning says so."""
    _installed.append(tracer)
    if _made["apps"]:
        _log.warning("tracer_after_app tracer=%s apps=%s", type(tracer).__name__, _made["apps"])


def installed_tracers() -> Sequence[Tracer]:
    """Return the installed tracers for a new app."""
    if not _installed:
        _made["apps"] += 1
    return tuple(_installed)
