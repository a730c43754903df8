"""Logs the errors of tracers and of recorders of metrics, which are otherwise ignored."""

from __future__ import annotations

import logging

from everbeat.domain.metrics.meters import Meters
from everbeat.domain.tracing.model import Tracer
from everbeat.errors.wording import class_name, safe_text

_log = logging.getLogger("everbeat.runtime")


def log_tracer_failure(tracer: Tracer, method: str, problem: BaseException) -> None:
    """Log that a method of a tracer raised an exception. Later errors of this method are not logged."""
    _log.error(
        "tracer_failed tracer=%s method=%s error=%s: %s",
        class_name(type(tracer)),
        method,
        class_name(type(problem)),
        safe_text(problem, limit=1_000),
        exc_info=problem,
    )


def log_meters_failure(meters: Meters, method: str, problem: BaseException) -> None:
    """Log that a method of a recorder of metrics raised an exception. Later errors of this method are not logged."""
    _log.error(
        "meters_failed meters=%s method=%s error=%s: %s",
        class_name(type(meters)),
        method,
        class_name(type(problem)),
        safe_text(problem, limit=1_000),
        exc_info=problem,
    )
